"""Creates a policy for layers, and calibrates those that have no cached costs for this GPU model.

Token counts that do not fit into free memory are skipped. If more memory is free later, the layer is measured again. On
a GPU that is too small for the largest token counts, that never happens, so nothing is measured again.

Only one process per machine measures at a time; the other processes wait and then read the results from the cache.
Global random states are not changed (a Layer has its own generator), and all memory is released afterwards.
"""

import dataclasses
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
from sparsellm.system.packages import PackageMissing

SPARE = 1 << 30  # bytes of GPU memory left free, because not all memory is allocated through torch

Shape = tuple[int, int]  # K and N of a layer


def policy_for(layers: Iterable[Shape], device: torch.device, missing: Iterable[Shape] = ()) -> Policy:
    """The policy for `layers`, from the cached costs for the current GPU's model and the loaded kernels.

    missing: the layers to measure on `device` first, unless they have cached costs or the package's costs were measured
    on this GPU model. Layers are also measured again if more memory is free now than when they were measured. Each
    measurement and each failure is reported in one line. A layer that could not be measured uses the package's costs.
    """
    layers = list(layers)
    found = store.kept(layers)
    unmeasured = [layer for layer in dict.fromkeys(missing) if _is_missing(layer, found, device)]
    if unmeasured:
        with store.measuring() as free:
            found |= store.kept(unmeasured)  # results that another process has cached meanwhile
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
                        f"layers of {width} x {neurons} were not measured, so an H200's constants choose their engines:"
                        f" {failed}; {command}"
                    )
    return Policy(measured=found)


def _is_missing(layer: Shape, found: dict[Shape, Costs], device: torch.device) -> bool:
    """Whether `layer` has no costs for this GPU, or costs for fewer token counts than fit into memory now."""
    if layer not in found:
        return not is_shipped(backend.loaded() or "cuda", *layer)
    tried = found[layer].tried
    return tried is not None and _largest_that_fits(*layer, device) > tried


def _measure(
    width: int, neurons: int, device: torch.device, command: str, before: Costs | None
) -> tuple[Costs | None, str]:
    """Measures a layer and caches its costs. Returns (costs, "") or (None, why it failed). If `before` covers as many
    tokens as the new costs, `before` is returned and cached."""
    kernels = backend.loaded() or "cuda"
    largest, most = measure.SIZES[kernels][-1], _largest_that_fits(width, neurons, device)
    started = time.perf_counter()
    try:
        with torch.cuda.device(device), torch.autocast(device.type, enabled=False):
            if most < measure.TRAINING_SIZES[0]:
                raise torch.OutOfMemoryError(f"{device} does not have enough free memory")
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
    costs = dataclasses.replace(costs, tried=None if most == largest else most)
    seconds = time.perf_counter() - started
    try:
        kept = f"cached in {store.keep(costs, None)}"
    except (OSError, PackageMissing) as error:
        kept = f"not cached, because the cache cannot be written ({error})"
    reached = max(costs.forward)
    if reached < largest:
        kept = f"up to {reached:,} tokens, the most that fit into free memory ({command}), {kept}"
    had = "not been measured" if before is None else f"been measured only up to {max(before.forward):,} tokens"
    warn(f"this GPU had {had} for layers of {width} x {neurons}: measured in {seconds:.1f} s, {kept}")
    return costs, ""


def _largest_that_fits(width: int, neurons: int, device: torch.device) -> int:
    """The largest token count of measure.SIZES whose forward call fits into free memory; 0 if none does."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    gates = len({*measure.TILE, *measure.ROW, *measure.ROW_OF_FEWEST})
    matrices = 3 * SETS + 1 + gates + 6  # 6: gradients, and neuron-major copies of weights
    # Below 1 if not even the weights fit.
    fit = (free - SPARE - 2 * width * neurons * matrices) // (16 * width + 12 * neurons)
    return max((tokens for tokens in measure.SIZES[backend.loaded() or "cuda"] if tokens <= fit), default=0)
