"""The figure and the table of several runs: coloured by path if there are two, otherwise by run."""

import json
import sys
from pathlib import Path

import matplotlib
import pytest
from matplotlib.colors import to_hex

from scripts import compare_runs
from sparsellm.config import from_overrides, save


def rows(engine, relu=True):
    found = [
        {
            "step": step, "ce": 3 + 1 / step, "val_ce": 3.1 if step % 4 == 0 else None,
            "nnz_mean": 10.0 if relu else None, "nnz_per_layer": [5.0, 15.0] if relu else None,
            "dead_per_layer": [1, 2] if relu else None, "plan_per_layer": ["dense" if step < 5 else engine] * 2,
            "tokens": 100 * step, "tokens_per_s": 50.0 if step < 5 else 100.0,
        }
        for step in range(1, 9)
    ]  # fmt: skip
    if engine is None:
        for row in found:
            del row["plan_per_layer"]
    elif engine == "torch":
        for row in found:
            row["plan_per_layer"] = ["torch"] * 2
    return found


def colours(figure, panel):
    """The colours of the lines that show runs."""
    return [to_hex(line.get_color()) for line in figure.axes[panel].get_lines()]


def test_runs_of_two_paths_have_one_colour_for_each_path():
    runs = {"k1": rows("tile"), "t1": rows("torch"), "k2": rows("tile"), "t2": rows(None)}
    assert [compare_runs.path(of_run) for of_run in runs.values()] == ["kernels", "PyTorch"] * 2
    figure = compare_runs.draw(runs)
    first, second = colours(figure, 1)[:2]
    assert colours(figure, 1) == [first, second, first, second]
    assert len(colours(figure, 2)) == 4
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["kernels (2)", "PyTorch (2)"]


def test_runs_of_one_path_have_a_colour_each():
    figure = compare_runs.draw({"sparse": rows("torch"), "relu": rows("torch"), "dense": rows("torch", relu=False)})
    assert len(set(colours(figure, 1))) == 3
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["sparse", "relu", "dense"]
    assert len(colours(figure, 2)) == 3 + 2  # and the layers of the first


def test_runs_of_silu_are_no_path_to_compare():
    figure = compare_runs.draw({"silu": rows("torch", relu=False), "at_once": rows("tile"), "gradual": rows("tile")})
    assert len(set(colours(figure, 1))) == 3


def test_how_long_a_run_took_to_a_loss():
    """Four steps of two seconds, then four of one; held out at steps 4 and 8."""
    of_run = rows("tile")
    assert compare_runs.seconds(of_run) == [2, 4, 6, 8, 9, 10, 11, 12]
    of_run[3]["val_ce"], of_run[7]["val_ce"] = 3.5, 3.1
    assert compare_runs.seconds_to(of_run, 3.6) == 8  # at the first validation, or before
    assert compare_runs.seconds_to(of_run, 3.2) == pytest.approx(11)
    assert compare_runs.seconds_to(of_run, 3.0) is None


def test_runs_on_a_cpu_have_no_panel_of_memory_and_those_on_a_gpu_have():
    on_gpu = [row | {"peak_memory_bytes": 2**30} for row in rows("torch")]
    assert [len(compare_runs.draw({"a": of_run}).axes) for of_run in (rows("torch"), on_gpu)] == [5, 6]


def test_long_names_leave_the_columns_below_their_titles(tmp_path, monkeypatch, capsys):
    run = tmp_path / "smoke-l1_coefficient_0-steps_40-e8046381"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows("torch")))
    monkeypatch.setattr(sys, "argv", ["compare_runs", str(run), f"--output={tmp_path}/picture.png"])
    compare_runs.main()
    titles, values = capsys.readouterr().out.splitlines()[:2]
    assert values.split()[:2] == [run.name, "PyTorch"]
    assert titles.index("path") + len("path") == values.index("PyTorch") + len("PyTorch")
    assert len(titles) == len(values)


def test_the_command_writes_a_table_and_a_picture(tmp_path, monkeypatch, capsys):
    for name, engine in (("a", "tile"), ("b", "torch")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(engine)))
        save(from_overrides([f"run.name={name}"]), tmp_path / name / "config.yaml")
    output, lines = tmp_path / "out/picture.png", tmp_path / "lines.jsonl"
    options = [f"--output={output}", f"--json={lines}"]
    monkeypatch.setattr(sys, "argv", ["compare_runs", str(tmp_path / "a"), str(tmp_path / "b"), *options])
    compare_runs.main()
    assert output.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.splitlines()[1].split() == [
        "a", "kernels", "8", "3.125", "3.100", "10.0", "3", "12", "8",
    ]  # fmt: skip
    assert matplotlib.rcParams["axes.grid"] is False  # the style does not leak out of the figure
    first, second = map(json.loads, lines.read_text().splitlines())
    assert list(first["saved_by"]) == ["command", "machine", "date", "commit", "versions"]
    assert (first["name"], second["config"]["run"]["name"]) == ("a", "b")
    assert [row["tokens_per_s"] for row in first["rows"]] == [50.0] * 4 + [100.0] * 4
    assert second["rows"][-1]["plan_per_layer"] == ["torch"] * 2


def test_runs_of_one_name_are_told_apart_by_their_paths():
    """A name follows from the configuration: two versions of the code give one run the same."""
    old, new, other = Path("old/runs/a"), Path("new/runs/a"), Path("new/runs/b")
    assert compare_runs.named([old, new, other]) == {"old/runs/a": old, "new/runs/a": new, "b": other}


def test_time_and_speed_are_drawn_of_every_run():
    of_run = [row | {"peak_memory_bytes": 2**31} for row in rows("tile")]
    figure = compare_runs.draw({"a": of_run, "b": rows("torch")})
    on_shared = compare_runs.draw({"a": of_run}, shared_gpus=True)
    assert [axes.get_title() for axes in on_shared.axes[3:]] == ["largest memory of tensors on a GPU, GiB"]
    *_, in_time, speed, memory = (axes.get_lines() for axes in figure.axes)
    assert [list(line.get_xdata()) for line in in_time] == [[8, 12]] * 2
    assert list(speed[0].get_ydata()) == [50] * 3 + [100] * 4  # without the first step, which compiles
    assert [list(line.get_ydata()) for line in memory] == [[2] * 7, []]
