"""Measures time, memory and energy per token of a trained checkpoint, on its own text and at its own sparsity."""

from sparsellm.benchmark.study import BenchmarkError, benchmark, mistakes

__all__ = ["BenchmarkError", "benchmark", "mistakes"]
