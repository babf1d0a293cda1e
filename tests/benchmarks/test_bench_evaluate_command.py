"""The seconds that bench_evaluate_command takes from a command's lines."""

import pytest

from scripts.benchmarks.bench_evaluate_command import scoring_seconds, timed

SAID = """
import time
print("sparsellm evaluate: starting", flush=True)
print("sparsellm: dtype bfloat16 (dtype=bfloat16), kernels cuda (available on this GPU)", flush=True)
print("arc_easy  3/9 requests", flush=True)
time.sleep(0.3)
print("arc_easy  0.1250", flush=True)
print("arc_easy        0.1250  acc_norm  0.2500", flush=True)
"""


def test_scoring_ends_with_the_last_score_and_not_with_the_table():
    said = [
        (2.0, "sparsellm: dtype bfloat16 (as the run trained), kernels cuda (available on this GPU)\n"),
        (2.5, "arc_easy  32/32 requests\n"), (3.0, "arc_easy  0.1250\n"), (4.5, "piqa  0.5000\n"),
        (9.0, "piqa            0.5000  acc_norm  0.5000\n"),
    ]  # fmt: skip
    assert scoring_seconds(said) == 2.5
    assert scoring_seconds(said[:2]) is None
    assert scoring_seconds([]) is None


def test_lines_are_timed_while_the_command_runs(tmp_path, monkeypatch):
    (tmp_path / "says.py").write_text(SAID)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    took = timed("says", [], 1)
    assert took.scoring is not None
    assert 0.3 <= took.scoring <= took.whole
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    with pytest.raises(SystemExit, match="fails failed with code 3"):
        timed("fails", [], 1)
