"""What decoding computes of one token of each sequence, beside the feedforward blocks: attention with all that stands
before it, and, for one sequence, a norm with the product behind it. Between products of one token a kernel costs about
as long as its start, so there are few.

Letters: B sequences, S positions of the cache, H heads of width D, H_kv heads of keys and values, each of which
H / H_kv query heads share, K model width, N columns of a product. Numerics: norms, rotation, scores and sums are
float32; normalised inputs, rotated heads and weights of attention's sums are rounded to the dtype of the heads.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsellm.ops.twell import tiles

Norms = tuple[Tensor, Tensor, float]  # weights [D] float32 of queries' and keys' RMS norms, and their epsilon
LOG2_E = math.log2(math.e)
FEWEST = 16  # rows of a product by tl.dot, and terms of its sums
# Bytes of keys that a program of `attend` loads in one step, and as many of values: where many programs share the GPU,
# and where there are at most FEW.
STEP, LONG_STEP = 4 << 10, 16 << 10
FEW = 132  # programs: one for each multiprocessor of an H100
SPLIT = 1024  # a cache has a split for so many positions, until there are 2 FEW programs
ROWS = 4  # of a weight, in one program of `normed_product`


@triton.jit
def turned(first, second, i, inside, weight, cos, sin, eps, D: tl.constexpr, NORMED: tl.constexpr):
    """Both halves of heads [..., D / 2] float32, normalised if NORMED, and rotated."""
    if NORMED:
        squares = tl.sum(first * first + second * second, 1)[:, None]
        factor = tl.rsqrt(squares / D + eps)
        first *= factor * tl.load(weight + i, mask=inside, other=0.0)[None, :]
        second *= factor * tl.load(weight + D // 2 + i, mask=inside, other=0.0)[None, :]
    return first * cos - second * sin, second * cos + first * sin


@triton.jit(do_not_specialize=["positions"])
def attend(
    heads, q_norm, k_norm, cos, sin, lengths, keys, values, out, sizes, positions,
    SCALE: tl.constexpr, EPS: tl.constexpr, H: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, NORMED: tl.constexpr,
    SPLITS: tl.constexpr, SHARING: tl.constexpr, HALF: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """out [B, H, SPLITS, D] of heads [B, H + 2 H_kv, D]; the caches [B, S, H_kv, D] get their keys and values at
    `lengths`. With several splits, each a part of the positions, out are sums that are not divided yet, and sizes
    [B, H, SPLITS, 2] the largest score of each and the sum of its weights.

    positions: S. SCALE: of scores, times log2(e). SHARING, HALF: powers of two, no less than H / H_kv and D / 2.
    Program (b, h, split): the query heads of one head of keys. Split 0 computes the new token, too, from registers;
    what it stores is read by no program of this launch. A split without positions leaves -inf and 0 as its sizes.
    """
    b, h, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    HEADS: tl.constexpr = H // H_KV
    length = tl.load(lengths + b).to(tl.int32)
    row, i, whole, step = tl.arange(0, SHARING), tl.arange(0, HALF), tl.arange(0, 2 * HALF), tl.arange(0, POSITIONS)
    inside, shared = i < D // 2, (row < HEADS)[:, None] & (i < D // 2)[None, :]
    c = tl.load(cos + length * D + i, mask=inside, other=0.0)[None, :]
    s = tl.load(sin + length * D + i, mask=inside, other=0.0)[None, :]
    dtype: tl.constexpr = heads.dtype.element_ty

    here = heads + b * ((H + 2 * H_KV) * D)
    of_q = here + (h * HEADS + row)[:, None] * D + i[None, :]
    q1, q2 = turned(
        tl.load(of_q, mask=shared, other=0.0).to(tl.float32),
        tl.load(of_q + D // 2, mask=shared, other=0.0).to(tl.float32), i, inside, q_norm, c, s, EPS, D, NORMED,
    )  # fmt: skip
    q1, q2 = q1.to(dtype), q2.to(dtype)
    first = (b * positions) * (H_KV * D) + h * D
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

    part = tl.cdiv(tl.cdiv(length, SPLITS), POSITIONS) * POSITIONS
    end = tl.minimum(length, (split + 1) * part)
    of_keys, of_values = keys + first + i[:, None], values + first + whole[None, :]
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
    line = ((b * H + h * HEADS + row) * SPLITS + split)[:, None]
    written = (row < HEADS)[:, None] & (whole < D)[None, :]
    if SPLITS == 1:
        sums /= total[:, None]
    else:
        one = tl.arange(0, 1)[None, :]
        tl.store(sizes + line * 2 + one, most[:, None], mask=(row < HEADS)[:, None])
        tl.store(sizes + line * 2 + 1 + one, total[:, None], mask=(row < HEADS)[:, None])
    tl.store(out + line * D + whole[None, :], sums.to(out.dtype.element_ty), mask=written)


def attend_to_the_past(
    heads: Tensor, norms: Norms | None, cos: Tensor, sin: Tensor, lengths: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """heads [B, H + 2 H_kv, D], queries, keys and values -> [B, H, D]. keys and values [B, S, H_kv, D] have `lengths`
    [B] int64 positions already, fewer than S, and get this one in place.

    norms: what queries and keys are normalised with. cos, sin: tables [S, D] float32, of which the first half of each
    row is read: the second is the same. All are contiguous.
    """
    size, positions, kv_heads, width = keys.shape
    count, programs = heads.shape[1] - 2 * kv_heads, size * kv_heads
    splits = max(1, min(positions // SPLIT, 2 * FEW // programs))
    out, sizes = heads.new_empty(size, count, 1, width), heads  # one split leaves no sizes: any tensor will do
    if splits > 1:
        out, sizes = (heads.new_empty(size, count, splits, n, dtype=torch.float32) for n in (width, 2))
    q_norm, k_norm, eps = norms or (cos, cos, 0.0)  # without norms any tensor, which is not read
    half = _padded(width // 2)
    attend[(size, kv_heads, splits)](
        heads, q_norm, k_norm, cos, sin, lengths, keys, values, out, sizes, positions,
        SCALE=width**-0.5 * LOG2_E, EPS=eps, H=count, H_KV=kv_heads, D=width, NORMED=norms is not None, SPLITS=splits,
        SHARING=_padded(count // kv_heads), HALF=half,
        POSITIONS=max(FEWEST, (LONG_STEP if programs <= FEW else STEP) // (2 * half * heads.itemsize)),
        num_warps=4, num_stages=3 if heads.itemsize == 2 else 2,
    )  # fmt: skip
    if splits == 1:
        return out[:, :, 0]
    parts = torch.exp2(sizes[..., 0] - sizes[..., 0].amax(-1, keepdim=True))
    return ((out * parts[..., None]).sum(2) / (sizes[..., 1] * parts).sum(-1, keepdim=True)).to(heads.dtype)


@triton.jit
def normed_product(
    x, y, norm, weight, bias, both, out, n,
    EPS: tl.constexpr, K: tl.constexpr, BIASED: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """both [K] = x + y, and out [N] = weight [N, K] norm(x + y) + bias. COLUMNS: a power of two, no less than K.
    Each program normalises for itself, while its rows of the weight arrive."""
    k, row = tl.arange(0, COLUMNS), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    within, there = k < K, row < n
    w = tl.load(weight + row.to(tl.int64)[:, None] * K + k[None, :], mask=there[:, None] & within[None, :], other=0.0)
    a = tl.load(x + k, mask=within, other=0.0) + tl.load(y + k, mask=within, other=0.0).to(tl.float32)
    if tl.program_id(0) == 0:
        tl.store(both + k, a, mask=within)
    factor = tl.rsqrt(tl.sum(a * a, 0) / K + EPS)
    normed = (a * factor * tl.load(norm + k, mask=within, other=0.0)).to(w.dtype).to(tl.float32)
    sums = tl.sum(w.to(tl.float32) * normed[None, :], 1)
    if BIASED:
        sums += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row, sums.to(out.dtype.element_ty), mask=there)


def sum_norm_product(
    x: Tensor, y: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x [1, K] float32, y [1, K] of any dtype -> (x + y, its RMS norm times weight [N, K]^T, plus bias [N]): [1, K]
    float32 and [1, N] in the dtype of `weight`.

    norm: weight [K] float32 of the norm. The product is in the dtype of `weight`. All are contiguous.
    """
    rows, width = weight.shape
    both, out, columns = torch.empty_like(x), weight.new_empty(1, rows), _padded(width)
    normed_product[(tiles(rows, ROWS),)](
        x, y, norm, weight, weight if bias is None else bias, both, out, rows, EPS=eps, K=width,
        BIASED=bias is not None, COLUMNS=columns, ROWS=ROWS, num_warps=min(16, max(1, columns // 512)),
    )  # fmt: skip
    return both, out


def _padded(length: int) -> int:
    """The power of two, no less than FEWEST, that `length` fits in: by arithmetic that dynamo traces with the step."""
    return max(FEWEST, 1 << (length - 1).bit_length())
