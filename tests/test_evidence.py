"""scripts/evidence_runs.py and scripts/evidence_report.py: many runs over several calls, and the report."""

import json
import sys

import pytest
from whole_config import prepare

from scripts import evidence_report, evidence_runs
from sparsellm.config import fingerprint, from_overrides, load, mistakes
from sparsellm.evaluation.tasks import TASKS

# A training that only sleeps and leaves rows: `python -c STAND_IN PACE OVERRIDE...`, PACE seconds for each step.
STAND_IN = """
import json, os, pathlib, sys, time
values = dict(word.split("=", 1) for word in sys.argv[2:])
folder = pathlib.Path(values["run.root"], values["run.name"])
folder.mkdir(parents=True, exist_ok=True)
with open(folder.parent / "starts", "a") as starts:
    starts.write(f"{folder.name} {time.time()} {os.environ.get('CUDA_VISIBLE_DEVICES')}\\n")
if folder.name in values["logging.wandb_group"]:
    sys.exit("a stand-in that fails")
for step in range(1, 11):
    time.sleep(float(sys.argv[1]))
    row = {"step": step, "tokens": 100 * step, "ce": 2.123456789, "val_ce": 3.0 if step % 5 == 0 else None,
           "nnz_mean": 5.0, "evaluation": {"mean": 0.25} if step == 10 else None}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row) + "\\n")
with open(folder.parent / "starts", "a") as starts:
    starts.write("- " + str(time.time()) + "\\n")
"""
MINI = ["experiment=mini", "data.files=[x.parquet]"]
SILU = "sparsity=dense_silu"
THREE = ["--only", "silu,relu,l1_2e-5"]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """runs(*arguments, pace=0): the exit code, on stand-ins of so many seconds for each step."""

    def call(*arguments, pace=0.0, failing="", stagger=0):
        monkeypatch.setattr(evidence_runs, "TRAIN", (sys.executable, "-c", STAND_IN, str(pace)))
        group = f"logging.wandb_group=of_{failing}"
        return evidence_runs.main(
            [
                str(tmp_path / "results.jsonl"),
                *MINI,
                group,
                "--root",
                str(tmp_path / "runs"),
                "--stagger",
                str(stagger),
                *arguments,
            ]
        )

    monkeypatch.setattr(evidence_runs, "POLL", 0.01)
    return call


def starts(tmp_path):
    return [line.split()[0] for line in (tmp_path / "runs/starts").read_text().splitlines()]


def test_every_run_is_one_of_its_own_and_accepted():
    runs = evidence_runs.runs(from_overrides(MINI), evidence_runs.RECOMMENDED)
    configs = {name: from_overrides([*MINI, *overrides]) for name, overrides in runs.items()}
    assert {name: mistakes(config, 1) for name, config in configs.items() if mistakes(config, 1)} == {}
    assert len({fingerprint(config) for config in configs.values()}) == len(runs) == 14
    swept = [name for name in runs if name == "relu" or (name.startswith("l1_") and name.count("_") == 1)]
    assert sorted(configs[name].sparsity.l1_coefficient for name in swept) == [0, *sorted(evidence_runs.COEFFICIENTS)]
    recommended = {name: config for name, config in configs.items() if name.startswith("l1_8e-5")}
    assert {config.sparsity.l1_coefficient for config in recommended.values()} == {evidence_runs.RECOMMENDED}
    assert len(recommended) == 5
    assert from_overrides(MINI).sparsity.l1_coefficient == evidence_runs.RECOMMENDED


def test_runs_are_several_at_once_and_one_that_is_in_the_results_is_not_trained_again(runs, tmp_path, capsys):
    assert runs(*THREE, "--at-once", "2", pace=0.15, failing="relu") == evidence_runs.FAILED
    assert "relu failed (exit code 1)" in (said := capsys.readouterr().out)
    assert "a stand-in that fails" in said
    assert starts(tmp_path)[:2] == ["silu", "relu"]
    assert starts(tmp_path)[2] == "l1_2e-5"  # begun before silu had ended
    lines = evidence_runs.load(tmp_path / "results.jsonl")
    assert sorted(lines) == ["l1_2e-5", "silu"]
    row = lines["silu"]["rows"][-1]
    assert (row["ce"], row["val_ce"], row["evaluation"]) == (2.12346, 3.0, {"mean": 0.25})
    assert [row["step"] for row in lines["silu"]["rows"]] == list(range(1, 11))

    (tmp_path / "runs/starts").unlink()
    assert runs(*THREE) == evidence_runs.COMPLETE
    assert starts(tmp_path) == ["relu", "-"]
    with pytest.raises(SystemExit, match=r"has a run silu of another configuration .*: give the overrides that it had"):
        runs(*THREE, "training.batch_size=32")
    with pytest.raises(SystemExit, match=r"--only gelu: there are silu, relu"):
        runs("--only", "gelu")


def test_a_folder_of_results_that_is_not_there_is_made_before_the_first_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evidence_runs, "TRAIN", (sys.executable, "-c", STAND_IN, "0"))
    results, own = tmp_path / "new/results.jsonl", ["--root", str(tmp_path / "runs"), "--run", "a training.seed=1"]
    assert evidence_runs.main([str(results), *MINI, "logging.wandb_group=none", *own]) == evidence_runs.COMPLETE
    assert list(evidence_runs.load(results)) == ["a"]
    with pytest.raises(SystemExit, match="2"):
        evidence_runs.main([str(results), "experimnt=mini"])
    assert "experimnt is not a key: did you mean experiment=mini?" in capsys.readouterr().err


def test_starts_on_one_gpu_are_staggered(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(evidence_runs.torch.cuda, "device_count", lambda: 2)
    own = [word for name in "abc" for word in ("--run", f"{name} training.seed={ord(name)}")]
    assert runs(*own, "--at-once", "2", pace=0.12, stagger=1) == evidence_runs.COMPLETE
    lines = [line.split() for line in (tmp_path / "runs/starts").read_text().splitlines()]
    assert {line[0]: line[2] for line in lines if line[0] != "-"} == {"a": "0", "b": "1", "c": "0"}
    begun = {line[0]: float(line[1]) for line in lines}
    assert begun["b"] - begun["a"] < 0.7 < begun["c"] - begun["a"]
    seeds = {
        name: line["config"]["training.seed"] for name, line in evidence_runs.load(tmp_path / "results.jsonl").items()
    }
    assert seeds == {name: ord(name) for name in "abc"}


def test_runs_stay_on_the_gpus_that_the_command_may_see(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert runs("--run", "a training.seed=1", "--run", "b training.seed=2") == evidence_runs.COMPLETE
    lines = [line.split() for line in (tmp_path / "runs/starts").read_text().splitlines()]
    assert {line[0]: line[2] for line in lines if line[0] != "-"} == {"a": "2", "b": "5"}


def test_what_is_not_done_in_time_is_stopped_and_with_last_not_begun(runs, tmp_path, capsys):
    assert runs(*THREE, "--minutes", "0.01", pace=0.2) == evidence_runs.LEFT
    assert "silu is stopped" in capsys.readouterr().out
    assert not (tmp_path / "results.jsonl").exists()
    assert runs("--only", "silu", pace=0.05) == evidence_runs.COMPLETE  # half a second and more
    (tmp_path / "runs/starts").unlink()
    assert runs(*THREE, "--minutes", "0.008", "--last", pace=0.05) == evidence_runs.LEFT
    assert not (tmp_path / "runs/starts").exists()
    begun = tmp_path / "runs/l1_2e-5"
    (begun / "checkpoints/step_00004500").mkdir(parents=True)  # of 4,578: little of it is left
    (begun / "metrics.jsonl").write_text("")
    assert runs(*THREE, "--minutes", "0.008", "--last", pace=0.01) == evidence_runs.LEFT
    assert starts(tmp_path)[0] == "l1_2e-5"  # before relu, which has not begun
    assert "relu" not in starts(tmp_path)


def result(name, ce, nonzeros, *overrides, dead=0.0, scores=None):
    """A line of results of 100M tokens, whose nonzeros fall as tokens^-0.5 to `nonzeros`."""
    config = from_overrides([*MINI, "model.num_layers=2", *overrides])
    rows, width = [], config.model.intermediate_size
    for step in range(1, 21):
        tokens = 5_000_000 * step
        rows.append({
            "step": step, "tokens": tokens, "val_ce": ce * (1 + 1 / tokens) if step % 5 == 0 else None,
            "nnz_mean": None if nonzeros is None else nonzeros * (tokens / 1e8) ** -0.5,
            "dead_per_layer": None if nonzeros is None else [dead * width * 2, 0], "tokens_per_s": 1e6 + step,
            "evaluation": None,
        })  # fmt: skip
    rows[-1] |= {"val_ce": ce, "evaluation": scores}
    kept = {f"sparsity.{key}": getattr(config.sparsity, key) for key in ("l1_coefficient", "dead_after_tokens")}
    kept |= {"sparsity.activation": config.sparsity.activation.name, "training.seed": config.training.seed}
    kept |= {"model.intermediate_size": width, "model.num_layers": 2}
    return {"name": name, "config": kept, "rows": rows, "seconds": 9.0, "task_rows": dict.fromkeys(TASKS, 400)}


def test_the_report_finds_prices_and_standard_errors(tmp_path, capsys):
    scores = dict.fromkeys(TASKS, 0.5) | {"mean": 0.5}
    lines = [
        result("relu", 3.0, 300, "sparsity=relu"), result("silu", 2.97, None, SILU, scores=scores),
        result("l1_1e-5", 2.99, 100, "sparsity.l1_coefficient=1e-5"),
        result("l1_4e-5", 3.0, 64, "sparsity.l1_coefficient=4e-5", dead=0.25, scores=scores),
        result("l1_1.6e-4", 3.045, 8, "sparsity.l1_coefficient=1.6e-4"),
        result("l1_4e-5_seed_1", 3.003, 63, "sparsity.l1_coefficient=4e-5", "training.seed=1"),
        result("l1_4e-5_redrawn", 3.001, 65, "sparsity.l1_coefficient=4e-5"),
    ]  # fmt: skip
    results = tmp_path / "results.jsonl"
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    evidence_report.main([str(results), "--output", str(tmp_path / "mini")])
    sweep = evidence_report.Sweep([evidence_report.Run(line) for line in lines])
    # Two thirds of the way from +0% to +1.5%, by logarithms: from 4e-5 to four times it, from 64 to an eighth of it.
    assert sweep.price(0.01) == pytest.approx([4e-5 * 4 ** (2 / 3), 64 / 4])
    assert sweep.price(0.02) is None
    assert sweep.runs[3].accuracy == pytest.approx((0.5, (0.25 / 400 / 7) ** 0.5))
    text = capsys.readouterr().out
    assert "| l1_4e-5 | 3.0000 | +0.00% | 64.0 | 25.0% | 50.0% ± 0.9% | 1,000,010 |" in text
    assert "- 1% of cross entropy: 1e-4, 16.0 nonzeros of 1,408." in text
    assert "- 2% of cross entropy: no coefficient of the sweep." in text
    for name in ("sweep", "dead"):
        assert (tmp_path / f"mini_{name}.png").read_bytes().startswith(b"\x89PNG")
    assert [run.name for run in sweep.relu] == ["relu", "l1_1e-5", "l1_4e-5", "l1_1.6e-4"]
    assert [run.name for run in sweep.remedies()] == ["l1_4e-5", "l1_4e-5_seed_1", "l1_4e-5_redrawn"]
    without_plain = [evidence_report.Run(line) for line in lines if line["name"] != "l1_4e-5"]
    assert evidence_report.Sweep(without_plain).remedies() == []


def test_few_runs_give_a_report_of_what_there_is(tmp_path, capsys):
    sparse, dense = result("l1_1e-5", 2.99, 100, "sparsity.l1_coefficient=1e-5"), result("silu", 2.97, None, SILU)
    for lines, pictures in (([dense], []), ([dense, sparse], ["two_sweep.png"])):
        results = tmp_path / "results.jsonl"
        results.write_text("".join(json.dumps(line) + "\n" for line in lines))
        evidence_report.main([str(results), "--output", str(tmp_path / "new/two")])
        assert [path.name for path in tmp_path.glob("new/*.png")] == pictures
        assert all(f"| {line['name']} |" in capsys.readouterr().out for line in lines[:1])


def test_the_coefficients_have_the_same_axis_in_every_panel_and_one_lies_in_its_middle():
    scores = dict.fromkeys(TASKS, 0.5) | {"mean": 0.5}
    found = [result("relu", 3.0, 300, "sparsity=relu"), result("l1_2e-5", 2.9, 30, "sparsity=l1", scores=scores)]
    figure = evidence_report.draw_sweep(evidence_report.Sweep([evidence_report.Run(line) for line in found]))
    axes = [axes.get_xlim() for axes in figure.axes if axes.get_xlabel().startswith("L1 coefficient")]
    assert axes == [(pytest.approx(2e-5 / 1.3), pytest.approx(2e-5 * 1.3))] * 4


def test_runs_of_several_widths_are_compared_with_the_narrowest_dense_one(tmp_path, capsys):
    wide = "model.intermediate_size=2816"
    lines = [
        result("l1_2816", 2.95, 32, "sparsity.l1_coefficient=8e-5", wide, dead=0.25), result("silu", 3.0, None, SILU),
        result("silu_2816", 2.98, None, SILU, wide), result("l1", 3.02, 16, "sparsity.l1_coefficient=8e-5"),
        result("relu", 2.99, 300, "sparsity=relu"),
    ]  # fmt: skip
    results = tmp_path / "results.jsonl"
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    evidence_report.main([str(results), "--widths", str(tmp_path / "new/widths.png")])
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["widths.png"]
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| SiLU | 1,408 | 3.0000 | +0.0000 |  |  |  |",
        "| SiLU | 2,816 | 2.9800 | -0.0200 |  |  |  |",
        "| ReLU | 1,408 | 2.9900 | -0.0100 | 300.0 | 78.69% | 0.0% |",
        "| ReLU + L1, 8e-5 | 1,408 | 3.0200 | +0.0200 | 16.0 | 98.86% | 0.0% |",
        "| ReLU + L1, 8e-5 | 2,816 | 2.9500 | -0.0500 | 32.0 | 98.86% | 25.0% |",
    ]
    figure = evidence_report.draw_widths([evidence_report.Run(line) for line in lines])
    drawn = [[list(line.get_xdata()) for line in axes.get_lines()] for axes in figure.axes]
    assert drawn == [[[1408, 2816], [1408], [1408, 2816]], [[1408], [1408, 2816]], [[1408], [1408, 2816]]]


@pytest.mark.slow
def test_a_real_run_becomes_a_line_and_a_report(tmp_path):
    """The whole procedure on a tiny model: prepared text, real training, report."""
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"Sentence {n} says {n * n}, no more. " * 20}) + "\n" for n in range(400))
    )
    tiny = [
        "experiment=mini", f"data.files=[{tmp_path}/text.jsonl]", f"data.path={tmp_path}/data", "model.vocab_size=400",
        "data.tokenizer_vocab_size=400", "model.hidden_size=32", "model.intermediate_size=64", "model.num_layers=2",
        "model.num_heads=2", "training.sequence_length=32", "training.batch_size=4", "training.steps=12",
        "logging.every=1", "logging.validation_every=4", "logging.validation_samples=4", "runtime.data_workers=0",
        "sparsity.dead_after_tokens=256", "sparsity.reinit_every=2", "runtime.compile=false", "runtime.device=cpu",
    ]  # fmt: skip
    prepare(from_overrides(tiny))
    results = tmp_path / "results.jsonl"
    name = "l1_8e-5_blended"
    code = evidence_runs.main([str(results), *tiny, "--root", str(tmp_path / "runs"), "--only", name])
    assert code == evidence_runs.COMPLETE, (tmp_path / f"runs/{name}.log").read_text()
    line = evidence_runs.load(results)[name]
    assert [row["step"] for row in line["rows"]] == list(range(1, 13))
    assert line["rows"][-1]["val_ce"] > 0
    assert line["fingerprint"] == fingerprint(load(tmp_path / f"runs/{name}/config.yaml"))
    evidence_report.main([str(results), "--output", str(tmp_path / "tiny")])
    assert 0 < evidence_report.Run(line).nonzeros < 64
