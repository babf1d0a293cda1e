"""The policy by costs that were measured: between, below and beyond the sizes, and what a file of them must hold."""

import json

import pytest

from sparsellm.ops import Engine, backend, choose_engine, choose_training_engine, dispatch
from sparsellm.ops.costs import Cost, Costs, costs_at

K, N = 2048, 5632
FORWARD = {
    1: {Engine.dense: Cost(10e-6), Engine.row: Cost(5e-6, 1e-8)},
    1000: {Engine.dense: Cost(60e-6), Engine.row: Cost(15e-6, 1e-9), Engine.tile: Cost(40e-6, 0.0, 1e-9)},
    2000: {Engine.dense: Cost(110e-6), Engine.tile: Cost(50e-6, 0.0, 3e-9)},
}
TRAINING = {2048: {Engine.dense: Cost(500e-6), Engine.tile: Cost(200e-6, 1e-10, 1e-8)}}
COSTS = Costs("cuda", K, N, FORWARD, TRAINING)


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.setitem(backend.measured, (K, N), COSTS)


def test_costs_between_two_sizes_are_interpolated_for_the_engines_of_both():
    assert costs_at(FORWARD, 1000) is FORWARD[1000]
    between = costs_at(FORWARD, 1500)
    assert set(between) == {Engine.dense, Engine.tile}
    assert between[Engine.dense] == pytest.approx(Cost(85e-6))
    assert between[Engine.tile] == pytest.approx(Cost(45e-6, 0.0, 2e-9))


def test_beyond_the_largest_size_the_fixed_part_grows_on_and_the_others_stay():
    beyond = costs_at(FORWARD, 4000)
    assert beyond[Engine.dense].fixed == pytest.approx(210e-6)
    assert beyond[Engine.tile] == pytest.approx(Cost(70e-6, 0.0, 3e-9))
    assert costs_at(TRAINING, 70_000) == TRAINING[2048]


def test_fewer_tokens_than_were_measured_are_for_dense():
    assert COSTS.choose_training_engine(2047, 0, 0) == Engine.dense
    assert COSTS.choose_engine(0, 0, 0) == Engine.dense


def test_the_cheapest_engine_is_chosen_if_it_wins_by_the_margin_or_computes_already():
    def at(share, current=None):  # of what dense takes
        return COSTS.choose_engine(2000, 0, (share * 110e-6 - 50e-6) / 3e-9, current)

    assert at(1 - dispatch.TILE_MARGIN - 0.001) == at(0.999, Engine.tile) == Engine.tile
    assert at(1 - dispatch.TILE_MARGIN + 0.001) == at(1.001, Engine.tile) == Engine.dense


def test_a_union_that_was_not_counted_or_very_many_nonzeros_are_not_for_the_tile_engine():
    assert COSTS.choose_engine(2000, 10, 10) == Engine.tile
    assert COSTS.choose_engine(2000, 10, -1) == Engine.dense
    assert COSTS.choose_engine(2000, 2000 * dispatch.TILE_MAX_NONZEROS + 1, 10) == Engine.dense


def test_row_density_is_where_the_row_engine_stops_winning():
    density = COSTS.row_density(1000)
    assert COSTS.row_density(1000) == density == pytest.approx((0.97 * 60e-6 - 15e-6) / 1e-9 / 1000)
    assert COSTS.row_density(2000) < 0
    free = Costs("cuda", K, N, {1: {Engine.dense: Cost(1e-6), Engine.row: Cost(0.5e-6)}}, TRAINING)
    assert free.row_density(1) == float("inf")


def test_the_policy_goes_by_them_for_their_layer_alone(measured):
    assert choose_engine(2000, K, N, 10, 10) == Engine.tile
    assert choose_engine(2000, K, 2 * N, 10, -1) == dispatch.choose_engine(2000, K, 2 * N, 10, -1)
    assert choose_training_engine(2048, K, N, 10, 10) == Engine.tile
    assert choose_training_engine(2048, K, N, 10, 1e6) == Engine.dense
    assert backend.row_density(1000, K, N) == COSTS.row_density(1000)
    assert backend.row_density(1000, K, 2 * N) == dispatch.row_density(1000, K, 2 * N)


def test_they_come_back_from_json_as_they_were():
    assert Costs.of_json(json.loads(json.dumps(COSTS.as_json()))) == COSTS


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values.pop("training"),
        lambda values: values["forward"].clear(),
        lambda values: values["forward"]["1000"].pop("dense"),
        lambda values: values["forward"]["1000"].update(wide=[1]),
        lambda values: values["forward"]["1"].update(row=[1, 2, 3, 4]),
    ],
)
def test_other_values_are_refused(change):
    values = COSTS.as_json()
    change(values)
    with pytest.raises((KeyError, TypeError, ValueError)):
        Costs.of_json(values)
