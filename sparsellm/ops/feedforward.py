"""The two feedforward operators, as callers and compilers see them.

    gated_ffn(x, w_gate, w_up, w_down, plan, w_down_t)  -> FeedForwardOutput
    nongated_ffn(x, w_up, w_down, plan, w_down_t)       -> FeedForwardOutput

`plan` says who computes. None: the PyTorch reference, traced, so that torch.compile fuses its elementwise half; it
saves for backward g and u (h, for non-gated) beside the inputs. A plan tensor (`plan_of()`): the registered operator
`torch.ops.sparsellm.feedforward`, opaque to compilers, which reads the plan when it runs, so that a new plan never
recompiles; its engine saves what its backward needs: dense two planes of M x N, tile the packed g and u. Both run the
same mathematics (sparsellm.ops.reference).

A plan is three integers: the engine, the compression of the packed gate, and the room of the tile engine. The row and
tile engines run on CUDA kernels, in bfloat16 on a Hopper GPU, or raise; the dense engine runs everywhere, and takes its
own kernels where they are already loaded (sparsellm.ops.build). No engine ever stands in for another.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparsellm.ops import reference
from sparsellm.ops.dispatch import DENSE, ENGINES, LISTED_PER_TOKEN, TILE
from sparsellm.ops.layout import NeuronMajor, check_fresh
from sparsellm.ops.twell import COMPRESSIONS

MULTIPLE = 8  # K and N: 16-byte rows of bfloat16
MAX_COLUMNS = 65_536  # K and N: a column index of the packed format is a uint16
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


class FeedForwardOutput(NamedTuple):
    """What an operator returns; only y and l1 carry gradients.

    The caller weights l1 (DESIGN §2): lambda / M, M the tokens of the whole optimizer step.
    """

    y: Tensor  # [M, K], the compute dtype
    l1: Tensor  # 0-d float32 (float64 for float64 inputs): the sum of |h|
    nnz: Tensor  # 0-d int64: how many of the M x N activations are not zero
    fired: Tensor  # bool [N]: the neurons that are not zero for some token
    overflow: Tensor  # 0-d int64: how often the packed format was too small and a slower exact path ran
    union: Tensor  # 0-d int64: the neurons active in each 128-token tile, summed over tiles; -1: not measured


def plan_of(engine: str = "dense", compression: int = 8, room: int = LISTED_PER_TOKEN) -> Tensor:
    """The plan (int32 [3], CPU) of an engine of ENGINES.

    compression: columns per word of the packed gate. room: nonzeros per token, on average over a call, that the tile
    engine's lists hold; of a call with more, a slower exact path computes everything, and `overflow` counts it.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine is {engine!r}: it should be {_or(ENGINES)}")
    plan = torch.tensor([ENGINES.index(engine), compression, room], dtype=torch.int32)
    _check_plan(plan)
    return plan


def saved_bytes(plan: Tensor | None, tokens: int, neurons: int, gated: bool, dtype: torch.dtype) -> int:
    """What a call with gradients saves for its backward beside the inputs; dtype: what the operator computes in."""
    if plan is not None and int(plan[0]) == TILE:
        # Here, for nothing else needs the machinery of the kernels.
        from sparsellm.ops import cuda

        return cuda.tile_saved_bytes(tokens, neurons, int(plan[2]), gated)
    return (2 if gated else 1) * tokens * neurons * dtype.itemsize


def gated_ffn(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, plan: Tensor | None, w_down_t: NeuronMajor | None = None
) -> FeedForwardOutput:
    """h = relu(x w_gate^T) * (x w_up^T), y = h w_down^T, and the statistics of h; x [M, K], M >= 0.

    Under autocast all is computed in the autocast dtype. A registered operator casts the weights itself, in backward
    anew, so that nothing but the weights as they are is kept between the two. `w_down_t`, from
    `neuron_major(w_down)`, spares the row and tile engines a transposition per call; it is of no use where autocast
    casts w_down. Raises ValueError for other shapes, dtypes, devices or plans than this module's constants allow, and
    for a w_down_t that is not of w_down as it is now (under torch.compile only where it is used).
    """
    x, cast = _autocast(x)
    _check(x, w_down, cast, w_gate=w_gate, w_up=w_up)
    transposed = _applicable(w_down_t, w_down, x.dtype, plan)
    if plan is None:
        return _unmeasured_union(*_Gated.apply(x, *_in(x.dtype, w_gate, w_up, w_down))[:5])
    saving = _saving(x, w_gate, w_up, w_down)
    return _output(*torch.ops.sparsellm.feedforward(x, w_gate, w_up, w_down, plan, *transposed, saving)[:4])


def nongated_ffn(
    x: Tensor, w_up: Tensor, w_down: Tensor, plan: Tensor | None, w_down_t: NeuronMajor | None = None
) -> FeedForwardOutput:
    """h = relu(x w_up^T), y = h w_down^T, and the statistics of h; otherwise as `gated_ffn`."""
    x, cast = _autocast(x)
    _check(x, w_down, cast, w_up=w_up)
    transposed = _applicable(w_down_t, w_down, x.dtype, plan)
    if plan is None:
        return _unmeasured_union(*_Nongated.apply(x, *_in(x.dtype, w_up, w_down))[:5])
    saving = _saving(x, w_up, w_down)
    return _output(*torch.ops.sparsellm.feedforward(x, w_up, None, w_down, plan, *transposed, saving)[:4])


def _output(y: Tensor, l1: Tensor, fired: Tensor, counts: Tensor) -> FeedForwardOutput:
    nnz, overflow, union = counts.unbind()
    return FeedForwardOutput(y, l1, nnz, fired, overflow, union)


def _unmeasured_union(*outputs: Tensor) -> FeedForwardOutput:
    return FeedForwardOutput(*outputs, union=torch.full_like(outputs[2], -1))


def _applicable(
    w_down_t: NeuronMajor | None, w_down: Tensor, dtype: torch.dtype, plan: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """(weight, stamp) for the operator, which checks them when it runs; (None, None) if it has no use for them."""
    if w_down_t is None:
        return None, None
    if plan is not None and w_down.dtype == dtype:
        return w_down_t.weight, w_down_t.stamp
    if not torch.compiler.is_compiling():
        check_fresh(w_down_t.weight, w_down_t.stamp, w_down)
    return None, None


def _saving(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _check_layer(x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor) -> None:
    if w_up is None:
        _check(x, w_down, True, w_up=w_gate)
    else:
        _check(x, w_down, True, w_gate=w_gate, w_up=w_up)


def _loaded() -> bool:
    from sparsellm.ops import build

    return build.loaded()


def _autocast(x: Tensor) -> tuple[Tensor, bool]:
    """x as autocast has it, and whether autocast is on."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x, False
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(device)), True


def _in(dtype: torch.dtype, *weights: Tensor | None) -> list[Tensor | None]:
    return [None if weight is None else weight.to(dtype) for weight in weights]


def _check(x: Tensor, w_down: Tensor, cast: bool, **up: Tensor) -> None:
    """Raise ValueError unless x [M, K], w_down [K, N] and every tensor of `up` [N, K] fit together.

    cast: the weights will be cast to the dtype of x, as autocast does it: whatever they are but float64.
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
    for name, weight in {**up, "w_down": w_down}.items():
        if name != "w_down" and tuple(weight.shape) != (n, k):
            refuse(name, list(weight.shape), f"[N, K] = [{n}, {k}]")
        castable = cast and weight.is_floating_point() and torch.float64 not in (weight.dtype, x.dtype)
        if weight.dtype != x.dtype and not castable:
            refuse(f"{name}.dtype", weight.dtype, f"{x.dtype}, the dtype of x")
        if weight.device != x.device:
            refuse(f"{name}.device", weight.device, f"{x.device}, the device of x")


def _check_plan(plan: Tensor) -> None:
    if plan.dtype != torch.int32 or plan.device.type != "cpu" or plan.shape != (3,):
        raise ValueError(
            f"plan is {plan.dtype} {list(plan.shape)} on {plan.device}: it should be torch.int32 [3] on cpu"
        )
    engine, compression, room = plan.tolist()
    if not 0 <= engine < len(ENGINES):
        engines = _or([f"{number} ({name})" for number, name in enumerate(ENGINES)])
        raise ValueError(f"plan[0], the engine, is {engine}: it should be {engines}")
    if compression not in COMPRESSIONS:
        raise ValueError(f"plan[1], the compression, is {compression}: it should be {_or(COMPRESSIONS)}")
    if not 1 <= room <= MAX_COLUMNS:
        raise ValueError(f"plan[2], the room per token, is {room}: it should be between 1 and {MAX_COLUMNS}")


def _or(choices) -> str:
    *most, last = map(str, choices)
    return f"{', '.join(most)} or {last}"


def _kernels(x: Tensor, plan: Tensor):
    """The module that runs `plan` on CUDA kernels, or None where PyTorch is the dense engine.

    Raises ValueError or KernelsUnavailable where the plan's engine cannot run.
    """
    engine = int(plan[0])
    fits = x.is_cuda and x.dtype == torch.bfloat16
    if engine == DENSE and not fits:
        return None
    if not x.is_cuda:
        raise ValueError(f"x.device is {x.device}: it should be a CUDA device for the {ENGINES[engine]} engine")
    if not fits:
        raise ValueError(f"x.dtype is {x.dtype}: it should be torch.bfloat16 for the {ENGINES[engine]} engine")
    # Here, for nothing else needs the machinery that builds kernels.
    from sparsellm.ops import build, cuda

    if engine == DENSE and not build.loaded():
        return None
    build.load()
    return cuda


# The traced reference.


def _gated_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:4], *output[5:])


def _gated_gradients(ctx, dy, dl1, *_unused):
    return reference.gated_backward(*ctx.saved_tensors, dy, dl1)


def _nongated_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:3], *output[5:])


def _nongated_gradients(ctx, dy, dl1, *_unused):
    return reference.nongated_backward(*ctx.saved_tensors, dy, dl1)


class _Gated(torch.autograd.Function):
    forward = staticmethod(reference.gated_forward)
    setup_context = staticmethod(_gated_context)
    backward = staticmethod(_gated_gradients)


class _Nongated(torch.autograd.Function):
    forward = staticmethod(reference.nongated_forward)
    setup_context = staticmethod(_nongated_context)
    backward = staticmethod(_nongated_gradients)


# The registered operator, gated or not (w_up None, w_gate then being W_u). Its backward is an operator too: autograd of
# a registered operator must not look inside. It returns (y, l1, fired, counts) and what backward needs: four tensors
# (sparsellm.ops.cuda.Saved) whose sizes depend on the plan, and so are known only when it runs. An operator's results
# may not share memory, and counts, int64 [3] of nonzeros, overflow and union, is one result. Weights of another dtype
# than x are cast to it, forward and backward, and have gradients of their own dtype. Autocast, which the callers have
# heeded, is off inside of both.


@torch.library.custom_op("sparsellm::feedforward", mutates_args=())
def _feedforward(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor, plan: Tensor, w_down_t: Tensor | None,
    stamp: Tensor | None, saving: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _check_layer(x, w_gate, w_up, w_down)
    _check_plan(plan)
    if w_down_t is not None:
        check_fresh(w_down_t, stamp, w_down)
    with torch.autocast(x.device.type, enabled=False):
        return _forward(x, w_gate, w_up, w_down, plan, w_down_t, saving)


def _forward(x, w_gate, w_up, w_down, plan, w_down_t, saving):
    if kernels := _kernels(x, plan):
        *outputs, saved = kernels.forward(x, w_gate, w_up, w_down, plan, w_down_t, saving)
        return *outputs, *saved
    w_gate, w_up, w_down = _in(x.dtype, w_gate, w_up, w_down)
    if w_up is None:
        y, l1, nnz, fired, overflow, g = reference.nongated_forward(x, w_gate, w_down)
        planes = (g,)
    else:
        y, l1, nnz, fired, overflow, *planes = reference.gated_forward(x, w_gate, w_up, w_down)
        g = planes[0]
    counts = torch.stack([nnz, overflow, reference.union(g != 0)])
    nothing = [x.new_empty(0, dtype=d) for d in (x.dtype, x.dtype, torch.int32, torch.int32)]
    saved = [plane.flatten() for plane in planes] if saving else []
    return y, l1, fired, counts, *saved, *nothing[len(saved) :]


@_feedforward.register_fake
def _(x, w_gate, w_up, w_down, plan, w_down_t, stamp, saving):
    w_gate, w_up, w_down = _in(x.dtype, w_gate, w_up, w_down)
    if w_up is None:
        y, l1, nnz, fired, *_ = reference.nongated_forward(x, w_gate, w_down)
    else:
        y, l1, nnz, fired, *_ = reference.gated_forward(x, w_gate, w_up, w_down)
    new_size = torch.library.get_ctx().new_dynamic_size if saving else lambda: 0
    saved = [x.new_empty(new_size(), dtype=d) for d in (x.dtype, x.dtype, torch.int32, torch.int32)]
    return y, l1, fired, nnz.new_empty(3), *saved


@torch.library.custom_op("sparsellm::feedforward_backward", mutates_args=())
def _feedforward_backward(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor, dy: Tensor, dl1: Tensor,
    first: Tensor, second: Tensor, lists: Tensor, index: Tensor,
) -> list[Tensor]:  # fmt: skip
    with torch.autocast(x.device.type, enabled=False):
        found = _backward(x, w_gate, w_up, w_down, dy, dl1, first, second, lists, index)
    gradients = [gradient for gradient in found if gradient is not None]
    dtypes = [t.dtype for t in (x, w_gate, w_up, w_down) if t is not None]
    return [gradient.to(dtype).contiguous() for gradient, dtype in zip(gradients, dtypes, strict=True)]


def _backward(x, w_gate, w_up, w_down, dy, dl1, first, second, lists, index):
    if x.is_cuda and x.dtype == torch.bfloat16 and _loaded():
        from sparsellm.ops import cuda

        return cuda.backward(x, w_gate, w_up, w_down, dy, dl1, cuda.Saved(first, second, lists, index))
    shape, layer = (x.shape[0], w_down.shape[1]), _in(x.dtype, w_gate, w_up, w_down)
    if w_up is None:
        return reference.nongated_backward(x, layer[0], layer[2], first.view(shape), dy, dl1)
    return reference.gated_backward(x, *layer, first.view(shape), second.view(shape), dy, dl1)


@_feedforward_backward.register_fake
def _(x, w_gate, w_up, w_down, dy, dl1, first, second, lists, index):
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, w_gate, w_up, w_down) if t is not None
    ]


def _feedforward_context(ctx, inputs, output) -> None:
    x, w_gate, w_up, w_down, *_, saving = inputs
    ctx.set_materialize_grads(False)  # else what is saved would be given gradients, planes of zeros
    if saving:
        ctx.save_for_backward(x, w_gate, w_up, w_down, *output[4:])


def _feedforward_gradients(ctx, dy, dl1, *_unused):
    x, w_gate, w_up, w_down, *saved = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dy
    dl1 = x.new_zeros(()) if dl1 is None else dl1
    gradients = torch.ops.sparsellm.feedforward_backward(x, w_gate, w_up, w_down, dy, dl1, *saved)
    dx, dw_gate, *dw_up, dw_down = gradients
    return dx, dw_gate, dw_up[0] if dw_up else None, dw_down, None, None, None, None


_feedforward.register_autograd(_feedforward_gradients, setup_context=_feedforward_context)
