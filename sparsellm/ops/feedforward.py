"""The feedforward operator, as callers and compilers see it.

    feedforward(x, w_gate, w_up, w_down, plan)  -> FeedForwardOutput      w_gate None: non-gated

`plan` selects what computes the call; the mathematics is the same for all (sparsellm.ops.reference).
    None      The PyTorch reference, traced, so that torch.compile fuses its elementwise half. The reference saves g and
              u (in non-gated layers g) for backward, in addition to the inputs.
    a plan    or the tensor that encodes one (sparsellm.ops.plan): the registered operator
              `torch.ops.sparsellm.feedforward`. Compilers do not look inside the operator, which reads the plan when it
              runs, so a new plan triggers no recompilation. Each engine saves what its own backward needs: dense one or
              two planes of M x N values, tile the nonzeros of g and u.

The row and tile engines run on the CUDA or Triton kernels, in bfloat16 on a GPU, or raise an error. The dense engine
runs everywhere: on kernels if they are already loaded (sparsellm.ops.backend), else in PyTorch. An engine that cannot
run is never replaced by another one.

With `rounded`, x in FP8, the tile engine computes the gate product in FP8 (sparsellm.ops.float8_gate): it rounds
w_gate (non-gated: w_up) with a scale per neuron, and packs g from this product. Everything else is bfloat16, from the
x and the weights that were not rounded. Backward uses the packed g, so both passes agree on what fires, and treats the
rounding as the identity (straight-through). The dense engine ignores `rounded`, and the tokens that take the tile
engine's overflow path (rest_calls) compute the gate product in bfloat16 in both passes.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sparsellm.ops import accumulation, backend, cuda, reference
from sparsellm.ops.float8_gate import Float8Rows
from sparsellm.ops.plan import Engine, Plan
from sparsellm.ops.twell import MAX_COLUMNS

MULTIPLE = 8  # K and N must be multiples of this, so that every bfloat16 row is a multiple of 16 bytes long
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


class FeedForwardOutput(NamedTuple):
    """What the operator returns; only y and l1 carry gradients.

    Attributes:
        y: [..., K], the compute dtype; M counts the tokens of all leading dimensions.
        l1: 0-d float32 (float64 for float64 inputs): the plain sum of |h|. The caller multiplies the sum by lambda / M,
            where M counts the tokens of the whole optimizer step (DESIGN §2).
        nnz: 0-d int64: number of nonzeros among the M x N activations.
        fired: bool [N]: the neurons that fire for some token.
        wide_segments: 0-d int64: segments of the packed gate that overflow their words (sparsellm.ops.twell).
        rest_calls: 0-d int64: 1 if the call exceeded the tile engine's lists, so that some of its tokens took the
            overflow path, else 0.
        union: 0-d int64: the neurons active in each 128-token tile, summed over tiles; -1: not measured.
        overflow_tiles: 0-d int64: the 128-token tiles that took the overflow path.
    """

    y: Tensor
    l1: Tensor
    nnz: Tensor
    fired: Tensor
    wide_segments: Tensor
    rest_calls: Tensor
    union: Tensor
    overflow_tiles: Tensor


def saved_bytes(plan: Plan | None, tokens: int, neurons: int, gated: bool, dtype: torch.dtype) -> int:
    """The bytes that a call computed in `dtype` saves for backward in addition to the inputs."""
    if plan is not None and plan.engine == Engine.tile:
        return (backend.driver() or cuda).tile_saved_bytes(tokens, neurons, plan.room, gated)
    return (2 if gated else 1) * tokens * neurons * dtype.itemsize


def feedforward(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    plan: Plan | Tensor | None,
    rounded: Float8Rows | None = None,
) -> FeedForwardOutput:
    """y = h w_down^T and the statistics of h, where h = relu(x w_gate^T) * (x w_up^T).

    Autocast sets the compute dtype. The registered operator casts the weights in forward and again in backward, so that
    no cast copies occupy memory in between, unless a step's micro-batches share them (sparsellm.ops.accumulation).

    Args:
        x: [..., K]: M >= 0 tokens in any leading dimensions.
        w_gate: [N, K], or None: h = relu(x w_up^T).
        w_up: [N, K].
        w_down: [K, N].
        plan: The engine that computes the call. None: the PyTorch reference, traced.
        rounded: x [M, K] in FP8, with K a multiple of 16: the tile engine then computes the gate product in FP8, on
            the CUDA kernels. None: in the compute dtype.

    Raises:
        ValueError: Shapes, dtypes, devices or the plan are invalid.
        KernelsUnavailable: The plan's engine, or its FP8 gate product, cannot run here.
        RuntimeError: The caller requested second derivatives or forward mode.
    """
    shape = x.shape
    x, cast = in_autocast(x.reshape(-1, shape[-1]) if shape else x)
    check(x, w_gate, w_up, w_down, cast)
    if plan is None:
        y, *statistics = _Traced.apply(x, *_cast(x.dtype, w_gate, w_up, w_down))[:4]
        return uncounted(y.view(shape), *statistics)
    saving = torch.is_grad_enabled() and any(t.requires_grad for t in (x, w_gate, w_up, w_down) if t is not None)
    plan = plan.tensor() if isinstance(plan, Plan) else plan
    in_float8 = (None, None) if rounded is None else rounded
    y, l1, fired, counts, _ = torch.ops.sparsellm.feedforward(x, w_gate, w_up, w_down, plan, saving, *in_float8)
    return output_of(y.view(shape), l1, fired, counts)


def output_of(y: Tensor, l1: Tensor, fired: Tensor, counts: Tensor) -> FeedForwardOutput:
    """The registered operator's results by name. counts: int64 [5] of nnz, wide_segments, rest_calls, union and
    overflow_tiles."""
    nnz, *others = counts.unbind()
    return FeedForwardOutput(y, l1, nnz, fired, *others)


def uncounted(y: Tensor, l1: Tensor, nnz: Tensor, fired: Tensor) -> FeedForwardOutput:
    """The output of plain PyTorch code, which packs nothing and does not measure the union."""
    zero = torch.zeros_like(nnz)
    return FeedForwardOutput(y, l1, nnz, fired, zero, zero.clone(), zero - 1, zero.clone())


def in_autocast(x: Tensor) -> tuple[Tensor, bool]:
    """(x, cast to the autocast dtype if autocast is on; whether it is on). float64 stays float64."""
    if not _autocasts(x.device.type):
        return x, False
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(x.device.type)), True


def _autocasts(device: str) -> bool:
    return device != "meta" and torch.is_autocast_enabled(device)  # is_autocast_enabled raises an error for meta


def _cast(dtype: torch.dtype, *weights: Tensor | None) -> Any:
    return [None if weight is None else weight.to(dtype) for weight in weights]


def check(x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, cast: bool) -> None:
    """Raise ValueError unless x [M, K], w_gate and w_up [N, K] and w_down [K, N] fit together.

    cast: the weights will be cast to the dtype of x, so they may have another floating dtype, except float64.
    """

    def refuse(name: str, is_: object, should_be: object) -> None:
        raise ValueError(f"{name} is {is_}: it should be {should_be}")

    if x.dtype not in DTYPES:
        refuse("x.dtype", x.dtype, " or ".join(str(d) for d in DTYPES))
    if x.dim() != 2:
        refuse("x", f"{x.dim()}-dimensional {tuple(x.shape)}", "2-dimensional [M, K]")
    k = x.shape[1]
    n = w_down.shape[1] if w_down.dim() == 2 else -1
    if w_down.dim() != 2 or w_down.shape[0] != k:
        refuse("w_down", list(w_down.shape), f"[K, N] with K = {k}, the width of x")
    for name, width in (("K, the width of x,", k), ("N, the columns of w_down,", n)):
        if width % MULTIPLE or not 0 < width <= MAX_COLUMNS:
            refuse(name, width, f"a multiple of {MULTIPLE} up to {MAX_COLUMNS}")
    dtype, device, shape = x.dtype, x.device, (n, k)
    for name, weight in (("w_down", w_down), ("w_up", w_up), ("w_gate", w_gate)):
        if weight is None:
            continue
        if name != "w_down" and weight.shape != shape:
            refuse(name, list(weight.shape), f"[N, K] = [{n}, {k}]")
        castable = weight.is_floating_point() and torch.float64 not in (weight.dtype, dtype)
        if weight.dtype != dtype and not (cast and castable):
            unless = ", unless torch.autocast is on" if castable else ""
            refuse(f"{name}.dtype", weight.dtype, f"{dtype}, the dtype of x{unless}")
        if weight.device != device:
            refuse(f"{name}.device", weight.device, f"{device}, the device of x")


def save_inputs_and_planes(ctx: Any, inputs: tuple, output: tuple) -> None:
    """Save the inputs, and the outputs after (y, l1, nnz, fired), for backward."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output[4:])


class _Traced(torch.autograd.Function):
    """The traced reference: (x, w_gate or None, w_up, w_down) -> (y, l1, nnz, fired, *planes)."""

    forward = staticmethod(reference.forward)

    setup_context = staticmethod(save_inputs_and_planes)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dl1: Tensor | None, *of_others: Tensor | None) -> tuple:
        x, w_gate, w_up, w_down, *planes = ctx.saved_tensors
        dy, dl1 = first_order(x, dy, dl1, of_others)
        return _by_argument(w_gate, reference.backward(x, w_gate, w_up, w_down, planes, dy, dl1))


def _by_argument(w_gate: Tensor | None, gradients: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """(dx, dw_gate, dw_up, dw_down) from the gradients that exist; dw_gate is None in a non-gated layer."""
    dx, *dws = gradients
    return dx, None if w_gate is None else dws[0], *dws[-2:]


def first_order(
    x: Tensor, dy: Tensor | None, dl1: Tensor | None, of_others: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """(dy, dl1), with zeros for None. of_others: the gradients of outputs that no caller sees, such as g and u. Only
    second derivatives produce such gradients. Ignoring them would give wrong results, so this function raises
    RuntimeError. (Compiled code passes zeros, and refuses second derivatives itself.)"""
    if not torch.compiler.is_compiling() and any(gradient is not None for gradient in of_others):
        raise RuntimeError("the feedforward operator was differentiated twice: it supports only first derivatives")
    return torch.zeros_like(x) if dy is None else dy, x.new_zeros(()) if dl1 is None else dl1


# The registered operator. Its backward is a registered operator too, because autograd must not trace into either.
# Forward returns (y, l1, fired, counts, saved):
#   saved   one uint8 buffer for backward (sparsellm.ops.cuda), whose length depends on the plan, and is known only when
#           the operator runs
#   counts  int64 [5] in one tensor, because the results of an operator may not share memory, as five views would
# Forward and backward each cast the weights to the dtype of x; the gradients have the weights' own dtypes.
# Backward may return the sum of earlier micro-batches' gradients after adding to it in place. Nobody else holds that
# tensor (sparsellm.ops.accumulation), so to autograd and to compilers it is a new one.
# `feedforward` has cast x to the autocast dtype, so both operators compute with autocast off.


@torch.library.custom_op("sparsellm::feedforward", mutates_args=())
def _feedforward(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    plan: Tensor,
    saving: bool,
    values: Tensor | None = None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """values, scales: x in FP8, or None."""
    check(x, w_gate, w_up, w_down, cast=True)
    rounded = None if values is None or scales is None else Float8Rows(values, scales)
    return forward(x, w_gate, w_up, w_down, Plan.read(plan), None, saving, rounded=rounded)


def forward(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    plan: Plan,
    w_down_t: Tensor | None,
    saving: bool,
    counting: bool = True,
    rounded: Float8Rows | None = None,
) -> cuda.Forward:
    """(y, l1, fired, counts, saved), computed by the engine of `plan`; the caller must have checked the inputs.

    w_down_t [N, K]: w_down transposed in advance for the row and tile engines, or None. Without `counting`, the
    kernels' dense engine may skip the statistics: l1, fired and counts are then empty. rounded: as in `feedforward`.
    Raises ValueError or KernelsUnavailable if the plan's engine cannot run, and RuntimeError in forward mode.
    """
    if in_forward_mode():
        raise RuntimeError("a feedforward layer with a plan was differentiated in forward mode: use backward mode")
    if _autocasts(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return forward(x, w_gate, w_up, w_down, plan, w_down_t, saving, counting, rounded)
    if (kernels := _kernels(x, plan.engine)) is not None:
        if rounded is None or plan.engine != Engine.tile:
            return kernels.forward(x, w_gate, w_up, w_down, plan, w_down_t, saving, counting)
        if kernels is not cuda:
            raise backend.KernelsUnavailable("the Triton kernels have no gate product in FP8: use the CUDA kernels")
        return cuda.forward(x, w_gate, w_up, w_down, plan, w_down_t, saving, counting, rounded)
    y, l1, nnz, fired, *planes = reference.forward(x, *_cast(x.dtype, w_gate, w_up, w_down))
    counts = torch.stack([nnz, zero := torch.zeros_like(nnz), zero, reference.union(planes[0] != 0), zero])
    saved = torch.stack(planes).view(torch.uint8).flatten() if saving else x.new_empty(0, dtype=torch.uint8)
    return y, l1, fired, counts, saved


def in_forward_mode() -> bool:
    """Whether torch differentiates in forward mode (torch.func.jvp), where it treats custom operators as constants."""
    return forward_ad._current_level >= 0


def _kernels(x: Tensor, engine: Engine) -> ModuleType | None:
    """The driver of the kernels that compute `engine`, or None if PyTorch does: only the dense engine runs without
    kernels. Raises ValueError or KernelsUnavailable if `engine` cannot run."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        if engine != Engine.dense:
            backend.load()
        return backend.driver()
    if engine == Engine.dense:
        return None
    if not x.is_cuda:
        raise ValueError(f"x.device is {x.device}: it should be a CUDA device for the {engine.name} engine")
    raise ValueError(f"x.dtype is {x.dtype}: it should be torch.bfloat16 for the {engine.name} engine")


@_feedforward.register_fake
def _(
    x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, plan: Tensor, saving: bool, *_: Tensor | None
) -> tuple[Tensor, ...]:
    length = torch.library.get_ctx().new_dynamic_size() if saving else 0
    return *fake_results(x, w_down.shape[1]), x.new_empty(length, dtype=torch.uint8)


def fake_results(x: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, l1, fired and counts without values, from which compilers learn shapes and dtypes."""
    l1 = x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32))
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, l1, x.new_empty(n, dtype=torch.bool), x.new_empty(cuda.COUNTS, dtype=torch.int64)


@torch.library.custom_op("sparsellm::feedforward_backward", mutates_args=())
def _feedforward_backward(
    x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, dy: Tensor, dl1: Tensor, saved: Tensor
) -> list[Tensor]:
    weights = [w for w in (w_gate, w_up, w_down) if w is not None]
    sums = [accumulation.sum_of(w) for w in weights]
    with torch.autocast(x.device.type, enabled=False):
        kernels = _kernels(x, cuda.engine_of(saved))
        if kernels is cuda:
            dx, *dws = cuda.backward(x, w_gate, w_up, w_down, dy, dl1, saved, sums)
        elif kernels is not None:
            dx, *dws = kernels.backward(x, w_gate, w_up, w_down, dy, dl1, saved)
        else:
            planes = cuda.planes_of(saved, 1 if w_gate is None else 2, x.shape[0], w_down.shape[1], x.dtype)
            gate, up, down = _cast(x.dtype, w_gate, w_up, w_down)
            dx, *dws = reference.backward(x, gate, up, down, planes, dy, dl1)
    return [dx.contiguous(), *map(accumulation.added, sums, dws, [w.dtype for w in weights])]


@_feedforward_backward.register_fake
def _(
    x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, dy: Tensor, dl1: Tensor, saved: Tensor
) -> list[Tensor]:
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, w_gate, w_up, w_down) if t is not None
    ]


def _feedforward_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, w_gate, w_up, w_down, _, saving, *_ = inputs
    ctx.set_materialize_grads(False)  # otherwise autograd would allocate a zero gradient as large as `saved`
    if saving:
        ctx.save_for_backward(x, w_gate, w_up, w_down, output[4])


def _feedforward_gradients(ctx: Any, dy: Tensor | None, dl1: Tensor | None, *_unused: Any) -> tuple[Tensor | None, ...]:
    x, w_gate, w_up, w_down, saved = ctx.saved_tensors
    dy, dl1 = first_order(x, dy, dl1, ())
    gradients = torch.ops.sparsellm.feedforward_backward(x, w_gate, w_up, w_down, dy, dl1, saved)
    return *_by_argument(w_gate, gradients), None, None, None, None


_feedforward.register_autograd(_feedforward_gradients, setup_context=_feedforward_context)
