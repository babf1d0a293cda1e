"""The dense engine's elementwise kernels between torch's matmuls, each one pass over the matrices."""

import triton
import triton.language as tl

from sparsellm.ops.triton.plan import NONZEROS, UNION


@triton.jit(do_not_specialize=["m"])
def hidden(
    z, u, h, fired, sums, totals, m,
    N: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """h = relu(z) * u (not GATED: relu(z)), [M, N], and its statistics. Program (i, j) computes TOKENS tokens of
    COLUMNS neurons, ROWS tokens at a time, and writes its sum of |h| to `sums`, float32."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    # The sums over rows come after the loop, because a sum over rows crosses warps, which then wait for each other.
    counts = tl.zeros((ROWS, COLUMNS), tl.int32)
    magnitudes = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, TOKENS, ROWS):
        row = tl.program_id(0) * TOKENS + start + tl.arange(0, ROWS)
        inside = (row < m)[:, None] & (column < N)[None, :]
        at = row.to(tl.int64)[:, None] * N + column[None, :]
        g = tl.load(z + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.where(g <= 0, 0.0, g)
        counts += (g != 0).to(tl.int32)
        if GATED:
            g = (g * tl.load(u + at, mask=inside, other=0.0).to(tl.float32)).to(h.dtype.element_ty).to(tl.float32)
        tl.store(h + at, g.to(h.dtype.element_ty), mask=inside)
        magnitudes += tl.abs(g)
    nonzeros = tl.sum(counts, 0)
    tl.store(fired + column, tl.full((COLUMNS,), 1, tl.uint8), mask=nonzeros > 0)
    tl.store(sums + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.sum(tl.sum(magnitudes, 0), 0))
    tl.atomic_add(totals + NONZEROS, tl.sum(nonzeros, 0).to(tl.int64))
    tl.atomic_add(totals + UNION, tl.sum((nonzeros > 0).to(tl.int32), 0).to(tl.int64))


@triton.jit(do_not_specialize=["octets"])
def hidden_gradient(z, u, dh, dl1, dz, du, h, octets, BLOCK: tl.constexpr, GATED: tl.constexpr):
    """dz, du and h (not GATED: dz and h), flat, from z, u and dh; dz may be dh. `octets` is the number of elements
    divided by 8. With it, Triton can prove that the mask never splits 16 bytes, so it loads and stores 16 bytes at
    once."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < octets.to(tl.int64) * 8
    of_l1 = tl.load(dl1)
    g = tl.load(z + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.where(g <= 0, 0.0, g)
    d = tl.load(dh + at, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        of_u = tl.load(u + at, mask=inside, other=0.0).to(tl.float32)
        product = (g * of_u).to(h.dtype.element_ty).to(tl.float32)
        d += of_l1 * tl.where(product > 0, 1.0, tl.where(product < 0, -1.0, 0.0))
        tl.store(du + at, (d * g).to(du.dtype.element_ty), mask=inside)
        tl.store(dz + at, tl.where(g != 0, d * of_u, 0.0).to(dz.dtype.element_ty), mask=inside)
        tl.store(h + at, product.to(h.dtype.element_ty), mask=inside)
    else:
        tl.store(dz + at, tl.where(g != 0, d + of_l1, 0.0).to(dz.dtype.element_ty), mask=inside)
        tl.store(h + at, g.to(h.dtype.element_ty), mask=inside)
