"""How a measurement was made: the first keys in every benchmark's JSON."""

import os
import platform
import shlex
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pynvml

PACKAGES = ("sparsellm", "torch", "triton", "transformers", "datasets", "lm_eval")
CHECKOUT = Path(__file__).resolve().parents[2]


def provenance() -> dict[str, Any]:
    """Command, machine, date (UTC), commit and versions of this process."""
    return {
        "command": _command(sys.orig_argv, int(os.environ.get("LOCAL_WORLD_SIZE", 1))),
        "machine": _machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(CHECKOUT),
        "versions": {"python": platform.python_version()} | {name: installed(name) for name in PACKAGES},
    }


def _command(argv: list[str], ranks: int) -> str:
    """The command line without the interpreter's path; `ranks`: processes that torchrun started on this node."""
    if "-m" in argv:
        launcher = ["python"] if ranks == 1 else ["torchrun", "--standalone", "--nproc_per_node", str(ranks)]
        return shlex.join([*launcher, *argv[argv.index("-m") :]])
    return shlex.join([Path(argv[1]).name, *argv[2:]] if len(argv) > 1 else argv)


def _machine() -> str:
    """For example "2 x NVIDIA H100 80GB HBM3, 32 CPU cores, driver 580.159.04"; without a GPU only "32 CPU cores".

    Queries NVML instead of torch, which would create a CUDA context and take memory from the runs of a sweep.
    """
    cores = f"{len(os.sched_getaffinity(0))} CPU cores"
    try:
        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        gpus = [f"{count} x {name}" for name, count in Counter(map(pynvml.nvmlDeviceGetName, handles)).items()]
        return ", ".join([*gpus, cores, f"driver {pynvml.nvmlSystemGetDriverVersion()}"])
    except pynvml.NVMLError:
        return cores


def _commit(folder: Path) -> str | None:
    """The commit checked out in `folder`, with "+" if files differ from it; None outside a git checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    if not (folder / ".git").exists():
        return None  # an installed wheel, which may be inside some other project's checkout
    try:
        return git("rev-parse", "HEAD") + "+" * bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return None


def installed(package: str) -> str | None:
    """The installed version; None for a package that is not installed but runs from its source tree."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
