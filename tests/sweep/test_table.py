"""The table and the figure, from the files of runs alone."""

import csv
import errno
import io
import json
import os
from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from sparsellm.analysis.report import as_csv
from sparsellm.commands import sweep as command
from sparsellm.sweep import commands, figure, report, table
from sparsellm.sweep.plan import plan

SMALL = ["experiment=smoke", "training.steps=40", "model.num_layers=2"]


@pytest.fixture
def swept(tmp_path):
    """swept(*arguments): a sweep of runs below tmp_path."""
    return lambda *arguments: plan(
        [*SMALL, f"run.root={tmp_path}/runs", f"sweep.root={tmp_path}/sweeps", *map(str, arguments)]
    )


def leave(point, step=40, scores=None, **values):
    """What a run leaves at `step`, complete or not."""
    row = {"step": step, "tokens": step * 4096, "ce": 3.0, "val_ce": 3.5, "nnz_mean": 20.0,
           "nnz_per_layer": [30.0, 10.0], "dead_per_layer": [5, 7]} | values  # fmt: skip
    point.folder.mkdir(parents=True)
    before = row | {"step": 1, "tokens": 2048, "ce": 9.0}
    (point.folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (before, row)) + '{"step": 4')
    if step == point.config.training.steps:
        (point.checkpoint / "hf").mkdir(parents=True)
        committed = {"step": point.config.training.steps, "files": {}}
        (point.checkpoint / "COMMITTED").write_text(json.dumps(committed))
        if scores is not None:
            (point.checkpoint / "evaluation").mkdir()
            (point.checkpoint / "evaluation/results.json").write_text(json.dumps(scores))


def test_what_a_benchmark_measured_stands_beside_the_scores(swept):
    sweep = swept("sparsity.l1_coefficient=0,1e-3,3e-3", "sweep.benchmark=true")
    dense, sparse, _ = sweep.points
    rate = {"tokens_per_s": 1000.0, "mj_per_token": 0.5}
    for point, sides in (
        (dense, {"PyTorch": dict.fromkeys(("forward", "prefill", "decode"), rate) | {"training": None}}),
        (sparse, {"kernels": {"forward": {"tokens_per_s": 1500.0, "mj_per_token": None}}, "PyTorch": {}}),
    ):
        leave(point)
        (point.checkpoint / "benchmark").mkdir()
        (point.checkpoint / "benchmark/benchmark.json").write_text(json.dumps({"checkpoints": [{"sides": sides}]}))
    rows = table.rows(sweep)
    assert [row["forward_tokens_per_s"] for row in rows] == [1000.0, 1500.0, None]
    assert [row["decode_mj_per_token"] for row in rows] == [0.5, None, None]
    assert [row["training_peak_bytes"] for row in rows] == [None] * 3
    markdown = table.as_markdown(sweep, rows)
    assert "| forward tokens/s | prefill tokens/s |" in markdown
    assert "training tokens/s" not in markdown  # nobody has one
    shown = [line for line in commands.text(sweep, []).splitlines() if not line.startswith("#")]
    wanted = [f" -m sparsellm.benchmark checkpoint={point.checkpoint}" for point in sweep.points]
    assert all(line.endswith(end) for line, end in zip(shown, wanted, strict=True))
    assert not table.COSTS.keys() & table.rows(swept("sparsity.l1_coefficient=0,1e-3"))[0].keys()


def scored(mean, **tasks):
    by_task = {t: {"score": s, "stderr": 0.03} for t, s in tasks.items()}
    return {"tasks": by_task, "failed": {}, "mean": mean, "mean_acc": mean - 0.125}


def test_a_row_per_run_with_its_files_numbers_and_nothing_where_there_is_none(swept):
    sweep = swept("sparsity.l1_coefficient=0,1e-3,3e-3,1e-2", "sweep.baseline=true")
    none, l1, unfinished, not_begun, dense = sweep.points
    leave(none, scores=scored(0.5, arc_easy=0.6, piqa=0.4), val_ce=3.2)
    leave(l1, scores=scored(0.25, arc_easy=0.25), ce=3.25, val_ce=3.36)
    leave(unfinished, step=20)
    leave(dense, nnz_mean=None, nnz_per_layer=None, dead_per_layer=None)
    rows = table.rows(sweep)
    assert [list(row) for row in rows] == [list(rows[0])] * 5
    assert rows[0] == {
        "sparsity.l1_coefficient": "0", "activation": "relu", "run": none.name, "status": "complete", "step": 40,
        "tokens": 163840, "ce": 3.0, "val_ce": 3.2, "ce_increase": 0.0, "nnz_mean": 20.0, "nnz_layer_00": 30.0,
        "nnz_layer_01": 10.0, "dead_neurons": 12, "arc_easy": 0.6, "piqa": 0.4, "mean": 0.5,
        "mean_stderr": pytest.approx(0.03 / 2**0.5), "mean_acc": 0.375, "score_dtype": "float32",
    }  # fmt: skip
    assert rows[1]["ce_increase"] == pytest.approx(0.05)
    assert (rows[1]["arc_easy"], rows[1]["piqa"], rows[1]["mean"]) == (0.25, None, 0.25)
    absent = dict.fromkeys(list(rows[0])[6:])
    assert rows[2] == absent | {
        "sparsity.l1_coefficient": "0.003", "activation": "relu", "run": unfinished.name, "status": "unfinished",
        "step": 20, "tokens": 81920,
    }  # fmt: skip
    assert rows[3] == rows[2] | {
        "sparsity.l1_coefficient": "0.01", "run": not_begun.name, "status": "not begun", "step": None, "tokens": None,
    }  # fmt: skip
    assert (rows[4]["activation"], rows[4]["nnz_mean"], rows[4]["dead_neurons"]) == ("silu", None, None)
    assert rows[4]["ce_increase"] == pytest.approx(3.5 / 3.2 - 1)

    read = list(csv.reader(io.StringIO(as_csv(rows).decode())))
    assert read[0] == list(rows[0])
    assert read[3][4:6] == ["20", "81920"]
    assert read[3][6:] == [""] * (len(read[0]) - 6)
    assert float(read[2][read[0].index("ce_increase")]) == rows[1]["ce_increase"]


def test_no_neuron_of_a_run_shorter_than_their_silence_is_counted_as_alive_or_dead(swept):
    sweep = swept("sparsity.l1_coefficient=0,1e-3")
    for point, tokens in zip(sweep.points, (99_999, 100_000), strict=True):
        leave(point, tokens=tokens)
    assert [row["dead_neurons"] for row in table.rows(sweep)] == [None, 12]


def test_the_cross_entropy_is_compared_within_the_other_swept_values(swept):
    sweep = swept("training.seed=0,1", "sparsity.l1_coefficient=0,1e-3", "sweep.baseline=true")
    for point, val_ce in zip(sweep.points, (2.0, 2.2, 4.0, 5.0, 2.5, 4.5), strict=True):
        leave(point, val_ce=val_ce)
    expected = [0, 0.1, 0, 0.25, 0.25, 0.125]
    assert [row["ce_increase"] for row in table.rows(sweep)] == pytest.approx(expected)


def test_without_validation_the_training_cross_entropy_is_compared_and_without_l1_zero_nothing(swept):
    sweep = swept("sparsity.l1_coefficient=0,1e-3")
    for point, ce in zip(sweep.points, (2.0, 3.0), strict=True):
        leave(point, ce=ce, val_ce=None)
    assert [row["ce_increase"] for row in table.rows(sweep)] == [0, 0.5]
    assert [row["ce_increase"] for row in table.rows(swept("sparsity.l1_coefficient=1e-3,2e-3"))] == [None, None]


def test_a_task_that_failed_and_scores_that_cannot_be_read_are_empty(swept, capsys):
    sweep = swept("sparsity.l1_coefficient=0,1e-3")
    for point in sweep.points:
        leave(point, scores={"tasks": {"piqa": {"score": 0.5, "stderr": None}}, "failed": {"x": "gone"}, "mean": None})
    (sweep.points[1].checkpoint / "evaluation/results.json").write_text('{"tasks"')
    rows = table.rows(sweep)
    assert [(row["piqa"], row["mean"], row["mean_stderr"]) for row in rows] == [(0.5, None, None), (None, None, None)]
    assert f"the scores of {sweep.points[1].checkpoint} are left out: " in capsys.readouterr().err


def test_the_markdown_table_is_aligned_and_says_what_its_numbers_are(swept):
    sweep = swept("sparsity.l1_coefficient=0,1e-3")
    leave(sweep.points[0], scores=scored(0.5, arc_easy=0.6))
    lines = table.as_markdown(sweep, table.rows(sweep)).splitlines()
    assert len({len(line) for line in lines[:4]}) == 1
    header, first, second = ([cell.strip() for cell in lines[i].split("|")[1:-1]] for i in (0, 2, 3))
    assert dict(zip(header, first, strict=True)) == {
        "sparsity.l1_coefficient": "0", "activation": "relu", "run": sweep.points[0].name, "status": "complete",
        "steps": "40", "CE": "3.000", "held-out CE": "3.500", "CE increase": "+0.00%", "nonzeros": "20.0", "dead": "12",
        "arc_easy": "60.0%", "mean": "50.0%", "mean acc": "37.5%",
    }  # fmt: skip
    assert second[3:] == ["not begun"] + [""] * 9
    assert any("did not fire for the last 100,000 tokens" in line for line in lines)
    assert any("- Scores: zero-shot, in float32, acc_norm" in line for line in lines)
    assert any("the sum over neurons and layers of |h|" in line for line in lines)


def test_scores_in_float8_are_those_of_their_own_folder(swept):
    sweep = replace(swept("sparsity.l1_coefficient=1e-3"), evaluate=["float8=true"])
    (point,) = sweep.points
    leave(point, scores=scored(0.5, piqa=0.5))
    assert "piqa" not in table.rows(sweep)[0]
    (point.checkpoint / "evaluation/float8").mkdir()
    result = scored(0.25, piqa=0.25) | {"dtype": "float8", "float8": True}
    (point.checkpoint / "evaluation/float8/results.json").write_text(json.dumps(result))
    assert (table.rows(sweep)[0]["piqa"], table.rows(sweep)[0]["score_dtype"]) == (0.25, "float8")


def test_scores_in_several_dtypes_say_which_each_is_of(swept):
    sweep = swept("runtime.precision=bfloat16", "sparsity.l1_coefficient=0,1e-3")
    for point, folder, result in zip(
        sweep.points, (".", "bfloat16"), (scored(0.5, piqa=0.5), scored(0.25, piqa=0.25) | {"dtype": "bfloat16"}),
        strict=True,
    ):  # fmt: skip
        leave(point, scores=scored(0.5, piqa=0.5))  # of an earlier version, which says no dtype: float32
        (point.checkpoint / "evaluation" / folder).mkdir(exist_ok=True)
        (point.checkpoint / "evaluation" / folder / "results.json").write_text(json.dumps(result))
    rows = table.rows(sweep)
    assert [(row["piqa"], row["score_dtype"]) for row in rows] == [(0.5, "float32"), (0.25, "bfloat16")]
    lines = table.as_markdown(sweep, rows).splitlines()
    assert [line.split("|")[-2].strip() for line in lines[:4]] == [
        "dtype",
        lines[1].split("|")[-2].strip(),
        "float32",
        "bfloat16",
    ]
    assert lines[-1].startswith("- Scores: zero-shot, in float32 or bfloat16, ")


def test_the_markdown_table_explains_no_column_that_it_does_not_have(swept):
    sweep = swept("sparsity.l1_coefficient=0,1e-3")
    leave(sweep.points[0], tokens=99_999)  # too few tokens for dead neurons
    text = table.as_markdown(sweep, table.rows(sweep))
    assert "- CE increase: relative to the ReLU run" in text
    assert "- dead: " not in text
    assert "- Scores: " not in text


def test_the_figure_has_a_panel_for_what_exists(swept, monkeypatch):
    panels = []
    monkeypatch.setattr(
        figure, "_draw", lambda axes, panel, lines, dense, at: panels.append((panel.title, [*lines], dense))
    )
    sweep = swept("sparsity.l1_coefficient=0,1e-3", "sweep.baseline=true")
    leave(sweep.points[0])
    assert figure.draw(sweep, table.rows(sweep)) is None
    leave(sweep.points[1])
    leave(sweep.points[2], nnz_mean=None, nnz_per_layer=None, dead_per_layer=None)
    assert figure.draw(sweep, table.rows(sweep)).keys() == {"png", "pdf"}
    assert [title for title, _, _ in panels] == [panel.title for panel in figure.PANELS[1:]]
    assert all(lines == ["ReLU + L1"] and dense[0][0] is sweep.points[2] for _, lines, dense in panels)


def drawn(runs, sweep, wanted):
    """The axes of one panel, with everything in it."""
    axes = Figure().subplots()
    lines = {}
    for point, row in runs:
        if not point.baseline:
            lines.setdefault(figure._label(point), []).append((point, row))
    at = figure.positions(sorted({figure._coefficient(point) for point, _ in runs if not point.baseline}))
    figure._coefficient_axis(axes, at)
    panel = next(panel for panel in figure.PANELS if panel.title.startswith(wanted))
    figure._draw(axes, panel, lines, [run for run in runs if run[0].baseline], at)
    return axes, at


def test_lines_and_baselines_are_drawn_where_the_numbers_are(swept):
    sweep = swept("training.seed=0,1", "sparsity.l1_coefficient=0,1e-3,1e-2", "sweep.baseline=true")
    for point, val_ce in zip(sweep.points, (2.0, 2.2, 2.4, 4.0, 5.0, 6.0, 2.5, 4.5), strict=True):
        leave(point, val_ce=val_ce)
    axes, at = drawn(list(zip(sweep.points, table.rows(sweep), strict=True)), sweep, "Cross entropy")
    lines = [line for line in axes.get_lines() if line.get_label() == "training.seed=1"]
    assert [list(line.get_xdata()) for line in lines] == [[at[0]], [at[1e-3], at[1e-2]]]
    assert [y for line in lines for y in line.get_ydata()] == pytest.approx([0, 0.25, 0.5])
    dense = [line for line in axes.get_lines() if line.get_label().startswith("dense SiLU, training.seed=")]
    assert [line.get_ydata()[0] for line in dense] == pytest.approx([0.25, 0.125])
    assert [line.get_color() for line in dense] == ["C0", "C1"]


def test_the_axis_is_broken_after_zero_and_no_line_crosses_the_break(swept):
    sweep = swept("sparsity.l1_coefficient=0,1e-5,1e-4,1e-3")
    for point in sweep.points:
        leave(point)
    at = figure.positions([0, 1e-5, 1e-4, 1e-3])
    assert [at[c] for c in (1e-5, 1e-4, 1e-3)] == pytest.approx([-5, -4, -3])
    assert at[0] < -5.2
    for wanted in ("Nonzero", "Cross entropy", "Dead"):
        axes, at = drawn(list(zip(sweep.points, table.rows(sweep), strict=True)), sweep, wanted)
        curves = [line for line in axes.get_lines() if line.get_transform() == axes.transData]
        assert curves
        assert all(len(line.get_xdata()) == 1 or min(line.get_xdata()) >= at[1e-5] for line in curves)
        assert [line for line in axes.get_lines() if line.get_transform() == axes.transAxes]  # the strokes
    axes, _ = drawn(list(zip(sweep.points[1:], table.rows(sweep)[1:], strict=True)), sweep, "Dead")
    assert not [line for line in axes.get_lines() if line.get_transform() == axes.transAxes]


def test_accuracies_are_points_with_errors_beside_the_level_of_chance(swept):
    sweep = swept("sparsity.l1_coefficient=0,1e-4,1e-3")
    for point in sweep.points:
        leave(point, scores=scored(0.5, arc_easy=0.6, piqa=0.4))
    axes, _ = drawn(list(zip(sweep.points, table.rows(sweep), strict=True)), sweep, "Mean accuracy")
    (points,) = axes.containers
    assert points.lines[0].get_linestyle() == "None"
    assert [text.get_text() for text in axes.texts] == ["chance\n37.5%"]  # of 25% and 50%
    assert axes.get_ylim()[0] == 0
    axes, _ = drawn(list(zip(sweep.points, table.rows(sweep), strict=True)), sweep, "Dead")
    assert axes.get_ylim()[0] == 0


def test_the_same_numbers_give_the_same_files(swept):
    sweep = swept("sparsity.l1_coefficient=0,1e-3")
    for point in sweep.points:
        leave(point, scores=scored(0.5, arc_easy=0.6))
    sweep.folder.mkdir(parents=True)

    def files():
        report.write_all(sweep)
        written = json.loads((sweep.folder / "sweep.json").read_text())
        assert written["rows"] == table.rows(sweep)
        assert {"command", "machine", "date", "commit", "versions"} < written.keys()
        (sweep.folder / "sweep.json").unlink()  # has a date
        return {path.name: path.read_bytes() for path in sweep.folder.iterdir()}

    first = files()
    assert set(first) == {"sweep.csv", "sweep.md", "sweep.png", "sweep.pdf", "lock"}
    assert first["sweep.png"].startswith(b"\x89PNG")
    assert b"![" in first["sweep.md"]
    assert files() == first


def test_a_figure_or_a_table_that_fails_is_a_sentence(swept, monkeypatch, capsys):
    sweep = swept("sparsity.l1_coefficient=0,1e-3")
    for point in sweep.points:
        leave(point, scores=scored(0.5, arc_easy=0.6))
    shown, unwritten = report.write_all(sweep)  # its folder is not there
    assert sweep.points[0].name in shown.split()
    assert unwritten is not None
    assert f"the table in {sweep.folder} cannot be written (FileNotFoundError: " in unwritten
    assert "run the same command to write the table" in unwritten
    sweep.folder.mkdir(parents=True)

    def fails(*_):
        raise ValueError("not to be drawn")

    monkeypatch.setattr(report.figure, "draw", fails)
    _, unwritten = report.write_all(sweep)
    assert unwritten is None
    assert {path.name for path in sweep.folder.iterdir()} == {"sweep.csv", "sweep.json", "sweep.md", "lock"}
    assert "sweep cannot be drawn (ValueError: not to be drawn)" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["table", "log"])
def test_a_sweep_goes_on_where_its_table_or_a_log_cannot_be_written_and_ends_with_1(swept, monkeypatch, capsys, where):
    sweep, done = swept("sparsity.l1_coefficient=0,1e-3"), []
    sweep.folder.mkdir(parents=True)

    def do(_sweep, point, *_):
        done.append(point)
        yield
        if where == "log":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(command, "do", do)
    if where == "table":
        monkeypatch.setattr(report, "write_whole", full)
    assert command.run(sweep) == 1
    assert done == sweep.points
    shown = capsys.readouterr().err
    assert "No space left on device" in shown.splitlines()[-1]
    assert ("run the same command to write the table" in shown) == (where == "table")
