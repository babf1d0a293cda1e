"""The tile engine's matmuls, written with pointer loads and tl.dot. Read this file before kernels/sm90/tile, which
computes the same products with Hopper's instructions.

Letters: M tokens, K model width, N neurons. A tile is TILE tokens (or neurons); sparsellm.ops.triton.plan defines its
union, slots, places and items. A *tile matrix* has a row of `pitch` values for each row of each tile. Value s of a row
belongs to slot s of the tile, and is zero if the row does not fire the slot's column; values after the last block of
slots are unused. So a matmul with gathered rows is a dense matmul within the tile:

    sampled     a tile's tokens times the weight rows of its union, used where a neuron fires: u = x W_u^T, dh = dy W_d
    gathered    a tile matrix times the rows that its slots name: y, dx, dW

Sums are float32 over K or over the tile's slots in ascending order, and are rounded once: the same bits in every run.
"""

import triton
import triton.language as tl

from sparsellm.ops.triton.plan import ITEMS, NONZEROS


@triton.jit
def product(x, w, rows, columns, K: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """x[rows] w[columns]^T, float32 [TILE, BLOCK]; x and w have rows of K values."""
    k = tl.arange(0, DEPTH)
    a = x + rows.to(tl.int64)[:, None] * K + k[None, :]
    b = w + columns.to(tl.int64)[None, :] * K + k[:, None]
    sums = tl.zeros((TILE, BLOCK), tl.float32)
    for start in range(0, K, DEPTH):
        if K % DEPTH == 0:
            sums = tl.dot(tl.load(a), tl.load(b), sums, input_precision="ieee")
        else:
            inside = k < K - start
            left = tl.load(a, mask=inside[None, :], other=0.0)
            sums = tl.dot(left, tl.load(b, mask=inside[:, None], other=0.0), sums, input_precision="ieee")
        a += DEPTH
        b += DEPTH
    return sums


@triton.jit(do_not_specialize=["m", "capacity"])
def sampled(
    x, w, order, slots, sizes, items, totals, out, m, capacity,
    K: tl.constexpr, PITCH: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out, a tile matrix: x w^T for each tile's tokens and the neurons in the tile's slots, even where a neuron does
    not fire; x [M, K], w [N, K].

    A call with at most `capacity` nonzeros is skipped; -1 computes every call. Programs take items in turn.
    """
    count = tl.load(totals + ITEMS).to(tl.int32)
    if tl.load(totals + NONZEROS) <= capacity:
        count = 0
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        item = tl.load(items + i)
        tile, block = item // (PITCH // BLOCK), item % (PITCH // BLOCK)
        position = tile * TILE + tl.arange(0, TILE)
        token = tl.where(position < m, position, 0)  # rows after the last token compute token 0, and are never read
        if order is not None:
            token = tl.load(order + token)
        slot = block * BLOCK + tl.arange(0, BLOCK)
        there = slot < tl.load(sizes + tile)
        neuron = tl.load(slots + tile.to(tl.int64) * PITCH + slot, mask=there, other=0)
        result = product(x, w, token, neuron, K, TILE, BLOCK, DEPTH).to(x.dtype.element_ty)
        tl.store(out + position.to(tl.int64)[:, None] * PITCH + slot[None, :], result)


@triton.jit
def gathered_product(
    a, b, of_tile, size, column, sums, K: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """sums + a b[slots], over the first `size` slots of a tile. a [rows, DEPTH] points to the values of the tile's
    first slots; of_tile [DEPTH] points to the numbers of the rows of b that these slots name."""
    step = tl.arange(0, DEPTH)
    for start in range(0, size, DEPTH):
        there = step < size - start
        row = tl.load(of_tile + start, mask=there, other=0).to(tl.int64)
        from_b = row[:, None] * K + column[None, :]
        if K % COLUMNS == 0:
            right = tl.load(b + from_b, mask=there[:, None], other=0.0)
        else:
            right = tl.load(b + from_b, mask=there[:, None] & (column < K)[None, :], other=0.0)
        sums = tl.dot(tl.load(a + start), right, sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["rows", "pitch"])
def gathered(
    a, b, more_a, more_b, slots, sizes, longest, order, out, more_out, rows, pitch,
    K: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out[row] = sum over the slots s of the row's tile of a[row, s] b[slots[s]], with rows of K values.

    a: a tile matrix of tiles of TILE rows. more_a, more_b: if not None, the same sum over these is added. more_out: if
    not None, each tile of `a` has the rows of two matrices, one below the other, whose results are `out` and
    `more_out`. order: if not None, the row of `out` for each position. longest: the tiles, those with the longest sums
    first, so that no long sum runs last. pitch must be a multiple of 64, and `a` must be zero from the tile's last slot
    to the next multiple of DEPTH.
    Program i: COLUMNS columns of one tile's rows.
    """
    STACKED: tl.constexpr = 1 if more_out is None else 2
    BLOCKS: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    tile = tl.load(longest + tl.program_id(0) // BLOCKS)
    size = tl.load(sizes + tile)
    line = tl.arange(0, TILE * STACKED)
    step = tl.arange(0, DEPTH)
    column = (tl.program_id(0) % BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < K
    pitch = (pitch // 64) * 64  # so that the compiler knows the alignment of a's rows
    from_a = (tile * (TILE * STACKED) + line).to(tl.int64)[:, None] * pitch + step[None, :]
    of_tile = slots + tile.to(tl.int64) * pitch + step
    sums = tl.zeros((TILE * STACKED, COLUMNS), tl.float32)
    sums = gathered_product(a + from_a, b, of_tile, size, column, sums, K, COLUMNS, DEPTH)
    if more_a is not None:
        sums = gathered_product(more_a + from_a, more_b, of_tile, size, column, sums, K, COLUMNS, DEPTH)
    position = tile * TILE + line % TILE
    row = position
    if order is not None:
        row = tl.load(order + position, mask=position < rows, other=0)
    to = out + row.to(tl.int64) * K
    if more_out is not None:
        to = tl.where(line < TILE, to, more_out + row.to(tl.int64) * K)
    there = (position < rows)[:, None] & inside[None, :]
    tl.store(to[:, None] + column[None, :], sums.to(out.dtype.element_ty), mask=there)
