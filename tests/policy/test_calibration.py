"""A calibration: a layer that fires as it should, costs that say which engine is fastest, kept and taken.

No GPU: the times are those of an invented machine, whose engines follow laws that the fit does not know exactly. What
the engines of a real one take is for tests/gpu.
"""

import itertools
import math
from unittest.mock import patch

import pytest
import torch
from invented_machine import CPU, K, Machine, N, a_gpu, counts, layer_of

from sparsellm.commands import calibrate
from sparsellm.config import ConfigError
from sparsellm.ops import Engine, backend, borders
from sparsellm.ops.borders import ALONE
from sparsellm.ops.triton import tuning
from sparsellm.ops.triton.tuning import SMALL, Shape
from sparsellm.policy import block_sizes, measure, report, store
from sparsellm.policy.costs import Cost, whole_tiles
from sparsellm.policy.layer import Call, Firing, Layer, frequencies
from sparsellm.policy.measure import (
    DENSE_SIZES,
    DENSE_TRAINING_SIZES,
    SIZES,
    TRAINING_SIZES,
    Timed,
    calls_of,
    fit,
    steps,
)


class InWaves(Machine):
    """Dense products of whole tiles, 128 tokens by 256 columns, on 132 multiprocessors at a time."""

    def seconds(self, call: Call) -> float:
        if call.engine == Engine.dense and call.tokens > borders.FEW_TOKENS:
            tiles = -(-call.tokens // 128)
            if call.tokens >= borders.MANY_TOKENS:
                tiles = -(-tiles * N // 256 // 132) * 132 * 256 // N
            call = call._replace(tokens=tiles * 128)
        return super().seconds(call)


class InPieces(Machine):
    """For few tokens, the row engine deals rows to 16 clusters, in pieces of whole rounds of 64 nonzeros."""

    def seconds(self, call: Call) -> float:
        if call.engine != Engine.row or call.tokens > borders.FEW_TOKENS:
            return super().seconds(call)
        row = counts(call)[0] / call.tokens
        piece = max(64 * math.ceil(call.tokens * row / 16 / 64), 256 if row <= 256 else 0)
        pieces = [min(piece, row)] * call.tokens
        pieces += [min(piece, row - begin) for _ in range(call.tokens) for begin in range(piece, int(row), piece)]
        return 12e-6 + 20e-9 * max(sum(pieces[cluster::16]) for cluster in range(16))


def measured_on(machine: Machine, advance=lambda _: None, kernels="cuda"):
    with patch.object(measure, "gpu_milliseconds", lambda _, calls: machine.milliseconds(calls)):
        return measure.measure(kernels, layer_of(K, N), advance)


def behind(machine: Machine, costs, call: Call) -> float:
    """Slowdown of the chosen engine relative to the fastest."""
    engines = [Engine.dense] + [Engine.tile] * (call.training or call.tokens >= borders.MANY_TOKENS)
    engines += [] if call.training else [Engine.row]
    seconds = {engine: machine.seconds(call._replace(engine=engine)) for engine in engines}
    nonzeros, union = counts(call)
    return (
        seconds[costs.choose_engine(call.tokens, nonzeros, union, training=call.training)] / min(seconds.values()) - 1
    )


@pytest.mark.parametrize("firing", [Firing(0.0065), Firing(0.018, skew=0.7), Firing(0.05), Firing(0.15)])
def test_a_layer_fires_as_often_as_it_is_asked_to(firing):
    tokens, neurons = 512, 1408
    layer = Layer(512, neurons, tokens, CPU, torch.float32)
    assert frequencies(neurons, firing).sum().item() == pytest.approx(firing.per_token(neurons), rel=1e-6)
    nonzeros, union = layer.counts(Call(tokens, firing, Engine.dense, training=False))
    assert nonzeros / tokens == pytest.approx(firing.per_token(neurons), rel=0.1)
    expected = (1 - (1 - frequencies(neurons, firing)) ** 128).sum().item()
    assert union / (tokens / 128) == pytest.approx(expected, rel=0.1)


def test_unlike_neurons_have_smaller_unions():
    alike, unlike = (frequencies(N, Firing(0.018, skew)) for skew in (0.7, 1.3))
    assert (1 - (1 - unlike) ** 128).sum() < 0.7 * (1 - (1 - alike) ** 128).sum()


def test_calls_take_turns_with_the_weights_and_run_backward():
    layer = Layer(64, 128, 16, CPU, torch.float32)
    call = Call(16, Firing(0.0065), Engine.dense, training=False)
    assert len({layer._weights(call)[1].data_ptr() for _ in range(6)}) == 3
    gradients = layer.run(call._replace(training=True))
    assert [tuple(g.shape) for g in gradients] == [(16, 64), (128, 64), (128, 64), (64, 128)]


def test_the_fit_finds_a_law_and_no_part_of_it_is_below_zero():
    def timed(engine, law, cases):
        return [Timed(Call(1, Firing(0.1), engine, False), a, b, law(a, b)) for a, b in cases]

    cases = [(100, 1000), (500, 2000), (2000, 9000), (2000, 20_000)]
    assert fit(timed(Engine.dense, lambda a, b: 3e-5, cases)) == pytest.approx(Cost(3e-5))
    assert fit(timed(Engine.row, lambda a, b: 1e-5 + 2e-9 * a, cases)) == pytest.approx(Cost(1e-5, 2e-9))
    law = Cost(1e-5, 2e-9, 3e-10)
    assert fit(timed(Engine.tile, law.seconds, cases)) == pytest.approx(law)
    falling = fit(timed(Engine.tile, lambda a, b: 1e-4 - 1e-9 * a, cases))
    assert falling.fixed == pytest.approx(1e-4, rel=0.03)
    assert falling[1:] == (0.0, 0.0)


@pytest.mark.parametrize("slower", [0.7, 1.0, 1.4, 3.0])
def test_on_sizes_and_firing_that_were_not_timed_the_chosen_engine_is_near_the_fastest(slower):
    machine = Machine(slower)
    costs, _ = measured_on(machine)
    cells = [
        behind(machine, costs, Call(tokens, Firing(share, skew), Engine.dense, training))
        for training, sizes in ((False, (1, 2, 7, 33, 64, 100, 300, 700, 1500, 3000, 12_000, 50_000, 131_072)),
                                (True, (2048, 3000, 12_000, 16_384, 50_000)))
        for tokens in sizes
        for share in (0.001, 0.004, 0.01, 0.03, 0.05)
        for skew in (0.8, 1.2)
    ]  # fmt: skip
    assert sum(cell <= 0.05 for cell in cells) >= 0.95 * len(cells)
    assert max(cells) <= 0.15


@pytest.mark.slow
def test_steps_in_what_dense_takes_are_known():
    machine = InWaves()
    costs, _ = measured_on(machine)
    cells = [
        behind(machine, costs, Call(tokens, Firing(share, 1.1), Engine.dense, training))
        for training, sizes in ((False, range(65, 16_384, 111)), (True, range(2048, 16_384, 333)))
        for tokens in sizes
        for share in (0.003, 0.0065, 0.011, 0.02, 0.04)
    ]
    assert max(cells) <= 0.06


def test_where_rows_are_cut_into_pieces_each_of_the_fewest_numbers_of_tokens_is_known():
    machine = InPieces()
    costs, _ = measured_on(machine)
    calls = [Call(m, Firing(share), Engine.dense, False) for m in range(1, 9) for share in (0.04, 0.101, 0.12, 0.14)]
    assert max(behind(machine, costs, call) for call in calls) <= 0.12


def test_calls_that_take_longer_than_dense_bend_the_fit_little():
    cases = [(100, 1.0), (200, 1.2), (300, 1.4), (1000, 9.0)]
    timed = [Timed(Call(64, Firing(0.1), Engine.row, False), nonzeros, -1, ms) for nonzeros, ms in cases]

    def error(cost):
        return max(abs(cost.seconds(nonzeros, -1) / seconds - 1) for nonzeros, seconds in cases[:3])

    assert error(fit(timed, dense=1.5)) < 0.1 < 0.2 < error(fit(timed))


@pytest.mark.parametrize("kernels", SIZES)
def test_every_size_is_timed_with_the_engines_that_may_compute_it(kernels):
    machine, advanced = Machine(), []
    costs, times = measured_on(machine, advanced.append, kernels)
    assert len(advanced) == steps(kernels)
    assert [each.call for each in times] == machine.asked
    assert set(costs.forward) == {*SIZES[kernels], *DENSE_SIZES}
    assert set(costs.training) == {*TRAINING_SIZES, *DENSE_TRAINING_SIZES}
    assert all(whole_tiles(tokens) == tokens for tokens in (*costs.forward, *costs.training))
    assert all(set(costs.forward[tokens]) == {Engine.dense} for tokens in DENSE_SIZES)
    for tokens in SIZES[kernels]:
        expected = {Engine.dense, Engine.row} | ({Engine.tile} if tokens >= borders.MANY_TOKENS else set())
        assert set(costs.forward[tokens]) == expected
    # More calls than a cost has parts, so that a fit cannot pass through all of them.
    for tokens in (16, 512, 4096):
        assert sum(call.engine == Engine.row for call in calls_of(tokens, False)) > 2
    assert sum(call.engine == Engine.tile for call in calls_of(2048, True)) > 3


@pytest.mark.parametrize(
    ("sizes", "alone"), [(SIZES["cuda"], 1), (SIZES["triton"], ALONE), (TRAINING_SIZES, 1)], ids=[*SIZES, "training"]
)
def test_both_sides_are_timed_where_kernels_begin_to_order_tokens_and_two_sizes_beyond(sizes, alone):
    ((before, border),) = (pair for pair in itertools.pairwise(sizes) if borders.orders(pair[1] // alone) and not
                           borders.orders(pair[0] // alone))  # fmt: skip
    assert before == border - 1
    assert sizes[-1] >= 2 * border


def test_sizes_beyond_the_memory_are_left_out_and_none_at_all_is_an_error():
    costs, _ = measured_on(Machine(memory=5000))
    assert max(costs.forward) == max(costs.training) == 4096
    with pytest.raises(torch.OutOfMemoryError, match="2,048 tokens does not fit"):
        measured_on(Machine(memory=1536))


def test_the_table_has_what_was_measured_what_is_predicted_and_what_is_chosen():
    costs, times = measured_on(Machine())
    found = report.choices(costs, times)
    text = report.text(found)
    sparse = {each.call._replace(engine=Engine.dense) for each in times if each.call.engine != Engine.dense}
    assert {choice.call for choice in found} == sparse
    for choice in found:
        assert choice.predicted[choice.chosen] == pytest.approx(choice.seconds[choice.chosen], rel=0.1)
    line = next(line for line in text.splitlines() if line.split()[:2] == ["16,384", "36.6"])
    assert "tile" in line
    assert text.endswith(report.summary(found))
    assert f" of {len(found)} cases" in text


def test_a_choice_that_is_behind_is_counted_as_such():
    call = Call(64, Firing(0.0065), Engine.dense, training=False)
    seconds = {Engine.dense: 3e-5, Engine.row: 2e-5}
    good, bad = (report.Choice(call, 100.0, -1.0, seconds, seconds, engine) for engine in (Engine.row, Engine.dense))
    assert report.summary([good, bad]) == (
        "chosen: the fastest engine, or one within 5% of it, in 1 of 2 cases; at most 50.0% behind (64 tokens, 1.6"
        " nonzeros per token)"
    )


@pytest.fixture
def machine(monkeypatch, tmp_path):
    a_gpu(monkeypatch, tmp_path)
    return tmp_path


def test_what_is_kept_is_taken_for_its_layer_on_its_gpu_and_kernels(machine, monkeypatch):
    costs, _ = measured_on(Machine())
    assert store.kept([(K, N)]) == {}
    path = store.keep(costs, None)
    assert path.parent == machine / "calibrations"
    assert path.name.startswith("nvidia-h200-test-cuda-")
    assert store.kept([(K, 2 * N)]) == {}
    assert store.kept([(K, 2 * N), (K, N)]) == {(K, N): costs}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100")
    assert store.kept([(K, N)]) == {}


def test_layers_are_kept_side_by_side_with_the_block_sizes_of_the_last(machine, monkeypatch):
    costs, _ = measured_on(Machine())
    other = costs.__class__("triton", 64, 128, costs.forward, costs.training)
    monkeypatch.setattr(store, "_version", lambda: "0123")
    sizes = SMALL._replace(sampled=Shape(64, 32, 4, 3), resident=1)
    store.keep(costs, None)
    store.keep(other, sizes)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert store.kept([(K, N), (64, 128)]) == {(K, N): costs, (64, 128): other}
    assert tuning.of(CPU)[0] is SMALL  # where only the interpreter runs
    assert tuning._by_device == {torch.device("cuda:0"): sizes}
    tuning.use(None, torch.device("cuda:0"))


@pytest.mark.parametrize("damage", [lambda b: b[:-40], lambda b: b.replace(b"dense", b"dance", 1), lambda b: b""])
def test_a_damaged_file_is_said_and_not_taken(machine, capsys, damage):
    path = store.keep(measured_on(Machine())[0], None)
    path.write_bytes(damage(path.read_bytes()))
    assert store.kept([(K, N)]) == {}
    said = capsys.readouterr().err
    assert str(path) in said
    assert "`sparsellm calibrate` measures again" in said


def test_block_sizes_are_the_fastest_that_run(monkeypatch):
    base = tuning.of(CPU)[0]
    asked = []

    def milliseconds(_, sizes):
        asked.append(len(sizes))
        return {
            name: RuntimeError("shared memory") if each.gathered.columns == 256
            else 10.0 - (each.sampled.depth == 64) * each.sampled.stages - 2 * (each.resident == 1)
            for name, each in sizes.items()
        }  # fmt: skip

    layer = Layer(8, 8, 1, CPU, torch.float32)
    monkeypatch.setattr(block_sizes, "gpu_milliseconds", milliseconds)
    best = block_sizes.find(layer)
    assert best == base._replace(sampled=Shape(128, 64, 8, 4), resident=1)
    assert len(asked) == len(block_sizes.LISTED)
    assert min(asked) >= 2
    failed = RuntimeError("shared memory")
    monkeypatch.setattr(block_sizes, "gpu_milliseconds", lambda _, sizes: dict.fromkeys(sizes, failed))
    with pytest.raises(RuntimeError, match="shared memory"):
        block_sizes.find(layer)


def test_block_sizes_in_the_list_hold_what_the_kernels_ask_of_them():
    for name, values in block_sizes.LISTED.items():
        for value in values:
            if isinstance(value, Shape):
                assert tuning.PITCH_MULTIPLE % value.depth == 0
                assert name not in ("sampled",) or tuning.PITCH_MULTIPLE % value.columns == 0
    gathered = [shape.depth for shape in block_sizes.LISTED["gathered"]]
    assert max(gathered) <= min(shape.columns for shape in block_sizes.LISTED["sampled"])


def test_the_layers_of_models_and_of_sizes():
    assert calibrate.layer_of("1p5b") == (2048, 5632)
    assert calibrate.layer_of("4096x12288") == (4096, 12_288)
    with pytest.raises(ConfigError, match="a dimension of 12: K and N should be multiples of 8"):
        calibrate.layer_of("2048x12")


def test_without_a_gpu_the_command_says_what_is_missing(capsys):
    assert calibrate.main(["model=tiny"], "sparsellm calibrate") == 1
    assert "calibration is not possible here: " in capsys.readouterr().err


def test_the_command_measures_keeps_and_shows(machine, monkeypatch, capsys):
    invented = Machine()
    monkeypatch.setattr(backend, "load", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(calibrate, "Layer", lambda k, n, *_: layer_of(k, n))
    monkeypatch.setattr(measure, "gpu_milliseconds", lambda _, calls: invented.milliseconds(calls))
    assert calibrate.main(["model=[1p5b,2048x5632]"], "sparsellm calibrate") == 0
    shown = capsys.readouterr().out
    assert shown.count("K 2,048, N 5,632: forward: measured microseconds of a call") == 1
    assert "chosen: the fastest engine" in shown
    assert f"saved in {store.file()}" in shown
    assert store.kept([(K, N)])[K, N].choose_engine(16_384, 36 * 16_384, 950 * 128) == Engine.tile
