"""GPU time of several candidates, measured in alternation in one process with CUDA events.

Alternation spreads drifts of clock and temperature over all candidates. Every round starts behind a short spin of the
GPU, while which the host enqueues the whole round: what is measured is the GPU's work, not the host's launches, as in a
model whose host runs ahead. Inputs rotate past the L2 cache if candidate(round) takes another copy of them each round.
"""

import statistics
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch

SPIN_CYCLES = 6_000_000  # 3 ms at 2 GHz


def alternating_ms(
    candidates: dict[str, Callable[[int], object]], budget_ms: float = 150, least: int = 5, most: int = 40
) -> dict[str, float | Exception]:
    """The median time in ms of each candidate, or what it raised. Each gets about budget_ms of measured time.

    Fewer than `least` rounds only where one alone takes longer than the whole budget: then it is timed twice.
    """
    results: dict[str, float | Exception] = {}
    estimates = {}
    for name, candidate in candidates.items():
        try:
            candidate(0)  # compiles, chooses algorithms
            estimates[name] = _events([partial(candidate, 1)])[0]
        except Exception as error:  # said by the caller; the others go on
            results[name] = error
    rounds = {
        name: 2 if ms > budget_ms else max(least, min(most, int(budget_ms / max(ms, 1e-3))))
        for name, ms in estimates.items()
    }
    times: dict[str, list[float]] = {name: [] for name in estimates}
    for i in range(max(rounds.values(), default=0)):
        now = [name for name in rounds if i < rounds[name]]
        torch.cuda._sleep(SPIN_CYCLES)
        for name, ms in zip(now, _events([partial(candidates[name], i) for name in now]), strict=True):
            times[name].append(ms)
    return results | {name: statistics.median(found) for name, found in times.items()}


def _events(runs: list[Callable[[], object]]) -> list[float]:
    """Milliseconds of each of consecutive runs, enqueued without waiting."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(runs) + 1)]
    marks[0].record()
    for run, mark in zip(runs, marks[1:], strict=True):
        run()
        mark.record()
    marks[-1].synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(marks)]
