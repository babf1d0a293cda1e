"""Kernels on single nonzeros between the matmuls: h, the values of g and u that are saved for backward, dz and du, and
the rearrangement of these nonzeros by neuron. sparsellm.ops.triton.plan defines tiles and slots, and
sparsellm.ops.triton.products defines tile matrices.

About 3% of a tile matrix is nonzero, so no kernel reads all entries. A program clears its part of a tile matrix, then
fills in the nonzeros: each round takes the lowest remaining bit of each word of the program's bits. So the number of
rounds is the number of bits set in the fullest word:

    word            0    1    2      3      round 0: neurons 1, 69, 98, whose list indices are 0, 1 and 3
    bits that are   1    .    5, 7   2      round 1: neuron 71, whose list index is 2: before it come the bit of word 0
    set                                              and one bit of word 2

Saved values are contiguous for each row, from starts[row] on, in the order of the columns, so a value needs no index.
"""

import triton
import triton.language as tl

from sparsellm.ops.triton.plan import ITEMS, LISTED, NONZEROS, REST, ones


@triton.jit
def lowest(words):
    """The index of the lowest bit set in each uint32."""
    return ones((words ^ (words - 1)) >> 1)


@triton.jit
def most(counts):
    return tl.max(tl.max(counts, 1), 0)


@triton.jit
def words_of(bits, rows, there, of_row, WORDS: tl.constexpr):
    """uint32 [R, WORDS]: rows [R] of bits [., of_row], zeros for a row that is not `there`. of_row is a run-time value,
    not a constexpr, because Triton then gives neighbouring threads neighbouring words, here and in the code that uses
    the words."""
    word = tl.arange(0, WORDS)
    at = bits + rows.to(tl.int64)[:, None] * of_row + word[None, :]
    return tl.load(at, mask=there[:, None] & (word < of_row)[None, :], other=0).to(tl.uint32, bitcast=True)


@triton.jit
def offsets(counts):
    """(for each entry of counts [R, C], the sum of all entries before it, row by row; the sum of all entries)"""
    of_rows = tl.sum(counts, 1)
    return (tl.cumsum(of_rows, 0) - of_rows)[:, None] + tl.cumsum(counts, 1) - counts, tl.sum(of_rows, 0)


@triton.jit
def clear(rows, size, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Zero the first `size` columns, in whole blocks of BLOCK, of the rows that rows [ROWS, 1] point to."""
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        tl.store(rows + column[None, :], tl.zeros((ROWS, BLOCK), rows.dtype.element_ty))


@triton.jit
def positions(bits, order, m, of_row, PITCH: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """For the ROWS positions of this program: (their tokens [ROWS]; the words of their bits [ROWS, WORDS], 0 after the
    last token; the offsets of their rows in a tile matrix, int64 [ROWS, 1])."""
    position = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there, token = position < m, position
    if order is not None:
        token = tl.load(order + position, mask=there, other=0)
    return token, words_of(bits, token, there, of_row, WORDS), position.to(tl.int64)[:, None] * PITCH


@triton.jit(do_not_specialize=["m", "of_row", "capacity"])
def keep(
    z, u, hidden, bits, order, places, sizes, totals, sums, gates, ups, starts, m, of_row, capacity,
    N: tl.constexpr, PITCH: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
    BLOCK: tl.constexpr, GATED: tl.constexpr, SAVING: tl.constexpr,
):  # fmt: skip
    """Fill the tile matrix `hidden` with h = g * u (not GATED: g), where g = relu(z), z [M, N], and u is a tile matrix.
    Program i computes ROWS positions, and writes their sum of |h| to `sums`, float32. ROWS divides TILE. WORDS: at
    least the words of a row.

    SAVING: gates and ups, [capacity], get g and u of every nonzero. If there are more nonzeros than capacity, nothing
    is saved, totals[REST] is 1, and backward recomputes g and u.
    """
    token, words, row = positions(bits, order, m, of_row, PITCH, ROWS, WORDS)
    tile, counts = tl.program_id(0) * ROWS // TILE, ones(words)
    hidden, u, z = hidden + row, u + row, z + token.to(tl.int64)[:, None] * N
    clear(hidden, tl.load(sizes + tile), ROWS, BLOCK)
    fits = tl.load(totals + NONZEROS) <= capacity
    if SAVING:
        at, count = offsets(counts)
        start = tl.atomic_add(totals + LISTED, count.to(tl.int64))
        tl.store(starts + tl.program_id(0), start)
        gates, ups = gates + start, ups + start
        if tl.program_id(0) == 0:
            tl.store(totals + REST, tl.where(fits, 0, 1).to(tl.int64))
    tl.debug_barrier()  # all entries must be cleared before any is filled in
    first, places = (tl.arange(0, WORDS) * 32)[None, :], places + tile.to(tl.int64) * PITCH
    l1 = tl.zeros((ROWS, WORDS), tl.float32)
    for done in range(0, most(counts)):
        active = words != 0
        neuron = first + lowest(words)
        words &= words - 1
        place = tl.load(places + neuron, mask=active, other=0)
        g = tl.load(z + neuron, mask=active, other=0.0)
        h = g
        if GATED:
            up = tl.load(u + place, mask=active, other=0.0)
            h = (g.to(tl.float32) * up.to(tl.float32)).to(g.dtype)
        tl.store(hidden + place, h, mask=active)
        l1 += tl.abs(h.to(tl.float32))
        if SAVING:
            tl.store(gates + at + done, g, mask=active & fits)
            if GATED:
                tl.store(ups + at + done, up, mask=active & fits)
    tl.store(sums + tl.program_id(0), tl.sum(tl.sum(l1, 1), 0))


@triton.jit(do_not_specialize=["m", "of_row", "capacity"])
def gradient(
    dh, dz, du, z, u, dl1, bits, order, places, sizes, totals, gates, ups, starts, m, of_row, capacity,
    N: tl.constexpr, PITCH: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
    BLOCK: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Fill the tile matrices dz and du (not GATED: dz). In dh, h replaces the entries that fire. dl1: float32 [1].

    If forward saved nothing, the tile matrices z and u hold the recomputed values. Programs: as in `keep`.
    """
    _, words, row = positions(bits, order, m, of_row, PITCH, ROWS, WORDS)
    tile, counts = tl.program_id(0) * ROWS // TILE, ones(words)
    dh, dz, du, size = dh + row, dz + row, du + row, tl.load(sizes + tile)
    clear(dz, size, ROWS, BLOCK)
    if GATED:
        clear(du, size, ROWS, BLOCK)
    at, _ = offsets(counts)
    fits = tl.load(totals + NONZEROS) <= capacity
    start, of_l1 = tl.load(starts + tl.program_id(0)), tl.load(dl1)
    of_g, of_u = tl.where(fits, gates + start, z + row), tl.where(fits, ups + start, u + row)
    tl.debug_barrier()  # all entries must be cleared before any is filled in
    first, places = (tl.arange(0, WORDS) * 32)[None, :], places + tile.to(tl.int64) * PITCH
    for done in range(0, most(counts)):
        active = words != 0
        neuron = first + lowest(words)
        words &= words - 1
        place = tl.load(places + neuron, mask=active, other=0)
        d = tl.load(dh + place, mask=active, other=0.0).to(tl.float32)
        kept = tl.where(fits, at + done, place)
        g = tl.load(of_g + kept, mask=active, other=0.0).to(tl.float32)
        g = tl.where(g <= 0, 0.0, g)
        if GATED:
            up = tl.load(of_u + kept, mask=active, other=0.0).to(tl.float32)
            h = (g * up).to(dh.dtype.element_ty)
            d = d + of_l1 * tl.where(h > 0, 1.0, tl.where(h < 0, -1.0, 0.0))
            tl.store(dz + place, (d * up).to(dz.dtype.element_ty), mask=active)
            tl.store(du + place, (d * g).to(du.dtype.element_ty), mask=active)
        else:
            h = g.to(dh.dtype.element_ty)
            tl.store(dz + place, (d + of_l1).to(dz.dtype.element_ty), mask=active)
        tl.store(dh + place, h, mask=active)


@triton.jit(do_not_specialize=["m", "pitch"])
def regroup(
    dz, du, hidden, bits, places, positions, neurons, slots, columns, sizes, items, totals, stacked, turned, m, pitch,
    N: tl.constexpr, PITCH: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Rearrange tile matrices by tokens into tile matrices by neurons: `stacked` from dz and, below it, du; `turned`
    from hidden.

    bits [N, ceil(M / 32)] has a column per position. slots, columns (the `places` of `plan`), sizes, items and pitch
    describe tiles of TILE neurons; places [., PITCH] describes tiles of TOKENS tokens. positions: if tokens are
    ordered, the position of each token, else None. Programs take turns at parts of items: ROWS rows, WORDS words at a
    time.
    """
    PARTS: tl.constexpr = TILE // ROWS
    STACKED: tl.constexpr = 2 if GATED else 1
    pitch = (pitch // 64) * 64  # so that the compiler knows the alignment of rows
    of_row = tl.cdiv(m, 32)
    for i in range(tl.program_id(0), tl.load(totals + ITEMS).to(tl.int32) * PARTS, tl.num_programs(0)):
        item = tl.load(items + i // PARTS)
        tile, begin = item // (pitch // BLOCK), item % (pitch // BLOCK) * BLOCK
        row = i % PARTS * ROWS
        upper = stacked + (tile * TILE * STACKED + row).to(tl.int64) * pitch
        lower, to = upper + TILE * pitch, turned + (tile * TILE + row).to(tl.int64) * pitch
        rows = begin + (tl.arange(0, ROWS) * pitch)[:, None]
        clear(upper + rows, BLOCK, ROWS, BLOCK)
        if GATED:
            clear(lower + rows, BLOCK, ROWS, BLOCK)
        clear(to + rows, BLOCK, ROWS, BLOCK)
        # The arrays are one-dimensional, so that all loads of an iteration have the same layout, without conversions.
        line = tl.arange(0, ROWS * WORDS) // WORDS
        there = tile * TILE + row + line < N
        neuron = tl.load(neurons + tile * TILE + row + line, mask=there, other=0)
        of_tile = slots + tile.to(tl.int64) * pitch
        first = tl.load(of_tile + begin)
        last = tl.load(of_tile + tl.minimum(begin + BLOCK, tl.load(sizes + tile)) - 1)
        if positions is not None:
            first, last = tl.load(positions + first), tl.load(positions + last)
        tl.debug_barrier()  # all entries must be cleared before any is filled in
        for start in range(first // 32, last // 32 + 1, WORDS):
            word = start + tl.arange(0, ROWS * WORDS) % WORDS
            inside = there & (word <= last // 32)
            words = tl.load(bits + neuron.to(tl.int64) * of_row + word, mask=inside, other=0)
            words = words.to(tl.uint32, bitcast=True)
            words = tl.where(word == first // 32, words >> (first % 32) << (first % 32), words)
            words = tl.where(word == last // 32, words << (31 - last % 32) >> (31 - last % 32), words)
            for _ in range(0, tl.max(ones(words), 0)):
                active = words != 0
                position = word * 32 + lowest(words)
                words &= words - 1
                slot = line * pitch + tl.load(columns + tile.to(tl.int64) * pitch + position, mask=active, other=0)
                of_tokens = places + (position // TOKENS).to(tl.int64) * PITCH
                at = position.to(tl.int64) * PITCH + tl.load(of_tokens + neuron, mask=active, other=0)
                h, z_gradient = tl.load(hidden + at, mask=active, other=0.0), tl.load(dz + at, mask=active, other=0.0)
                if GATED:
                    tl.store(lower + slot, tl.load(du + at, mask=active, other=0.0), mask=active)
                tl.store(upper + slot, z_gradient, mask=active)
                tl.store(to + slot, h, mask=active)
