"""Decoding kernels for one token per sequence, except the feedforward operator: attention fused with the norms, the
rotation and the cache update before it, and, for a single sequence, every matmul fused with the operations around it.

A kernel for one token takes about as long as its launch. So there are few kernels, and each starts before the previous
one ends: matmuls prefetch their weights, which are constant during generation, and attention prefetches cache entries
of earlier steps. After the prefetch, a kernel waits for its input.

Letters: B sequences, S positions of the cache, H heads of width D, H_kv key/value heads, each shared by H / H_kv query
heads, K columns and N rows of a matrix. Numerics: norms, rotation, scores and sums are float32; normalised inputs,
rotated heads, attention weights and the results of matmuls are rounded to the dtype of the weights.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsellm.inference.kernels.pointwise import FEWEST, activated, await_kernel_ahead, early, padded
from sparsellm.ops.float8_gate import Float8Rows
from sparsellm.ops.twell import tiles

Matrix = Tensor | Float8Rows  # a weight [N, K], in the dtype of the products or in e4m3
Norms = tuple[Tensor, Tensor, float]  # RMS norm weights [D] float32 for queries and for keys, and epsilon
LOG2_E = math.log2(math.e)
# Bytes of keys, and of values, that a program of `attend` loads per step. LONG_STEP is for at most FEW programs.
STEP, LONG_STEP = 4 << 10, 16 << 10
FEW = 132  # programs: one per multiprocessor of an H100
SPLIT = 1024  # cache positions per split, up to 2 FEW programs or MOST_SPLITS
MOST_SPLITS = 32  # split counts are powers of two, so that few kernel variants are built
# Bytes of matrices per thread and step of `matrix_vector`. A program of 16 warps has 128 registers per thread, too few
# for 128 e4m3 values and their conversion: they spilled, and a step of 28 layers of N 11,264 took nine of bfloat16's.
THREAD, E4M3_THREAD = 128, 64
MOST_WARPS = 16  # per program of `matrix_vector`
ROWS = 4  # maximum rows of each matrix per program and step
# Maximum warps over all programs of `matrix_vector`. More programs do not pay, because each reads the whole vector
# again, which costs as much as one or two rows of the matrix.
WARPS = 16 * FEW


@triton.jit
def turned(first, second, i, inside, weight, cos, sin, eps, D: tl.constexpr, NORMED: tl.constexpr):
    """Both halves [..., D / 2] float32 of the rotated heads, which are normalized before the rotation if NORMED."""
    if NORMED:
        squares = tl.sum(first * first + second * second, 1)[:, None]
        factor = tl.rsqrt(squares / D + eps)
        first *= factor * tl.load(weight + i, mask=inside, other=0.0)[None, :]
        second *= factor * tl.load(weight + D // 2 + i, mask=inside, other=0.0)[None, :]
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def to_l2(pointers):
    """Prefetches the cache lines of these addresses to L2, on an NVIDIA GPU."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], tl.int32, False, 1)


@triton.jit(do_not_specialize=["positions"])
def attend(
    heads, q_norm, k_norm, cos, sin, lengths, keys, values, out, sizes, positions,
    SCALE: tl.constexpr, EPS: tl.constexpr, H: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, NORMED: tl.constexpr,
    SPLITS: tl.constexpr, SHARING: tl.constexpr, HALF: tl.constexpr, POSITIONS: tl.constexpr, FETCHING: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Attention of heads [B, H + 2 H_kv, D] -> out [B, H, SPLITS, D]. Writes keys and values to the caches [B, S, H_kv,
    D] at `lengths`. With several splits of the positions, out holds each split's result in float32, and sizes [B, H,
    SPLITS] the base-2 logarithm of its sum of weights.

    positions: S. SCALE: scale of scores times log2(e). SHARING, HALF: powers of two, at least H / H_kv and D / 2.
    FETCHING: prefetch the first cache entries to L2 while the previous kernel ends. Program (b, h, split) computes the
    query heads that share key head h. Split 0 also computes the new token, from registers, because no program may read
    what another program of the same launch stores. A split without positions writes zeros and -inf.
    """
    b, h, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    HEADS: tl.constexpr = H // H_KV
    length = tl.load(lengths + b).to(tl.int32)
    row, i, whole, step = tl.arange(0, SHARING), tl.arange(0, HALF), tl.arange(0, 2 * HALF), tl.arange(0, POSITIONS)
    inside, shared = i < D // 2, (row < HEADS)[:, None] & (i < D // 2)[None, :]
    c = tl.load(cos + length * D + i, mask=inside, other=0.0)[None, :]
    s = tl.load(sin + length * D + i, mask=inside, other=0.0)[None, :]
    dtype: tl.constexpr = heads.dtype.element_ty
    first = (b * positions) * (H_KV * D) + h * D
    part = tl.cdiv(tl.cdiv(length, SPLITS), POSITIONS) * POSITIONS
    if EARLY:  # reads only lengths and entries of earlier steps, which no kernel of this step writes
        if FETCHING:
            LINE: tl.constexpr = 128 * 8 // dtype.primitive_bitwidth
            soon = first + tl.minimum(split * part + step, tl.maximum(length - 1, 0)).to(tl.int64) * (H_KV * D)
            for line in tl.static_range(0, D, LINE):
                to_l2(keys + soon + line)
                to_l2(values + soon + line)
        tl.extra.cuda.gdc_wait()

    here = heads + b * ((H + 2 * H_KV) * D)
    of_q = here + (h * HEADS + row)[:, None] * D + i[None, :]
    q1, q2 = turned(
        tl.load(of_q, mask=shared, other=0.0).to(tl.float32),
        tl.load(of_q + D // 2, mask=shared, other=0.0).to(tl.float32), i, inside, q_norm, c, s, EPS, D, NORMED,
    )  # fmt: skip
    q1, q2 = q1.to(dtype), q2.to(dtype)
    most = tl.full((SHARING,), float("-inf"), tl.float32)
    total = tl.zeros((SHARING,), tl.float32)
    sums = tl.zeros((SHARING, 2 * HALF), tl.float32)
    if split == 0:
        of_k = here + (H + h) * D + i[None, :]
        k1, k2 = turned(
            tl.load(of_k, mask=inside[None, :], other=0.0).to(tl.float32),
            tl.load(of_k + D // 2, mask=inside[None, :], other=0.0).to(tl.float32),
            i, inside, k_norm, c, s, EPS, D, NORMED,
        )  # fmt: skip
        k1, k2 = k1.to(dtype), k2.to(dtype)
        v = tl.load(here + (H + H_KV + h) * D + whole, mask=whole < D, other=0.0)
        to = first + length.to(tl.int64) * (H_KV * D)
        tl.store(keys + to + i[None, :], k1, mask=inside[None, :])
        tl.store(keys + to + D // 2 + i[None, :], k2, mask=inside[None, :])
        tl.store(values + to + whole, v, mask=whole < D)
        most = SCALE * tl.sum(q1.to(tl.float32) * k1.to(tl.float32) + q2.to(tl.float32) * k2.to(tl.float32), 1)
        total += 1.0
        sums += v.to(tl.float32)[None, :]

    end = tl.minimum(length, (split + 1) * part)
    of_keys, of_values = keys + first + i[:, None], values + first + whole[None, :]
    if EARLY:  # after the loads above, which the next kernel's prefetch of weights would delay
        tl.extra.cuda.gdc_launch_dependents()
    for start in range(split * part, end, POSITIONS):
        there = start + step < end
        at = (start + step).to(tl.int64) * (H_KV * D)
        seen = there[None, :] & inside[:, None]
        past1 = tl.load(of_keys + at[None, :], mask=seen, other=0.0)
        past2 = tl.load(of_keys + D // 2 + at[None, :], mask=seen, other=0.0)
        scores = tl.dot(q2, past2, tl.dot(q1, past1, input_precision="ieee"), input_precision="ieee")
        scores = tl.where(there[None, :], scores * SCALE, float("-inf"))
        more = tl.maximum(most, tl.max(scores, 1))
        weights, kept = tl.exp2(scores - more[:, None]), tl.exp2(most - more)
        most, total = more, total * kept + tl.sum(weights, 1)
        value = tl.load(of_values + at[:, None], mask=there[:, None] & (whole < D)[None, :], other=0.0)
        sums = tl.dot(weights.to(dtype), value, sums * kept[:, None], input_precision="ieee")
    line = (b * H + h * HEADS + row) * SPLITS + split
    if SPLITS > 1:
        tl.store(sizes + line, most + tl.log2(total), mask=row < HEADS)
    sums /= tl.maximum(total, 1.0)[:, None]  # the largest weight is 1, so only an empty split has a smaller sum
    written = (row < HEADS)[:, None] & (whole < D)[None, :]
    tl.store(out + line[:, None] * D + whole[None, :], sums.to(out.dtype.element_ty), mask=written)


@triton.jit
def join(
    parts, sizes, out, D: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """out [B H, D]: the mean of parts [B H, SPLITS, D], weighted by 2^sizes [B H, SPLITS]. WIDTH: a power of two, at
    least D. Program i computes row i. The first split is never empty."""
    line, i = tl.program_id(0).to(tl.int64) * SPLITS + tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    await_kernel_ahead(EARLY)
    size = tl.load(sizes + line)
    weight = tl.exp2(size - tl.max(size, 0))
    part = tl.load(parts + line[:, None] * D + i[None, :], mask=(i < D)[None, :], other=0.0)
    mean = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + tl.program_id(0).to(tl.int64) * D + i, mean.to(out.dtype.element_ty), mask=i < D)


def attend_to_the_past(
    heads: Tensor, norms: Norms | None, cos: Tensor, sin: Tensor, lengths: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """heads [B, H + 2 H_kv, D] (queries, keys and values) -> [B, H, D]. The caches `keys` and `values` [B, S, H_kv, D]
    hold `lengths` [B] int64 positions, fewer than S; the keys and values of `heads` are appended in place.

    norms: see `Norms`. cos, sin: tables [S, D] float32; only the first half of each row is read, because the second
    repeats it. All must be contiguous.
    """
    size, positions, kv_heads, width = keys.shape
    count, programs, how = heads.shape[1] - 2 * kv_heads, size * kv_heads, early(heads.device)
    few = programs <= FEW
    most = max(1, min(positions // SPLIT, 2 * FEW // programs, MOST_SPLITS))
    splits = 1 << (most.bit_length() - 1)  # round down to a power of two
    out, parts, sizes = heads.new_empty(size, count, width), None, None
    if splits > 1:
        parts = heads.new_empty(size, count, splits, width, dtype=torch.float32)
        sizes = parts.new_empty(size, count, splits)
    q_norm, k_norm, eps = norms or (None, None, 0.0)
    half = padded(width // 2)
    attend[(size, kv_heads, splits)](
        heads, q_norm, k_norm, cos, sin, lengths, keys, values, out if parts is None else parts, sizes, positions,
        SCALE=width**-0.5 * LOG2_E, EPS=eps, H=count, H_KV=kv_heads, D=width, NORMED=norms is not None, SPLITS=splits,
        SHARING=padded(count // kv_heads), HALF=half,
        POSITIONS=max(FEWEST, (LONG_STEP if few else STEP) // (2 * half * heads.itemsize)),
        FETCHING=few,  # with more programs, prefetching would make the kernel 1% slower
        num_warps=4, num_stages=3 if heads.itemsize == 2 else 2, **how,
    )  # fmt: skip
    if parts is not None:
        join[(size * count,)](parts, sizes, out, D=width, SPLITS=splits, WIDTH=2 * half, num_warps=1, **how)
    return out


@triton.jit
def rows_of(matrix, row, n, k, K: tl.constexpr):
    """Rows `row` and columns `k` of a matrix [n, K]; zeros out of bounds."""
    at = row.to(tl.int64)[:, None] * K + k[None, :]
    return tl.load(matrix + at, mask=(row < n)[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def matrix_vector(
    x, y, norm, weight, scales, up, up_scales, bias, both, out, n, steps,
    EPS: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """out [N] = act(weight [N, K] a + bias) * (up [N, K] a), where a [K] is x, or both = x + y, or the RMS norm of
    either. Unused arguments are None. COLUMNS: a power of two, at least K. scales, up_scales: [N] float32, of e4m3
    weights.

    A program computes ROWS rows in each of `steps` steps and loads the next step's rows before it multiplies. Every
    program computes the norm for itself while its first rows arrive; the first program writes `both`.
    """
    k, row = tl.arange(0, COLUMNS), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    within = k < K
    dtype: tl.constexpr = out.dtype.element_ty
    w = rows_of(weight, row, n, k, K)
    u = w if up is None else rows_of(up, row, n, k, K)
    if scales is not None:
        of_w = tl.load(scales + row, mask=row < n, other=0.0)
        of_u = of_w if up is None else tl.load(up_scales + row, mask=row < n, other=0.0)
    await_kernel_ahead(EARLY)
    a = tl.load(x + k, mask=within, other=0.0).to(tl.float32)
    if y is not None:
        a += tl.load(y + k, mask=within, other=0.0).to(tl.float32)
        if tl.program_id(0) == 0:
            tl.store(both + k, a, mask=within)
    if norm is not None:
        scale = tl.load(norm + k, mask=within, other=0.0)
        a = (a * tl.rsqrt(tl.sum(a * a, 0) / K + EPS) * scale).to(dtype).to(tl.float32)
    for _ in range(steps):
        next_row = row + tl.num_programs(0) * ROWS
        next_w = rows_of(weight, next_row, n, k, K)
        next_u = next_w if up is None else rows_of(up, next_row, n, k, K)
        sums = tl.sum(w.to(tl.float32) * a[None, :], 1)
        if scales is not None:
            sums *= of_w
            of_w = tl.load(scales + next_row, mask=next_row < n, other=0.0)
        if bias is not None:
            sums += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)
        if ACTIVATION != "":
            sums = activated(sums.to(dtype).to(tl.float32), ACTIVATION)
        if up is not None:
            of_up = tl.sum(u.to(tl.float32) * a[None, :], 1)
            if scales is not None:
                of_up *= of_u
                of_u = tl.load(up_scales + next_row, mask=next_row < n, other=0.0)
            sums = sums.to(dtype).to(tl.float32) * of_up.to(dtype).to(tl.float32)
        tl.store(out + row, sums.to(dtype), mask=row < n)
        row, w, u = next_row, next_w, next_u


def multiply(
    weight: Matrix, x: Tensor, y: Tensor | None = None, norm: Tensor | None = None, eps: float = 0.0,
    bias: Tensor | None = None, activation: str = "", up: Matrix | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One token's a [1, K] -> (a, act(b weight^T + bias) * (b up^T)). a is x, or x + y in float32; b is a, or its RMS
    norm. The result [1, N] has the dtype of `weight`, or if this is e4m3, of y, or of x without y.

    weight, up: [N, K]. x, y: [1, K] of any dtype. norm: weight [K] float32 of the norm. bias: [N]. activation: "relu",
    "silu" or none. All must be contiguous.
    """
    (values, scales), (up_values, up_scales) = parts_of(weight), parts_of(up)
    rows, width = values.shape
    columns = padded(width)
    warps, of_a_row = min(MOST_WARPS, max(1, columns // 512)), columns * values.itemsize * (1 if up is None else 2)
    of_a_thread = THREAD if scales is None or warps < MOST_WARPS else E4M3_THREAD
    count = max(1, min(ROWS if scales is None else 2 * ROWS, 32 * warps * of_a_thread // of_a_row))
    both = x if y is None else torch.empty_like(x, dtype=torch.float32)
    dtype = values.dtype if scales is None else (x if y is None else y).dtype
    out, parts = values.new_empty(1, rows, dtype=dtype), tiles(rows, count)
    steps = tiles(parts, WARPS // warps)
    matrix_vector[(tiles(parts, steps),)](
        x, y, norm, values, scales, up_values, up_scales, bias, both, out, rows, steps, EPS=eps, K=width,
        ACTIVATION=activation, COLUMNS=columns, ROWS=count, num_warps=warps, num_stages=1, **early(x.device),
    )  # fmt: skip
    return both, out


def parts_of(weight: Matrix | None) -> tuple[Any, Tensor | None]:
    """(values, scales) of a matrix; scales are None where there are none."""
    return weight if isinstance(weight, Float8Rows) else (weight, None)


@triton.jit
def few_times_matrix(
    x, values, scales, bias, out, m, n,
    K: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [m, n] = x [m, K] times the transposed e4m3 matrix, values [n, K] times scales [n], plus bias [n] or None.
    TOKENS: a power of two, at least m. Program i computes ROWS rows of the matrix."""
    token, k = tl.arange(0, TOKENS), tl.arange(0, COLUMNS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    await_kernel_ahead(EARLY)
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    of_rows, of_x = values + row.to(tl.int64)[:, None] * K + k[None, :], x + token[None, :] * K + k[:, None]
    for start in range(0, K, COLUMNS):
        within = start + k < K
        w = tl.load(of_rows + start, mask=(row < n)[:, None] & within[None, :], other=0.0)
        a = tl.load(of_x + start, mask=(token < m)[None, :] & within[:, None], other=0.0)
        sums = tl.dot(w.to(a.dtype), a, sums, input_precision="ieee")
    sums *= tl.load(scales + row, mask=row < n, other=0.0)[:, None]
    if bias is not None:
        sums += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)[:, None]
    there = (row < n)[:, None] & (token < m)[None, :]
    tl.store(out + token[None, :] * n + row[:, None], sums.to(out.dtype.element_ty), mask=there)


def multiply_few(weight: Float8Rows, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, K] times the transpose of an e4m3 matrix [N, K], plus bias [N]: [M, N] in the dtype of x. For few tokens,
    up to about 64, whose products are bound by reading the matrix. All must be contiguous."""
    (tokens, width), rows = x.shape, len(weight.values)
    out, of_tokens = x.new_empty(tokens, rows), padded(tokens)
    of_program = 64 if rows >= 64 * FEW // 2 else 32
    few_times_matrix[(tiles(rows, of_program),)](
        x, *weight, bias, out, tokens, rows, K=width, TOKENS=of_tokens, ROWS=of_program,
        COLUMNS=128, num_warps=4, num_stages=4, **early(x.device),
    )  # fmt: skip
    return out
