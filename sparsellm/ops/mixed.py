"""The gated feedforward operator with a gate between SiLU and ReLU, in PyTorch, for ReLU annealing of a dense model.

    z = x w_gate^T    g = (1 - a) silu(z) + a relu(z)    u = x w_up^T    h = g * u    y = h w_down^T

Letters and numerics are those of reference.py; the gate is computed in float32 and rounded once. At a = 1 the result
equals that of the ReLU operator. While a < 1 no activation is exactly zero, so sparse kernels would gain nothing.

The statistics are those of a pure ReLU: a neuron counts as firing if z > 0. l1 is the sum of |h|.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsellm.ops.feedforward import (
    FeedForwardOutput,
    check,
    first_order,
    in_autocast,
    save_inputs_and_planes,
    uncounted,
)
from sparsellm.ops.reference import accumulator, statistics


def mixed_feedforward(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, mix: Tensor) -> FeedForwardOutput:
    """x [M, K], w_gate and w_up [N, K], w_down [K, N]; mix: the share of ReLU in the gate, in [0, 1], 0-d float32 on
    the device of x, without a gradient.

    Autocast sets the compute dtype. Nothing is packed, and the result's `union` is -1 (not measured). Raises ValueError
    for shapes, dtypes or devices that are not allowed.
    """
    x, cast = in_autocast(x)
    check(x, w_gate, w_up, w_down, cast)
    weights = (weight.to(x.dtype) for weight in (w_gate, w_up, w_down))
    return uncounted(*_Mixed.apply(x, *weights, mix)[:4])


def _gate(z: Tensor, mix: Tensor) -> Tensor:
    wide = z.to(accumulator(z.dtype))
    a = mix.to(wide.dtype)
    return ((1 - a) * F.silu(wide) + a * torch.relu(wide)).to(z.dtype)


class _Mixed(torch.autograd.Function):
    """(x, w_gate, w_up, w_down, mix) -> (y, l1, nnz, fired, z [M, N], u [M, N])."""

    @staticmethod
    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, mix: Tensor) -> tuple[Tensor, ...]:
        z, u = x @ w_gate.T, x @ w_up.T
        h = _gate(z, mix) * u
        return (h @ w_down.T, *statistics(h, z > 0), z, u)

    setup_context = staticmethod(save_inputs_and_planes)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dl1: Tensor | None, *of_others: Tensor | None) -> tuple:
        x, w_gate, w_up, w_down, mix, z, u = ctx.saved_tensors
        dy, dl1 = first_order(x, dy, dl1, of_others)
        wide, g = accumulator(x.dtype), _gate(z, mix)
        h, a = g * u, mix.to(wide)
        dh = (dy @ w_down).to(wide) + dl1.to(wide) * h.sign().to(wide)
        du = (dh * g).to(x.dtype)
        s = torch.sigmoid(z.to(wide))
        slope = (1 - a) * s * (1 + z.to(wide) * (1 - s)) + a * (z > 0).to(wide)
        dz = (dh * u * slope).to(x.dtype)
        return torch.addmm(dz @ w_gate, du, w_up), dz.T @ x, du.T @ x, dy.T @ h, None
