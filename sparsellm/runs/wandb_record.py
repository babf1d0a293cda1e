"""A run's record in Weights & Biases: the rows of metrics.jsonl, its figures, and evaluations of its checkpoints.

A run has one record, whose id is in its folder. Each start of a training, and each evaluation, adds to that record:
online as it goes on; offline in a folder of its own, wandb/offline-run-*, which `wandb sync` uploads. Given the folder
wandb/ of a run, `wandb sync` (0.31) takes all offline folders that it has not uploaded, and those of one id one after
the other, in the order of their starts, into one record.

wandb writes rows to the disk every 15 seconds. A run that was killed sooner leaves a file with a header alone, because
of which `wandb sync` refuses the whole folder: the next start removes such files, which hold nothing.

On a full disk wandb (0.31) drops rows without an error, those that come once there is room again, too. What shows is a
file that grows no more: a line says so, once, and training goes on, for metrics.jsonl has every row.

No failure of wandb ends a command or holds it up for more than some ten seconds. A start that fails online begins again
offline. The server may fail later: wandb writes every row to a file in the run's folder first, and a line at the end
names the command that uploads what the server has not taken.

A record leaves out what a model card leaves out (hf/card.py): command line, host, folders of absolute paths.
"""

import logging
import os
import re
import secrets
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from sparsellm.config import Config, LoggingConfig, WandbMode, to_dict
from sparsellm.hf.card import without_folders
from sparsellm.runs.checkpoint import spelled
from sparsellm.runs.metrics import METRICS
from sparsellm.system import regular
from sparsellm.system.console import say, warn
from sparsellm.system.files import write_whole

FOLDER = "wandb"  # in the run's folder
HEADER_BYTES = 7  # of a .wandb file, before its first record
PATIENCE = 60  # seconds without growth of a record that was given rows
FINISHING = 8  # seconds for which the end of a record is waited for
TABLE = ("score", "stderr", "metric", "rows")  # of a task, beside its name

# What wandb is told where its own variable, WANDB_INIT_TIMEOUT and so on, is not set.
SETTINGS: dict[str, Any] = {
    "init_timeout": 6,  # seconds for the server to answer, of 90 by default
    "finish_timeout": FINISHING,  # seconds to upload what is left, by default without end
    "finish_timeout_raises": True,
    "x_disable_meta": True,  # command line, program, interpreter, folder
    "host": "",
    "disable_git": True,
}
MODES = {
    "online": WandbMode.online, "run": WandbMode.online, "shared": WandbMode.online, "offline": WandbMode.offline,
    "dryrun": WandbMode.offline, "disabled": WandbMode.disabled,
}  # fmt: skip
LEAST_FIRST = (WandbMode.disabled, WandbMode.offline, WandbMode.online)
FATAL = b'"level":"ERROR+4"'  # in wandb's own log of a run: it has given up uploading rows


class WandbRun:
    """Online with a key, otherwise offline; `place` says which, and why. Without a record every method does nothing.

    No method raises an exception of wandb or OSError: what a record lacks is named in a line on stderr, once.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self.folder = folder
        self._run: Any = None  # wandb's own
        self._lacking = False  # whether it was said that rows are lacking
        self._bytes = 0  # of the record as last seen
        self._given: float | None = None  # when it was given the first row since
        mode, why = chosen_mode(config.logging.wandb)
        where = mode.name
        if mode != WandbMode.disabled:
            where = self._start(mode, partial(_init, config.logging, config.run.name, to_dict(config), folder))
        self.place = where + why

    def _start(self, mode: WandbMode, begin: Callable[[str], Any]) -> str:
        """Begin the record, by `begin(mode)`: where it is, or why there is none.

        One of wandb's own variables may be what fails, as WANDB_BASE_URL: the last attempt is without them.
        """
        os.environ.setdefault("WANDB_SILENT", "true")
        # wandb reports its own errors and timings to its server, for which the end of a process may wait for 20 s.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        _have_a_home()
        attempts = [("offline", False), ("offline", True)]
        if mode == WandbMode.online:
            attempts.insert(0, ("online", False))
        why = ""
        for attempt, bare in attempts:
            try:
                with _environment(bare), _quiet_logging():
                    if attempt == "online" and not _has_key():
                        why = ", for there is no key (set WANDB_API_KEY, or run `wandb login`)"
                        continue
                    self._run = begin(attempt)
                return self._run.url or attempt + why
            except Exception as error:
                failed = (
                    "online failed" if attempt == "online" else "it failed with wandb's variables in the environment"
                )
                why = why or f", for {failed}: {_said(error)}"
                failure = error
        if isinstance(failure, OSError):
            self._say_lacking(failure)
        return f"not recorded, for {_said(failure)}"

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

        def add() -> None:
            import wandb

            self._log(step, {f"plots/{path.stem}": wandb.Image(str(path)) for path in files})

        self._attempt(add)

    def evaluation(self, step: int, scores: dict[str, float], table: str, tasks: dict[str, dict[str, Any]]) -> None:
        """Add what an evaluation of the checkpoint at `step` gave: as a row, in the summary of the run, and as a table.

        `table`: its name. `tasks`: each one's values, of which the table has those of TABLE.
        """
        if self._run is None:
            return

        def add() -> None:
            import wandb

            rows = [[name, *(values[key] for key in TABLE)] for name, values in tasks.items()]
            self._run.define_metric("evaluation/*", step_metric="evaluation/step")
            self._log(step, {"evaluation/step": step, **scores, table: wandb.Table(["task", *TABLE], rows)})
            self._run.summary.update(scores)

        self._attempt(add)

    def _log(self, step: int, values: dict[str, Any]) -> None:
        """A record online refuses rows before its last one, and one offline has forgotten where that was."""
        self._run.log(values, step=max(step, self._run.step))

    def close(self, exit_code: int) -> None:
        """End the record. A server that does not take the rest within a few seconds is not waited for."""
        if self._run is None:
            return
        online, size = bool(self._run.url), self._size()
        failure = self._attempt(lambda: self._run.finish(exit_code=exit_code))
        self._attempt(_end_service)  # which writes the rest now, and cannot fail again as the process ends
        # It has at least the end of the run to add, which wandb's own process may still be about to do.
        deadline = time.monotonic() + FINISHING
        waits = failure is None and any((self.folder / FOLDER).glob("*run-*"))
        while waits and self._size() <= size and time.monotonic() < deadline:
            time.sleep(0.1)
        file = max((self.folder / FOLDER).glob("run-*/*.wandb"), default=None) if online else None
        if file is not None and (failure is not None or _gave_up(file)):
            warn(
                f"Weights & Biases has not taken the whole record. To upload what {file} has:"
                f" {_wandb_program()} sync --include-online {shlex.quote(str(file.parent))}"
            )
        elif isinstance(failure, TimeoutError) or (size and self._size() <= size):
            self._say_lacking("its file has not grown at its end")

    def _size(self) -> int:
        """Bytes of the record in the run's folder."""
        with suppress(OSError):  # the folder was removed
            return sum(part.stat().st_size for part in (self.folder / FOLDER).glob("*run-*/*.wandb"))
        return 0

    def _look_for_growth(self) -> None:
        """Say so if the record has not grown for long, though it was given rows."""
        size, now = self._size(), time.monotonic()
        if size != self._bytes:
            self._bytes, self._given = size, None
        if self._given is None:
            self._given = now
        elif now - self._given > PATIENCE:
            self._say_lacking(f"its file has not grown for {now - self._given:.0f} s")

    def _attempt(self, work: Callable[[], object]) -> Exception | None:
        """Do `work` of wandb's, and say once what fails."""
        try:
            with _quiet_logging():
                work()
        except Exception as error:
            if not isinstance(error, TimeoutError):  # the server's, of which `close` speaks
                self._say_lacking(error)
            return error
        return None

    def _say_lacking(self, why: str | Exception) -> None:
        if self._lacking:
            return
        self._lacking = True
        record = f"the Weights & Biases record in {self.folder / FOLDER} lacks rows"
        kept = f"{self.folder / METRICS} has them all"
        if isinstance(why, str) or (isinstance(why, OSError) and not isinstance(why, ConnectionError)):
            free = "its folder is gone"
            with suppress(OSError):
                free = f"{spelled(shutil.disk_usage(self.folder).free)} free there"
            say(f"sparsellm: {record}, for it cannot be written ({why}; {free}): {kept}. Free some space")
        else:
            say(f"sparsellm: {record}, for wandb failed ({_said(why)}): {kept}")


def chosen_mode(asked: WandbMode) -> tuple[WandbMode, str]:
    """Where rows are recorded, and what is to be said of the choice.

    The environment belongs to the machine, which may have no internet: of it and of the configuration the one that asks
    for less wins.
    """
    variable, value = "WANDB_MODE", os.environ.get("WANDB_MODE", "")
    if os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes", "on"):
        variable, value = "WANDB_DISABLED", os.environ["WANDB_DISABLED"]
    if not value:
        return asked, ""
    found = WandbMode.disabled if variable == "WANDB_DISABLED" else MODES.get(value.lower())
    if found is None:
        return asked, f"; {variable}={value} is ignored: it should be online, offline or disabled"
    if LEAST_FIRST.index(found) < LEAST_FIRST.index(asked):
        return found, f", for {variable}={value} in the environment asks for less than logging.wandb={asked.name}"
    if found != asked:
        return asked, f", for logging.wandb={asked.name} asks for less than {variable}={value} in the environment"
    return asked, ""


def _has_key() -> bool:
    import wandb

    return bool(wandb.api.api_key)


def _init(logging: LoggingConfig, name: str | None, values: dict[str, Any], folder: Path, mode: Any) -> Any:
    """A run of wandb's with these `values`, in the run's `folder`. What a start that fails leaves is removed."""
    import wandb

    for part in offline_parts(folder):
        if part.stat().st_size <= HEADER_BYTES:
            shutil.rmtree(part.parent)
    record = record_id(folder)
    before = set((folder / FOLDER).iterdir())
    given = {key: value for key, value in SETTINGS.items() if f"WANDB_{key.upper()}" not in os.environ}
    try:
        return wandb.init(
            project=logging.wandb_project, group=logging.wandb_group, name=name, id=record,
            resume="allow", config=without_folders(values), mode=mode, settings=wandb.Settings(**given),
            # The process of wandb that writes may be of a parent that works in another folder (WANDB_SERVICE).
            dir=folder.absolute(),
        )  # fmt: skip
    except Exception:
        with suppress(Exception):
            _end_service()  # which holds the id, so that no other start could have it (wandb 0.31)
        for left in set((folder / FOLDER).glob("*run-*")) - before:
            shutil.rmtree(left, ignore_errors=True)
        raise


def _end_service() -> None:
    import wandb

    wandb.teardown()


def _have_a_home() -> None:
    """wandb looks for its settings in the home, which a user id without an entry in the passwd file may not have."""
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = tempfile.gettempdir()


@contextmanager
def _environment(bare: bool) -> Iterator[None]:
    """Without WANDB_MODE, which `chosen_mode` has read; `bare`: without all of wandb's variables but those set here."""
    kept = ("WANDB_SILENT", "WANDB_ERROR_REPORTING")
    hidden = {k: v for k, v in os.environ.items() if k.startswith("WANDB_") and (bare or k == "WANDB_MODE")}
    hidden = {k: v for k, v in hidden.items() if k not in kept}
    for key in hidden:
        del os.environ[key]
    try:
        yield
    finally:
        for key, value in hidden.items():
            os.environ.setdefault(key, value)  # WANDB_SERVICE is that of the process which was begun meanwhile


@contextmanager
def _quiet_logging() -> Iterator[None]:
    """wandb keeps a log in the run's folder, too; where that cannot be written, logging prints tracebacks."""
    before, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        yield
    finally:
        logging.raiseExceptions = before


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def _gave_up(file: Path) -> bool:
    """Whether wandb stopped uploading the rows of `file`, as where the server refuses them; `finish` is silent."""
    try:
        return FATAL in (file.parent / "logs" / "debug-internal.log").read_bytes()
    except OSError:
        return False


def record_id(folder: Path) -> str:
    """One for each run folder, through all its starts: names of runs may repeat on other machines."""
    path = folder / FOLDER / "id"
    found, *check = _content(path).split() or [""]
    if re.fullmatch("[0-9a-f]{16}", found) and check == [_check(found)]:
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
    """A check value stored with the id, to detect a changed id."""
    return xxhash.xxh3_64_hexdigest(record.encode())


def offline_parts(folder: Path) -> list[Path]:
    """The files of the record of the run in `folder` that starts without a connection have left."""
    return sorted((folder / FOLDER).glob("offline-run-*/*.wandb"))


def sync_command(folder: Path) -> str | None:
    """What uploads the offline parts of the record of the run in `folder`; None: none waits for that."""
    if all(part.with_name(part.name + ".synced").exists() for part in offline_parts(folder)):
        return None
    return f"{_wandb_program()} sync {shlex.quote(str(folder / FOLDER))}"


def _wandb_program() -> str:
    return "wandb" if shutil.which("wandb") else f"{shlex.quote(sys.executable)} -m wandb"
