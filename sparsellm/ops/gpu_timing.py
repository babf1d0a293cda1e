"""GPU time of several candidates, measured in alternation in one process with CUDA events.

Alternation spreads drifts of clock and temperature over all candidates. Every round starts with a short spin of the
GPU, during which the host enqueues the whole round. So the GPU's work is measured, not the host's launches, as in a
model whose host runs ahead. A candidate that takes other copies of its inputs in each round does not find them in L2.
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
    """The median time in ms of each candidate, or what it raised. candidate(i) is one run, in round i.

    Each candidate is measured for about budget_ms, in `least` to `most` rounds; a candidate that takes longer than the
    whole budget is timed twice.
    """
    results: dict[str, float | Exception] = {}
    estimates = {}
    for name, candidate in candidates.items():
        try:
            candidate(0)  # not timed: it may compile, or choose algorithms
            estimates[name] = _events([partial(candidate, 1)])[0]
        except Exception as error:  # returned to the caller; the others go on
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
    """The milliseconds of each of several runs, which are enqueued one after the other without waiting."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(runs) + 1)]
    marks[0].record()
    for run, mark in zip(runs, marks[1:], strict=True):
        run()
        mark.record()
    marks[-1].synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(marks)]
