"""The policy by costs that were measured: between, below and beyond the sizes, and what a file of them must hold."""

import json

import pytest

from sparsellm.ops import Engine
from sparsellm.policy import Policy
from sparsellm.policy.choice import packaged
from sparsellm.policy.costs import MARGIN, MOST_CACHED, TILE_MAX_NONZEROS, Cost, Costs, costs_at, whole_tiles

K, N = 2048, 5632
FORWARD = {
    1: {Engine.dense: Cost(10e-6), Engine.row: Cost(5e-6, 1e-8)},
    1024: {Engine.dense: Cost(60e-6), Engine.row: Cost(15e-6, 1e-9), Engine.tile: Cost(40e-6, 0.0, 1e-9)},
    2048: {Engine.dense: Cost(110e-6), Engine.tile: Cost(50e-6, 0.0, 3e-9)},
}
TRAINING = {2048: {Engine.dense: Cost(500e-6), Engine.tile: Cost(200e-6, 1e-10, 1e-8)}}
COSTS = Costs("cuda", K, N, FORWARD, TRAINING)


def test_between_two_sizes_the_seconds_of_calls_that_fire_alike_are_interpolated():
    assert costs_at(FORWARD, 1024) == FORWARD[1024]
    between = costs_at(FORWARD, 1536)
    assert set(between) == {Engine.dense, Engine.tile}
    assert between[Engine.dense] == pytest.approx(Cost(85e-6))
    union = 9.0  # per token
    low, middle, high = (
        costs_at(FORWARD, tokens)[Engine.tile].seconds(0, union * tokens) for tokens in (1024, 1536, 2048)
    )
    assert middle == pytest.approx((low + high) / 2)


def test_each_engine_is_interpolated_between_its_own_sizes():
    sizes = {**FORWARD, 1280: {Engine.dense: Cost(90e-6)}}
    assert costs_at(sizes, 1280)[Engine.dense] == Cost(90e-6)
    assert costs_at(sizes, 1280)[Engine.tile] == costs_at(FORWARD, 1280)[Engine.tile]
    assert costs_at(sizes, 1536)[Engine.dense].fixed == pytest.approx(90e-6 + 256 / 768 * 20e-6)
    assert Engine.row not in costs_at(sizes, 1280)  # measured up to 1024 only


@pytest.mark.parametrize(
    ("tokens", "whole"),
    [(1, 1), (63, 63), (65, 128), (270, 320), (320, 320), (1300, 1343), (1344, 1344), (1500, 1535), (1537, 1600),
     (16_380, 16_383), (16_384, 16_384), (16_385, 16_448), (65_500, 65_535), (65_537, 65_600)],
)  # fmt: skip
def test_a_begun_tile_costs_a_whole_one_but_never_one_across_a_border(tokens, whole):
    assert whole_tiles(tokens) == whole
    sizes = {1: {Engine.dense: Cost(1.0)}, 100_000: {Engine.dense: Cost(100_000.0)}}
    assert costs_at(sizes, tokens)[Engine.dense].fixed == pytest.approx(whole)


def test_beyond_the_largest_size_the_fixed_part_grows_on_and_the_others_stay():
    beyond = costs_at(FORWARD, 4096)
    assert beyond[Engine.dense].fixed == pytest.approx(210e-6)
    assert beyond[Engine.tile] == pytest.approx(Cost(70e-6, 0.0, 3e-9))
    assert costs_at(TRAINING, 70_000) == TRAINING[2048]


def test_beyond_a_border_that_is_the_largest_size_seconds_do_not_grow_as_across_it():
    before, after = {Engine.dense: Cost(1000e-6)}, {Engine.dense: Cost(1010e-6)}  # measured, so a bit off
    sizes = {8192: {Engine.dense: Cost(500e-6)}, 16_383: before, 16_384: after}
    assert costs_at(sizes, 2 * 16_384)[Engine.dense].fixed == pytest.approx(2030e-6)


def test_fewer_tokens_than_were_measured_are_for_dense():
    assert COSTS.choose_engine(2047, 0, 0, training=True) == Engine.dense
    assert COSTS.choose_engine(0, 0, 0) == Engine.dense


def test_the_cheapest_engine_is_chosen_if_it_wins_by_the_margin_or_computes_already():
    def at(share, current=None):  # of what dense takes
        return COSTS.choose_engine(2048, 0, (share * 110e-6 - 50e-6) / 3e-9, current)

    assert at(1 - MARGIN - 0.001) == at(0.999, Engine.tile) == Engine.tile
    assert at(1 - MARGIN + 0.001) == at(1.001, Engine.tile) == Engine.dense


def test_a_union_that_was_not_counted_or_very_many_nonzeros_are_not_for_the_tile_engine():
    assert COSTS.choose_engine(2048, 10, 10) == Engine.tile
    assert COSTS.choose_engine(2048, 10, -1) == Engine.dense
    assert COSTS.choose_engine(2048, 2048 * TILE_MAX_NONZEROS + 1, 10) == Engine.dense


def test_row_density_is_where_the_row_engine_stops_winning():
    density = COSTS.row_density(1024)
    assert COSTS.row_density(1024) == density == pytest.approx((0.97 * 60e-6 - 15e-6) / 1e-9 / 1024)
    assert COSTS.row_density(2048) < 0
    free = Costs("cuda", K, N, {1: {Engine.dense: Cost(1e-6), Engine.row: Cost(0.5e-6)}}, TRAINING)
    assert free.row_density(1) == float("inf")


def test_estimates_are_remembered_of_some_numbers_of_tokens():
    costs = Costs("cuda", K, N, FORWARD, TRAINING)
    chosen = [costs.choose_engine(tokens, 10, 10) for tokens in range(2048, 2049 + MOST_CACHED)]
    assert set(chosen) == {Engine.tile}
    assert len(costs._cache) == 1  # forgotten, then the last one


def test_the_policy_goes_by_them_for_their_layer_alone():
    policy, other = Policy("cuda", {(K, N): COSTS}), packaged("cuda", K, 2 * N)
    assert policy.choose_engine(2048, K, N, 10, 10) == Engine.tile
    assert policy.choose_engine(2048, K, 2 * N, 10, -1) == other.choose_engine(2048, 10, -1)
    assert policy.choose_training_engine(2048, K, N, 10, 10) == Engine.tile
    assert policy.choose_training_engine(2048, K, N, 10, 1e6) == Engine.dense
    assert policy.row_density(1024, K, N) == COSTS.row_density(1024)
    assert policy.row_density(1024, K, 2 * N) == other.row_density(1024)


def test_they_come_back_from_json_as_they_were():
    assert Costs.of_json(json.loads(json.dumps(COSTS.as_json()))) == COSTS


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values.pop("training"),
        lambda values: values["forward"].clear(),
        lambda values: values["forward"]["1024"].pop("dense"),
        lambda values: values["forward"]["1024"].update(wide=[1]),
        lambda values: values["forward"]["1"].update(row=[1, 2, 3, 4]),
    ],
)
def test_other_values_are_refused(change):
    values = COSTS.as_json()
    change(values)
    with pytest.raises((KeyError, TypeError, ValueError)):
        Costs.of_json(values)
