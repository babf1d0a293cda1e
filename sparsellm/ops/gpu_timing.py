"""GPU time of several candidates, measured in alternation in one process with CUDA events.

Alternation spreads clock and temperature drift evenly over all candidates. Every round starts with a short spin of the
GPU, during which the host enqueues the whole round; rounds of many short calls have a longer spin. So the times are
those of the GPU's work rather than the host's launches, as in a model whose host runs ahead of the GPU. A candidate can
use different copies of its inputs in each round, so that the inputs are not in L2.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch

CYCLES = 2e9  # GPU cycles per second, roughly
SPIN_SECONDS = 3e-3, 20e-3  # minimum and maximum; no spin is long enough for a candidate that waits for the GPU
SPIN_MARGIN = 1.25  # ratio of the spin to the time that the host needs to enqueue a round's calls one by one


def alternating_ms(
    candidates: dict[str, Callable[[int], object]], budget_ms: float = 150, least: int = 5, most: int = 40
) -> dict[str, float | Exception]:
    """The median time in ms of each candidate, or the exception that it raised. candidate(i) is one run, in round i.

    Each candidate is measured for about budget_ms, in `least` to `most` rounds; a candidate that takes longer than the
    whole budget is timed twice. If the host needed longer to enqueue a round's calls than the GPU spun (because other
    processes use the host's cores), the round may have measured the host, so the round is repeated. At most as many
    rounds are repeated as are planned, because the host always needs longer for a candidate that waits for the GPU.
    """
    results: dict[str, float | Exception] = {}
    estimates, host = {}, {}
    for name, candidate in candidates.items():
        try:
            candidate(0)  # not timed, because the first run may compile, or choose algorithms
            (estimates[name],), host[name] = _events([partial(candidate, 1)])
        except Exception as error:  # returned to the caller; the other candidates are still timed
            results[name] = error
    rounds = {
        name: 2 if ms > budget_ms else max(least, min(most, int(budget_ms / max(ms, 1e-3))))
        for name, ms in estimates.items()
    }
    times: dict[str, list[float]] = {name: [] for name in estimates}
    least_spin, most_spin = SPIN_SECONDS
    i, left = 0, max(rounds.values(), default=0)  # the number of this round; how many rounds may still be repeated
    while now := [name for name in rounds if i < rounds[name]]:
        spin = min(max(SPIN_MARGIN * sum(host[name] for name in now), least_spin), most_spin)
        torch.cuda._sleep(int(spin * CYCLES))
        found, took = _events([partial(candidates[name], i) for name in now])
        if took > spin and left:
            left -= 1
            continue
        for name, ms in zip(now, found, strict=True):
            times[name].append(ms)
        i += 1
    return results | {name: statistics.median(of_one) for name, of_one in times.items()}


def _events(runs: list[Callable[[], object]]) -> tuple[list[float], float]:
    """(the milliseconds of each run, the seconds in which the host enqueued all runs, one after another)"""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(runs) + 1)]
    started = time.perf_counter()
    marks[0].record()
    for run, mark in zip(runs, marks[1:], strict=True):
        run()
        mark.record()
    host = time.perf_counter() - started
    marks[-1].synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(marks)], host
