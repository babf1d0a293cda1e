"""The energy used by a GPU, according to NVML's counter."""

import functools
import math
from typing import Any

import pynvml
import torch

from sparsellm.system.console import warn_on_main


class EnergyMeter:
    """Measures the energy of this rank's whole GPU from one logged step to the next, whatever ran in between."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._before: tuple[int, int] | None = None  # millijoules, tokens

    def mj_per_token(self, tokens: int) -> float:
        """Millijoules per token since the last call; NaN if unknown, as on the first call.

        `tokens`: number of tokens that the run has processed so far.
        """
        now, before = millijoules(self.device), self._before
        self._before = None if now is None else (now, tokens)
        return math.nan if now is None or before is None else (now - before[0]) / (tokens - before[1])


def millijoules(device: torch.device) -> int | None:
    """Energy used by the GPU since its driver was loaded, read without waiting for the GPU; None without a counter."""
    handle = _counter(device)
    try:
        return None if handle is None else pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError:
        return None


@functools.cache
def _counter(device: torch.device) -> Any | None:
    """NVML's handle for the GPU if the GPU has an energy counter, otherwise None."""
    if device.type != "cuda":
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError as error:
        warn_on_main(f"energy is not measured: {error}")
        return None
    return handle
