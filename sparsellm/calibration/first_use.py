"""Layers that nobody has measured on this GPU model: measured where they are first used, once, and kept.

Sizes that the free memory did not do for are left out. Where a later process has the memory for more of them, it
measures again; a GPU that is simply small never has, so there nothing is measured twice.

One process of a machine measures at a time, and one that waited takes what the other kept. Random states stay as they
are (a Layer has a generator of its own), and all memory that was taken is given back.
"""

import sys
import time
from collections.abc import Iterable

import torch

from sparsellm.calibration import measure, store
from sparsellm.calibration.layer import SETS, Layer
from sparsellm.ops import backend
from sparsellm.system.console import progress, warn

SPARE = 1 << 30  # bytes of the GPU that are left alone: torch's allocator is not alone in taking memory


def measure_missing(layers: Iterable[tuple[int, int]], device: torch.device) -> None:
    """Let engines of `layers`, (K, N) each, be chosen by what is kept of them, as `store.take` does. Before that, those
    are measured on `device` of which nothing is kept and that the package's constants are not of, or of which fewer
    sizes are kept than there is memory for now. A layer for which this process has decided already stays with that.

    Says so in a line for each, as it says why one could not be measured: that one goes by the package's constants.
    """
    undecided = [layer for layer in dict.fromkeys(layers) if layer not in backend.measured]
    store.take(undecided)
    missing = [layer for layer in undecided if _is_missing(*layer, device)]
    if not missing:
        return
    with store.measuring() as free:
        for layer in missing:
            backend.measured.pop(layer, None)
        store.take(missing)  # what another process has kept by now
        for width, neurons in missing:
            if not _is_missing(width, neurons, device):
                continue
            command = f"`sparsellm calibrate model={width}x{neurons}` measures this GPU"
            failed = _measure(width, neurons, device, command) if free else "another process is still measuring"
            torch.cuda.empty_cache()
            if failed and (width, neurons) not in backend.measured:
                backend.measured[width, neurons] = None  # asked once
                warn(
                    f"layers of {width} x {neurons} are not measured, so an H200's constants choose their engines:"
                    f" {failed}; {command}"
                )


def _is_missing(width: int, neurons: int, device: torch.device) -> bool:
    """Whether nothing, or fewer sizes than there is memory for now, were measured of such layers."""
    if (width, neurons) not in backend.measured:
        return not store.is_shipped(width, neurons)
    tried = store.tried(width, neurons)
    return tried is not None and _largest_that_fits(width, neurons, device) > tried


def _measure(width: int, neurons: int, device: torch.device, command: str) -> str | None:
    """Measure and keep a layer; what kept that from being done. Costs that reach as far already stay, as measured with
    as much memory as now."""
    kernels, before = backend.loaded() or "cuda", backend.measured.get((width, neurons))
    largest, most = measure.SIZES[kernels][-1], _largest_that_fits(width, neurons, device)
    started = time.perf_counter()
    try:
        with torch.cuda.device(device), torch.autocast(device.type, enabled=False):
            if most < measure.TRAINING_SIZES[0]:
                raise torch.OutOfMemoryError(f"{device} has not enough free memory")
            layer = Layer(width, neurons, most, device, torch.bfloat16)
            title = f"measuring layers of {width} x {neurons}"
            with progress(title, measure.steps(kernels), "step", shown=sys.stderr.isatty()) as advance:
                costs, _ = measure.measure(kernels, layer, advance=advance, most=most)
    except torch.OutOfMemoryError as error:
        if before is None:
            return " ".join(str(error).split())
        costs = before
    if before is not None and max(before.forward) >= max(costs.forward):
        costs = before
    backend.measured[width, neurons] = costs
    seconds = time.perf_counter() - started
    try:
        kept = f"kept in {store.keep(costs, None, None if most == largest else most)}"
    except OSError as error:
        kept = f"not kept, for the cache cannot be written ({error})"
    reached = max(costs.forward)
    if reached < largest:
        kept = f"up to {reached:,} tokens, as far as its free memory goes ({command}), {kept}"
    had = "not been measured" if before is None else f"been measured up to {max(before.forward):,} tokens only"
    warn(f"this GPU had {had} for layers of {width} x {neurons}: measured in {seconds:.1f} s, {kept}")
    return None


def _largest_that_fits(width: int, neurons: int, device: torch.device) -> int:
    """The largest number of tokens that is measured, of those that there is memory for; 0: not even the smallest."""
    fit = _tokens_that_fit(width, neurons, device)
    return max((tokens for tokens in measure.SIZES[backend.loaded() or "cuda"] if tokens <= fit), default=0)


def _tokens_that_fit(width: int, neurons: int, device: torch.device) -> int:
    """How many tokens there is memory to time forward calls of: below 1 if not even the weights fit."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    gates = len({*measure.TILE, *measure.ROW, *measure.ROW_OF_FEWEST})
    matrices = 3 * SETS + 1 + gates + 6  # 6: gradients, and weights by neuron
    return (free - SPARE - 2 * width * neurons * matrices) // (16 * width + 12 * neurons)
