"""Measure speed, memory and energy of checkpoints, against PyTorch and a baseline.

Times forward passes, training steps, prefill and decoding of each checkpoint on its own text, with its own active
neurons: on the GPU's kernels, in PyTorch, and for a baseline, in alternation within one process. Runs as one process on
a GPU, or on a CPU without kernels and energy. Exit codes: 0 complete, 1 if a checkpoint cannot be measured, 2 for a
refused configuration.
"""

from sparsellm.benchmark import benchmark, mistakes, report
from sparsellm.config import BenchmarkConfig, entry_point


@entry_point("benchmark", lambda config, _typed: mistakes(config))
def main(config: BenchmarkConfig) -> int:
    results, folder = benchmark(config)
    print(f"{report.text(results)}\n\n{folder / report.BENCHMARK_JSON}; also as .md and .png")
    return 0
