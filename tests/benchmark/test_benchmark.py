"""The command on tiny models and a CPU, with stand-ins for kernels and energy: measurements, output and refusals."""

import json
import random
import shutil
from dataclasses import replace
from functools import partial

import float8_stand_in
import pytest
import torch
from evaluation.conftest import LAST
from evaluation.small_rows import sentence

from sparsellm.analysis import speed
from sparsellm.benchmark import figure, phases, report, study, timing
from sparsellm.benchmark.subject import Subject
from sparsellm.benchmark.timing import Sample
from sparsellm.commands.benchmark import main
from sparsellm.config import Activation, BenchmarkConfig
from sparsellm.distributed.groups import process_group
from sparsellm.hf import conversion
from sparsellm.inference.accelerate import accelerate
from sparsellm.inference.feedforward import SparseFeedForward
from sparsellm.inference.generation import Generator
from sparsellm.model import Decoder
from sparsellm.runs.committed import problems
from sparsellm.runs.locate import locate
from sparsellm.training.loop import Trainer

PROGRAM = "sparsellm benchmark"
QUICK = ["device=cpu", "seconds=0.05", "sequences=4", "new_tokens=5", "prompts=2"]
CPU = torch.device("cpu")


@pytest.fixture
def silu(bare, tmp_path):
    """The hf/ folder of a SiLU model of the same sizes."""
    config, *_ = conversion.load(bare)
    weights = Decoder(config, Activation.silu).state_dict()
    conversion.export(weights, config, Activation.silu, tmp_path / "silu", bare, 0)
    return tmp_path / "silu"


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(sentence(random.Random(3), 1500))
    return tmp_path / "text.txt"


@pytest.fixture
def kernels(monkeypatch):
    """The operator's reference instead of the kernels, and an energy counter that rises by 1 J per reading."""
    counter = iter(range(0, 10**9, 1000))
    monkeypatch.setattr(timing, "energy_mj", lambda _device: next(counter))
    monkeypatch.setattr(study, "energy_mj", lambda _device: 0)
    monkeypatch.setattr(study, "_without_kernels", lambda *_: [])
    monkeypatch.setattr(phases, "accelerate", lambda model, _kernels, **_: accelerate(model, "torch"))
    monkeypatch.setattr(
        phases,
        "Generator",
        lambda decoder, dtype, kernels, **_: Generator(decoder, (), None, dtype, kernels and "torch"),
    )
    monkeypatch.setattr(speed, "gpu_milliseconds", lambda _: {"eager": 3.0, "compiled": 2.0, "engine": 1.0})


def measured(folder):
    return json.loads((folder / report.BENCHMARK_JSON).read_text())


def test_a_run_is_measured_on_its_held_out_text_without_a_gpu(run, capsys):
    assert main([*QUICK, f"checkpoint={run}"], PROGRAM) == 0
    shown, folder = capsys.readouterr().out, run / LAST / "benchmark"
    assert "no kernels: the kernels need a CUDA GPU" in shown
    assert "no energy: not measured on a CPU" in shown
    assert str(folder / report.BENCHMARK_JSON) in shown
    assert {path.name for path in folder.iterdir()} == {"benchmark.json", "benchmark.md", "benchmark.png"}
    assert {"command", "machine", "date", "commit", "versions"} < measured(folder).keys()
    (row,) = measured(folder)["checkpoints"]
    assert (row["name"], row["sequences"], row["sequence_length"]) == ("tiny, step 4", 4, 32)
    assert list(row["sides"]) == ["PyTorch"]
    for phase in report.PHASES:
        assert row["sides"]["PyTorch"][phase]["tokens_per_s"] > 0, phase
        assert row["sides"]["PyTorch"][phase]["mj_per_token"] is None
    assert len(row["nonzeros"]) == 2
    assert row["layer_speeds"] is row["baseline"] is row["scores"] is None
    assert problems(run / LAST, 4) == []  # the checkpoint is still whole


@pytest.mark.slow
def test_sizes_stand_side_by_side_each_with_its_baseline(run, bare, silu, text, tmp_path, kernels, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "250")  # no table continues below
    output = run / LAST / "evaluation"
    output.mkdir()
    scores = {"identity": locate(str(run)).identity(), "mean": 0.4321, "validation": {"loss": 2.5}}
    scores["tasks"] = {"piqa": {"score": 0.61}, "hellaswag": {"score": 0.3}}
    (output / "results.json").write_text(json.dumps(scores))
    arguments = [
        f"checkpoint=[{run},{bare}]",
        f"baseline=[{silu},{silu}]",
        f"text={text}",
        f"output_dir={tmp_path}/out",
    ]
    assert main([*QUICK, *arguments], PROGRAM) == 0
    results = measured(tmp_path / "out")
    assert results["missing"] == []
    assert [list(row["sides"]) for row in results["checkpoints"]] == [["kernels", "PyTorch", "baseline"]] * 2
    ours, alone = results["checkpoints"]
    assert (ours["sequence_length"], alone["sequence_length"]) == (32, 192)  # the run's, and the model's context
    assert (ours["sequences"], alone["sequences"]) == (4, 2)  # as requested, and as many as the text allows
    assert ours["baseline"]["activation"] == "silu"
    assert ours["scores"] == {
        "mean": 0.4321,
        "tasks": {"piqa": 0.61, "hellaswag": 0.3},
        "validation_loss": 2.5,
        "dtype": "float32",
    }
    assert alone["scores"] is None
    assert [of["speedup"] for of in ours["layer_speeds"]] == [2.0, 2.0]
    for side in ours["sides"].values():
        assert all(side[phase]["mj_per_token"] > 0 for phase in report.PHASES)
    shown = capsys.readouterr().out
    of_each = " or ".join(f"{row['layer_speeds'][0]['tokens']:,}" for row in (ours, alone))
    assert f"layers: each measured alone on {of_each} tokens" in shown
    tables = [part.splitlines() for part in shown.split("\n\n")]
    assert ["kernels" in line for line in tables[1][1:]] == [True, False, False] * 2
    assert ["0.4321" in line for line in tables[1][1:]] == [True, True, False] + [False] * 3
    forward = {name: side["forward"]["tokens_per_s"] for name, side in ours["sides"].items()}
    assert f"{forward['kernels'] / 1e3:,.1f} ({forward['kernels'] / forward['baseline']:.2f}x)" in tables[1][1]
    assert f"{forward['PyTorch'] / 1e3:,.1f} ({forward['PyTorch'] / forward['baseline']:.2f}x)" in tables[1][2]
    assert f"; not evaluated: {ours['baseline']['name']}; {alone['name']}\n" in shown
    assert tables[3][0].split()[-2:] == ["piqa", "hellaswag"]
    assert [line.split()[-2:] for line in tables[3][1:]] == [["0.6100", "0.3000"], ["-", "-"], ["-", "-"]]
    assert tables[2][0].split()[2:] == ["mJ", "per", "token", "on", "forward", "training", "prefill", "decode"]
    markdown = (tmp_path / "out" / report.BENCHMARK_MD).read_text()
    assert all(line.startswith("|") == ("|" in line) for line in markdown.splitlines())
    assert (tmp_path / "out" / report.BENCHMARK_PNG).read_bytes().startswith(b"\x89PNG")


def test_scores_of_other_weights_are_not_shown(run):
    output = run / LAST / "evaluation"
    output.mkdir()
    for identity in ({"identity": "another"}, {}):  # the latter was not written by our evaluation
        (output / "results.json").write_text(json.dumps({**identity, "mean": 0.5}))
        assert Subject.open(locate(str(run)), BenchmarkConfig()).scores is None


def test_what_is_compared_reads_as_many_sequences(run):
    subject = Subject.open(locate(str(run)), BenchmarkConfig())
    fewer = replace(subject, blocks=subject.blocks[:2])
    assert len(subject.blocks) > 2
    assert len(subject.limited_to(fewer).blocks) == len(fewer.limited_to(subject).blocks) == 2


def test_kernels_and_pytorch_compute_in_the_side_that_is_named_so(run, kernels):
    subject = Subject.open(locate(str(run)), BenchmarkConfig())
    found = {}
    for name, on_kernels in (("kernels", True), ("PyTorch", False)):
        generator = phases.generator_of(phases.Side(subject, on_kernels), CPU)
        found[name] = any(isinstance(module, SparseFeedForward) for module in generator.decoder.modules())
        config = phases.training_config(phases.Side(subject, on_kernels), BenchmarkConfig(), CPU)
        assert config.runtime.kernels.name == ("cuda" if on_kernels else "torch")
    assert found == {"kernels": True, "PyTorch": False}


def test_every_phase_takes_the_kernels_that_are_loaded(run, kernels, monkeypatch):
    """The Triton kernels, on a GPU that is not Hopper: `accelerate` then refuses others."""
    subject, taken = Subject.open(locate(str(run)), BenchmarkConfig()), []
    monkeypatch.setattr(phases.backend, "loaded", lambda: "triton")
    monkeypatch.setattr(phases, "accelerate", lambda model, name, **_: taken.append(name) or accelerate(model, "torch"))
    made = phases.Generator
    monkeypatch.setattr(
        phases,
        "Generator",
        lambda *given, kernels, **more: taken.append(kernels) or made(*given, kernels=kernels, **more),
    )
    sides, config = {"kernels": phases.Side(subject, True)}, BenchmarkConfig(seconds=0.01)
    phases.forward(sides, {subject.identity: phases.stock_model(subject, CPU)}, config, CPU)
    phases.generator_of(sides["kernels"], CPU)
    taken.append(phases.training_config(sides["kernels"], config, CPU).runtime.kernels.name)
    assert taken == ["triton"] * 3
    about = {"device": "A100", "torch": "2.11", "dtype": "bfloat16", "compiled": True, "text": "held-out"}
    assert ", the Triton kernels; held-out" in report.measured_on(about | {"kernels": "the Triton kernels"})


def test_dense_fp8_is_the_dense_model_with_rounded_weights_and_is_not_generated(run, monkeypatch):
    float8_stand_in.install(monkeypatch)
    ours = Subject.open(locate(str(run)), BenchmarkConfig(sequences=2))
    sides = {"dense FP8": phases.Side(ours, False, float8=True), "PyTorch": phases.Side(ours, False)}
    assert phases.training_config(sides["dense FP8"], BenchmarkConfig(), CPU).runtime.float8.name == "all"
    assert phases.training_config(sides["PyTorch"], BenchmarkConfig(), CPU).runtime.float8 is None
    stock, share, seen = phases.stock_model(ours, CPU), phases.sharing_copy, []
    before = {name: weight.clone() for name, weight in stock.state_dict().items()}
    monkeypatch.setattr(phases, "sharing_copy", lambda model: seen.append(share(model)) or seen[-1])
    rates = phases.forward(sides, {ours.identity: stock}, BenchmarkConfig(seconds=0.01), CPU)
    assert all(rate["tokens_per_s"] > 0 for rate in rates.values())
    rounded, exact = (model.state_dict() for model in seen)
    changed = {name for name, weight in before.items() if not torch.equal(rounded[name], weight)}
    assert changed == {name for name in before if "_proj.weight" in name}
    assert all(torch.equal(exact[name], weight) for name, weight in before.items())


def test_sparse_fp8_is_measured_where_it_is_asked_for_and_the_sizes_allow_it(run, monkeypatch):
    """Forward passes by accelerate(float8=True), training with FP8 attention, and no generation."""
    asked, sides = [], {}
    monkeypatch.setattr(
        phases,
        "accelerate",
        lambda model, kernels, float8: asked.append((kernels, float8)) or accelerate(model, "torch"),
    )
    ours = Subject.open(locate(str(run)), BenchmarkConfig(sequences=2))
    side = phases.Side(ours, True, float8=True)
    assert phases.training_config(side, BenchmarkConfig(), CPU).runtime.float8.name == "attention"
    rates = phases.forward({"a": side}, {ours.identity: phases.stock_model(ours, CPU)}, BenchmarkConfig(seconds=0), CPU)
    assert rates["a"]["tokens_per_s"] > 0
    assert asked == [("cuda", True)]

    def measure(_subject, _baseline, kernels, in_float8, *_):
        sides[kernels] = in_float8
        raise study.BenchmarkError("measured")

    monkeypatch.setattr(study, "mistakes", lambda _: [])
    monkeypatch.setattr(study, "_without_kernels", lambda *_: [])
    monkeypatch.setattr(study, "_measure", measure)
    for typed, odd, expected in ((True, None, ["sparse FP8"]), (False, None, []), (True, "hidden size is 40", [])):
        monkeypatch.setattr(study, "_odd_sizes", lambda _model, feedforward=True, odd=odd: odd)
        with pytest.raises(study.BenchmarkError, match="measured"):
            study.benchmark(BenchmarkConfig([str(run)], float8=typed))
        assert sides == {True: expected}


def test_a_silu_model_has_no_sparse_fp8_and_the_report_says_why(run, monkeypatch):
    opened, written = Subject.open(locate(str(run)), BenchmarkConfig(sequences=2)), []
    silu = replace(opened, activation=Activation.silu)
    monkeypatch.setattr(study, "mistakes", lambda _: [])
    monkeypatch.setattr(study, "_without_kernels", lambda *_: [])
    monkeypatch.setattr(study.Subject, "open", lambda *_: silu)
    monkeypatch.setattr(study, "_measure", lambda *arguments: arguments[3])
    monkeypatch.setattr(study.report, "write_all", lambda _, results: written.append(results))
    monkeypatch.setattr(study, "_draw", lambda *_: None)
    study.benchmark(BenchmarkConfig([str(run)], float8=True))
    assert written[0]["checkpoints"] == [[]]
    assert f"no sparse FP8 of {silu.name}: the kernels compute ReLU gates" in written[0]["missing"]


def test_dense_fp8_has_no_scores_and_no_decoding_in_the_tables():
    rate = {"tokens_per_s": 2000.0, "mj_per_token": 1.0, "peak_bytes": 2**30}
    model = {"name": "A", "checkpoint": "A", "parameters": 10**9, "activation": "relu"}
    scores = {"mean": 0.5, "tasks": {}, "validation_loss": 2.5}
    sides = {"dense FP8": {"forward": rate, "training": None}, "PyTorch": dict.fromkeys(report.PHASES, rate)}
    row = model | {"sides": sides, "baseline": None, "nonzeros": [3.0], "scores": scores, "layer_speeds": None}
    row |= {"sequences": 1, "sequence_length": 8, "correlation_with_nonzeros": None}
    results = {"checkpoints": [row], "micro_batch_size": 1, "missing": [], "device": "GPU", "torch": "2"}
    speeds, energies = report.tables(results)
    assert speeds[1] == ["A", "1.00B", "dense FP8", "3.0", "2.0 (1.00x)", "out of memory", "out of memory", *"----"]
    assert speeds[2][-2:] == ["2.5000", "0.5000"]
    assert energies[1] == ["A", "1.00B", "dense FP8", "1 (1.00x)", "out of memory", "-", "-"]
    assert any(note.startswith("dense FP8: every linear layer by torchao") for note in report.notes(results))
    sides["sparse FP8"] = sides.pop("dense FP8")
    row["sides"] = dict(reversed(sides.items()))
    assert report.tables(results)[0][1][-2:] == ["-", "-"]
    assert any(note.startswith("sparse FP8: forward: attention by torchao") for note in report.notes(results))
    assert figure.draw(results).startswith(b"\x89PNG")


@pytest.mark.slow
def test_training_steps_leave_the_weights_and_what_fires(run, monkeypatch):
    subject, made = Subject.open(locate(str(run)), BenchmarkConfig(sequences=4)), []

    class Kept(Trainer):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(phases, "Trainer", Kept)
    sides, config = {"PyTorch": phases.Side(subject, False)}, BenchmarkConfig(sequences=4, seconds=0.05)
    with process_group("cpu") as ranks:
        rates = phases.training(sides, config, ranks)
    assert rates["PyTorch"]["tokens_per_s"] > 0
    assert len(made) == phases.TRAINING_ROUNDS
    for trainer in made:
        assert trainer.step >= 3
        for name, parameter in trainer.decoder.named_parameters():
            assert torch.equal(parameter, subject.weights[name]), name


@pytest.mark.slow
def test_training_that_runs_out_of_memory_is_said_and_the_rest_goes_on(run, monkeypatch, capsys):
    def without_memory(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(phases, "Trainer", without_memory)
    assert main([*QUICK, f"checkpoint={run}"], PROGRAM) == 0
    row = measured(run / LAST / "benchmark")["checkpoints"][0]
    assert row["sides"]["PyTorch"]["training"] is None
    assert row["sides"]["PyTorch"]["decode"]["tokens_per_s"] > 0
    assert report.OUT_OF_MEMORY in capsys.readouterr().out


def test_what_decoding_counts_is_what_its_clock_saw(run, monkeypatch):
    """Steps while the clock runs, times sequences."""
    subject = Subject.open(locate(str(run)), BenchmarkConfig())
    generator, steps, seen = phases.generator_of(phases.Side(subject, False), CPU), [], []
    monkeypatch.setattr(generator, "_step", lambda *given, step=generator._step: (steps.append(1), step(*given)))

    class Clock:
        def __init__(self, _device):
            self.before = len(steps)

        def stop(self, tokens):
            seen.append((len(steps) - self.before, tokens))

    monkeypatch.setattr(phases, "Stopwatch", Clock)
    phases.decode(generator, subject, BenchmarkConfig(prompts=3, new_tokens=9), CPU)
    assert seen == [(7, 21)]


def test_candidates_take_turns_and_rates_are_of_what_they_took(monkeypatch):
    now, order = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing, "energy_mj", lambda _device: 500 * now[0])  # half a watt

    def work(name, seconds):
        order.append(name)
        now[0] += seconds
        return 100

    works = {"fast": partial(work, "fast", 0.5), "slow": partial(work, "slow", 1.0)}
    rates = timing.alternate(works, 3.0, CPU)
    assert order == ["fast", "slow", *["fast", "fast", "slow"] * timing.ROUNDS]
    assert rates["fast"] == {"tokens_per_s": 200.0, "spread": 0.0, "mj_per_token": 2.5}
    assert rates["slow"] == {"tokens_per_s": 100.0, "spread": 0.0, "mj_per_token": 5.0}
    uneven = timing.rate([Sample(100, 1.0, None), Sample(100, 2.0, None), Sample(300, 1.0, None)])
    assert uneven == {"tokens_per_s": 100.0, "spread": 2.5, "mj_per_token": None}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, ["checkpoint has no value"]),
        (["checkpoint=nope/nope/nope", "seconds=0", "new_tokens=2"], 2, ["nope/nope/nope", "seconds is 0", "least 3"]),
        (["checkpoint=RUN", "baseline=[RUN,RUN]"], 2, ["baseline has 2 entries, but checkpoint has 1"]),
        (["checkpoint=RUN", "baseline=BARE"], 2, ["baseline=BARE belongs to no run", "text=FILE"]),
        (["checkpoint=RUN", "baseline=./nope"], 2, ["baseline=./nope does not exist"]),
        (["checkpoint=RUN", "text=nowhere.txt"], 2, ["text=nowhere.txt is not a file"]),
        (["checkpoint=RUN", "kernels=cuda"], 2, ["kernels=cuda", "has no GPU"]),
        (["checkpoint=RUN", "baselin=RUN"], 2, ["did you mean baseline"]),
        (["checkpoint=CUT", "text=TEXT"], 1, ["cannot be read", "model.safetensors"]),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, code, words, run, bare, text, tmp_path, capsys):
    broken = shutil.copytree(bare, tmp_path / "cut")
    (broken / "model.safetensors").write_bytes((bare / "model.safetensors").read_bytes()[:999])
    for word, path in (("RUN", run), ("BARE", bare), ("CUT", broken), ("TEXT", text)):
        arguments, words = ([each.replace(word, str(path)) for each in texts] for texts in (arguments, words))
    typed = {argument.partition("=")[0] for argument in arguments}
    assert main([*arguments, *(q for q in QUICK if q.partition("=")[0] not in typed)], PROGRAM) == code
    said = capsys.readouterr().err
    assert all(word in said for word in words), said


def test_the_bars_of_one_checkpoint_have_names_and_values_and_those_of_several_a_legend(monkeypatch):
    drawn = []
    monkeypatch.setattr(figure, "saved", drawn.append)
    rate = {"tokens_per_s": 12_345.0, "peak_bytes": None, "mj_per_token": None}
    sides = {name: dict.fromkeys(report.PHASES, rate) for name in ("kernels", "PyTorch")}
    row = {"name": "a", "parameters": 10**9, "sides": sides, "layer_speeds": None}
    for rows in ([row], [row, row]):
        figure.draw({"checkpoints": rows, "device": "CPU"})
    alone, several = drawn
    axes = alone.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["kernels", "PyTorch"]
    assert [text.get_text() for text in axes.texts] == ["12.3", "12.3"]
    assert alone.legends == []
    assert [text.get_text() for text in several.legends[0].get_texts()] == ["kernels", "PyTorch"]
    assert [label.get_text() for label in several.axes[0].get_xticklabels()] == ["1.00B"] * 2
