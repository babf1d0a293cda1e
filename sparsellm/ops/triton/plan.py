"""Kernels that find which neurons fire: a bit for each nonzero of z, and the union of each tile as slots.

A *bit matrix* int32 [rows, words] has bit c % 32 of word c // 32 of a row set if column c fires. A bit matrix with a
row per token takes N / 8 bytes per token however many neurons fire, so nothing here can overflow. A *tile* is TILE rows
that are consecutive in some order of the rows. The columns that fire for at least one row of a tile are the *union* of
the tile, and are numbered as *slots* in ascending order. `slots` maps slots to columns, `places` maps columns to slots:

              c0  c1  c2  c3  c4  c5  c6  c7      union {1, 2, 5, 6}: slots 0 to 3
    row 0      .   p   .   .   .   q   .   .      slots of the tile   [1, 2, 5, 6]          slot -> column
    row 1      .   .   v   .   .   .   w   .      places of the tile  [., 0, 1, ., ., 2, 3, .]   column -> slot

The forward pass needs tiles of tokens, whose columns are neurons; the gradients of the weights need tiles of neurons,
whose columns are tokens. The kernel `plan` finds both kinds: from the bit matrix, and from its transpose.

If tokens are ordered (sparsellm.ops.triton.clusters), the data of tiles are indexed by position: slots, places, items,
the rows of tile matrices and the bits by neuron. Inputs, outputs and the bits by token are indexed by token. `order`
has the token at each position; `positions` is the inverse of `order`. An example with tiles of 2 rows, where token 0
is similar to token 2, and token 1 to token 3:

    position   0  1 | 2  3       `sampled` reads x of token 2 for row 0 of tile 0, and `gathered` writes the row's y to
    order      2  0 | 3  1       y[2]. In a tile of neurons, the slot of position 0 has the name 2, so that `gathered`
    positions  1  3   0  2       reads x[2]; `regroup` finds the values of token 2 in row 0
"""

import triton
import triton.language as tl

# Indices into a call's int64 `totals`, whose first five entries are the operator's counts. (No tile
# leaves these engines, so the fifth stays zero.)
NONZEROS, REST, UNION, LISTED, ITEMS = (tl.constexpr(index) for index in (0, 2, 3, 5, 6))
TOTALS = 8


@triton.jit
def ones(words):
    """The number of bits set in each uint32."""
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return ((words * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _or(a, b):
    return a | b


@triton.jit(do_not_specialize=["rows"])
def mark(z, bits, rows, N: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Set bits [rows, ceil(N / 32)] where relu(z), z [rows, N], is not zero. -0.0 is zero, NaN is not.

    Program (i, j): ROWS rows, WORDS words of each.
    """
    OF_ROW: tl.constexpr = (N + 31) // 32
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * WORDS * 32 + tl.arange(0, WORDS * 32)
    inside = (row < rows)[:, None] & (column < N)[None, :]
    values = tl.load(z + row.to(tl.int64)[:, None] * N + column[None, :], mask=inside, other=0.0)
    fires = tl.reshape(tl.where(values <= 0, 0, 1), (ROWS, WORDS, 32))
    words = tl.sum(fires << tl.arange(0, 32)[None, None, :], 2)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    to = bits + row.to(tl.int64)[:, None] * OF_ROW + word[None, :]
    tl.store(to, words, mask=(row < rows)[:, None] & (word < OF_ROW)[None, :])


@triton.jit(do_not_specialize=["rows", "columns"])
def turn(
    bits, order, turned, counts, rows, columns, GROUPS: tl.constexpr, WORDS: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """turned [columns, ceil(rows / 32)]: the transpose of bits [rows, ceil(columns / 32)], with the rows in the order
    given by `order`, or in their own order if `order` is None. Also adds to counts, int32 [PARTS, columns], how many
    rows of each part fire each column.

    Program (i, j): GROUPS times 32 rows, WORDS words of each.
    """
    of_row, of_column = tl.cdiv(columns, 32), tl.cdiv(rows, 32)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    row = tl.program_id(0) * GROUPS * 32 + tl.arange(0, GROUPS * 32)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = (row < rows)[:, None] & (word < of_row)[None, :]
    if order is not None:
        row = tl.load(order + row, mask=row < rows, other=0)
    words = tl.load(bits + row.to(tl.int64)[:, None] * of_row + word[None, :], mask=inside, other=0)
    bit = tl.arange(0, 32)
    fires = (tl.reshape(words, (GROUPS, 32, WORDS))[:, :, :, None] >> bit[None, None, None, :]) & 1
    words = tl.sum(fires << bit[None, :, None, None], 1)
    column = (word * 32)[:, None] + bit[None, :]
    to = turned + column.to(tl.int64)[None, :, :] * of_column + group[:, None, None]
    tl.store(to, words, mask=(group < of_column)[:, None, None] & (column < columns)[None, :, :])
    of_part = counts + (tl.program_id(0) * PARTS // tl.num_programs(0)) * columns
    tl.atomic_add(of_part + column, tl.sum(ones(words.to(tl.uint32, bitcast=True)), 0), mask=column < columns)


@triton.jit(do_not_specialize=["columns"])
def classify(counts, keys, columns, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """keys, int32 [columns], from counts [PARTS, columns]. Columns that fire about equally often (within a factor of
    two) and mostly in the same part of the rows have equal keys; columns that fire more often have larger keys."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, PARTS)[:, None] * columns + column[None, :]
    of_parts = tl.load(counts + at, mask=(column < columns)[None, :], other=0)
    below = tl.sum(of_parts, 0).to(tl.uint32, bitcast=True)
    for shift in tl.static_range(5):
        below |= below >> (1 << shift)
    octave, part = ones(below), tl.argmax(of_parts, 0)
    # Every second octave counts its parts backwards, so that the columns where two octaves meet are similar too.
    key = octave * PARTS + tl.where(octave % 2 == 0, part, PARTS - 1 - part)
    tl.store(keys + column, key, mask=column < columns)


@triton.jit(do_not_specialize=["rows", "columns", "pitch"])
def plan(
    bits, order, names, slots, places, sizes, items, totals, fired, rows, columns, pitch,
    TILE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, LISTING: tl.constexpr,
):  # fmt: skip
    """Program i finds the union of the columns that fire in tile i. `bits` is [rows, ceil(columns / 32)]; tile i has
    the rows order[i * TILE : (i + 1) * TILE], or rows i * TILE to (i + 1) * TILE - 1 if `order` is None. The program
    reads ROWS x WORDS words at a time.

    If LISTING, the program writes slots (names[column] if `names` is not None, else the column) and places, int32
    [tiles, pitch], and sizes, int32 [tiles], the number of slots. For each BLOCK slots of a tile, `items` gets the
    number tile * (pitch / BLOCK) + block; the items are in any order, and totals[ITEMS] counts them.
    fired, uint8 [columns]: if not None, the program sets the columns that fire to 1, and adds the number of nonzeros
    and the size of the union to totals.
    """
    tile, of_row = tl.program_id(0), tl.cdiv(columns, 32)
    bit = tl.arange(0, 32)
    size = tl.zeros((), tl.int32)
    nonzeros = tl.zeros((), tl.int32)
    for start in range(0, of_row, WORDS):
        word = start + tl.arange(0, WORDS)
        union = tl.zeros((WORDS,), tl.uint32)
        of_words = tl.zeros((WORDS,), tl.int32)
        for i in range(0, TILE, ROWS):
            at = tile * TILE + i + tl.arange(0, ROWS)
            row = at
            if order is not None:
                row = tl.load(order + at, mask=at < rows, other=0)
            there = (at < rows)[:, None] & (word < of_row)[None, :]
            words = tl.load(bits + row.to(tl.int64)[:, None] * of_row + word[None, :], mask=there, other=0)
            words = words.to(tl.uint32, bitcast=True)
            union |= tl.reduce(words, 0, _or)
            if fired is not None:
                of_words += tl.sum(ones(words), 0)
        nonzeros += tl.sum(of_words, 0)
        counts = ones(union)
        before = size + tl.cumsum(counts, 0) - counts
        column = (word * 32)[:, None] + bit[None, :]
        fires = ((union[:, None] >> bit[None, :]) & 1) != 0
        below = (tl.full((32,), 1, tl.uint32) << bit) - 1
        slot = before[:, None] + ones(union[:, None] & below[None, :])
        if LISTING:
            name = column
            if names is not None:
                name = tl.load(names + column, mask=fires, other=0)
            tl.store(slots + tile.to(tl.int64) * pitch + slot, name, mask=fires)
            tl.store(places + tile.to(tl.int64) * pitch + column, slot, mask=column < columns)
        if fired is not None:
            tl.store(fired + column, tl.full((WORDS, 32), 1, tl.uint8), mask=fires)
        size += tl.sum(counts, 0)
    if fired is not None:
        tl.atomic_add(totals + NONZEROS, nonzeros.to(tl.int64))
        tl.atomic_add(totals + UNION, size.to(tl.int64))
    if LISTING:
        tl.store(sizes + tile, size)
        blocks = tl.cdiv(size, BLOCK)
        first = tl.atomic_add(totals + ITEMS, blocks.to(tl.int64))
        for block in range(0, blocks):
            tl.store(items + first + block, tile * (pitch // BLOCK) + block)


@triton.jit(do_not_specialize=["count"])
def descending(keys, order, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """order [count]: the indices of keys, int32 [count], largest key first, equal keys by index.

    Program i finds the ranks of ROWS keys by comparing each with all keys, faster than a sort for a few thousand keys.
    """
    mine = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    key = tl.load(keys + mine, mask=mine < count, other=0)
    place = tl.zeros((ROWS,), tl.int32)
    for start in range(0, count, COLUMNS):
        other = start + tl.arange(0, COLUMNS)
        theirs = tl.load(keys + other, mask=other < count, other=-1)  # keys are not negative
        earlier = (theirs[None, :] == key[:, None]) & (other[None, :] < mine[:, None])
        place += tl.sum(((theirs[None, :] > key[:, None]) | earlier).to(tl.int32), 1)
    tl.store(order + place, mine, mask=mine < count)
