"""Time and energy per token of work that candidates do in turns, so that all of them drift alike."""

import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pynvml
import torch

from sparsellm.system.console import warn

ROUNDS = 3  # in each of which every candidate works for a third of the time

Work = Callable[[], int]  # does something once, and returns how many tokens that were


class Sample(NamedTuple):
    """What was measured of some work."""

    tokens: int
    seconds: float
    millijoules: float | None  # of the whole GPU; None where nothing counts them


class Stopwatch:
    """Starts once the device has done what it was given before."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        wait_for(device)
        self.energy, self.started = energy_mj(device), time.perf_counter()

    def stop(self, tokens: int) -> Sample:
        """Waits for the device."""
        wait_for(self.device)
        seconds, energy = time.perf_counter() - self.started, energy_mj(self.device)
        used = None if energy is None or self.energy is None else energy - self.energy
        return Sample(tokens, seconds, used)


def alternate(works: dict[str, Work], seconds: float, device: torch.device) -> dict[str, dict[str, Any]]:
    """The `rate` of each of `works`, each measured for about so many `seconds`. All must have been warmed up."""
    calls = {name: repetitions(sample(work, 1, device).seconds, seconds / ROUNDS) for name, work in works.items()}
    found: dict[str, list[Sample]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            found[name].append(sample(work, calls[name], device))
    return {name: rate(samples) for name, samples in found.items()}


def sample(work: Work, calls: int, device: torch.device) -> Sample:
    """So many `calls`, enqueued one after the other without waiting."""
    watch = Stopwatch(device)
    return watch.stop(sum(work() for _ in range(calls)))


def repetitions(once: float, seconds: float) -> int:
    """How often what takes `once` seconds is done in `seconds`: at least once."""
    return max(1, math.ceil(seconds / max(once, 1e-9)))


def rate(samples: list[Sample]) -> dict[str, Any]:
    """{"tokens_per_s": the median, "spread": of the samples, relative to it, "mj_per_token": the mean, or None}"""
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
    """Millijoules that the GPU has used since its driver was loaded, once its work is done; None without a counter."""
    handle = energy_counter(device)
    if handle is None:
        return None
    torch.cuda.synchronize(device)
    return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)


@functools.cache
def energy_counter(device: torch.device) -> Any | None:
    """NVML's handle of a GPU that counts its energy, or None."""
    if device.type != "cuda":
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError as error:
        warn(f"energy is not measured: {error}")
        return None
    return handle
