"""The names of files and folders in a run's folder.

runs/NAME/{config.yaml, plots/, checkpoints/step_00000400/{hf/, state/, COMMITTED, evaluation/, analysis/, benchmark/}}
"""

import re
from collections.abc import Iterable
from pathlib import Path

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
STEP = r"step_(\d{8,})"  # name of a checkpoint's folder
HF = "hf"
STATE = "state"
VALUES = "values.json"  # in state/: values shared by all ranks
WAITING_ROW = "row"  # in values.json: the row of the checkpoint's step, or null if that row was scored and written
COMMITTED = "COMMITTED"  # JSON: size and checksum of every file of a checkpoint
EVALUATION, ANALYSIS, BENCHMARK = "evaluation", "analysis", "benchmark"
BENCHMARK_JSON = "benchmark.json"  # in benchmark/
PLOTS = "plots"
LOSS_PLOT = "loss.png"  # in plots/, written after the other plots
ADDED = (EVALUATION, ANALYSIS, BENCHMARK)  # added to a checkpoint later, so not in COMMITTED


def checkpoint(folder: Path, step: int) -> Path:
    """The checkpoint of `step` in the run's `folder`."""
    return folder / CHECKPOINTS / f"step_{step:08d}"


def checkpoints_by_step(paths: Iterable[Path]) -> dict[int, Path]:
    """{step: path} for those `paths` that are named like checkpoints, complete or not, in ascending order."""
    found = ((re.fullmatch(STEP, path.name), path) for path in paths)
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def rank_json(rank: int) -> str:
    """Name of the file in state/ with the values saved by `rank`. Key "data": the position in the training tokens."""
    return f"rank_{rank:05}.json"
