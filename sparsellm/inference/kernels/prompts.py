"""One kernel for prompts between a layer's projections and its attention: norm, rotation, and writing the caches.

Letters: R packed tokens of all B sequences, T length of the longest sequence, S cache positions, H heads of width D,
H_kv key/value heads. Numerics: norms and rotation are float32; rotated heads are rounded once, to the dtype of the
matmuls.
"""

import triton
import triton.language as tl
from torch import Tensor

from sparsellm.inference.kernels.decoding import Norms, turned
from sparsellm.inference.kernels.pointwise import await_kernel_ahead, early, padded

BLOCK = 2048  # elements of a token's heads per program and step of `turned_and_placed`


@triton.jit
def turn(
    heads, out, norm, c, s, there,
    COUNT: tl.constexpr, EPS: tl.constexpr, D: tl.constexpr, NORMED: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """out [COUNT, D] = the heads of one token, normalised if NORMED, and rotated; zeros unless `there`."""
    row, i = tl.arange(0, ROWS), tl.arange(0, HALF)
    inside = i < D // 2
    for start in range(0, COUNT, ROWS):
        at, mine = (start + row)[:, None] * D + i[None, :], (start + row < COUNT)[:, None] & inside[None, :]
        first, second = turned(
            tl.load(heads + at, mask=mine & there, other=0.0).to(tl.float32),
            tl.load(heads + at + D // 2, mask=mine & there, other=0.0).to(tl.float32),
            i, inside, norm, c, s, EPS, D, NORMED,
        )  # fmt: skip
        tl.store(out + at, first.to(out.dtype.element_ty), mask=mine)
        tl.store(out + at + D // 2, second.to(out.dtype.element_ty), mask=mine)


@triton.jit(do_not_specialize=["positions"])
def turned_and_placed(
    heads, q_norm, k_norm, cos, sin, ends, lengths, queries, keys, values, positions,
    EPS: tl.constexpr, H: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, NORMED: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """heads [R, H + 2 H_kv, D] -> queries [B, T, H, D], keys and values [B, S, H_kv, D]. positions: S. ROWS: heads per
    step, a power of two. HALF: a power of two, at least D / 2.

    Program (t, b): position t of sequence b; writes zeros past the sequence's end. A grid allows 65,535 sequences.
    Offsets are int64, because b and the loaded lengths are.
    """
    t, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    await_kernel_ahead(EARLY)
    length = tl.load(lengths + b)
    there = t < length
    here = heads + (tl.load(ends + b) - length + t) * ((H + 2 * H_KV) * D)
    of_queries = queries + (b * tl.num_programs(0) + t) * (H * D)
    cached = (b * positions + t) * (H_KV * D)
    i = tl.arange(0, HALF)
    c = tl.load(cos + t * D + i, mask=i < D // 2, other=0.0)[None, :]
    s = tl.load(sin + t * D + i, mask=i < D // 2, other=0.0)[None, :]
    turn(here, of_queries, q_norm, c, s, there, H, EPS, D, NORMED, ROWS, HALF)
    turn(here + H * D, keys + cached, k_norm, c, s, there, H_KV, EPS, D, NORMED, ROWS, HALF)
    for start in range(0, H_KV * D, ROWS * 2 * HALF):
        at = start + tl.arange(0, ROWS * 2 * HALF)
        v = tl.load(here + (H + H_KV) * D + at, mask=(at < H_KV * D) & there, other=0.0)
        tl.store(values + cached + at, v, mask=at < H_KV * D)


def place(
    heads: Tensor, norms: Norms | None, cos: Tensor, sin: Tensor, ends: Tensor, lengths: Tensor, longest: int,
    keys: Tensor, values: Tensor,
) -> Tensor:  # fmt: skip
    """heads [R, H + 2 H_kv, D] (queries, keys and values) -> rotated queries [B, T, H, D]. Writes the first T positions
    of the caches `keys` and `values` [B, S, H_kv, D] in place. Queries and caches are zero past a sequence's end.

    norms: RMS norm weights of queries and keys, and epsilon. cos, sin: tables [S, D] float32; only the first half of
    each row is read, because the second repeats it. ends, lengths [B] int64: end of each sequence among the R tokens,
    and its length. longest: T. All must be contiguous.
    """
    size, positions, kv_heads, width = keys.shape
    count, half = heads.shape[1] - 2 * kv_heads, padded(width // 2)
    queries = heads.new_empty(size, longest, count, width)
    q_norm, k_norm, eps = norms or (None, None, 0.0)
    turned_and_placed[(longest, size)](
        heads, q_norm, k_norm, cos, sin, ends, lengths, queries, keys, values, positions,
        EPS=eps, H=count, H_KV=kv_heads, D=width, NORMED=norms is not None, ROWS=max(1, BLOCK // (2 * half)), HALF=half,
        num_warps=4, **early(heads.device),
    )  # fmt: skip
    return queries
