"""The feedforward operator in plain PyTorch: the executable specification, and the fallback where no kernel runs.

Letters: M tokens, K model width, N neurons. Weights have Hugging Face's layout: w_gate, w_up [N, K], w_down [K, N].

    gated      z = x w_gate^T    g = relu(z)    u = x w_up^T    h = g * u    y = h w_down^T
    non-gated  z = x w_up^T      g = relu(z)                    h = g        y = h w_down^T      w_gate is None

Numerics: every matmul accumulates as PyTorch does (float32 for bfloat16) and is rounded once to the compute dtype, the
dtype of x. Elementwise arithmetic on the results is done in `accumulator(dtype)` and rounded once. Gradients follow
docs/dev/DESIGN.md, section 2, and are exactly zero where the neuron is inactive. float64 inputs give float64
throughout.

All functions here are pure, and written so that a compiler can fuse their elementwise halves.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsellm.ops.twell import TOKEN_TILE, tiles


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and of elementwise arithmetic: float32, or float64 for float64 inputs."""
    return torch.promote_types(dtype, torch.float32)


def statistics(h: Tensor, active: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(l1, nnz, fired) of hidden values h [M, N]; `active`, bool [M, N], marks the entries whose neuron fires.

    l1: 0-d accumulator dtype, the sum of |h|. nnz: 0-d int64, the number of active entries. fired: bool [N]. All three
    results start with sums over M, so a compiler computes them in one pass over h.
    """
    per_neuron = active.sum(0)
    l1 = h.abs().sum(0, dtype=accumulator(h.dtype)).sum()
    return l1, per_neuron.sum(), per_neuron > 0


def union(active: Tensor) -> Tensor:
    """The number of neurons active in each tile of TOKEN_TILE tokens, summed over tiles: bool [M, N] -> 0-d int64."""
    m, n = active.shape
    padded = F.pad(active, (0, 0, 0, tiles(m, TOKEN_TILE) * TOKEN_TILE - m))
    return padded.view(-1, TOKEN_TILE, n).any(1).sum()


def forward(x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor) -> tuple[Tensor, ...]:
    """(y [M, K], l1, nnz, fired, *planes). The planes [M, N], which backward needs in addition to the inputs, are g and
    u, or g alone in a non-gated layer."""
    g = torch.relu(x @ (w_up if w_gate is None else w_gate).T)
    planes = [g] if w_gate is None else [g, x @ w_up.T]
    h = g if w_gate is None else g * planes[1]
    return (h @ w_down.T, *statistics(h, g != 0), *planes)


def backward(
    x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, planes: Sequence[Tensor], dy: Tensor, dl1: Tensor
) -> tuple[Tensor, ...]:
    """(dx, dw_gate if gated, dw_up, dw_down) from the planes of `forward`, dy [M, K], and dl1 (0-d), the derivative of
    the loss with respect to l1."""
    wide, g = accumulator(x.dtype), planes[0]
    if w_gate is None:
        dh = (dy @ w_down).to(wide) + dl1.to(wide)  # without sign(h), which is 1 wherever the next line keeps a value
        dz = torch.where(g != 0, dh, 0).to(x.dtype)
        return dz @ w_up, dz.T @ x, dy.T @ g
    u = planes[1]
    h = g * u
    dh = (dy @ w_down).to(wide) + dl1.to(wide) * h.sign().to(wide)
    du = (dh * g).to(x.dtype)
    dz = torch.where(g != 0, dh * u, 0).to(x.dtype)
    return torch.addmm(dz @ w_gate, du, w_up), dz.T @ x, du.T @ x, dy.T @ h
