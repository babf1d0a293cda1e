"""python -m sparsellm.push : see sparsellm/commands/push.py."""

from sparsellm.cli import run

if __name__ == "__main__":
    run("push")
