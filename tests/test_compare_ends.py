"""Runs compared at their ends: nothing in mid-schedule counts, and the numbers follow from the file."""

import json

import pytest
from PIL import Image

from scripts import compare_ends, compare_runs
from sparsellm.config import from_overrides, save, to_dict

GIB = 2**30


def line(name, losses, speed, *overrides, engines=None):
    """A run of four steps of 1M tokens, validated at steps 2 and 4; `engines`: one of each row, for ReLU."""
    config = to_dict(from_overrides(["experiment=0p5b", "training.steps=4", *overrides]))
    rows = []
    for step, held_out in zip(range(1, 5), (None, losses[0], None, losses[1]), strict=True):
        relu = {"nnz_mean": 5632 / 4**step, "dead_per_layer": [2816] + [0] * 7} if engines else {}
        rows.append({
            "step": step, "tokens": step * 1_000_000, "ce": 3.0, "val_ce": held_out,
            "nnz_mean": None, "dead_per_layer": None, "tokens_per_s": speed, "mj_per_token": None if step == 1 else 4.0,
            "peak_memory_bytes": (50 - step) * GIB, "plan_per_layer": [engines[step - 1] if engines else "torch"] * 8,
        } | relu)  # fmt: skip
    return {"name": name, "config": config, "rows": rows}


def lines():
    silu = "sparsity=dense_silu"
    return [
        line("silu", (4.0, 3.0), 1e6, silu),
        line("fp8", (4.0, 3.01), 1.25e6, silu, "runtime.float8=all"),
        line("l1", (3.9, 2.95), 0.8e6, "model.intermediate_size=11264", engines=("dense", "dense", "tile", "tile")),
    ]


def written(path, lines):
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def test_the_table_has_a_column_for_each_run(tmp_path):
    runs = compare_ends.read(written(tmp_path / "runs.jsonl", lines()))
    header, _, *rows = compare_ends.table(runs).splitlines()
    assert header == "|  | SiLU, N 5,632 | SiLU in FP8, N 5,632 | ReLU + L1 2e-5, N 11,264 |"
    assert [[cell.strip() for cell in row.strip("|").split("|")] for row in rows] == [
        ["parameters", "512M", "512M", "789M"],
        ["held-out cross entropy at the end", "3.0000", "3.0100", "2.9500"],
        ["difference to SiLU, N 5,632", "", "+0.0100", "-0.0500"],
        ["nonzeros per token at the end", "all", "all", "22.0"],
        ["zeros", "", "", "99.80%"],
        ["dead neurons", "", "", "3.1%"],
        ["seconds of steps", "4", "3", "5"],
        ["seconds, ratio to SiLU, N 5,632", "", "0.80", "1.25"],
        ["seconds until no layer was dense", "", "", "2"],  # 2.5, rounded to even
        ["tokens/s in the last steps", "1,000,000", "1,250,000", "800,000"],
        ["peak tensor memory, GiB", "49.0", "49.0", "49.0"],
        ["memory at the end, GiB", "46.0", "46.0", "46.0"],
        ["energy, kJ", "12", "12", "12"],
        ["energy, ratio to SiLU, N 5,632", "", "1.00", "1.00"],
        ["checkpoint, GB", "7.2", "7.2", "11.0"],
    ]


def test_each_relu_run_is_compared_with_each_silu_run(tmp_path):
    runs = compare_ends.read(written(tmp_path / "runs.jsonl", lines()))
    assert compare_ends.pairs(runs).splitlines() == [
        "- **ReLU + L1 2e-5, N 11,264** ends 0.050 nats lower in 1.25x the time, with 1.00x the energy and 1.54x the"
        " parameters of SiLU, N 5,632.",
        "- **ReLU + L1 2e-5, N 11,264** ends 0.060 nats lower in 1.56x the time, with 1.00x the energy and 1.54x the"
        " parameters of SiLU in FP8, N 5,632.",
    ]


def test_a_layer_that_stays_dense_is_counted_until_the_end():
    engines = ("dense", "tile", "dense", "tile")  # back to dense once
    assert compare_ends.Run(line("l1", (3, 3), 1e6, engines=engines)).dense_seconds == 3
    assert compare_ends.Run(line("l1", (3, 3), 1e6, engines=("tile",) * 4)).dense_seconds == 0


def test_a_run_without_its_end_is_refused(tmp_path, capsys):
    stopped = lines()
    del stopped[2]["rows"][3:]
    unvalidated = lines()
    unvalidated[0]["rows"][-1]["val_ce"] = None
    for wrong, message in (
        (stopped, "no validation at the last step, so no end to compare: l1"),
        (unvalidated, "no validation at the last step, so no end to compare: silu"),
        (lines()[2:], "no SiLU run"),
    ):
        with pytest.raises(SystemExit):
            compare_ends.main([str(written(tmp_path / "runs.jsonl", wrong)), f"--output={tmp_path}/ends.png"])
        assert message in capsys.readouterr().err
    assert not (tmp_path / "ends.png").exists()


def test_a_file_that_cannot_be_read_is_named(tmp_path, capsys):
    path = tmp_path / "runs.jsonl"
    for message in ("No such file", "Expecting"):
        with pytest.raises(SystemExit):
            compare_ends.main([str(path), f"--output={tmp_path}/ends.png"])
        said = capsys.readouterr().err
        assert f"{path}: " in said
        assert message in said
        path.write_text('{"name": 1\n')


def test_of_two_close_ends_the_higher_is_named_above_the_lower_below(tmp_path):
    runs = compare_ends.read(written(tmp_path / "runs.jsonl", lines()))  # ends at 3.00, 3.01 and 2.95
    runs[1].rows[-1]["val_ce"] = 3.001
    ends = compare_ends.draw(runs, []).axes[1]
    assert [text.get_va() for text in ends.texts[:3]] == ["top", "bottom", "center"]


def test_the_command_draws_ends_large_and_runs_of_another_host_hollow(tmp_path, capsys):
    path = written(tmp_path / "runs.jsonl", lines())
    compare_ends.main([str(path), "--output", str(tmp_path / "ends.png"), "--other-host", "fp8"])
    runs = compare_ends.read(path)
    with Image.open(tmp_path / "ends.png") as picture:
        assert picture.info["Source"] == compare_runs.checksum({run.name: run.rows for run in runs})
    assert capsys.readouterr().out.startswith(compare_ends.table(runs))
    figure = compare_ends.draw(runs, ["fp8"])
    over_time, ends = figure.axes
    large = [line for line in over_time.get_lines() if line.get_markersize() == compare_ends.LARGE]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in large] == [(4, 3.0), (3.2, 3.01), (5, 2.95)]
    assert [line.get_markerfacecolor() == "white" for line in large] == [False, True, False]
    small = [list(line.get_ydata()) for line in over_time.get_lines() if line not in large]
    assert small == [[4.0, 3.0], [4.0, 3.01], [3.9, 2.95]]
    names = [text.get_text() for text in ends.texts]
    assert "ReLU + L1 2e-5, N 11,264\n-0.050 nats, 1.25x the time" in names
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["SiLU, N 5,632", "SiLU in FP8, N 5,632 (another host)", "ReLU + L1 2e-5, N 11,264"]


def test_a_file_of_compare_runs_has_the_times_and_energies_of_all_rows(tmp_path, monkeypatch):
    """300 rows with speeds and energies of their own, of which the file keeps about 80."""
    rows = [
        {
            "step": step, "tokens": 100 * step, "ce": 3.0, "val_ce": 3.1 if step == 300 else None, "nnz_mean": None,
            "dead_per_layer": None, "tokens_per_s": 50.0 + step % 7,
            "mj_per_token": 4.0 + step % 3 if step > 1 else None,
            "peak_memory_bytes": 2**34 if step == 200 else 2**33, "plan_per_layer": ["torch"] * 8,
        }
        for step in range(1, 301)
    ]  # fmt: skip
    folder = tmp_path / "silu"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save(from_overrides(["experiment=0p5b", "sparsity=dense_silu", "training.steps=300"]), folder / "config.yaml")
    output = tmp_path / "runs.jsonl"
    command = ["compare_runs", str(folder), f"--output={tmp_path}/all.png", f"--json={output}"]
    monkeypatch.setattr("sys.argv", command)
    compare_runs.main()
    (run,) = compare_ends.read(output)
    assert len(run.rows) < 90
    assert run.finished
    assert run.seconds == pytest.approx(compare_runs.seconds(rows)[-1], rel=1e-6)
    assert run.kilojoules == pytest.approx(sum(100 * row["mj_per_token"] for row in rows[1:]) / 1e6, rel=1e-5)
    assert max(row["peak_memory_bytes"] for row in run.rows) == 2**34
