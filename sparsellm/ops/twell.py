"""TwELL, the packed format of the sparse activations, in plain PyTorch: the executable specification of the kernels.

Letters: M tokens, N neurons. MT = ceil(M / 128) token tiles, NT = ceil(N / 256) column tiles, W = 32 words per segment,
one for every eight columns.

A segment is one token's part of one column tile: 256 columns. Its nonzeros are stored in W 32-bit words: word 0 is the
number of nonzeros; words 1 to count are `bfloat16 bits << 16 | column`, columns ascending and counted from the start of
the whole row. A token whose neurons 3, 200 and 300 fire has the segments `2, v3 << 16 | 3, v200 << 16 | 200` in column
tile 0 and `1, v300 << 16 | 300` in column tile 1. A value is nonzero if a bit other than the sign is set: NaN counts,
-0.0 does not.

A segment with more than W - 1 nonzeros is wide. Its values are contiguous in `wide`, columns ascending, from value UNIT
times word 1 on; bit c of words 8 to 15 is set if its column c is not zero. It takes a multiple of UNIT values, and
segments may be in any order. Everything else is undefined.

A token's words are stored eight at a time: words 0 to 7 of all its segments, then words 8 to 15 of all, and so on. Few
segments have more than seven nonzeros, so the memory read for a token is mostly contiguous.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TOKEN_TILE = 128  # tokens per token tile
MAX_COLUMNS = 65_536  # maximum K and N: a column index of the packed format is a uint16
COLUMN_TILE = 256  # columns per column tile, and per segment
COMPRESSION = 8  # columns per word of a segment
WORDS = COLUMN_TILE // COMPRESSION  # W
WORD_BITS = 32
SECTOR_WORDS = 8  # words of a segment that are contiguous: 32 bytes, the unit of a memory read
UNIT = 8  # values of a wide segment take a multiple of this


class PackedGate(NamedTuple):
    """A matrix [M, N] in the packed format, and the counts taken while packing."""

    words: Tensor  # int32 [M, 4, NT, 8]
    wide: Tensor  # bfloat16 [M N]: the nonzeros of segments with more than W - 1; undefined elsewhere
    mask: Tensor  # int32 [MT, NT * 8]: bit n % 32 of word n // 32 of a row: neuron n fires for some token of the tile
    row_counts: Tensor  # int32 [M]: nonzeros of each token
    fired: Tensor  # bool [N]: the neurons that fire for some token
    nnz: Tensor  # 0-d int64: all nonzeros
    wide_segments: Tensor  # 0-d int64: segments with more than W - 1 nonzeros
    union: Tensor  # 0-d int64: the set bits of mask


def tiles(length: int, tile: int) -> int:
    """How many tiles of size `tile` are needed to cover `length`."""
    return -(-length // tile)


def segments(words: Tensor) -> Tensor:
    """The words of a PackedGate as int32 [M, NT, W], with each segment's words contiguous."""
    return words.transpose(1, 2).flatten(2)


def pack(h: Tensor) -> PackedGate:
    """h, bfloat16 [M, N], in the packed format. Entries that the format leaves undefined are zero; wide segments are in
    the order of their tokens."""
    m, n = h.shape
    token_tiles, column_tiles = tiles(m, TOKEN_TILE), tiles(n, COLUMN_TILE)
    width = column_tiles * COLUMN_TILE
    # Works on the bits as integers, because copying a bfloat16 NaN may change its bits.
    bits = F.pad(h.contiguous().view(torch.int16).int(), (0, width - n)).view(m, column_tiles, COLUMN_TILE)
    active = (bits & 0x7FFF) != 0
    counts = active.sum(-1, dtype=torch.int32)
    fits = counts < WORDS

    columns = torch.arange(width, dtype=torch.int32, device=h.device)
    values = (bits << 16) | columns.view(column_tiles, COLUMN_TILE)
    kept = active & fits[..., None]
    slot = torch.where(kept, active.cumsum(-1), WORDS)  # values not kept go after the last word, and are cut off
    words = bits.new_zeros((m, column_tiles, WORDS + 1))
    words = words.scatter_(2, slot, values)[..., :WORDS]
    words[..., 0] = counts

    full = active[~fits]  # [wide segments, 256]
    units = (counts[~fits] + UNIT - 1) // UNIT
    starts = units.cumsum(0) - units
    words[..., 1][~fits] = starts.to(torch.int32)
    words[..., SECTOR_WORDS : 2 * SECTOR_WORDS][~fits] = _mask(full)
    wide = torch.zeros(m * n, dtype=torch.int16, device=h.device)
    wide[(starts[:, None] * UNIT + full.cumsum(-1) - 1)[full]] = bits[~fits][full].to(torch.int16)
    words = words.unflatten(2, (-1, SECTOR_WORDS)).transpose(1, 2)

    active = active.view(m, width)
    of_tiles = F.pad(active, (0, 0, 0, token_tiles * TOKEN_TILE - m)).view(token_tiles, TOKEN_TILE, width).any(1)
    return PackedGate(
        words.contiguous(), wide.view(torch.bfloat16), _mask(of_tiles), counts.sum(1, dtype=torch.int32),
        active.any(0)[:n], counts.sum(), (~fits).sum(), of_tiles.sum(),
    )  # fmt: skip


def unpack(packed: PackedGate, n: int) -> Tensor:
    """The bfloat16 [M, N] that was packed, with +0.0 for -0.0. Reads no entry that the format leaves undefined."""
    words = segments(packed.words)
    m, column_tiles, _ = words.shape
    width = column_tiles * COLUMN_TILE
    counts, slots = words[..., :1], words[..., 1:]
    fits = counts < WORDS
    used = fits & (torch.arange(WORDS - 1, device=counts.device) < counts)
    column = torch.where(used, slots & 0xFFFF, width).long()  # unused words go after the last column, and are cut off
    dense = slots.new_zeros((m, width + 1)).scatter_(1, column.flatten(1), (slots >> 16).flatten(1))
    dense = dense[:, :width].unflatten(1, (column_tiles, COLUMN_TILE))
    of_wide = words[~fits[..., 0]]
    masks = of_wide[:, SECTOR_WORDS : 2 * SECTOR_WORDS, None]
    full = (masks >> torch.arange(WORD_BITS, device=counts.device) & 1).flatten(1).bool()
    at = of_wide[:, 1:2].long() * UNIT + full.cumsum(-1) - 1
    values = torch.zeros(full.shape, dtype=torch.int32, device=counts.device)
    values[full] = packed.wide.view(torch.int16)[at[full]].int()
    dense[~fits[..., 0]] = values
    return dense.flatten(1)[:, :n].to(torch.int16).view(torch.bfloat16)


def _mask(active: Tensor) -> Tensor:
    """bool [..., C] as int32 [..., C / 32]: bit c % 32 of word c // 32 is set if entry c is."""
    powers = 2 ** torch.arange(WORD_BITS, device=active.device)
    return (active.unflatten(-1, (-1, WORD_BITS)) * powers).sum(-1).to(torch.int32)
