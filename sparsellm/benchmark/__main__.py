"""python -m sparsellm.benchmark: see sparsellm/commands/benchmark.py."""

from sparsellm.cli import run

if __name__ == "__main__":
    run("benchmark")
