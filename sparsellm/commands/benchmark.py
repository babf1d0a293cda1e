"""python -m sparsellm.benchmark checkpoint=PATH [baseline=PATH] [key=value] : speed, memory and energy of checkpoints.

Forward passes, training steps, prefill and decoding of each checkpoint on its own text, with its own firing: on the
kernels of the GPU, in PyTorch, and of a baseline, in turns in one process. One process, on a CPU, without kernels and
energy, or on a GPU. Exit codes: 0 complete, 1 for a checkpoint that cannot be measured, 2 for a refused configuration.
"""

from sparsellm.benchmarks import BenchmarkError, benchmark, mistakes, report
from sparsellm.config import BenchmarkConfig, benchmark_mistakes, entry_point
from sparsellm.console import warn


@entry_point(lambda config, _typed: mistakes(config), benchmark_mistakes, BenchmarkConfig)
def main(config: BenchmarkConfig) -> int:
    try:
        results, folder = benchmark(config)
    except BenchmarkError as error:
        warn(str(error))
        return 1
    print(f"{report.text(results)}\n\n{folder / report.BENCHMARK_JSON}, beside it the same as .md and .png")
    return 0
