"""A sweep's commands: as argument lists, as shell lines, and as a SLURM script."""

import shlex
import sys
from pathlib import Path

from sparsellm.config import quoted, wandb_variables
from sparsellm.sweep.plan import Point, Sweep

GROUP = "logging.wandb_group"
SAVING = 180  # how many seconds before the time limit SLURM sends its signal, so that a run can save


def train(sweep: Sweep, point: Point) -> list[str]:
    typed = any(override.startswith(f"{GROUP}=") for override in point.overrides)
    # A run reads WANDB_RUN_GROUP itself, unless it starts from the config.yaml of another run.
    grouped = typed or ("wandb_group" in wandb_variables() and point.config.logging.wandb_group is not None)
    return _launch(sweep, "train", [*point.overrides, *([] if grouped else [f"{GROUP}={sweep.name}"])])


def evaluate(sweep: Sweep, point: Point) -> list[str]:
    return _launch(sweep, "evaluate", sweep.evaluation_of(point))


def benchmark(point: Point) -> list[str]:
    """The command that benchmarks a point: one process, however many processes trained the run."""
    return [sys.executable, "-m", "sparsellm.benchmark", f"checkpoint={quoted(str(point.checkpoint))}"]


def text(sweep: Sweep, arguments: list[str]) -> str:
    """One shell line per run, and a comment with the command that writes the table once the runs are done."""
    lines = []
    for point in sweep.points:
        each = [train(sweep, point)]
        each += [evaluate(sweep, point)] if sweep.options.evaluate else []
        each += [benchmark(point)] if sweep.options.benchmark else []
        lines.append(" && ".join(map(shlex.join, each)))
    return "\n".join([*lines, f"# afterwards, for the table and the figure: {shlex.join(_again(arguments))}"])


def slurm_script(sweep: Sweep, arguments: list[str]) -> str:
    """A SLURM array script. Each task runs one point of the sweep given by `arguments`, then rewrites the table.

    `exec` replaces the shell, so that the sweep alone gets SLURM's signal and forwards it once.
    """
    return f"""#!/bin/bash
#SBATCH --job-name={sweep.name}
#SBATCH --array=0-{len(sweep.points) - 1}
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node={sweep.processes}
#SBATCH --signal=B:TERM@{SAVING}
#SBATCH --open-mode=append

cd {shlex.quote(str(Path.cwd()))} || exit 1
exec {shlex.join(_again(arguments))} sweep.point="$SLURM_ARRAY_TASK_ID"
"""


def _again(arguments: list[str]) -> list[str]:
    kept = [argument for argument in arguments if not argument.startswith(("sweep.mode=", "sweep.point="))]
    return [sys.executable, "-m", "sparsellm.sweep", *kept]


def _launch(sweep: Sweep, module: str, arguments: list[str]) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={sweep.processes}"]
    return [sys.executable, *(torchrun if sweep.processes > 1 else []), "-m", f"sparsellm.{module}", *arguments]
