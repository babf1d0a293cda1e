"""python -m sparsellm.prepare_data : see sparsellm/commands/prepare_data.py."""

from sparsellm.cli import run

if __name__ == "__main__":
    run("prepare_data")
