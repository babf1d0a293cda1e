"""The notebook in examples/ runs from top to bottom, and is stored without outputs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples/tiny.ipynb"


def code_cells() -> list[dict]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_stored_without_outputs():
    assert [cell["outputs"] for cell in code_cells()] == [[] for _ in code_cells()]


@pytest.mark.slow
def test_the_notebook_trains_draws_and_writes(tmp_path):
    script = tmp_path / "cells.py"
    cells = "\n".join("".join(cell["source"]) for cell in code_cells())
    assert cells.count("training.steps=100") == 1
    script.write_text(cells.replace("training.steps=100", "training.steps=30"))  # it only trains longer
    environment = os.environ | {"MPLBACKEND": "Agg", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "runs/notebook/metrics.jsonl").is_file()
    assert "Return the" in done.stdout
