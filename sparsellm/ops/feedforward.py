"""The two feedforward operators, as callers and compilers see them.

    gated_ffn(x, w_gate, w_up, w_down, plan)  -> FeedForwardOutput
    nongated_ffn(x, w_up, w_down, plan)       -> FeedForwardOutput

`plan` says who computes. None: the PyTorch reference, traced, so that torch.compile fuses its elementwise half. A plan
tensor (`dense_plan()`): the registered operator `torch.ops.sparsellm.*`, opaque to compilers, which reads the plan when
it runs, so that a new plan never recompiles. Both run the same mathematics (sparsellm.ops.reference) and save for
backward only g and u (h, for non-gated) beside the inputs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparsellm.ops import reference

MULTIPLE = 8  # K and N: 16-byte rows of bfloat16
MAX_COLUMNS = 65_536  # K and N: a column index of the packed format is a uint16
DTYPES = (torch.bfloat16, torch.float32, torch.float64)

DENSE = 0  # plan[0]: the engine


class FeedForwardOutput(NamedTuple):
    """What an operator returns; only y and l1 carry gradients.

    The caller weights l1 (DESIGN §2): lambda / M, M the tokens of the whole optimizer step.
    """

    y: Tensor  # [M, K], the compute dtype
    l1: Tensor  # 0-d float32 (float64 for float64 inputs): the sum of |h|
    nnz: Tensor  # 0-d int64: how many of the M x N activations are not zero
    fired: Tensor  # bool [N]: the neurons that are not zero for some token
    overflow: Tensor  # 0-d int64: how often the packed format was too small and a slower exact path ran


def dense_plan() -> Tensor:
    """The plan (int32 [1], CPU) of the dense PyTorch engine."""
    return torch.tensor([DENSE], dtype=torch.int32)


def gated_ffn(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, plan: Tensor | None) -> FeedForwardOutput:
    """h = relu(x w_gate^T) * (x w_up^T), y = h w_down^T, and the statistics of h; x [M, K], M >= 0.

    Under autocast, x and the weights are cast to the autocast dtype. Raises ValueError for other shapes, dtypes,
    devices or plans than this module's constants allow.
    """
    x, w_gate, w_up, w_down = _autocast(x, w_gate, w_up, w_down)
    _check(x, w_down, w_gate=w_gate, w_up=w_up)
    if plan is None:
        return FeedForwardOutput(*_Gated.apply(x, w_gate, w_up, w_down)[:5])
    return FeedForwardOutput(*torch.ops.sparsellm.gated_ffn(x, w_gate, w_up, w_down, plan)[:5])


def nongated_ffn(x: Tensor, w_up: Tensor, w_down: Tensor, plan: Tensor | None) -> FeedForwardOutput:
    """h = relu(x w_up^T), y = h w_down^T, and the statistics of h; otherwise as `gated_ffn`."""
    x, w_up, w_down = _autocast(x, w_up, w_down)
    _check(x, w_down, w_up=w_up)
    if plan is None:
        return FeedForwardOutput(*_Nongated.apply(x, w_up, w_down)[:5])
    return FeedForwardOutput(*torch.ops.sparsellm.nongated_ffn(x, w_up, w_down, plan)[:5])


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def _check(x: Tensor, w_down: Tensor, **up: Tensor) -> None:
    """Raise ValueError unless x [M, K], w_down [K, N] and every tensor of `up` [N, K] fit together."""

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
        if weight.dtype != x.dtype:
            refuse(f"{name}.dtype", weight.dtype, f"{x.dtype}, the dtype of x")
        if weight.device != x.device:
            refuse(f"{name}.device", weight.device, f"{x.device}, the device of x")


def _check_plan(plan: Tensor) -> None:
    if plan.dtype != torch.int32 or plan.device.type != "cpu" or plan.dim() != 1 or plan.numel() != 1:
        raise ValueError(
            f"plan is {plan.dtype} {list(plan.shape)} on {plan.device}: it should be torch.int32 [1] on cpu"
        )
    if plan[0] != DENSE:
        raise ValueError(f"plan[0], the engine, is {int(plan[0])}: it should be {DENSE} (dense)")


# Saving and differentiating, written once for both ways of calling.


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


# The registered operators. Their backward is an operator too: autograd of a registered operator must not look inside.


@torch.library.custom_op("sparsellm::gated_ffn", mutates_args=())
def _gated_op(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, plan: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    _check(x, w_down, w_gate=w_gate, w_up=w_up)
    _check_plan(plan)
    return reference.gated_forward(x, w_gate, w_up, w_down)


@torch.library.custom_op("sparsellm::gated_ffn_backward", mutates_args=())
def _gated_backward_op(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, g: Tensor, u: Tensor, dy: Tensor, dl1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return reference.gated_backward(x, w_gate, w_up, w_down, g, u, dy, dl1)


@torch.library.custom_op("sparsellm::nongated_ffn", mutates_args=())
def _nongated_op(
    x: Tensor, w_up: Tensor, w_down: Tensor, plan: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    _check(x, w_down, w_up=w_up)
    _check_plan(plan)
    return reference.nongated_forward(x, w_up, w_down)


@torch.library.custom_op("sparsellm::nongated_ffn_backward", mutates_args=())
def _nongated_backward_op(
    x: Tensor, w_up: Tensor, w_down: Tensor, h: Tensor, dy: Tensor, dl1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return reference.nongated_backward(x, w_up, w_down, h, dy, dl1)


# Fake tensors run the reference itself: shapes and dtypes then cannot disagree with it.
_gated_op.register_fake(lambda x, w_gate, w_up, w_down, plan: reference.gated_forward(x, w_gate, w_up, w_down))
_gated_backward_op.register_fake(reference.gated_backward)
_nongated_op.register_fake(lambda x, w_up, w_down, plan: reference.nongated_forward(x, w_up, w_down))
_nongated_backward_op.register_fake(reference.nongated_backward)

_gated_op.register_autograd(
    lambda ctx, dy, dl1, *_: (*_gated_backward_op(*ctx.saved_tensors, dy, dl1), None), setup_context=_gated_context
)
_nongated_op.register_autograd(
    lambda ctx, dy, dl1, *_: (*_nongated_backward_op(*ctx.saved_tensors, dy, dl1), None),
    setup_context=_nongated_context,
)
for _device in ("cpu", "cuda"):
    _gated_op.register_autocast(_device, torch.bfloat16)
    _nongated_op.register_autocast(_device, torch.bfloat16)
