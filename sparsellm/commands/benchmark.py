"""python -m sparsellm.benchmark checkpoint=PATH [baseline=PATH] [key=value] : measure speed, memory and energy.

Times forward passes, training steps, prefill and decoding of each checkpoint on its own text, with its own active
neurons: on the GPU's kernels, in PyTorch, and for a baseline, in alternation within one process. Runs as one process on
a GPU, or on a CPU without kernels and energy. Exit codes: 0 complete, 1 if a checkpoint cannot be measured, 2 for a
refused configuration.
"""

from sparsellm.benchmark import BenchmarkError, benchmark, mistakes, report
from sparsellm.config import BenchmarkConfig, benchmark_mistakes, entry_point
from sparsellm.system.console import warn


@entry_point(lambda config, _typed: mistakes(config), benchmark_mistakes, BenchmarkConfig)
def main(config: BenchmarkConfig) -> int:
    try:
        results, folder = benchmark(config)
    except BenchmarkError as error:
        warn(str(error))
        return 1
    print(f"{report.text(results)}\n\n{folder / report.BENCHMARK_JSON}, beside it the same as .md and .png")
    return 0
