"""Pointwise kernels between the matmuls of a layer in inference: a sum fused with the following norm, and act(gate) *
up. Also programmatic dependent launch, by which a kernel starts before the previous kernel ends.

Letters: R tokens of a call, K model width, N neurons. Numerics: sums, norms and activations are float32; normalised
inputs, the activated gate and its product are rounded to the dtype of the weights, as PyTorch's operators round them.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsellm.ops.twell import tiles

FEWEST = 16  # smallest dimension of a block: the minimum for tl.dot
THREAD = 8  # elements of a row per thread of `normed_sum`: 16 bytes in bfloat16
BLOCK = 2048  # elements per program of `gated`


@triton.jit
def await_kernel_ahead(EARLY: tl.constexpr):
    """Wait until all previous kernels have ended, then let the next kernel start."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def early(device: torch.device) -> dict[str, bool]:
    """Launch options for a kernel that calls `await_kernel_ahead`: the kernel starts before the previous kernel ends if
    the GPU supports programmatic dependent launch. Before the call, the kernel must not write, and may read only memory
    that no kernel writes or that was written before the last kernel that did not start early. Every kernel that starts
    early waits in this way, including those of `kernels/`, so when a kernel has ended, all earlier kernels have."""
    return {"EARLY": True, "launch_pdl": True} if _starts_early(device) else {"EARLY": False}


@cache
def _starts_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def padded(length: int) -> int:
    """The smallest power of two that is at least `length` and at least FEWEST."""
    return max(FEWEST, triton.next_power_of_2(length))


@triton.jit
def normed_sum(
    x, y, weight, both, normed, EPS: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """both [R, K] = x + y, and normed [R, K] = norm(x + y). COLUMNS: a power of two, at least K. Program i computes
    row i."""
    k = tl.arange(0, COLUMNS)
    within, at = k < K, tl.program_id(0).to(tl.int64) * K + k
    scale = tl.load(weight + k, mask=within, other=0.0)
    await_kernel_ahead(EARLY)
    a = tl.load(x + at, mask=within, other=0.0) + tl.load(y + at, mask=within, other=0.0).to(tl.float32)
    tl.store(both + at, a, mask=within)
    a *= tl.rsqrt(tl.sum(a * a, 0) / K + EPS) * scale
    tl.store(normed + at, a.to(normed.dtype.element_ty), mask=within)


def sum_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [R, K] float32, y [R, K] of any dtype -> (x + y, its RMS norm): [R, K] float32 and [R, K] in `dtype`.

    weight: the norm's, [K] float32. All must be contiguous.
    """
    rows, width = x.shape
    both, normed, columns = x.new_empty(rows, width), x.new_empty(rows, width, dtype=dtype), padded(width)
    normed_sum[(rows,)](
        x, y, weight, both, normed, EPS=eps, K=width, COLUMNS=columns,
        num_warps=min(16, max(1, columns // (32 * THREAD))), **early(x.device),
    )  # fmt: skip
    return both, normed


@triton.jit
def activated(a, ACTIVATION: tl.constexpr):
    """a, float32, through silu or relu."""
    if ACTIVATION == "silu":
        a *= tl.sigmoid(a)
    if ACTIVATION == "relu":
        a = tl.where(a < 0, 0.0, a)  # NaN stays NaN
    return a


@triton.jit
def gated(gate, up, count, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """gate = act(gate) * up in place, for `count` elements; act(gate) if up is None."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    await_kernel_ahead(EARLY)
    a = activated(tl.load(gate + at, mask=there).to(tl.float32), ACTIVATION)
    if up is not None:
        a = a.to(gate.dtype.element_ty).to(tl.float32) * tl.load(up + at, mask=there).to(tl.float32)
    tl.store(gate + at, a.to(gate.dtype.element_ty), mask=there)


def activate(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """act(gate) * up, or act(gate) alone, in the memory of `gate` [R, N]. activation: "relu" or "silu"."""
    count, how = gate.numel(), early(gate.device)
    gated[(tiles(count, BLOCK),)](gate, up, count, ACTIVATION=activation, BLOCK=BLOCK, num_warps=4, **how)
    return gate
