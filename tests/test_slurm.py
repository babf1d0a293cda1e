"""The SLURM scripts: what they request, and the commands that they run on one node and on many."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "scripts" / "slurm"
GPUS, CPUS = "8", "64"
ALWAYS = {"requeue": "", "open-mode": "append", "output": "%x-%j.log"}
ASKED = {
    "prepare": {"job-name": "sparsellm-prepare", "nodes": "1", "ntasks": "1", "cpus-per-task": "16",
                "time": "24:00:00"},
    "train": {"job-name": "sparsellm-train", "nodes": "1", "ntasks-per-node": "1", "gpus-per-node": GPUS,
              "cpus-per-task": CPUS, "exclusive": "", "mem": "0", "time": "24:00:00", "signal": "TERM@180"},
    "evaluate": {"job-name": "sparsellm-evaluate", "nodes": "1", "ntasks": "1", "gpus-per-node": GPUS,
                 "cpus-per-task": CPUS, "time": "04:00:00"},
}  # fmt: skip


def test_every_script_is_here():
    assert {path.stem for path in FOLDER.iterdir()} == ASKED.keys()


@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked_of_the_cluster(name):
    lines = (FOLDER / f"{name}.sh").read_text().splitlines()
    asked = [line.removeprefix("#SBATCH --").partition("=") for line in lines if line.startswith("#SBATCH")]
    assert {option: value for option, _, value in asked} == ASKED[name] | ALWAYS
    first = lines.index(next(line for line in lines if line and not line.startswith("#")))
    assert not [line for line in lines[first:] if line.startswith("#SBATCH")]  # SLURM reads none after a command
    assert subprocess.run(["bash", "-n", FOLDER / f"{name}.sh"], check=False).returncode == 0


def rendered(name: str, nodes: int, folder: Path, *arguments: str) -> list[str]:
    """The command that the script runs when SLURM allocates `nodes` nodes."""
    for program, does in {
        "scontrol": f"[ \"$*\" = 'show hostnames gpu[3-{nodes + 2}]' ] && printf 'gpu%d\\n' $(seq 3 {nodes + 2})",
        "srun": 'printf "%s\\n" "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" srun "$@"',
        "python": 'printf "%s\\n" python "$@"',
    }.items():
        (folder / program).write_text(f"#!/bin/sh\n{does}\n")
        (folder / program).chmod(0o755)
    # As sbatch does, which copies the script.
    script = shutil.copy(FOLDER / f"{name}.sh", folder / "slurm_script")
    slurm = {"JOB_ID": "1234567", "JOB_NUM_NODES": str(nodes), "JOB_NODELIST": f"gpu[3-{nodes + 2}]",
             "GPUS_ON_NODE": GPUS, "CPUS_PER_TASK": CPUS}  # fmt: skip
    environment = {f"SLURM_{key}": value for key, value in slurm.items()} | {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", script, *arguments], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize("nodes", [1, 4])
def test_training_on_one_node_and_on_many(nodes, tmp_path):
    assert rendered("train", nodes, tmp_path, "experiment=2b", "run.name=a b") == [
        "120", "srun", "--cpus-per-task=64", "python", "-m", "torch.distributed.run", f"--nnodes={nodes}",
        "--nproc-per-node=8", "--max-restarts=3", "--rdzv-backend=c10d",
        "--rdzv-endpoint=gpu3:24567", "--rdzv-id=1234567", "-m", "sparsellm.train", "experiment=2b", "run.name=a b",
    ]  # fmt: skip


def test_preparation_and_evaluation(tmp_path):
    assert rendered("prepare", 1, tmp_path, "experiment=2b") == [
        "python", "-m", "sparsellm.prepare_data", "experiment=2b",
    ]  # fmt: skip
    assert rendered("evaluate", 1, tmp_path, "checkpoint=runs/large") == [
        "python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=8", "-m", "sparsellm.evaluate",
        "checkpoint=runs/large",
    ]  # fmt: skip
