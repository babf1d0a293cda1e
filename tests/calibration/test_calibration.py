"""A calibration: a layer that fires as it should, costs that say which engine is fastest, kept and taken.

No GPU: the times are those of an invented machine, whose engines follow laws that the fit does not know exactly. What
the engines of a real one take is for tests/gpu.
"""

import random

import pytest
import torch

from sparsellm import calibration
from sparsellm.calibration import block_sizes, measure, report, store
from sparsellm.calibration.layer import Call, Firing, Layer, frequencies
from sparsellm.calibration.measure import SIZES, TRAINING_SIZES, Timed, calls_of, fit
from sparsellm.commands import calibrate
from sparsellm.config import ConfigError
from sparsellm.ops import Engine, backend, dispatch
from sparsellm.ops.costs import Cost
from sparsellm.ops.triton import tuning
from sparsellm.ops.triton.tuning import SMALL, Shape

K, N = 2048, 5632
CPU = torch.device("cpu")


class Machine:
    """Times by the H200's constants, `slower` times as long in the sparse engines, and up to 1.5% off."""

    def __init__(self, slower: float = 1.0, memory: int = 1 << 20) -> None:
        self.slower, self.memory, self.random, self.asked = slower, memory, random.Random(0), []

    def seconds(self, call: Call) -> float:
        tokens, engine = call.tokens, call.engine
        nonzeros, union = counts(call)
        if call.training:
            taken = dispatch.training_estimates(tokens, K, N, nonzeros, union)[engine]
        elif tokens >= dispatch.MANY_TOKENS:
            taken = dispatch.estimates(tokens, K, N, nonzeros, union)[engine]
        elif engine == Engine.row:
            taken = 9e-6 + tokens * 6e-9 + 1.2e-9 * nonzeros
        else:
            taken = 18e-6 + tokens * 57e-9
        return taken * (1 if engine == Engine.dense else self.slower)

    def milliseconds(self, calls):
        self.asked += calls
        if any(call.tokens > self.memory for call in calls):
            return [None] * len(calls)
        return [1e3 * self.seconds(call) * self.random.uniform(0.985, 1.015) for call in calls]


def counts(call: Call) -> tuple[float, float]:
    """What such a call counts on average."""
    rates = frequencies(N, call.firing)
    union = float((1 - (1 - rates) ** min(128, call.tokens)).sum()) * -(-call.tokens // 128)
    return call.tokens * float(rates.sum()), union


def measured_on(machine: Machine, advance=lambda _: None):
    layer = Layer(8, 8, 1, CPU, torch.float32)
    layer.width, layer.neurons = K, N
    return measure.measure("cuda", layer, machine.milliseconds, counts, advance)


def behind(machine: Machine, costs, call: Call) -> float:
    """By how much the chosen engine takes longer than the fastest."""
    engines = [Engine.dense] + [Engine.tile] * (call.training or call.tokens >= dispatch.MANY_TOKENS)
    engines += [] if call.training else [Engine.row]
    seconds = {engine: machine.seconds(call._replace(engine=engine)) for engine in engines}
    nonzeros, union = counts(call)
    choose = costs.choose_training_engine if call.training else costs.choose_engine
    return seconds[choose(call.tokens, nonzeros, union)] / min(seconds.values()) - 1


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


def test_every_size_is_timed_with_the_engines_that_may_compute_it():
    machine, steps = Machine(), []
    costs, times = measured_on(machine, steps.append)
    assert len(steps) == len(SIZES) + len(TRAINING_SIZES)
    assert [each.call for each in times] == machine.asked
    assert set(costs.forward) == set(SIZES)
    assert set(costs.training) == set(TRAINING_SIZES)
    for tokens in SIZES:
        expected = {Engine.dense, Engine.row} | ({Engine.tile} if tokens >= dispatch.MANY_TOKENS else set())
        assert set(costs.forward[tokens]) == expected
    # More calls than a cost has parts, so that a fit cannot pass through all of them.
    for tokens in (16, 512, 4096):
        assert sum(call.engine == Engine.row for call in calls_of(tokens, False)) > 2
    assert sum(call.engine == Engine.tile for call in calls_of(2048, True)) > 3


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
        "chosen is the fastest engine, or one within 5% of it, in 1 of 2 cases; at most 50.0% behind (64 tokens, 1.6"
        " nonzeros)"
    )


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A GPU with Triton kernels, as far as the store looks."""
    monkeypatch.setenv("SPARSELLM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200 (test)")
    monkeypatch.setattr(backend, "loaded", lambda: "cuda")
    monkeypatch.setattr(backend, "measured", {})
    monkeypatch.setattr(tuning, "_measured", None)
    return tmp_path


def test_what_is_kept_is_taken_for_its_layer_on_its_gpu_and_kernels(machine, monkeypatch):
    costs, _ = measured_on(Machine())
    calibration.take([(K, N)])
    assert backend.measured == {}
    path = store.keep(costs, None)
    assert path.parent == machine / "calibrations"
    assert path.name.startswith("nvidia-h200-test-cuda-")
    calibration.take([(K, 2 * N)])
    assert backend.measured == {}
    calibration.take([(K, 2 * N), (K, N)])
    assert backend.measured == {(K, N): costs}
    backend.measured.clear()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100")
    calibration.take([(K, N)])
    assert backend.measured == {}


def test_layers_are_kept_side_by_side_with_the_block_sizes_of_the_last(machine, monkeypatch):
    costs, _ = measured_on(Machine())
    other = costs.__class__("triton", 64, 128, costs.forward, costs.training)
    monkeypatch.setattr(store, "_version", lambda: "0123")
    sizes = SMALL._replace(sampled=Shape(64, 32, 4, 3), resident=1)
    store.keep(costs, None)
    store.keep(other, sizes)
    calibration.take([(K, N), (64, 128)])
    assert backend.measured == {(K, N): costs, (64, 128): other}
    assert tuning.of(CPU)[0] is SMALL  # where only the interpreter runs
    assert tuning._measured == sizes
    tuning.use(None)


@pytest.mark.parametrize("damage", [lambda b: b[:-40], lambda b: b.replace(b"dense", b"dance", 1), lambda b: b""])
def test_a_damaged_file_is_said_and_not_taken(machine, capsys, damage):
    path = store.keep(measured_on(Machine())[0], None)
    path.write_bytes(damage(path.read_bytes()))
    calibration.take([(K, N)])
    assert backend.measured == {}
    said = capsys.readouterr().err
    assert str(path) in said
    assert "`sparsellm calibrate` measures anew" in said


def test_block_sizes_are_the_fastest_that_run():
    base = tuning.of(CPU)[0]
    asked = []

    def milliseconds(sizes):
        asked.append(len(sizes))
        return {
            name: RuntimeError("shared memory") if each.gathered.columns == 256
            else 10.0 - (each.sampled.depth == 64) * each.sampled.stages - 2 * (each.resident == 1)
            for name, each in sizes.items()
        }  # fmt: skip

    layer = Layer(8, 8, 1, CPU, torch.float32)
    best = block_sizes.find(layer, milliseconds)
    assert best == base._replace(sampled=Shape(128, 64, 8, 4), resident=1)
    assert len(asked) == len(block_sizes.LISTED)
    assert min(asked) >= 2
    with pytest.raises(RuntimeError, match="shared memory"):
        block_sizes.find(layer, lambda sizes: dict.fromkeys(sizes, RuntimeError("shared memory")))


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
    with pytest.raises(ConfigError, match="a size of 12: K and N must be multiples of 8"):
        calibrate.layer_of("2048x12")


def test_without_a_gpu_the_command_says_what_is_missing(capsys):
    assert calibrate.main(["model=tiny"], "sparsellm calibrate") == 1
    assert "nothing can be measured here: " in capsys.readouterr().err


def test_the_command_measures_keeps_and_shows(machine, monkeypatch, capsys):
    invented = Machine()
    monkeypatch.setattr(backend, "load", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(calibrate, "Layer", lambda k, n, *_: _sized(k, n))
    monkeypatch.setattr(measure, "gpu_milliseconds", lambda _, calls: invented.milliseconds(calls))
    assert calibrate.main(["model=[1p5b,2048x5632]"], "sparsellm calibrate") == 0
    shown = capsys.readouterr().out
    assert shown.count("K 2,048, N 5,632: forward: microseconds of a call") == 1
    assert "chosen is the fastest engine" in shown
    assert f"kept in {store.file()}" in shown
    calibration.take([(K, N)])
    assert backend.measured[K, N].choose_engine(16_384, 36 * 16_384, 950 * 128) == Engine.tile


def _sized(width, neurons):
    layer = Layer(8, 8, 1, CPU, torch.float32)
    layer.width, layer.neurons, layer.counts = width, neurons, counts
    return layer
