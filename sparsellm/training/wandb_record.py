"""A run's record in Weights & Biases: the rows of metrics.jsonl, its figures, and evaluations of its checkpoints.

A run has one record, whose id is in its folder. Each start of a training, and each evaluation, adds to that record:
online as it goes on; offline in a folder of its own, wandb/offline-run-*, which `wandb sync` uploads. Given the folder
wandb/ of a run, `wandb sync` (0.31) takes all offline folders that it has not uploaded, and those of one id one after
the other, in the order of their starts, into one record.

wandb writes rows to the disk every 15 seconds. A run that was killed sooner leaves a file with a header alone, because
of which `wandb sync` refuses the whole folder: the next start removes such files, which hold nothing.

On a full disk wandb (0.31) drops rows without an error, those that come once there is room again, too. What shows is a
file that grows no more: a line says so, once, and training goes on, for metrics.jsonl has every row.
"""

import logging
import os
import re
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from sparsellm import regular
from sparsellm.config import Config, WandbMode, to_dict
from sparsellm.console import say, warn
from sparsellm.files import write_whole
from sparsellm.training.checkpoint import spelled
from sparsellm.training.metrics import METRICS

FOLDER = "wandb"  # in the run's folder
HEADER_BYTES = 7  # of a .wandb file, before its first record
PATIENCE = 60  # seconds without growth of a record that was given rows
FINISHING = 30  # seconds for which the end of a record is waited for
TABLE = ("score", "stderr", "metric", "rows")  # of a task, beside its name


class WandbRun:
    """Online with a key, otherwise offline; `place` says which. Every method does nothing where logging is disabled.

    No method raises OSError: a record that cannot be written, as on a full disk, is named in a line on stderr, once.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self.folder = folder
        self._run: Any = None  # wandb's own
        self._lacking = False  # whether it was said that rows are lacking
        self._bytes = 0  # of the record as last seen
        self._given: float | None = None  # when it was given the first row since
        self.place = "disabled"
        if config.logging.wandb != WandbMode.disabled:
            self._attempt(lambda: self._start(config, folder))
            if self._run is None:
                self.place = "not recorded, for its folder cannot be written"

    def _start(self, config: Config, folder: Path) -> None:
        for part in offline_parts(folder):
            if part.stat().st_size <= HEADER_BYTES:
                shutil.rmtree(part.parent)
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        mode: Any = config.logging.wandb.name
        self.place = mode
        if mode == "online" and not wandb.api.api_key:
            mode = "offline"
            self.place = "offline, for there is no key (set WANDB_API_KEY, or run `wandb login`)"
        start = partial(
            wandb.init, project=config.logging.wandb_project, group=config.logging.wandb_group, name=config.run.name,
            id=record_id(folder), resume="allow", config=to_dict(config),
            # The process of wandb that writes may be of a parent that works in another folder (WANDB_SERVICE).
            dir=folder.absolute(),
        )  # fmt: skip
        try:
            self._run = start(mode=mode)
        except wandb.errors.Error as error:
            self.place = f"offline, for {mode} failed: {error}"
            self._run = start(mode="offline")
        if self._run.url:
            self.place = self._run.url

    def write(self, row: dict[str, Any]) -> None:
        if self._run is None:
            return
        flat = {}
        for key, value in row.items():
            if key == "plan_per_layer":
                flat["tile_layers"] = value.count("tile")
            elif isinstance(value, list):
                flat |= {f"{key}/{layer:02d}": v for layer, v in enumerate(value)}
            elif isinstance(value, dict):  # as `evaluation` below has them
                named = {"step": row["step"], **value}
                flat |= {f"{key}/{name}": v for name, v in named.items() if v is not None}
            elif value is not None:
                flat[key] = value
        self._look_for_growth()
        # The step is given: an offline run that resumes would count from 0 again.
        self._attempt(lambda: self._run.log(flat, step=row["step"]))

    def figures(self, step: int, files: list[Path]) -> None:
        """Add pictures of the run after `step`, by the names of their files."""
        if self._run is None:
            return
        import wandb

        self._attempt(lambda: self._log(step, {f"plots/{path.stem}": wandb.Image(str(path)) for path in files}))

    def evaluation(self, step: int, scores: dict[str, float], table: str, tasks: dict[str, dict[str, Any]]) -> None:
        """Add what an evaluation of the checkpoint at `step` gave: as a row, in the summary of the run, and as a table.

        `table`: its name. `tasks`: each one's values, of which the table has those of TABLE.
        """
        if self._run is None:
            return
        import wandb

        def add() -> None:
            rows = [[name, *(values[key] for key in TABLE)] for name, values in tasks.items()]
            self._run.define_metric("evaluation/*", step_metric="evaluation/step")
            self._log(step, {"evaluation/step": step, **scores, table: wandb.Table(["task", *TABLE], rows)})
            self._run.summary.update(scores)

        self._attempt(add)

    def _log(self, step: int, values: dict[str, Any]) -> None:
        """A record online refuses rows before its last one, and one offline has forgotten where that was."""
        self._run.log(values, step=max(step, self._run.step))

    def close(self, exit_code: int) -> None:
        if self._run is None:
            return
        size = self._size()
        self._attempt(lambda: self._run.finish(exit_code=exit_code))
        # It has at least the end of the run to add, which wandb's own process may still be about to do.
        deadline = time.monotonic() + FINISHING
        while self._size() <= size and any((self.folder / FOLDER).glob("*run-*")) and time.monotonic() < deadline:
            time.sleep(0.1)
        if size and self._size() <= size:
            self._say_lacking("its file has not grown at its end")

    def _size(self) -> int:
        """Bytes of the record in the run's folder."""
        return sum(part.stat().st_size for part in (self.folder / FOLDER).glob("*run-*/*.wandb"))

    def _look_for_growth(self) -> None:
        """Say so if the record has not grown for long, though it was given rows."""
        size, now = self._size(), time.monotonic()
        if size != self._bytes:
            self._bytes, self._given = size, None
        if self._given is None:
            self._given = now
        elif now - self._given > PATIENCE:
            self._say_lacking(f"its file has not grown for {now - self._given:.0f} s")

    def _attempt(self, work: Callable[[], object]) -> None:
        """Do `work`, which may find the disk full."""
        # wandb keeps a log in the run's folder, too; where that cannot be written, logging prints tracebacks.
        before, logging.raiseExceptions = logging.raiseExceptions, False
        try:
            work()
        except OSError as error:
            self._say_lacking(str(error))
        finally:
            logging.raiseExceptions = before

    def _say_lacking(self, why: str) -> None:
        if not self._lacking:
            self._lacking = True
            free = shutil.disk_usage(self.folder).free
            say(
                f"sparsellm: the Weights & Biases record in {self.folder / FOLDER} lacks rows, for it cannot be written"
                f" ({why}; {spelled(free)} free there): {self.folder / METRICS} has them all. Free some space"
            )


def record_id(folder: Path) -> str:
    """One for each run folder, through all its starts: names of runs may repeat on other machines."""
    path = folder / FOLDER / "id"
    found, *check = _content(path).split() or [""]
    if re.fullmatch("[0-9a-f]{16}", found) and check in ([], [_check(found)]):
        return found
    damaged = f"{path}, which names the run's record in Weights & Biases, is damaged: " if path.exists() else None
    known = {part.name.rpartition("-")[2] for part in path.parent.glob("*run-*-*")}  # wandb's folders end in the id
    if len(known) == 1:
        (found,) = known
        remedy = f"the folders beside it are of {found}, which the run goes on with"
    else:
        found = secrets.token_hex(8)
        remedy = f"the run goes on in a new record, {found}"
    if damaged:
        warn(f"{damaged}{remedy}")
    path.parent.mkdir(exist_ok=True)
    write_whole(path, f"{found} {_check(found)}\n")
    return found


def _content(path: Path) -> str:
    try:
        return regular.content(path).decode(errors="replace")
    except OSError:  # there is none, or what is there is no file
        return ""


def _check(record: str) -> str:
    """What stands beside an id in its file, so that a changed one is noticed; earlier versions wrote the id alone."""
    return xxhash.xxh3_64_hexdigest(record.encode())


def offline_parts(folder: Path) -> list[Path]:
    """The files of the record of the run in `folder` that starts without a connection have left."""
    return sorted((folder / FOLDER).glob("offline-run-*/*.wandb"))


def sync_command(folder: Path) -> str | None:
    """What uploads the offline parts of the record of the run in `folder`; None: none waits for that."""
    if all(part.with_name(part.name + ".synced").exists() for part in offline_parts(folder)):
        return None
    program = "wandb" if shutil.which("wandb") else f"{shlex.quote(sys.executable)} -m wandb"
    return f"{program} sync {shlex.quote(str(folder / FOLDER))}"
