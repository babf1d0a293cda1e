"""A run's record in Weights & Biases: the rows of metrics.jsonl, figures, and evaluations of checkpoints.

A run has one record, whose id is stored in the run's folder. Each start of training, and each evaluation, adds to the
record: online immediately; offline in a separate folder, wandb/offline-run-*, which `wandb sync` uploads. Given a run's
wandb/ folder, `wandb sync` (0.31) uploads all offline folders that are not uploaded yet, and merges those with the same
id, in the order in which they were started, into one record.

wandb writes rows to disk every 15 seconds. A run that was killed sooner leaves a file with only a header, which makes
`wandb sync` refuse the whole folder; the next start removes such empty files.

On a full disk wandb (0.31) silently drops rows, and keeps dropping them once there is space again. The only symptom is
that wandb's file stops growing. One message says so, and training continues, because metrics.jsonl has every row.

No failure of wandb ends a command or delays it by more than about ten seconds. A start that fails online is retried
offline. If the server fails later, wandb still writes every row to a file in the run's folder, and a line at the end
gives the command that uploads the rest.

Like a model card (hf/card.py), a record omits the command line, the host, and the folder part of absolute paths.
"""

import logging
import os
import re
import secrets
import shlex
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from sparsellm.config import Config, LoggingConfig, WandbMode, to_dict, wandb_variables
from sparsellm.config.environment import DISABLED, VARIABLES
from sparsellm.hf.card import without_folders
from sparsellm.runs.checkpoint import spelled
from sparsellm.runs.metrics import METRICS, scalars
from sparsellm.system import regular
from sparsellm.system.console import warn
from sparsellm.system.errors import one_line
from sparsellm.system.files import write_whole
from sparsellm.system.packages import PackageMissing, needed_by

FOLDER = "wandb"  # in the run's folder
HEADER_BYTES = 7  # size of a .wandb file's header
PATIENCE = 60  # seconds that a record may go without growing after rows were logged
FINISHING = 8  # seconds to wait for a record to finish
TABLE = ("score", "stderr", "metric", "rows")  # columns of the evaluation table, after the task's name

# Settings used unless wandb's own environment variable (WANDB_INIT_TIMEOUT, ...) is set.
SETTINGS: dict[str, Any] = {
    "init_timeout": 6,  # seconds for the server to answer; wandb's default is 90
    "finish_timeout": FINISHING,  # seconds to upload the rest; wandb's default is unlimited
    "finish_timeout_raises": True,
    "x_disable_meta": True,  # otherwise wandb would record the command line, program, interpreter and folder
    "host": "",
    "disable_git": True,
}
FATAL = b'"level":"ERROR+4"'  # in wandb's log of a run: wandb has given up uploading rows


class WandbRun:
    """A run's record: online with an API key, otherwise offline; `status` says which and why. If there is no record,
    methods do nothing.

    No method raises wandb's exceptions or OSError: lost rows are reported once on stderr.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self.folder = folder
        self._run: Any = None  # wandb's run object
        self._lacking = False  # whether lost rows have been reported
        self._bytes = 0  # size of the record when last checked
        self._waiting_since: float | None = None  # time of the first row logged since the size changed
        mode = config.logging.wandb
        self.status = mode.name
        if mode != WandbMode.disabled:
            self.status = self._start(mode, partial(_init, config.logging, config.run.name, to_dict(config), folder))
        self.status += _environments_part(config.logging)

    def _start(self, mode: WandbMode, begin: Callable[[str], Any]) -> str:
        """Start the record with `begin(mode)`. Returns whether it is online or offline, or why there is none.

        The last attempt ignores wandb's environment variables, because a variable such as WANDB_BASE_URL may be wrong.
        """
        os.environ.setdefault("WANDB_SILENT", "true")
        # wandb reports its own errors and timings to its server, which can delay the end of a process by 20 s.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            Path.home()
        except RuntimeError:  # wandb needs a home folder; a user id without a passwd entry has none
            os.environ["HOME"] = tempfile.gettempdir()
        attempts = [("offline", False), ("offline", True)]
        if mode == WandbMode.online:
            attempts.insert(0, ("online", False))
        why = ""
        for attempt, bare in attempts:
            try:
                with _environment(bare), _quiet_logging():
                    with needed_by("the record"):
                        import wandb
                    if attempt == "online" and not wandb.login(prompt=False, verify=False):
                        why = ": there is no key (set WANDB_API_KEY, or run `wandb login`)"
                        continue
                    self._run = begin(attempt)
                return self._run.url or attempt + why
            except PackageMissing as error:
                return f"not recorded: {error}"
            except Exception as error:
                failed = (
                    "online failed" if attempt == "online" else "it failed with wandb's variables in the environment"
                )
                why = why or f": {failed}: {one_line(error)}"
                failure = error
        if isinstance(failure, OSError):
            self._say_lacking(failure)
        return f"not recorded: {one_line(failure)}"

    def write(self, row: dict[str, Any]) -> None:
        if self._run is None:
            return
        self._look_for_growth()
        # Pass the step, because otherwise a resumed offline run would count from 0 again.
        self._attempt(lambda: self._run.log(scalars(row), step=row["step"]))

    def alert(self, title: str, text: str) -> None:
        """Send an alert: Weights & Biases notifies the run's owner."""
        self._attempt(lambda: self._run.alert(title, text, level="ERROR"))

    def figures(self, step: int, files: list[Path]) -> None:
        """Add figures, drawn after `step`, under their file names."""

        def add() -> None:
            import wandb

            self._log(step, {f"plots/{path.stem}": wandb.Image(str(path)) for path in files})

        self._attempt(add)

    def evaluation(self, step: int, scores: dict[str, float], table: str, tasks: dict[str, dict[str, Any]]) -> None:
        """Add an evaluation of the checkpoint at `step`: as a row, in the run's summary, and as a table.

        `table`: the table's name. `tasks`: {task: values}; the table's columns are TABLE.
        """

        def add() -> None:
            import wandb

            rows = [[name, *(values[key] for key in TABLE)] for name, values in tasks.items()]
            self._run.define_metric("evaluation/*", step_metric="evaluation/step")
            self._log(step, {"evaluation/step": step, **scores, table: wandb.Table(["task", *TABLE], rows)})
            self._run.summary.update(scores)

        self._attempt(add)

    def _log(self, step: int, values: dict[str, Any]) -> None:
        """Log `values` at `step`, or at the record's last step if that is later: rows online must be in order."""
        self._run.log(values, step=max(step, self._run.step))

    def close(self, exit_code: int) -> None:
        """End the record. Waits at most a few seconds for the server to receive the rest."""
        if self._run is None:
            return
        import wandb

        online, size = bool(self._run.url), self._size()
        failure = self._attempt(lambda: self._run.finish(exit_code=exit_code))
        self._attempt(wandb.teardown)  # writes the rest now, so that nothing can fail when the process ends
        # wandb's own process may not have written the end of the run yet.
        deadline = time.monotonic() + FINISHING
        waits = failure is None and any((self.folder / FOLDER).glob("*run-*"))
        while waits and self._size() <= size and time.monotonic() < deadline:
            time.sleep(0.1)
        file = max((self.folder / FOLDER).glob("run-*/*.wandb"), default=None) if online else None
        if file is not None and (failure is not None or _gave_up(file)):
            warn(
                f"Weights & Biases has not received the whole record. To upload {file}:"
                f" {_wandb_program()} sync --include-online {shlex.quote(str(file.parent))}"
            )
        elif isinstance(failure, TimeoutError) or (size and self._size() <= size):
            self._say_lacking("its file did not grow at the end")

    def _size(self) -> int:
        """Size in bytes of the record in the run's folder."""
        with suppress(OSError):  # the folder was removed
            return sum(part.stat().st_size for part in (self.folder / FOLDER).glob("*run-*/*.wandb"))
        return 0

    def _look_for_growth(self) -> None:
        """Warn if the record has not grown for PATIENCE seconds although rows were logged."""
        size, now = self._size(), time.monotonic()
        if size != self._bytes:
            self._bytes, self._waiting_since = size, None
        if self._waiting_since is None:
            self._waiting_since = now
        elif now - self._waiting_since > PATIENCE:
            self._say_lacking(f"its file has not grown for {now - self._waiting_since:.0f} s")

    def _attempt(self, work: Callable[[], object]) -> Exception | None:
        """Call wandb through `work`, and report a failure once. Does nothing if there is no record."""
        if self._run is None:
            return None
        try:
            with _quiet_logging():
                work()
        except Exception as error:
            if not isinstance(error, TimeoutError):  # the server's timeout, which `close` reports
                self._say_lacking(error)
            return error
        return None

    def _say_lacking(self, why: str | Exception) -> None:
        if self._lacking:
            return
        self._lacking = True
        record = f"the Weights & Biases record in {self.folder / FOLDER} is missing rows"
        kept = f"{self.folder / METRICS} has them all"
        if isinstance(why, str) or (isinstance(why, OSError) and not isinstance(why, ConnectionError)):
            free = "its folder no longer exists"
            with suppress(OSError):
                free = f"{spelled(shutil.disk_usage(self.folder).free)} free there"
            warn(f"{record}: it cannot be written ({why}; {free}). {kept}. Free some space")
        else:
            warn(f"{record}: wandb failed ({one_line(why)}). {kept}")


def _environments_part(logging: LoggingConfig) -> str:
    """The part of `status` that says which WANDB_* environment variables were applied, and why others were not."""
    obeyed, rest = [], ""
    for key, (name, text, value, mistake) in wandb_variables().items():
        shown = f"{name}={textwrap.shorten(text, 60, placeholder='...')}"
        chosen = to_dict(logging)[key]
        if mistake is not None:
            rest += f"; {shown} is ignored: it should be {mistake}"
        elif chosen == value:
            obeyed.append(shown)
        else:
            rest += f"; logging.{key}={'null' if chosen is None else chosen} wins over {shown} in the environment"
    return (f"; {', '.join(obeyed)} in the environment" if obeyed else "") + rest


def _init(logging: LoggingConfig, name: str | None, values: dict[str, Any], folder: Path, mode: Any) -> Any:
    """Start a wandb run with the configuration `values` in the run's `folder`. Removes its files if that fails."""
    import wandb

    for part in offline_parts(folder):
        if part.stat().st_size <= HEADER_BYTES:
            shutil.rmtree(part.parent)
    record = record_id(folder)
    before = set((folder / FOLDER).iterdir())
    given = {key: value for key, value in SETTINGS.items() if f"WANDB_{key.upper()}" not in os.environ}
    try:
        return wandb.init(
            entity=logging.wandb_entity, project=logging.wandb_project, group=logging.wandb_group, name=name,
            tags=logging.wandb_tags or None, notes=logging.wandb_notes, id=record,
            resume="allow", config=without_folders(values), mode=mode, settings=wandb.Settings(**given),
            # wandb's writing process may belong to a parent with another working directory (WANDB_SERVICE).
            dir=folder.absolute(),
        )  # fmt: skip
    except Exception:
        with suppress(Exception):
            wandb.teardown()  # wandb's service holds the id, which blocks another start (0.31)
        for left in set((folder / FOLDER).glob("*run-*")) - before:
            shutil.rmtree(left, ignore_errors=True)
        raise


@contextmanager
def _environment(bare: bool) -> Iterator[None]:
    """Hide the variables that config/environment.py has read; with `bare`, hide all of wandb's variables except those
    that WandbRun sets."""
    kept, read = ("WANDB_SILENT", "WANDB_ERROR_REPORTING"), (*VARIABLES.values(), DISABLED)
    hidden = {k: v for k, v in os.environ.items() if k.startswith("WANDB_") and (bare or k in read)}
    hidden = {k: v for k, v in hidden.items() if k not in kept}
    for key in hidden:
        del os.environ[key]
    try:
        yield
    finally:
        for key, value in hidden.items():
            os.environ.setdefault(key, value)  # keeps a new WANDB_SERVICE: it names a running process


@contextmanager
def _quiet_logging() -> Iterator[None]:
    """Suppress the tracebacks that `logging` prints if wandb cannot write its own log in the run's folder."""
    before, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        yield
    finally:
        logging.raiseExceptions = before


def _gave_up(file: Path) -> bool:
    """Whether wandb stopped uploading `file`, for example because the server refuses rows. `finish` succeeds anyway."""
    try:
        return FATAL in (file.parent / "logs" / "debug-internal.log").read_bytes()
    except OSError:
        return False


def record_id(folder: Path) -> str:
    """The record's id, which all starts of a run use. Not derived from the run's name, which may not be unique."""
    path = folder / FOLDER / "id"
    try:
        content = regular.content(path).decode(errors="replace")
    except OSError:  # missing, or not a file
        content = ""
    found, *check = content.split() or [""]
    if re.fullmatch("[0-9a-f]{16}", found) and check == [_check(found)]:
        return found
    damaged = f"{path}, the id of the run's record in Weights & Biases, is damaged: " if path.exists() else None
    # The names of wandb's folders end with the id.
    known = {part.name.rpartition("-")[2] for part in path.parent.glob("*run-*-*")}
    if len(known) == 1:
        (found,) = known
        remedy = f"continuing with {found}, the id of the folders next to it"
    else:
        found = secrets.token_hex(8)
        remedy = f"continuing with a new record, {found}"
    if damaged:
        warn(f"{damaged}{remedy}")
    path.parent.mkdir(exist_ok=True)
    write_whole(path, f"{found} {_check(found)}\n")
    return found


def _check(record: str) -> str:
    """A checksum stored next to the id, to detect damage."""
    return xxhash.xxh3_64_hexdigest(record.encode())


def offline_parts(folder: Path) -> list[Path]:
    """The record's offline files, for the run in `folder`."""
    return sorted((folder / FOLDER).glob("offline-run-*/*.wandb"))


def sync_command(folder: Path) -> str | None:
    """The command that uploads the offline files of the run in `folder`; None if nothing is left to upload."""
    if all(part.with_name(part.name + ".synced").exists() for part in offline_parts(folder)):
        return None
    return f"{_wandb_program()} sync {shlex.quote(str(folder / FOLDER))}"


def _wandb_program() -> str:
    return "wandb" if shutil.which("wandb") else f"{shlex.quote(sys.executable)} -m wandb"
