"""What a trained checkpoint costs, on its own text and with its own firing: time, memory and energy per token."""

from sparsellm.benchmark.study import BenchmarkError, benchmark, mistakes

__all__ = ["BenchmarkError", "benchmark", "mistakes"]
