"""bench_memory.py: what it measures and prints, on a CPU instead of a part of a GPU."""

import json

import pytest
from test_shaped_models import TINY

from scripts.benchmarks import bench_memory
from sparsellm.training import micro_batch, plans


@pytest.mark.slow
def test_auto_is_shown_beside_half_as_many_and_twice_as_many_sequences(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plans, "DECIDE_EVERY", 8)  # so that the script's change is undone
    monkeypatch.setattr(micro_batch, "SETTLED", 4)
    monkeypatch.setattr(micro_batch, "CPU_SEQUENCES", 4)
    monkeypatch.setattr(bench_memory, "WARMUP", 1)
    out = tmp_path / "result.json"
    overrides = [each for each in TINY if not each.startswith(("experiment", "training.batch_size", "logging"))]
    bench_memory.main(
        [*overrides, f"data.path={tmp_path / 'data'}", f"run.root={tmp_path / 'runs'}", "--experiments", "smoke",
         "--ways", "torch", "sparse", "--batch", "8", "--steps", "1", "--firing", "8", "--json", str(out)]
    )  # fmt: skip
    rows = json.loads(out.read_text())["rows"]
    assert [row["way"] for row in rows] == ["torch", "sparse"]
    for row in rows:
        assert row["auto"]["micro_batches"] == [4, 4]
        assert list(row["given"]) == ["2", "8"]
        assert all(given["micro_batches"] == [int(size)] * 2 for size, given in row["given"].items())
    assert rows[0]["auto"]["nonzeros"] > 10 * rows[1]["auto"]["nonzeros"]
    shown = capsys.readouterr().out
    assert "smoke: kernels with an automatic micro-batch: " in shown
    line = next(line for line in shown.splitlines() if line.startswith("smoke") and " torch " in line)
    speeds = [row["tokens_per_s"] for row in (rows[0]["auto"], *rows[0]["given"].values())]
    assert line.split()[-1] == f"{speeds[0] / max(speeds):.3f}"
