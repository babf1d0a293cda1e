"""scripts/evidence_report.py: what is made of many runs."""

import json

import pytest
from evaluation.conftest import rows, run, tiny, trained

from scripts import evidence_report
from sparsellm.commands import evaluate
from sparsellm.config import definition, from_overrides, load
from sparsellm.evaluation.tasks import TASKS
from sparsellm.runs.metrics import METRICS, read

__all__ = ["rows", "run", "tiny", "trained"]  # fixtures

MINI = ["experiment=mini", "data.files=[x.parquet]"]
SILU = "sparsity=dense_silu"


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
    kept |= {"sparsity.reinit_dead_after_tokens": 9 if name.endswith("redrawn") else None, "sparsity.reinit_blend": 1.0}
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
        "| SiLU | 1,408 | 3.0000 | +0.0000 | - | - | - |",
        "| SiLU | 2,816 | 2.9800 | -0.0200 | - | - | - |",
        "| ReLU | 1,408 | 2.9900 | -0.0100 | 300.0 | 78.69% | 0.0% |",
        "| ReLU + L1, 8e-5 | 1,408 | 3.0200 | +0.0200 | 16.0 | 98.86% | 0.0% |",
        "| ReLU + L1, 8e-5 | 2,816 | 2.9500 | -0.0500 | 32.0 | 98.86% | 25.0% |",
    ]
    figure = evidence_report.draw_widths([evidence_report.Run(line) for line in lines])
    drawn = [[list(line.get_xdata()) for line in axes.get_lines()] for axes in figure.axes]
    assert drawn == [[[1408, 2816], [1408], [1408, 2816]], [[1408], [1408, 2816]], [[1408], [1408, 2816]]]


def test_a_runs_folder_becomes_a_line_and_a_report(run, rows, tmp_path, capsys):
    assert evaluate.main([f"checkpoint={run}", f"data_dir={rows}", "device=cpu"], "evaluate") == 0
    capsys.readouterr()
    arguments = [str(run), "--output", str(tmp_path / "tiny"), "--save", str(tmp_path / "lines.jsonl")]
    evidence_report.main(arguments)
    told = capsys.readouterr().out
    (line,) = evidence_report.lines_of(tmp_path / "lines.jsonl")
    assert (line["name"], line["task_rows"]) == ("tiny", dict.fromkeys(TASKS, 6))
    assert list(line["saved_by"]) == ["command", "machine", "date", "commit", "versions"]
    assert line["config"] == definition(load(run / "config.yaml"))
    assert [row["step"] for row in line["rows"]] == [row["step"] for row in read(run / METRICS)]
    assert 0 < evidence_report.Run(line).nonzeros < 48
    assert evidence_report.Run(line).accuracy is not None
    evidence_report.main([str(tmp_path / "lines.jsonl"), *arguments[1:3]])
    assert capsys.readouterr().out == told
