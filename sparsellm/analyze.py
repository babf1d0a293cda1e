"""python -m sparsellm.analyze : see sparsellm/commands/analyze.py."""

from sparsellm.cli import run

if __name__ == "__main__":
    run("analyze")
