"""Results of the CUDA kernels, compared with the one right answer if there is one, else with float64.

Before every call, free memory is poisoned and new inputs are made. tests/gpu/test_kernels_in_torch.py tests the kernels
in graphs, streams, compilers, autograd and models.
"""

import kernel_cases as cases
import pytest
import torch
from kernel_cases import DEVICE, ENGINE, GATED, assert_as_accurate, assert_equal, check_exact, check_packed

from scripts.benchmarks import patterns
from sparsellm.inference.engine_choice import EngineChoice
from sparsellm.ops import Plan, borders, cuda, reference, twell
from sparsellm.ops.plan import ROOM
from sparsellm.ops.twell import TOKEN_TILE
from sparsellm.policy import Policy

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]
FEW, MANY = 60, 300  # tokens: gate_pack has a kernel for each


def gate_pack(x, w):
    cases.poison()
    return cuda.gate_pack(x, w)


def tile_engine(x, ws, ordered=None, capacity=None, long_capacity=None, saving=False):
    """(y, l1, fired, counts, saved) of the C++ operator; arguments that are None are chosen as in ops/cuda.py."""
    m, n = len(x), len(ws[0])
    capacity = cuda.capacity_of(m, n, ROOM) if capacity is None else capacity
    ordered = borders.orders(m) if ordered is None else ordered
    w_gate, w_up, w_down = cases.layer(ws)
    cases.poison()
    return torch.ops.sparsellm_cuda.tile_forward(
        x, w_gate, w_up, w_down.T.contiguous(), capacity, long_capacity, ordered, saving
    )


def saved_field(saved, x, ws, name, dtype):
    """The field `name` of the plan in a tile engine's saved buffer (kernels/engines.h: tile_saved_field)."""
    return torch.ops.sparsellm_cuda.tile_saved_field(saved, len(x), len(ws[0]), len(ws) == 3, name).view(dtype)


def test_empty_memory_is_poisoned():
    for _ in range(2):
        cases.poison()
        held = [torch.empty(n, dtype=torch.bfloat16, device=DEVICE) for n in (1, 77, 5_000, 600_000, 20_000_000)]
        assert [bool(t.isnan().all()) for t in held] == [True] * len(held)
        del held[::2]  # leaves holes between allocations, for the second round


# gate_pack.


@pytest.mark.parametrize("pattern", cases.PATTERNS)
def test_gate_pack_keeps_every_value(pattern):
    for m, n in ((FEW, 1000), (MANY, 5632), (129, 264), (16, 1000)):
        fires = cases.firing(pattern, m, n)
        gate = cases.any_values(fires, seed=m)
        packed = gate_pack(*cases.one_hot(gate))
        check_packed(packed, torch.relu(gate), f"{pattern}, M {m}, N {n}")
        assert_equal(packed.nnz, fires.sum(), "nnz")


@pytest.mark.parametrize("m", cases.HEIGHTS)
def test_gate_pack_is_exact_at_any_shape(m):
    shapes = [(k, n) for k in cases.WIDTHS for n in cases.NEURONS]
    for i, (k, n) in enumerate(shapes):
        x, (w, *_) = cases.integers(m, k, n, seed=i)
        packed = gate_pack(x, w)
        check_packed(packed, torch.relu(cases.product(x, w)), f"M {m}, K {k}, N {n}")


@pytest.mark.parametrize(
    ("m", "k", "n"), [(40_001, 8, 2048), (40_000, 64, 2056), (40_000, 136, 2048), (2600, 2048, 16_384)]
)
def test_gate_pack_in_many_rounds(m, k, n):
    """Clusters draw many pairs, in some of which one of the two CTAs has nothing to pack. The w of the last shape is so
    large that it is processed in bands of columns."""
    x, (w, *_) = cases.integers(m, k, n)
    odd = (torch.arange(m, device=DEVICE) // TOKEN_TILE % 2 == 1)[:, None]
    for name, some in (("all", x), ("first", x.where(~odd, 0)), ("second", x.where(odd, 0))):
        gate = torch.relu(cases.product(some, w))
        check_packed(gate_pack(some, w), gate, f"M {m}, K {k}, N {n}, tokens of {name}")


@pytest.mark.parametrize("m", [FEW, 130])
@pytest.mark.parametrize(("k", "n"), [(8, 65_536), (65_536, 8)])
def test_gate_pack_takes_the_widest_layers(k, n, m):
    x, (w, *_) = cases.integers(m, k, n)
    w[-1] = x[0]  # the last column fires
    gate = torch.relu(cases.product(x, w))
    assert gate[0, -1] > 0
    check_packed(gate_pack(x, w), gate, f"K {k}, N {n}")


@pytest.mark.parametrize("m", [16, 64, 65, 1000, 4088])
@pytest.mark.parametrize(("k", "n"), [(264, 1000), (2048, 5632)])
def test_gate_pack_is_as_accurate_as_cublas(k, n, m):
    """Both errors come from one rounding to bfloat16, compared with which the order of float32 sums hardly matters. So
    the error may exceed cuBLAS's by a twentieth."""
    x, (w, *_) = cases.normal(m, k, n)
    packed = gate_pack(x, w)
    g, exact = twell.unpack(packed, n), torch.relu(x.double() @ w.double().T)
    assert_as_accurate(g, torch.relu(x @ w.T), exact, f"M {m}, K {k}, N {n}", factor=1.05)
    check_packed(packed, g, "the packed form of its own values")


@pytest.mark.parametrize("m", [8, 40, 136])
def test_gate_pack_knows_zero_from_almost_zero_and_from_not_a_number(m):
    n, k = 264, 16
    generator = cases.random(0)
    w = torch.zeros((n, k), device=DEVICE, dtype=torch.bfloat16)
    x = torch.zeros((8, k), device=DEVICE, dtype=torch.bfloat16)
    bits = torch.tensor([0, -0x8000, 1, 2, 0x7F, 0x80, 0x7F7F, -0x7FFF, -0x8000 + 0x80, 0x3F80], device=DEVICE)
    # zeros, subnormals, the largest numbers
    w[:, 0] = bits.to(torch.int16).view(torch.bfloat16).repeat(n // len(bits) + 1)[:n]
    x[0, 0] = 1
    below = torch.tensor([2.0**-65, 2.0**-64, 1.5 * 2.0**-64, 2.0**-63, -(2.0**-63), 2.0**-56], device=DEVICE)
    # times 2^-70: rounds to zero, is a tie, rounds to the smallest number, is that number
    w[:, 1] = below.bfloat16().repeat(n // len(below))
    x[1, 1] = 2.0**-70
    x[2] = -0.0
    w[:, 3] = torch.randint(-1, 2, (n,), device=DEVICE, generator=generator).bfloat16()
    x[3, 3] = torch.inf  # times w gives inf, -inf, and NaN where w is 0
    x[4, 9] = torch.nan
    w[:, 5], w[:, 6] = torch.finfo(torch.bfloat16).max, 2.0**119
    x[5, 5:7] = 1  # rounds up to inf
    x[6, :2] = -1
    x = x.repeat(m // 8, 1)
    gate = torch.relu(cases.product(x, w))
    assert (gate[0] != 0).sum() < n
    assert gate[1].count_nonzero() == n // 2
    assert gate[3].isnan().any()
    assert gate[3].isinf().any()
    assert gate[4].isnan().all()
    assert gate[5].isinf().all()
    check_packed(gate_pack(x, w), gate, f"M {m}")


@pytest.mark.parametrize("m", [3, 17, 40, 63, 65, 200])
def test_nothing_fires_behind_the_last_token(m):
    """Beyond the last token the kernels read x as zeros; zero times an infinite weight is NaN, which would fire."""
    x, w = (torch.zeros((rows, 16), device=DEVICE, dtype=torch.bfloat16) for rows in (m, 264))
    x[:, 0], w[:, 0] = -1, torch.inf
    gate = torch.relu(cases.product(x, w))
    assert not gate.any()
    check_packed(gate_pack(x, w), gate, f"M {m}")
    for way, _, there in cases.either_way(("dense",)):
        with there:
            *_, counts, saved = cuda.forward(x, None, w, w.T, Plan(), None, saving=True)
        (g,) = cuda.planes_of(saved, 1, m, 264, x.dtype)
        assert_equal(torch.relu(g), gate, f"M {m}, {way}: g")
        assert not counts.any(), f"M {m}, {way}: counts {counts.tolist()}"


# The operator, where there is one right answer.


@GATED
@pytest.mark.parametrize("m", cases.HEIGHTS)
def test_every_engine_is_exact_at_any_shape(m, gated):
    for i, (k, n) in enumerate(cases.LAYERS):
        x, ws = cases.integers(m, k, n, gated, seed=i)
        check_exact(x, ws, f"M {m}, K {k}, N {n}")


@GATED
def test_the_dense_engine_is_exact_in_many_rounds(gated):
    """A CTA computes more tiles than its kernel has places for drawn tiles, so places are reused."""
    x, ws = cases.integers(20_001, 264, 2048, gated)
    check_exact(x, ws, "M 20,001", engines=("dense",))


@GATED
@pytest.mark.parametrize(("k", "n"), [(8, 65_536), (65_536, 8)])
def test_every_engine_takes_the_widest_layers(k, n, gated):
    check_exact(*cases.integers(130, k, n, gated), f"K {k}, N {n}")


@GATED
@pytest.mark.parametrize("m", [1, 16, 40, 64, 130])
def test_the_widest_rows_that_fire_every_neuron(m, gated):
    """A row of 65,536 nonzeros, one more than a 16-bit count can hold."""
    x, ws = cases.integers(m, 8, 65_536, gated)
    ws[0].zero_()
    ws[0][:, 0] = 1  # as x[:, 0] is
    check_exact(x, ws, f"M {m}")


@GATED
@pytest.mark.parametrize("k", [2056, 4096, 4104, 8200])
def test_every_engine_takes_wide_tokens(k, gated):
    for m in (3, 40, 130):
        check_exact(*cases.integers(m, k, 264, gated), f"M {m}, K {k}")


@GATED
@pytest.mark.parametrize("m", [600, 1500, 8192, 9001, 20_000])
def test_every_engine_takes_many_tokens(m, gated):
    """There are so many tokens that they are ordered in several chunks, that rows are cut into larger chunks, and that
    every CTA has several units of work."""
    for name in ("synthetic29", "synthetic300", "full rows"):
        gate = cases.small_integers(cases.firing(name, 256, 5632))
        x, ws = cases.layer_of(gate, gated)
        drawn = torch.randint(256, (m,), device=DEVICE, generator=cases.random(m))
        check_exact(x[drawn], ws, f"{name}, M {m}")


@GATED
@pytest.mark.parametrize("pattern", cases.PATTERNS)
def test_every_engine_is_exact_for_any_pattern(pattern, gated):
    for i, (m, n) in enumerate(((5, 5632), (FEW, 1000), (MANY, 5632), (513, 264))):
        gate = cases.small_integers(cases.firing(pattern, m, n), seed=i)
        check_exact(*cases.layer_of(gate, gated), f"{pattern}, M {m}, N {n}")


@GATED
@ENGINE
def test_no_tokens(engine, gated):
    x, ws = cases.integers(3, 264, 1000, gated)
    out = cases.run(engine, x[:0], ws)
    assert out.y.shape == (0, 264)
    assert [t.item() for t in (out.l1, out.nnz, out.wide_segments, out.rest_calls, out.union, out.overflow_tiles)] == [
        0
    ] * 6
    assert out.fired.shape == (1000,)
    assert not out.fired.any()


def test_the_library_has_the_borders_that_python_has():
    assert cuda.limit("few tokens") == borders.FEW_TOKENS
    assert cuda.limit("many tokens") == borders.MANY_TOKENS


@GATED
@pytest.mark.parametrize("engine", ["dense", "tile"])
def test_a_saved_buffer_of_a_length_that_the_layer_does_not_give_it_is_refused(engine, gated):
    x, ws = cases.integers(300, 264, 1000, gated)
    layer, dl1 = cases.layer(ws), torch.tensor(0.5, device=DEVICE)
    *_, saved = cuda.forward(x, *layer, Plan.of(engine), None, True)
    for length in (len(saved) - 16, len(saved) + 16):  # another buffer of the same engine
        with pytest.raises(RuntimeError, match=rf"{engine}_backward: saved has {length} bytes: it should have "):
            cuda.backward(x, *layer, x, dl1, saved.new_empty(length))
    with pytest.raises(ValueError, match="more than a multiple of 16: it should have"):
        cuda.backward(x, *layer, x, dl1, saved.new_empty(len(saved) + 1))


UNIONS = {  # how many neurons fire in each of consecutive token tiles
    "around blocks and items": [1, 63, 64, 65, 255, 256, 257, 1],
    "none between full": [5632, 0, 5632, 0, 0, 5632],
    "none at the ends": [0, 0, 300, 0],
    "one to nine blocks": [64 * blocks for blocks in range(1, 10)],
    "nine blocks to one": [64 * blocks - 63 for blocks in range(9, 0, -1)],
    "all but one": [5631, 5632, 1],
}


@GATED
@pytest.mark.parametrize("sizes", UNIONS.values(), ids=UNIONS)
def test_tiles_of_any_union(sizes, gated):
    n = max(sizes) if 5632 not in sizes else 5632
    n = cases.round_up(n)
    generator = cases.random(len(sizes))
    fires = torch.zeros((len(sizes) * TOKEN_TILE, n), dtype=torch.bool, device=DEVICE)
    for size, tile in zip(sizes, fires.split(TOKEN_TILE), strict=True):
        neurons = torch.randperm(n, device=DEVICE, generator=generator)[:size]
        for _ in range(2):  # each neuron fires for one or two tokens of the tile
            tokens = torch.randint(TOKEN_TILE, (size,), device=DEVICE, generator=generator)
            tile[tokens, neurons] = True
    for rows in (len(fires), len(fires) - 1, len(fires) - 100):
        x, ws = cases.layer_of(cases.small_integers(fires[:rows], seed=rows), gated)
        check_exact(x, ws, f"unions of {sizes}, M {rows}")
        y, l1, *_ = tile_engine(x, ws, ordered=False)
        _, h, expected = cases.stepwise(x, ws)
        assert_equal(y, expected, f"unions of {sizes}, M {rows}, tokens as they come: y")
        assert_equal(l1, h.abs().sum(dtype=torch.float32), f"unions of {sizes}, M {rows}, tokens as they come: l1")


@GATED
@pytest.mark.parametrize("m", [1024, 1100, 4088, 9001])
@pytest.mark.parametrize("pattern", ["synthetic29", "full rows", "none", "one neuron for every token"])
def test_an_order_of_the_tokens_changes_no_more_than_the_union(pattern, m, gated):
    gate = cases.small_integers(cases.firing(pattern, 256, 1000))
    x, ws = cases.layer_of(gate, gated)
    drawn = torch.randint(256, (m,), device=DEVICE, generator=cases.random(m))
    x, fires = x[drawn], gate[drawn] > 0
    ordered, again, natural = (tile_engine(x, ws, ordered=o, saving=True) for o in (True, True, False))
    for name, ours, theirs in zip(("y", "l1"), ordered, natural, strict=False):
        assert_equal(ours, theirs, f"{pattern}, M {m}: {name}")
    assert_equal(ordered[0], cases.stepwise(x, ws)[-1], f"{pattern}, M {m}: y")

    order, second = (saved_field(out[-1], x, ws, "tokens", torch.int32) for out in (ordered, again))
    assert_equal(order, second, f"{pattern}, M {m}: the order, twice")
    assert_equal(order.sort().values, torch.arange(m, device=DEVICE), f"{pattern}, M {m}: a permutation")
    union = ordered[3][3]
    assert_equal(union, reference.union(fires[order.long()]), f"{pattern}, M {m}: the union of tiles so ordered")
    slots = saved_field(ordered[-1], x, ws, "slots", torch.uint16).view(-1, 1024)
    tiles = saved_field(ordered[-1], x, ws, "tiles", torch.int32).view(-1, 4)
    for tile, (numbers, of_tile) in enumerate(zip(slots.int(), tiles, strict=True)):
        neurons = fires[order[tile * TOKEN_TILE : (tile + 1) * TOKEN_TILE].long()].any(0).nonzero()[:, 0]
        listed = numbers[: of_tile[0]].sort().values
        assert_equal(listed, neurons, f"{pattern}, M {m}: the neurons of tile {tile}")


@GATED
@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
@pytest.mark.parametrize(("m", "n"), [(60, 1000), (700, 1000), (3000, 1000), (2900, 5632)])
def test_exactly_the_fullest_tiles_leave_where_the_lists_overflow(m, n, ordered, gated):
    """None, some and all of the tiles leave, in calls with and without long rows that were not stored, and the overflow
    path computes their tokens."""
    fires = cases.firing("synthetic29", m, n)
    fires[::97] = True  # long rows
    fires[m // 3 : m // 2] |= torch.rand((m // 2 - m // 3, n), device=DEVICE, generator=cases.random(m)) < 0.3
    gate = cases.small_integers(fires)
    x, ws = cases.layer_of(gate, gated)
    _, h, expected = cases.stepwise(x, ws)
    counts = fires.sum(1)
    nnz, in_long_rows = int(counts.sum()), int(counts[counts > cases.ROW_CAPACITY].sum())
    packed = cuda.gate_pack(x, ws[0])
    for capacity, long_capacity in (
        (nnz, in_long_rows), ((nnz - 1) // 128 * 128, in_long_rows), (nnz // 256 * 128, in_long_rows),
        (nnz, in_long_rows - 1), (nnz // 512 * 128, in_long_rows // 2), (1, 0),
    ):  # fmt: skip
        name = f"M {m}, N {n}, room for {capacity}, {long_capacity} of them in long rows"
        y, l1, _, found, saved = tile_engine(x, ws, ordered, capacity, long_capacity, saving=True)
        order = saved_field(saved, x, ws, "tokens", torch.int32).long() if ordered else torch.arange(m, device=DEVICE)
        leaves = cases.leaving(counts[order], -(-capacity // 128) * 128, long_capacity)
        tiles = int(leaves.sum())
        assert_equal(y, expected, f"{name}: y")
        assert_equal(l1, h.abs().sum(dtype=torch.float64).float(), f"{name}: l1")
        union = saved_field(saved, x, ws, "tiles", torch.int32).view(-1, 4)[:, 0].sum() if not tiles else packed.union
        assert found.tolist() == [nnz, int(packed.wide_segments), int(tiles > 0), int(union), tiles], name
        rest = torch.nn.functional.pad(order, (0, -m % TOKEN_TILE), value=-1).view(-1, TOKEN_TILE)[leaves].flatten()
        rest = rest[rest >= 0]
        assert_equal(saved_field(saved, x, ws, "rest_tokens", torch.int32)[: len(rest)], rest.int(), f"{name}: tokens")
        assert not (saved_field(saved, x, ws, "tiles", torch.int32).view(-1, 4)[leaves, :2]).any(), name


# The nonzeros of all segments of 256 columns, where the lists do not hold them. There is memory for 64 values of each.
WIDE = {"none are wide": 31, "all are wide and fit": 64, "one has one value too many": 64, "all are full": 256}


@GATED
@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
@pytest.mark.parametrize("case", WIDE)
def test_every_tile_leaves_where_wide_segments_have_too_many_values(case, ordered, gated):
    """And none does where the lists hold all nonzeros, for which there is always enough memory."""
    m, n, count = 520, 1024, WIDE[case]
    noise = torch.rand((m, n // 256, 256), device=DEVICE, generator=cases.random(count))
    fires = (noise.argsort(-1).argsort(-1) < count).view(m, n)
    if case == "one has one value too many":
        fires[m // 2, fires[m // 2].int().argmin()] = True
    counts = fires.view(m, -1, 256).sum(-1)
    wide_segments = int((counts > 31).sum())
    fits = torch.where(counts > 31, (counts + 7) // 8 * 8, 0).sum() <= m * n // 4
    assert fits == (case in ("none are wide", "all are wide and fit"))
    x, ws = cases.layer_of(cases.small_integers(fires), gated)
    _, h, expected = cases.stepwise(x, ws)
    nnz = int(fires.sum())
    for capacity in (nnz, nnz // 256 * 128):
        name = f"{case}, room for {capacity} of {nnz}"
        y, l1, fired, found, saved = tile_engine(x, ws, ordered, capacity, saving=True)
        tiles = 0 if capacity == nnz else 5
        if fits and tiles:  # the last tile has eight tokens
            order = saved_field(saved, x, ws, "tokens", torch.int32).long() if ordered else slice(None)
            tiles = int(cases.leaving(fires.sum(1)[order], capacity, capacity).sum())
            assert 0 < tiles < 5
        assert_equal(y, expected, f"{name}: y")
        assert_equal(l1, h.abs().sum(dtype=torch.float64).float(), f"{name}: l1")
        assert_equal(fired, fires.any(0), f"{name}: fired")
        assert found.tolist()[:3] == [nnz, wide_segments, int(tiles > 0)], name
        assert found[4] == tiles, name


@pytest.mark.parametrize("saving", [False, True], ids=["forward", "saving"])
@pytest.mark.parametrize("heavy", [0.2, 0.9], ids=["some", "all"])
def test_what_leaves_repeats_bit_for_bit(heavy, saving):
    """With the larger share, the packed gate lacks values of wide segments, in each run of others."""
    x, ws = cases.normal(20_000, 264, 1000, rate=0.05)
    x[torch.rand(len(x), device=DEVICE, generator=cases.random(3)) < heavy, 0] = 0  # lower thresholds
    once, again = (tile_engine(x, ws, capacity=20_000 * 60, saving=saving) for _ in range(2))
    assert 0 < once[3][4] < 157 if heavy < 0.5 else once[3][4] == 157
    for name, a, b in zip(("y", "l1", "fired", "counts"), once, again, strict=False):
        assert_equal(a, b, f"{name}, twice")


@GATED
@pytest.mark.parametrize("m", [1, 2, 4, 16, 64, 100, 200])
def test_rows_that_fire_every_neuron(m, gated):
    """Rows that fire every neuron: one of them, every third row, all rows."""
    n = 5632
    sparse = torch.rand((m, n), device=DEVICE, generator=cases.random(m)) < 30 / n
    for heavy in (slice(m // 2, m // 2 + 1), slice(0, None, 3), slice(None)):
        fires = sparse.clone()
        fires[heavy] = True
        gate = cases.small_integers(fires, seed=m)
        check_exact(*cases.layer_of(gate, gated), f"M {m}, heavy rows {heavy}")


# Nonzeros of consecutive rows. Up to 64 rows, the row engine deals rows to clusters: one row per cluster, the pieces of
# a row with very many nonzeros to several clusters, and several rows per cluster if there are more rows than clusters.
# With at least 65 rows, rows are divided into runs, one per cluster, and only rows with more than 128 nonzeros are cut;
# with at least 512 rows, those with more than 64.
RUNS = {
    "rows that end where runs do": [8, 16, 8, 24] * 20,
    "rows that end between": [7, 9, 1, 15] * 32,
    "many rows in a run": [1] * 128,
    "one row over many runs, among empty ones": [0] * 50 + [5632] + [0] * 77,
    "none but in the last row": [0] * 127 + [3],
    "runs listed in parts": [5632, 0, 1, 511] * 32,
    "runs without a row": [0] * 30 + [5632] * 5 + [0] * 30,
    "long rows at both ends": [5632] + [129] * 100 + [5632],
    "rows that are just cut, or just not": [128, 129, 127, 160, 161] * 40,
    "rows that are just cut, or just not, in long runs": [64, 65, 63, 80, 81] * 120,
    "long runs without a row": [0] * 250 + [5632] * 12 + [0] * 250,
    "the largest number of rows": [0, 3, 40, 700, 31] * 307,
    "the largest number of rows, all empty": [0] * 1535,
    "one row more than there may be": [0, 3, 40, 700] * 384,
    "one row, one cluster": [56],
    "one row in pieces for all clusters": [5632],
    "rows in pieces, among others and empty ones": [900, 0, 257, 256, 3, 0, 5632, 80, 81],
    "rows whose pieces are more than clusters": [300] * 8 + [0] * 8,
    "long rows, none cut": [2000] * 16,
    "rows that end near the ends of chunks": [1, 8, 9, 63, 64, 65, 128, 0, 129, 161, 255, 7, 0, 0, 320, 33],
    "one row more than clusters have at first": [30] * 30 + [200],
    "two or three rows to a cluster": [180, 5, 38, 60] * 16,
    "several rows to a cluster, some cut or listed in parts": [40, 0, 321, 17, 1200, 9, 64] * 9,
    "a row in pieces behind more rows than clusters": [20] * 62 + [5632],
    "64 rows, all empty": [0] * 64,
    "64 long rows, none cut": [700] * 64,
}


@GATED
@pytest.mark.parametrize("k", [8, 2048])  # at 2048, CTAs of two clusters share an SM
@pytest.mark.parametrize("counts", RUNS.values(), ids=RUNS)
def test_rows_of_any_length_in_runs_or_clusters(counts, k, gated):
    noise = torch.rand((len(counts), 5632), device=DEVICE, generator=cases.random(0))
    fires = noise.argsort(1).argsort(1) < torch.tensor(counts, device=DEVICE)[:, None]
    x, ws = cases.layer_of(cases.small_integers(fires), gated, k=k)
    check_exact(x, ws, "the operator", ("row",))
    _, h, expected = cases.stepwise(x, ws)
    cases.poison()
    y, l1, *_ = torch.ops.sparsellm_cuda.row_forward(x, *cases.layer(ws)[:2], ws[-1].T.contiguous(), True)
    assert_equal(y, expected, "y")
    assert_equal(l1, h.abs().sum(dtype=torch.float32), "l1")


@GATED
@ENGINE
@pytest.mark.parametrize("m", [FEW, MANY])
def test_numbers_that_are_not_finite_stay_in_their_rows(m, engine, gated):
    x, ws = cases.integers(m, 264, 1000, gated)
    x[5], x[m - 2, 7], x[m // 2, 0] = torch.nan, torch.nan, torch.inf
    *_, y = cases.stepwise(x, ws)
    assert y.isnan().all(1).sum() == 3
    check_exact(x, ws, f"M {m}", (engine,))


@GATED
@pytest.mark.parametrize("engine", ["row", "tile"])
@pytest.mark.parametrize("m", [FEW, MANY])
def test_the_weights_of_neurons_that_never_fire_are_not_read(m, engine, gated):
    fires = cases.firing("synthetic300", m, 1000)
    fires[:, ::3] = False
    x, ws = cases.layer_of(cases.small_integers(fires), gated)
    *_, y = cases.stepwise(x, ws)
    silent = ~fires.any(0)
    if gated:
        ws[1][silent] = torch.nan
    ws[-1][:, silent] = torch.nan
    cases.poison()
    assert_equal(cases.run(engine, x, ws).y, y, f"M {m}: y")


@GATED
@ENGINE
def test_inputs_of_any_layout(engine, gated):
    m, k, n = 130, 264, 1000
    x, ws = cases.integers(m, k, n, gated)
    y = cases.stepwise(x, ws)[-1]

    def elsewhere(t, layout):
        if layout == "every other column":
            return t.new_full((t.shape[0], 2 * t.shape[1]), torch.nan)[:, ::2].copy_(t)
        if layout == "transposed":
            return t.T.contiguous().T
        if layout == "misaligned":
            return t.new_full((t.numel() + 1,), torch.nan)[1:].view(t.shape).copy_(t)
        return t.new_full((t.shape[0] + 2, t.shape[1] + 8), torch.nan)[1:-1, 8:].copy_(t)

    for layout in ("every other column", "transposed", "misaligned", "inner"):
        moved_x, moved = elsewhere(x, layout), [elsewhere(w, layout) for w in ws]
        for inputs in ((moved_x, ws), (x, moved), (moved_x, moved, EngineChoice(engine, Policy()))):
            cases.poison()
            out = cases.run(engine, *inputs)
            assert_equal(out.y, y, f"{layout}: y")
    repeated = x[7:8].expand(m, k)
    assert_equal(cases.run(engine, repeated, ws).y, y[7:8].expand(m, k), "one row for all: y")


# The operator on normal numbers, against float64.


@GATED
@pytest.mark.parametrize("m", cases.HEIGHTS)
def test_every_engine_is_as_accurate_as_dense_pytorch(m, gated):
    for i, (k, n) in enumerate(cases.LAYERS):
        rate = (0.01, 0.1, 0.5)[i % 3]
        cases.check_accuracy(*cases.normal(m, k, n, gated, rate, seed=m + i), f"M {m}, K {k}, N {n}, rate {rate}")


@pytest.mark.parametrize("pattern", patterns.PATTERNS)
def test_patterns_as_they_occur(pattern):
    block = cases.recorded(pattern, 4096)
    gated, nongated = [block.w_gate, block.w_up, block.w_down], [block.w_gate, block.w_down]
    for rows in (4096, 2047, 16):
        cases.check_accuracy(block.x[:rows], gated, f"{pattern}, M {rows}")
    cases.check_accuracy(block.x, nongated, f"{pattern}, M 4096, non-gated")


def workspace(call):
    """The bytes that a call takes in addition to its results."""
    call()  # cuBLAS may allocate a workspace of its own, and keep it
    torch.cuda.reset_peak_memory_stats()
    results = call()
    taken = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del results
    return taken


@pytest.mark.parametrize("saving", [False, True], ids=["forward", "saving"])
@pytest.mark.parametrize(("m", "k"), [(16_384, 2048), (65_536, 2048), (16_384, 8192)])
@pytest.mark.parametrize("n", [5632, 11_264, 16_384, 28_672])
def test_a_forward_pass_of_the_tile_engine_takes_no_more_memory_than_dense(m, k, n, saving):
    ops = torch.ops.sparsellm_cuda
    x, w_gate, w_up, w_down = (
        torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE) for shape in ((m, k), (n, k), (n, k), (k, n))
    )
    capacity, ordered = cuda.capacity_of(m, n, ROOM), borders.orders(m)
    dense = workspace(lambda: ops.dense_forward(x, w_gate, w_up, w_down, True, True, saving))
    w_down = w_down.view(n, k)
    tile = workspace(lambda: ops.tile_forward(x, w_gate, w_up, w_down, capacity, None, ordered, saving))
    assert tile <= dense, f"{tile / 2**30:.3f} GiB, dense {dense / 2**30:.3f} GiB"
