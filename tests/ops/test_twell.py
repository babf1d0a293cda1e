"""The packed format: its contents, that it loses nothing, and that C++ has the same constants."""

import re
from pathlib import Path

import pytest
import torch

from sparsellm.ops import twell
from sparsellm.ops.twell import COLUMN_TILE, SECTOR_WORDS, TOKEN_TILE, UNIT, WORDS, pack, segments, tiles, unpack

ENGINES_H = Path(__file__).parents[2] / "kernels" / "engines.h"
HEIGHTS = (0, 1, 127, 129)
WIDTHS = (8, 264, 1000)


def bits(h):
    return h.view(torch.int16)


def poisoned(packed):
    """Fill everything that the format leaves undefined with garbage."""
    words = segments(packed.words)
    counts = words[..., :1]
    fits = counts < WORDS
    position = torch.arange(words.shape[2])
    of_wide = (position == 1) | (position // SECTOR_WORDS == 1)
    defined = (position == 0) | torch.where(fits, position <= counts, of_wide)
    defined = defined.unflatten(2, (-1, SECTOR_WORDS)).transpose(1, 2)
    wide = torch.full_like(packed.wide, float("nan"))
    for segment in words[~fits[..., 0]].tolist():
        first, count = segment[1] * UNIT, segment[0]
        wide[first : first + count] = packed.wide[first : first + count]
    return packed._replace(words=torch.where(defined, packed.words, -1), wide=wide)


def check(h):
    m, n = h.shape
    slots = WORDS - 1
    packed = pack(h)
    assert packed.words.shape == (m, (slots + 1) // 8, tiles(n, COLUMN_TILE), 8)
    assert packed.wide.shape == (m * n,)
    assert packed.mask.shape == (tiles(m, TOKEN_TILE), tiles(n, COLUMN_TILE) * 8)
    dtypes = [t.dtype for t in packed]
    assert dtypes == [torch.int32, torch.bfloat16, torch.int32, torch.int32, torch.bool, *[torch.int64] * 3]
    assert all(t.is_contiguous() for t in packed)

    active = (bits(h) & 0x7FFF) != 0
    expected = torch.where(active, bits(h), 0)
    assert torch.equal(bits(unpack(packed, n)), expected)
    assert torch.equal(bits(unpack(poisoned(packed), n)), expected)
    counts = torch.stack([t.sum(1) for t in active.split(COLUMN_TILE, 1)], 1)
    assert torch.equal(segments(packed.words)[..., 0], counts)
    assert torch.equal(packed.row_counts, active.sum(1))
    assert torch.equal(packed.fired, active.any(0))
    assert packed.nnz == active.sum()
    assert packed.wide_segments == (counts > slots).sum()
    union = [t.any(0) for t in active.split(TOKEN_TILE)]
    assert packed.union == sum(t.sum() for t in union)
    for tile, of_tile in enumerate(union[:m]):
        for neuron in range(0, n, 7):
            assert (int(packed.mask[tile, neuron // 32]) >> neuron % 32 & 1) == of_tile[neuron]
    return packed


def heavy_tailed(m, n, density, seed=0):
    """Rates that differ between neurons and between tokens, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    neurons = torch.randn(n, generator=generator).mul(1.5).exp() * (torch.rand(n, generator=generator) > 0.3)
    of_tokens = torch.randn(m, 1, generator=generator).exp()
    rates = (neurons * of_tokens * density).clamp(max=1)
    fires = torch.rand(m, n, generator=generator) < rates
    return (torch.rand(m, n, generator=generator).bfloat16() + 0.01) * fires


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("m", HEIGHTS)
def test_any_shape_and_density(m, n):
    for seed, density in enumerate((0.0, 0.003, 0.03, 0.3, 3.0)):
        check(heavy_tailed(m, n, density, seed))


def test_all_zero_and_all_one():
    zero = check(torch.zeros(129, 1000, dtype=torch.bfloat16))
    assert (zero.nnz, zero.wide_segments, zero.union) == (0, 0, 0)
    one = check(torch.ones(129, 1000, dtype=torch.bfloat16))
    assert (one.nnz, one.wide_segments, one.union) == (129_000, 129 * 4, 2000)


@pytest.mark.parametrize("distance", [-1, 0, 1, "255", "256"])
def test_a_tile_as_full_as_its_slots_and_one_fuller(distance):
    count = int(distance) if isinstance(distance, str) else WORDS - 1 + distance
    generator = torch.Generator().manual_seed(count)
    h = torch.zeros(5, 2 * COLUMN_TILE, dtype=torch.bfloat16)
    for row in h:
        row[COLUMN_TILE + torch.randperm(COLUMN_TILE, generator=generator)[:count]] = 1.5
    packed = check(h)
    assert packed.wide_segments == (5 if count > WORDS - 1 else 0)


def test_an_overfull_tile_is_kept_and_counted():
    h = torch.zeros(2, 512, dtype=torch.bfloat16)
    h[0, 256:288] = torch.arange(1, 33)  # one more than its 31 slots
    h[1, 256:287] = 1
    packed = check(h)
    assert packed.wide_segments == 1
    assert segments(packed.words)[:, 1, 0].tolist() == [32, 31]
    assert torch.equal(packed.wide[:32], h[0, 256:288])


def test_wide_segments_take_whole_units_and_have_a_mask_of_their_columns():
    h = torch.zeros(3, 520, dtype=torch.bfloat16)
    h[0, 1:34] = torch.arange(1, 34)  # 33 values take five units of eight
    h[1, :31] = 1  # not wide
    h[2, 256:512] = torch.arange(2, 258)
    packed = check(h)
    words = segments(packed.words)
    assert words[0, 0, :2].tolist() == [33, 0]
    assert words[0, 0, 8:16].tolist() == [-2, 3, 0, 0, 0, 0, 0, 0]
    assert words[2, 1, :2].tolist() == [256, 5]
    assert words[2, 1, 8:16].tolist() == [-1] * 8
    assert torch.equal(packed.wide[:33], h[0, 1:34])
    assert torch.equal(packed.wide[40:296], h[2, 256:512])


def test_values_of_wide_segments_may_be_stored_in_any_order():
    h = heavy_tailed(9, 1000, 1.0)
    packed = pack(h)
    words = segments(packed.words).clone()
    is_wide = words[..., 0] >= WORDS
    assert is_wide.sum() > 9
    units = tiles(words[..., 0][is_wide], UNIT)
    starts = units.flip(0).cumsum(0).flip(0) - units  # the last segment first
    moved = torch.full_like(packed.wide, float("nan"))
    for count, old, new in zip(units * UNIT, words[..., 1][is_wide], starts, strict=True):
        moved[new * UNIT : new * UNIT + count] = packed.wide[old * UNIT : old * UNIT + count]
    words[..., 1][is_wide] = starts.int()
    words = words.unflatten(2, (-1, SECTOR_WORDS)).transpose(1, 2)
    assert torch.equal(bits(unpack(packed._replace(words=words, wide=moved), 1000)), bits(h))


@pytest.mark.parametrize("capacity", [128, 12_800])
def test_wide_segments_fit_where_all_nonzeros_fit_in_the_lists(capacity):
    """The tile engine has memory for capacity + capacity / 4 values (kernels/portable/engines.cpp: wide_values_of)."""
    for count in range(WORDS, COLUMN_TILE + 1):
        assert capacity // count * tiles(count, UNIT) * UNIT <= capacity + capacity // 4


def test_columns_ascend_and_count_from_the_start_of_the_row():
    h = torch.zeros(1, 520, dtype=torch.bfloat16)
    h[0, [3, 200, 256, 515]] = torch.tensor([1.0, -2.0, 3.0, 4.0], dtype=torch.bfloat16)
    words = segments(pack(h).words)[0]
    assert words[:, 0].tolist() == [2, 1, 1]
    assert [w & 0xFFFF for w in words[0, 1:3].tolist()] == [3, 200]
    assert words[0, 1] == 0x3F80 << 16 | 3
    assert words[1, 1] & 0xFFFF == 256
    assert words[2, 1] & 0xFFFF == 515


def test_words_lie_eight_at_a_time():
    h = torch.zeros(2, 512, dtype=torch.bfloat16)
    h[:, 1:10] = h[:, 256] = 1
    row = pack(h).words.flatten(1)[1]
    one = 0x3F80 << 16
    assert row[:8].tolist() == [9, *(one | column for column in range(1, 8))]
    assert row[8:10].tolist() == [1, one | 256]
    assert row[16:18].tolist() == [one | 8, one | 9]


def test_the_last_column_of_the_widest_layer():
    h = torch.zeros(1, 65_536, dtype=torch.bfloat16)
    h[0, -1] = -1
    check(h)


def test_nan_counts_and_negative_zero_does_not():
    h = torch.zeros(3, 264, dtype=torch.bfloat16)
    h[0, 5], h[1, 6], h[2, 263] = float("nan"), -0.0, torch.finfo(torch.bfloat16).smallest_normal / 4
    packed = check(h)
    assert packed.row_counts.tolist() == [1, 0, 1]
    assert unpack(packed, 264)[0, 5].isnan()
    check(torch.full((3, 264), float("nan"), dtype=torch.bfloat16))
    check(torch.full((3, 264), -0.0, dtype=torch.bfloat16))


def test_the_constants_are_those_of_the_kernels():
    header = ENGINES_H.read_text()
    names = {"kTokenTile": TOKEN_TILE, "kColumnTile": COLUMN_TILE, "kSectorWords": SECTOR_WORDS,
             "kCompression": twell.COMPRESSION}  # fmt: skip
    for name, value in names.items():
        assert int(re.search(rf"constexpr int {name} = (\d+);", header)[1]) == value


def test_words_hold_a_column_of_the_widest_layer():
    from sparsellm.ops import MAX_COLUMNS

    assert MAX_COLUMNS == 1 << 16
    assert COLUMN_TILE % twell.WORD_BITS == 0
