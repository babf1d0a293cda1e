"""Rows and their file."""

import json

import pytest

from sparsellm.training.metrics import METRICS, MetricsFile, mfu, read


def test_mfu_is_the_designs():
    """DESIGN §6: 152k tokens/s of the 0.5B model are 50% of an H200."""
    parameters = 49_152 * 2_048 + 8 * (4 * 2_048**2 + 3 * 2_048 * 5_632)
    assert mfu(152_000, parameters, 8, 2_048, 2_048, 989e12) == pytest.approx(0.50, abs=0.005)
    assert mfu(152_000, parameters, 8, 2_048, 2_048, 8 * 989e12) == pytest.approx(0.50 / 8, abs=0.001)


def test_the_file_begins_anew_after_the_last_step(tmp_path):
    path = tmp_path / METRICS
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 10, 20)) + '{"step": 3')
    file = MetricsFile(path, last_step=10)
    file.write({"step": 11})
    file.sync()
    assert read(path) == [{"step": 1}, {"step": 10}, {"step": 11}]
    with pytest.raises(ValueError, match="not JSON compliant"):
        file.write({"loss": float("nan")})
