"""What happens to single nonzeros between the products: h, what is kept of g and u for backward, dz and du, and the
same nonzeros once more by neuron. Tiles, slots and items are those of sparsellm.ops.triton.plan, tile matrices those of
sparsellm.ops.triton.products.

An item, TILE rows of BLOCK slots, is done in parts of ROWS rows. Whether an entry fires is a bit; what is kept lies
side by side for each part, from starts[part] on, in the order of the entries: so a value needs no index beside it.
"""

import triton
import triton.language as tl

from sparsellm.ops.triton.plan import ITEMS, LISTED, NONZEROS, REST


@triton.jit
def firing(bits, rows, columns, N: tl.constexpr):
    """Whether rows [R] of bits [., ceil(N / 32)] fire columns [C]: bool [R, C]."""
    words = tl.load(bits + rows.to(tl.int64)[:, None] * ((N + 31) // 32) + (columns >> 5)[None, :])
    return ((words >> (columns & 31)[None, :]) & 1) != 0


@triton.jit
def entries(
    item, first, order, slots, sizes, m,
    PITCH: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """ROWS rows of an item, from `first` on: (their positions, also behind the last token; the tokens there, any one
    behind the last; the slots; their neurons, 0 behind the last one; bool [ROWS, BLOCK]: whether both are there)."""
    tile, block = item // (PITCH // BLOCK), item % (PITCH // BLOCK)
    position = tile * TILE + first + tl.arange(0, ROWS)
    token = tl.where(position < m, position, 0)
    if ORDERED:
        token = tl.load(order + token)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    there = slot < tl.load(sizes + tile)
    neuron = tl.load(slots + tile.to(tl.int64) * PITCH + slot, mask=there, other=0)
    return position, token, slot, neuron, (position < m)[:, None] & there[None, :]


@triton.jit
def offsets(active):
    """(the place of each true entry among all, row by row; how many there are) of bool [R, C]."""
    true = active.to(tl.int32)
    of_rows = tl.sum(true, 1)
    return (tl.cumsum(of_rows, 0) - of_rows)[:, None] + tl.cumsum(true, 1) - true, tl.sum(of_rows, 0)


@triton.jit(do_not_specialize=["m", "capacity"])
def keep(
    z, hidden, bits, order, slots, sizes, items, totals, sums, gates, ups, starts, m, capacity,
    N: tl.constexpr, PITCH: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ORDERED: tl.constexpr, GATED: tl.constexpr, SAVING: tl.constexpr,
):  # fmt: skip
    """hidden, a tile matrix that holds u (not GATED: anything), becomes h = g * u (g), where g = relu(z), z [M, N];
    sums, float32 by part: the sum of |h|.

    SAVING: gates and ups, [capacity], get g and u of every nonzero, unless there are more than capacity: then nothing
    is kept, totals[REST] is 1, and backward computes them again. Programs take parts in turn.
    """
    PARTS: tl.constexpr = TILE // ROWS
    fits = tl.load(totals + NONZEROS) <= capacity
    for i in range(tl.program_id(0), tl.load(totals + ITEMS).to(tl.int32) * PARTS, tl.num_programs(0)):
        item = tl.load(items + i // PARTS)
        position, token, slot, neuron, inside = entries(
            item, i % PARTS * ROWS, order, slots, sizes, m, PITCH, TILE, ROWS, BLOCK, ORDERED
        )
        active = inside & firing(bits, token, neuron, N)
        g = tl.load(z + token.to(tl.int64)[:, None] * N + neuron[None, :], mask=active, other=0.0)
        to = hidden + position.to(tl.int64)[:, None] * PITCH + slot[None, :]
        h = g
        u = g
        if GATED:
            u = tl.load(to, mask=active, other=0.0)
            h = (g.to(tl.float32) * u.to(tl.float32)).to(u.dtype)
        tl.store(to, h)
        part = item * PARTS + i % PARTS
        tl.store(sums + part, tl.sum(tl.sum(tl.abs(h.to(tl.float32)), 1), 0))
        if SAVING:
            at, count = offsets(active)
            start = tl.atomic_add(totals + LISTED, count.to(tl.int64))
            tl.store(starts + part, start)
            tl.store(gates + start + at, g, mask=active & fits)
            if GATED:
                tl.store(ups + start + at, u, mask=active & fits)
    if SAVING and tl.program_id(0) == 0:
        tl.store(totals + REST, tl.where(fits, 0, 1).to(tl.int64))


@triton.jit(do_not_specialize=["m", "capacity"])
def gradient(
    dh, dz, du, dl1, bits, order, slots, sizes, items, totals, gates, ups, starts, m, capacity,
    N: tl.constexpr, PITCH: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ORDERED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The tile matrix dh becomes h; dz and du (not GATED: dz) are written. dl1: float32 [1].

    If forward kept nothing, dz and du hold z and u computed again. Programs take parts in turn.
    """
    PARTS: tl.constexpr = TILE // ROWS
    fits = tl.load(totals + NONZEROS) <= capacity
    of_l1 = tl.load(dl1)
    for i in range(tl.program_id(0), tl.load(totals + ITEMS).to(tl.int32) * PARTS, tl.num_programs(0)):
        item = tl.load(items + i // PARTS)
        position, token, slot, neuron, inside = entries(
            item, i % PARTS * ROWS, order, slots, sizes, m, PITCH, TILE, ROWS, BLOCK, ORDERED
        )
        active = inside & firing(bits, token, neuron, N)
        to = position.to(tl.int64)[:, None] * PITCH + slot[None, :]
        if fits:
            at, _ = offsets(active)
            start = tl.load(starts + item * PARTS + i % PARTS)
            g = tl.load(gates + start + at, mask=active, other=0.0).to(tl.float32)
            u = g
            if GATED:
                u = tl.load(ups + start + at, mask=active, other=0.0).to(tl.float32)
        else:
            g = tl.load(dz + to, mask=active, other=0.0).to(tl.float32)
            g = tl.where(g <= 0, 0.0, g)
            u = g
            if GATED:
                u = tl.load(du + to, mask=active, other=0.0).to(tl.float32)
        d = tl.load(dh + to, mask=active, other=0.0).to(tl.float32)
        if GATED:
            h = (g * u).to(dh.dtype.element_ty)
            d = d + of_l1 * tl.where(h > 0, 1.0, tl.where(h < 0, -1.0, 0.0))
            tl.store(dz + to, tl.where(active, d * u, 0.0).to(dz.dtype.element_ty))
            tl.store(du + to, tl.where(active, d * g, 0.0).to(du.dtype.element_ty))
        else:
            h = g.to(dh.dtype.element_ty)
            tl.store(dz + to, tl.where(active, d + of_l1, 0.0).to(dz.dtype.element_ty))
        tl.store(dh + to, h)


@triton.jit(do_not_specialize=["m", "pitch"])
def regroup(
    dz, du, hidden, bits, places, positions, neurons, slots, sizes, items, totals, stacked, turned, m, pitch,
    N: tl.constexpr, PITCH: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    ORDERED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Tile matrices by tokens once more, by neurons: `stacked` from dz and, below it, du; `turned` from hidden.

    bits [N, ceil(M / 32)], slots, sizes, items and pitch are those of tiles of TILE neurons; places [., PITCH] is of
    tiles of TOKENS tokens, where a token has the row positions[token] (ORDERED; else `token`). Programs take items in
    turn.
    """
    STACKED: tl.constexpr = 2 if GATED else 1
    pitch = (pitch // 64) * 64
    of_row = tl.cdiv(m, 32)
    line = tl.arange(0, TILE)
    for i in range(tl.program_id(0), tl.load(totals + ITEMS).to(tl.int32), tl.num_programs(0)):
        item = tl.load(items + i)
        tile, block = item // (pitch // BLOCK), item % (pitch // BLOCK)
        slot = block * BLOCK + tl.arange(0, BLOCK)
        there = slot < tl.load(sizes + tile)
        token = tl.load(slots + tile.to(tl.int64) * pitch + slot, mask=there, other=0)
        rank = tile * TILE + line
        neuron = tl.load(neurons + rank, mask=rank < N, other=0)
        words = tl.load(bits + neuron.to(tl.int64)[:, None] * of_row + (token >> 5)[None, :])
        active = (((words >> (token & 31)[None, :]) & 1) != 0) & (rank < N)[:, None] & there[None, :]
        position = token
        if ORDERED:
            position = tl.load(positions + token)
        of_tokens = places + (position // TOKENS).to(tl.int64)[None, :] * PITCH
        at = position.to(tl.int64)[None, :] * PITCH + tl.load(of_tokens + neuron[:, None], mask=active, other=0)
        upper = (tile * TILE * STACKED + line).to(tl.int64)[:, None] * pitch + slot[None, :]
        tl.store(stacked + upper, tl.load(dz + at, mask=active, other=0.0))
        if GATED:
            lower = (tile * TILE * STACKED + TILE + line).to(tl.int64)[:, None] * pitch + slot[None, :]
            tl.store(stacked + lower, tl.load(du + at, mask=active, other=0.0))
        to = (tile * TILE + line).to(tl.int64)[:, None] * pitch + slot[None, :]
        tl.store(turned + to, tl.load(hidden + at, mask=active, other=0.0))
