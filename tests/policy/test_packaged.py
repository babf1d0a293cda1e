"""The choice of engine from what a layer counted earlier, by the costs that come with the package."""

import csv
from pathlib import Path

import pytest

from sparsellm.ops import Engine
from sparsellm.ops.borders import FEW_TOKENS, MANY_TOKENS, MIN_ORDERED_TOKENS
from sparsellm.policy import Policy
from sparsellm.policy.choice import packaged
from sparsellm.policy.costs import MARGIN, TILE_MAX_NONZEROS, room_for
from sparsellm.policy.measure import MANY_TRAINING_TOKENS
from sparsellm.policy.packaged import Formula, data, read

ROOT = Path(__file__).parents[2]
SMALL_BATCH_MAX_NONZEROS = 256  # per token: the tile engine is chosen for as many in a batch that is not ordered
K, N = 2048, 5632
# nonzeros per token, union of 128 tokens: KERNELS.md's measured patterns
PATTERNS = {"sparse": (20.5, 580), "layer 1": (36, 1565), "layer 4": (76, 2647), "layer 7": (116, 3117)}


choose_engine, choose_training_engine = Policy().choose_engine, Policy().choose_training_engine


def estimates(tokens, nnz, union, training=False):
    """Seconds by engine."""
    found = packaged("cuda", K, N).estimates(tokens, training)
    return {engine: estimate.cost.seconds(nnz, union) for engine, estimate in found.items()}


def choose(tokens, per_token, per_tile, **current):
    return choose_engine(tokens, K, N, per_token * tokens, per_tile * -(-tokens // 128), **current)


@pytest.mark.parametrize("tokens", [16_384, 131_072])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_real_patterns_take_the_tile_engine(pattern, tokens):
    assert choose(tokens, *PATTERNS[pattern]) == Engine.tile


@pytest.mark.parametrize(
    ("tokens", "share"), [(1, 0.15), (4, 0.15), (8, 0.7 / 8), (16, 0.7 / 16), (17, 1.5 / 17), (64, 1.5 / 64)]
)
def test_few_tokens_take_the_row_engine_unless_too_many_neurons_fire(tokens, share):
    assert choose(tokens, 0, 0) == Engine.row
    assert choose(tokens, 0.99 * share * N, N) == Engine.row
    assert choose(tokens, 1.01 * share * N, N) == Engine.dense


# Tokens -> microseconds after the gate GEMM, (dense, row) of layer 1 and of layer 4 (LOG.md, "65 to 1,535 tokens").
BETWEEN = {
    65: ((20.9, 17.4), (23.2, 21.7)), 128: ((23.5, 21.6), (24.8, 28.7)), 192: ((25.1, 23.1), (25.7, 33.8)),
    384: ((36.6, 32.5), (37.2, 50.2)), 512: ((43.0, 38.8), (43.7, 61.0)), 768: ((59.9, 52.1), (60.5, 82.8)),
    1024: ((70.2, 66.6), (69.7, 109.1)), 1280: ((94.7, 80.1), (93.9, 132.3)), 1535: ((106.0, 93.3), (109.0, 160.9)),
}  # fmt: skip


@pytest.mark.parametrize("tokens", BETWEEN)
def test_neither_few_nor_many_tokens_take_the_engine_that_was_faster(tokens):
    for per_token, (dense, row) in zip((37, 75), BETWEEN[tokens], strict=True):
        chosen = {Engine.dense: dense, Engine.row: row}[choose(tokens, per_token, 2000)]
        assert chosen <= 1.08 * min(dense, row)  # of what comes behind the gate: 1.05 of the whole


def test_neither_few_nor_many_tokens_take_the_dense_engine_where_row_was_not_measured():
    assert choose_engine(256, 4096, 11008, 256, 100) == Engine.dense
    assert choose_engine(256, K, N, 256, 100) == Engine.row


def test_very_few_nonzeros_take_the_row_engine():
    assert choose(16_384, 1.5, 150) == Engine.row


@pytest.mark.parametrize(
    ("tokens", "most"), [(8192, SMALL_BATCH_MAX_NONZEROS), (16_384, TILE_MAX_NONZEROS), (131_072, TILE_MAX_NONZEROS)]
)
def test_batches_take_the_tile_engine_for_about_as_many_nonzeros_as_were_measured(tokens, most):
    assert choose(tokens, most, 2500) == choose_training(tokens, most, 2500) == Engine.tile
    for per_token, per_tile in ((most + 1, 2500), (900, 3853)):
        assert choose(tokens, per_token, per_tile) == choose_training(tokens, per_token, per_tile) == Engine.dense


def test_300_per_token_where_they_were_measured():
    for tokens in (16_384, 131_072):
        assert choose(tokens, 300, 3306) == choose_training(tokens, 300, 3306) == Engine.tile
    for tokens in (2048, 4096):
        assert choose(tokens, 300, 3306) == choose_training(tokens, 300, 3306) == Engine.dense


@pytest.mark.parametrize(
    ("per_token", "room"), [(0, 320), (80, 320), (80.1, 352), (300, 1216), (320, 1280), (60_000, 1280)]
)
def test_the_room_is_for_several_times_as_many_as_the_tile_engine_is_chosen_for(per_token, room):
    assert room_for(per_token) == room


def test_long_rows_never_take_the_tile_engine():
    neurons, tokens = 65_536, 16_384
    assert choose_engine(tokens, K, neurons, 700 * tokens, 20_000 * tokens // 128) != Engine.tile
    assert choose_engine(tokens, K, neurons, 200 * tokens, 8_000 * tokens // 128) == Engine.tile


@pytest.mark.parametrize("per_token", [300, 1000, 2800, N])
def test_half_dense_activations_take_the_dense_engine(per_token):
    assert choose(16_384, per_token, N) == Engine.dense


def test_the_tile_engine_must_win_by_a_margin_and_then_stays():
    tokens = 16_384
    dense = estimates(tokens, 0, 0)[Engine.dense]
    nnz = 100 * tokens  # too many for the row engine
    fixed, per_union = estimates(tokens, nnz, 0)[Engine.tile], estimates(tokens, nnz, 1)[Engine.tile]
    per_union -= fixed

    def at(share, current):
        return choose_engine(tokens, K, N, nnz, (share * dense - fixed) / per_union, current)

    assert at(1 - MARGIN - 0.01, Engine.dense) == Engine.tile
    assert at(1 - MARGIN / 2, Engine.dense) == Engine.dense
    assert at(1 - MARGIN / 2, None) == Engine.dense
    assert at(1 - MARGIN / 2, Engine.tile) == Engine.tile
    assert at(1.01, Engine.tile) == Engine.dense


def test_an_unmeasured_union_is_no_reason_for_the_tile_engine():
    assert choose_engine(16_384, K, N, 36 * 16_384, -1) in (Engine.dense, Engine.row)
    assert choose_engine(16_384, K, N, N * 16_384, -1, current=Engine.tile) == Engine.dense


def test_no_tokens_and_no_nonzeros_are_cases_too():
    assert choose_engine(0, K, N, 0, 0) == Engine.row
    assert choose_engine(16_384, K, N, 0, 0) == Engine.row


@pytest.mark.parametrize(
    ("tokens", "per_token", "per_tile", "microseconds"),
    [
        (2048, 19.9, 572, 69), (2048, 28.2, 1370, 86), (2048, 35.0, 1612, 93), (2048, 42.6, 1800, 95),
        (2048, 66.0, 2549, 129), (2048, 123.2, 3216, 175),
        (4096, 20.3, 581, 80), (4096, 35.7, 1628, 136), (4096, 62.8, 2508, 180), (4096, 114.1, 3080, 247),
        (16_384, 20.5, 438, 196), (16_384, 29.1, 926, 315), (16_384, 36, 940, 309), (16_384, 76, 2228, 511),
        (16_384, 116.1, 2610, 629), (16_384, 300, 3309, 870),
        (65_536, 20.5, 438, 526), (65_536, 36, 940, 898), (65_536, 76, 2228, 1798), (65_536, 116.1, 2610, 2255),
    ],
)  # fmt: skip
def test_estimates_are_near_what_was_measured(tokens, per_token, per_tile, microseconds):
    """Measured through the operator, less cuBLAS's gate product of the same run; at 300 per token, of others (467)."""
    seconds = estimates(tokens, per_token * tokens, per_tile * tokens // 128)
    assert seconds[Engine.tile] == pytest.approx(microseconds * 1e-6, rel=0.12)


@pytest.mark.parametrize(
    ("tokens", "microseconds"), [(2048, 139), (4096, 230), (8192, 447), (16_384, 856), (65_536, 3676)]
)
def test_the_estimate_of_the_dense_engine_is_near_what_was_measured(tokens, microseconds):
    """As above; of 131,072 tokens, which the board's power binds, it makes 7,062 where 7,250 to 8,660 were measured."""
    assert estimates(tokens, 0, 0)[Engine.dense] == pytest.approx(microseconds * 1e-6, rel=0.1)


@pytest.mark.parametrize(("tokens", "microseconds"), [(4096, 986), (16_384, 3727), (32_768, 7521)])
def test_the_training_estimate_of_the_dense_engine_is_near_what_was_measured(tokens, microseconds):
    """Forward and backward, less cuBLAS's gate product of forward runs (126, 486, twice that)."""
    assert estimates(tokens, 0, 0, training=True)[Engine.dense] == pytest.approx(microseconds * 1e-6, rel=0.05)


@pytest.mark.parametrize(
    ("per_token", "per_tile", "engine"),
    [
        (19.9, 572, Engine.tile), (28.2, 1370, Engine.tile), (35.0, 1612, Engine.tile), (42.6, 1800, Engine.tile),
        (66.0, 2549, Engine.tile),
        (123.2, 3216, Engine.dense), (298.1, 3282, Engine.dense),
    ],
)  # fmt: skip
def test_2048_tokens_take_the_engine_that_was_fastest(per_token, per_tile, engine):
    assert choose(2048, per_token, per_tile) == engine


def choose_training(tokens, per_token, per_tile, **current):
    return choose_training_engine(tokens, K, N, per_token * tokens, per_tile * -(-tokens // 128), **current)


@pytest.mark.parametrize(
    ("tokens", "per_token", "per_tile", "microseconds"),
    [
        (4096, 20.3, 581, 406), (4096, 35.7, 1628, 538), (4096, 62.8, 2508, 695), (4096, 114.1, 3080, 853),
        (16_384, 20.5, 438, 875), (16_384, 29.1, 926, 1088), (16_384, 36, 940, 1236), (16_384, 76, 2228, 2095),
        (16_384, 116.1, 2610, 2446), (16_384, 300, 3309, 3060),
        (65_536, 20.5, 438, 2551), (65_536, 36, 940, 4665), (65_536, 76, 2228, 8676), (65_536, 116.1, 2610, 10_256),
    ],
)  # fmt: skip
def test_training_estimates_are_near_what_was_measured(tokens, per_token, per_tile, microseconds):
    """Measured through the operator and autograd, less cuBLAS's gate product, as above."""
    seconds = estimates(tokens, per_token * tokens, per_tile * tokens // 128, training=True)
    assert seconds[Engine.tile] == pytest.approx(microseconds * 1e-6, rel=0.1)


@pytest.mark.parametrize("tokens", [2048, 16_384, 131_072])
def test_training_takes_the_tile_engine_for_sparse_layers_only(tokens):
    assert choose_training(tokens, 36, 640) == Engine.tile
    for per_token in (TILE_MAX_NONZEROS + 1, 900, N // 2, N):
        assert choose_training(tokens, per_token, min(N, 4 * per_token)) == Engine.dense


def test_training_is_dense_where_the_tile_engine_cannot_be_judged_or_cannot_win():
    assert choose_training(MANY_TRAINING_TOKENS - 1, 1, 10) == Engine.dense
    assert choose_training(0, 0, 0) == Engine.dense
    for current in (None, Engine.dense, Engine.tile):
        assert choose_training_engine(16_384, K, N, 36 * 16_384, -1, current=current) == Engine.dense
    small_model = choose_training_engine(16_384, 64, 128, 10 * 16_384, 100 * 128)
    assert small_model == Engine.dense


def test_in_training_too_the_tile_engine_must_win_by_a_margin_and_then_stays():
    tokens, nnz = 16_384, 36 * 16_384
    dense, fixed = (estimates(tokens, nnz, 0, training=True)[engine] for engine in (Engine.dense, Engine.tile))
    per_union = estimates(tokens, nnz, 1, training=True)[Engine.tile] - fixed

    def at(share, current):
        return choose_training_engine(tokens, K, N, nnz, (share * dense - fixed) / per_union, current)

    assert at(1 - MARGIN - 0.01, Engine.dense) == at(1 - MARGIN - 0.01, None) == Engine.tile
    assert at(1 - MARGIN / 2, Engine.dense) == at(1 - MARGIN / 2, None) == Engine.dense
    assert at(1 - MARGIN / 2, Engine.tile) == Engine.tile
    assert at(1.01, Engine.tile) == Engine.dense


def test_choices_are_those_of_the_table():
    """golden_choices.csv, one letter for each number of nonzeros per token: of the formulas before they were data."""
    with (Path(__file__).parent / "golden_choices.csv").open() as file:
        (*_, per_token), *rows = csv.reader(file)
    engines, wrong = {"d": Engine.dense, "r": Engine.row, "t": Engine.tile}, []
    for kernels, way, tokens, width, neurons, share, current, expected in rows:
        m, k, n, policy = int(tokens), int(width), int(neurons), Policy(kernels)
        choose = policy.choose_engine if way == "forward" else policy.choose_training_engine
        union = round(float(share) * n) * -(-m // 128) if share else -1
        found = [choose(m, k, n, float(per) * m, union, engines.get(current)) for per in per_token.split()]
        if found != [engines[letter] for letter in expected]:
            wrong.append((kernels, way, tokens, width, neurons, share, current))
    assert wrong == []
    assert len(rows) > 700


@pytest.mark.parametrize("kernels", ["cuda", "triton"])
def test_each_entry_names_its_measurement_and_begins_where_the_kernels_change(kernels):
    headings = {line.lstrip("#").strip() for line in (ROOT / "docs/dev/LOG.md").read_text().splitlines()}
    values = read(kernels)
    for way in ("forward", "training"):
        for engine, entries in values[way].items():
            for entry in entries:
                assert set(entry) - {"from", "sources"} <= set(Formula._fields)
                for source in entry["sources"]:
                    assert source in headings or source.startswith("not measured: "), (engine, source)
    if kernels == "cuda":
        starts = {entry["from"] for entries in values["forward"].values() for entry in entries}
        assert starts == {0, 17, FEW_TOKENS + 1, MANY_TOKENS, MIN_ORDERED_TOKENS}
        assert {entry["from"] for entry in values["training"]["tile"]} == {MANY_TRAINING_TOKENS, MIN_ORDERED_TOKENS}
    of = data(kernels)
    most = {formula.most_per_token for by in (of.forward, of.training) for formula in by[Engine.tile].values()}
    assert max(most) == TILE_MAX_NONZEROS
