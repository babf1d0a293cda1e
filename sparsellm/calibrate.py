"""python -m sparsellm.calibrate : see sparsellm/commands/calibrate.py."""

from sparsellm.cli import run

if __name__ == "__main__":
    run("calibrate")
