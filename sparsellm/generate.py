"""python -m sparsellm.generate : see sparsellm/commands/generate.py."""

from sparsellm.cli import run

if __name__ == "__main__":
    run("generate")
