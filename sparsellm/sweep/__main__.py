"""python -m sparsellm.sweep: see sparsellm/commands/sweep.py."""

from sparsellm.cli import run

if __name__ == "__main__":
    run("sweep")
