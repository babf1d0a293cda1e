"""A policy of some layers, measured where they are first used if nobody has measured them on this GPU model.

Sizes that the free memory did not do for are left out. Where there is memory for more of them later, they are measured
again; a GPU that is simply small never has, so there nothing is measured twice.

One process of a machine measures at a time, and one that waited takes what the other kept. Random states stay as they
are (a Layer has a generator of its own), and all memory that was taken is given back.
"""

import sys
import time
from collections.abc import Iterable

import torch

from sparsellm.ops import backend
from sparsellm.policy import measure, store
from sparsellm.policy.choice import Policy
from sparsellm.policy.costs import Costs
from sparsellm.policy.layer import SETS, Layer
from sparsellm.policy.packaged import is_shipped
from sparsellm.system.console import progress, warn

SPARE = 1 << 30  # bytes of the GPU that are left alone: torch's allocator is not alone in taking memory

Shape = tuple[int, int]  # K and N of a layer


def policy_for(layers: Iterable[Shape], device: torch.device, missing: Iterable[Shape] = ()) -> Policy:
    """The policy of `layers` by what is kept of them, for the current GPU's model and the kernels that are loaded.

    missing: those of them to measure on `device` first, if nothing is kept of them and the package's costs are of
    others, or if fewer sizes are kept than there is memory for now. Says so in a line for each, as it says why one
    could not be measured: that one goes by the package's costs.
    """
    layers = list(layers)
    found = store.kept(layers)
    unmeasured = [layer for layer in dict.fromkeys(missing) if _is_missing(layer, found, device)]
    if unmeasured:
        with store.measuring() as free:
            found |= store.kept(unmeasured)  # what another process has kept by now
            for layer in unmeasured:
                if not _is_missing(layer, found, device):
                    continue
                width, neurons = layer
                command = f"`sparsellm calibrate model={width}x{neurons}` measures this GPU"
                failed = "another process is still measuring"
                if free:
                    costs, failed = _measure(width, neurons, device, command, found.get(layer))
                    found |= {} if costs is None else {layer: costs}
                torch.cuda.empty_cache()
                if failed and layer not in found:
                    store.warn_once(
                        f"layers of {width} x {neurons} are not measured, so an H200's constants choose their engines:"
                        f" {failed}; {command}"
                    )
    return Policy(measured=found)


def _is_missing(layer: Shape, found: dict[Shape, Costs], device: torch.device) -> bool:
    """Whether nothing, or fewer sizes than there is memory for now, were measured of such layers."""
    if layer not in found:
        return not is_shipped(backend.loaded() or "cuda", *layer)
    tried = store.tried(*layer)
    return tried is not None and _largest_that_fits(*layer, device) > tried


def _measure(
    width: int, neurons: int, device: torch.device, command: str, before: Costs | None
) -> tuple[Costs | None, str]:
    """(the costs of a layer, measured and kept; what kept that from being done). Costs from `before` that reach as far
    stay, as measured with as much memory as now."""
    kernels = backend.loaded() or "cuda"
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
            return None, " ".join(str(error).split())
        costs = before
    if before is not None and max(before.forward) >= max(costs.forward):
        costs = before
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
    return costs, ""


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
