"""python -m sparsellm.train : see sparsellm/commands/train.py."""

from sparsellm.cli import run

if __name__ == "__main__":
    run("train")
