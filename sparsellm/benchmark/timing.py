"""Time and energy per token. Candidates run in turns, so that drift affects all of them equally."""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sparsellm.system.energy import millijoules

ROUNDS = 3  # each candidate runs for a third of its time in each round

Work = Callable[[], int]  # runs once and returns the number of tokens


class Sample(NamedTuple):
    """One measurement."""

    tokens: int
    seconds: float
    millijoules: float | None  # energy of the whole GPU; None without a counter


class Stopwatch:
    """Measures time and energy; starts when the device has finished earlier work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        wait_for(device)
        self.energy, self.started = energy_mj(device), time.perf_counter()

    def stop(self, tokens: int) -> Sample:
        """Wait for the device and return the measurement."""
        wait_for(self.device)
        seconds, energy = time.perf_counter() - self.started, energy_mj(self.device)
        used = None if energy is None or self.energy is None else energy - self.energy
        return Sample(tokens, seconds, used)


def alternate(works: dict[str, Work], seconds: float, device: torch.device) -> dict[str, dict[str, Any]]:
    """The `rate` of each of `works`, measured for about `seconds` each. All must have been warmed up."""
    calls = {name: repetitions(sample(work, 1, device).seconds, seconds / ROUNDS) for name, work in works.items()}
    found: dict[str, list[Sample]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            found[name].append(sample(work, calls[name], device))
    return {name: rate(samples) for name, samples in found.items()}


def sample(work: Work, calls: int, device: torch.device) -> Sample:
    """Measure `calls` calls, enqueued without waiting in between."""
    watch = Stopwatch(device)
    return watch.stop(sum(work() for _ in range(calls)))


def repetitions(once: float, seconds: float) -> int:
    """How many calls of `once` seconds fit into `seconds`, at least one."""
    return max(1, math.ceil(seconds / max(once, 1e-9)))


def rate(samples: list[Sample]) -> dict[str, Any]:
    """{"tokens_per_s": median, "spread": (max - min) / median, "mj_per_token": mean, or None}"""
    rates = [each.tokens / each.seconds for each in samples]
    median = statistics.median(rates)
    counted = [each.millijoules for each in samples if each.millijoules is not None]
    return {
        "tokens_per_s": median,
        "spread": (max(rates) - min(rates)) / median,
        "mj_per_token": sum(counted) / sum(each.tokens for each in samples) if len(counted) == len(samples) else None,
    }


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def energy_mj(device: torch.device) -> int | None:
    """Millijoules used by the GPU since its driver was loaded, read when its work is done; None without a counter."""
    wait_for(device)
    return millijoules(device)
