"""Shared by all benchmarks: options, tables, the JSON file of results, and commands that end with a benchmark."""

import argparse
import json
import os
import signal
import subprocess
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from sparsellm.system.provenance import provenance

GRACE = 45  # seconds from SIGTERM to SIGKILL: torchrun gives its ranks 30 s


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that prints `description` unformatted in --help, with the option --json OUT."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="OUT", help="also write every number to this file")
    return made


def gpu() -> str:
    """A benchmark's first line: the GPU's name and torch's version. Exits if there is no GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


def cell(value: float | None, form: str) -> str:
    """`value` formatted with `form`; a dash for None."""
    return "-" if value is None else format(value, form)


def listed(title: str, values: Sequence[float]) -> str:
    """Formats the mean over layers and each layer's value."""
    return f"{title}: mean {sum(values) / len(values):,.1f}, by layer {' '.join(f'{value:.0f}' for value in values)}"


def table(rows: Iterable[dict[str, str]]) -> None:
    """Print `rows` as a table whose header is their keys, with the first column left-aligned. Rows may lack keys."""
    rows = list(rows)
    if not rows:
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    widths = [max(len(name), *(len(row.get(name, "")) for row in rows)) for name in names]
    for row in [dict(zip(names, names, strict=True)), *rows]:
        first, *others = (row.get(name, "") for name in names)
        print(first.ljust(widths[0]) + "".join(f"  {cell:>{w}}" for cell, w in zip(others, widths[1:], strict=True)))


def write(out: Path | None, found: Any) -> None:
    """Write `provenance()` and the results to the file given by --json, if any. A list is stored under "results"."""
    if out is not None:
        results = found if isinstance(found, dict) else {"results": found}
        out.write_text(json.dumps(provenance() | results, indent=1, default=str) + "\n")


@contextmanager
def started(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start `command` and append its output to `log`. At the end, all processes under it are ended.

    If the command still runs, it gets SIGTERM and GRACE seconds. Then whatever is left gets SIGKILL. The processes are
    found by a variable in their environment, because torchrun's ranks have sessions of their own, and a dead rank's
    children no longer have a parent.
    """
    mark = f"SPARSELLM_BENCHMARK_{uuid.uuid4().hex}"
    with log.open("ab") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=os.environ | {mark: "1"}
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        for pid in _processes_with(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _processes_with(variable: str) -> list[int]:
    """IDs of the processes that have `variable` in their environment. One that has ended has no environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # another user's, or ended
            if f"{variable}=1".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def run(command: Sequence[str], log: Path, seconds: float) -> int | None:
    """The exit code of `command`, or None if it was ended after `seconds`. Its output is appended to `log`."""
    with started(command, log) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
