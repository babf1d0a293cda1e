"""python -m sparsellm.evaluate : see sparsellm/commands/evaluate.py."""

from sparsellm.cli import run

if __name__ == "__main__":
    run("evaluate")
