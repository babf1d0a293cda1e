"""What a run's folder holds, by name, for those that write it and those that only read it.

runs/NAME/{config.yaml, plots/, checkpoints/step_00000400/{hf/, state/, COMMITTED, evaluation/, analysis/, benchmark/}}
"""

from pathlib import Path

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
STEP = r"step_(\d{8,})"  # of a checkpoint's name
HF = "hf"
STATE = "state"
VALUES = "values.json"  # in state/: what is the same on all ranks
WAITING_ROW = "row"  # in values.json: that of the checkpoint's step, where it was saved before it was scored; or null
COMMITTED = "COMMITTED"  # JSON: size and checksum of every file of a checkpoint
EVALUATION, ANALYSIS, BENCHMARK = "evaluation", "analysis", "benchmark"
BENCHMARK_JSON = "benchmark.json"  # in benchmark/
PLOTS = "plots"
LOSS_PLOT = "loss.png"  # in plots/, written after the other pictures
ADDED = (EVALUATION, ANALYSIS, BENCHMARK)  # to a checkpoint, later, so not among them


def checkpoint(folder: Path, step: int) -> Path:
    """The checkpoint of `step` in the run's `folder`."""
    return folder / CHECKPOINTS / f"step_{step:08d}"


def rank_json(rank: int) -> str:
    """The file in a checkpoint's state/ with what `rank` saved; under "data" is its place in the training tokens."""
    return f"rank_{rank:05}.json"
