"""Layers that nobody has measured on this GPU model: measured where they are first used, once, and kept.

One process of a machine measures at a time, and one that waited takes what the other kept. Random states stay as they
are (a Layer has a generator of its own), and all memory that was taken is given back.
"""

import sys
import time
from collections.abc import Iterable

import torch

from sparsellm.calibration import measure, store
from sparsellm.calibration.layer import SETS, Layer
from sparsellm.console import progress, warn
from sparsellm.ops import backend

SPARE = 1 << 30  # bytes of the GPU that are left alone: torch's allocator is not alone in taking memory


def measure_missing(layers: Iterable[tuple[int, int]], device: torch.device) -> None:
    """Have those layers (K, N) measured on `device` that this process has taken no costs for, and that the package's
    constants are not of.

    Says so in a line for each, as it says why one could not be measured: that one goes by the package's constants.
    """
    missing = [layer for layer in dict.fromkeys(layers) if not (layer in backend.measured or store.is_shipped(*layer))]
    if not missing:
        return
    with store.measuring() as free:
        store.take(missing)  # what another process has kept by now
        for width, neurons in missing:
            if (width, neurons) in backend.measured:
                continue
            command = f"`sparsellm calibrate model={width}x{neurons}` measures this GPU"
            failed = _measure(width, neurons, device, command) if free else "another process is still measuring"
            torch.cuda.empty_cache()
            if failed:
                backend.measured[width, neurons] = None  # asked once
                warn(
                    f"layers of {width} x {neurons} are not measured, so an H200's constants choose their engines:"
                    f" {failed}; {command}"
                )


def _measure(width: int, neurons: int, device: torch.device, command: str) -> str | None:
    """Measure and keep a layer; what kept that from being done."""
    kernels = backend.loaded() or "cuda"
    largest = measure.SIZES[kernels][-1]
    most, started = min(_tokens_that_fit(width, neurons, device), largest), time.perf_counter()
    try:
        with torch.cuda.device(device), torch.autocast(device.type, enabled=False):
            if most < measure.TRAINING_SIZES[0]:
                raise torch.OutOfMemoryError(f"{device} has not enough free memory")
            layer = Layer(width, neurons, most, device, torch.bfloat16)
            title = f"measuring layers of {width} x {neurons}"
            with progress(title, measure.steps(kernels), "step", shown=sys.stderr.isatty()) as advance:
                costs, _ = measure.measure(kernels, layer, advance=advance, most=most)
    except torch.OutOfMemoryError as error:
        return " ".join(str(error).split())
    backend.measured[width, neurons] = costs
    seconds = time.perf_counter() - started
    try:
        kept = f"kept in {store.keep(costs, None)}"
    except OSError as error:
        kept = f"not kept, for the cache cannot be written ({error})"
    reached = max(costs.forward)
    if reached < largest:
        kept = f"up to {reached:,} tokens, as far as its free memory goes ({command}), {kept}"
    warn(f"this GPU had not been measured for layers of {width} x {neurons}: measured in {seconds:.1f} s, {kept}")
    return None


def _tokens_that_fit(width: int, neurons: int, device: torch.device) -> int:
    """How many tokens there is memory to time forward calls of: below 1 if not even the weights fit."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    gates = len({*measure.TILE, *measure.ROW, *measure.ROW_OF_FEWEST})
    matrices = 3 * SETS + 1 + gates + 6  # 6: gradients, and weights by neuron
    return (free - SPARE - 2 * width * neurons * matrices) // (16 * width + 12 * neurons)
