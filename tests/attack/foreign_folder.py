"""What may stand in a run's folder that somebody else has his hands in, and how a command answers to it."""

import os
import shutil
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from sparsellm import cli

PATIENCE = 30  # seconds
LAST = "runs/r/checkpoints/step_00000012"
FILES = [
    "runs/r/config.yaml", "runs/r/metrics.jsonl", "runs/r/lock", "runs/r/plots/loss.png", "runs/r/micro_batch.json",
    f"{LAST}/COMMITTED", f"{LAST}/hf/config.json", f"{LAST}/hf/tokenizer.json", f"{LAST}/hf/tokenizer_config.json",
    f"{LAST}/hf/model.safetensors", f"{LAST}/hf/generation_config.json", f"{LAST}/hf/README.md",
    f"{LAST}/state/values.json", f"{LAST}/state/rank_00000.json", f"{LAST}/state/.metadata",
    f"{LAST}/evaluation/results.json", f"{LAST}/evaluation/results.json.partial", f"{LAST}/evaluation/tasks/piqa.json",
    f"{LAST}/analysis/analysis.json", f"{LAST}/analysis/analysis.json.partial", f"{LAST}/benchmark/benchmark.json",
    "runs/r/config.yaml.partial", "runs/r/metrics.jsonl.partial",
]  # fmt: skip
FOLDERS = [
    "runs", "runs/r", "runs/r/checkpoints", "runs/r/plots", LAST, f"{LAST}/hf", f"{LAST}/state", f"{LAST}/evaluation",
    f"{LAST}/analysis", f"{LAST}/benchmark", f"{LAST}.partial", "runs/r/checkpoints/step_00000013",
]  # fmt: skip


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 10**10)


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's path has 107 bytes at most
        made.bind(path.name)
        os.chdir(here)


# What is put at a path where nothing is.
PLANTED: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a socket": bound,
    "a folder": os.mkdir,
    "an empty file": Path.touch,
    "10 GB of zeros": sparse,
    "a link to nothing": lambda path: path.symlink_to("/nothing/there"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to zeros without end": lambda path: path.symlink_to("/dev/zero"),
    "a link to a file of the user's": lambda path: path.symlink_to(Path.cwd() / "precious"),
    "nothing": lambda path: None,
}


def plant(path: Path, kind: str) -> None:
    """Put `kind` in the place of what is at `path`, in the working directory."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    PLANTED[kind](path)


def answer(command: str, arguments: list[str], folder: Path, output: Path) -> int:
    """The exit code of `command` in `folder`, done in a fork of this process; -14: it took longer than PATIENCE."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(PATIENCE)
            os.chdir(folder)
            with output.open("wb", buffering=0) as said, Path("/dev/null").open("rb") as nothing:
                os.dup2(nothing.fileno(), 0)
                for number in (1, 2):
                    os.dup2(said.fileno(), number)
            cli.run(command, arguments)
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def wrong(code: int, output: Path) -> str | None:
    """What is wrong with an answer: a traceback, no end, or no word."""
    said = output.read_text(errors="replace")
    if code == -signal.SIGALRM:
        return f"hangs: {said[-300:]}"
    if code not in (0, 1, 2) or "Traceback" in said:
        return f"exit code {code}: {said[-1500:]}"
    lines = [line for line in said.splitlines() if line.strip() and "starting" not in line]
    return f"exit code {code} without a word" if code and not lines else None
