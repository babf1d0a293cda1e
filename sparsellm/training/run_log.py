"""Where the rows of a run go, on its main rank: to metrics.jsonl, to Weights & Biases and to the terminal."""

import shutil
from collections.abc import Callable
from typing import Any

from sparsellm.runs.checkpoint import spelled
from sparsellm.runs.metrics import MetricsFile, Rows
from sparsellm.runs.wandb_record import WandbRun
from sparsellm.system.console import say, warn
from sparsellm.training.progress import Progress


class RunLog:
    """The rows of a run, wherever they go, and what people are told in between."""

    def __init__(self, rows: Rows, metrics: MetricsFile, wandb: WandbRun, progress: Progress) -> None:
        self.rows, self.metrics, self.wandb, self.progress = rows, metrics, wandb, progress
        self._warned_of: str | None = None  # the last failure of a save

    def write(self, row: dict[str, Any], give_back: Callable[[], None]) -> None:
        """On a full disk the row waits in memory, after `give_back()`, which frees what a failing save has taken. All
        rows must be on disk before the next save (`unwritten`)."""
        try:
            try:
                self.metrics.write(row)
            except OSError:
                give_back()
                self.metrics.sync()
        except OSError as error:
            if self.metrics.waiting == 1:
                say(
                    f"sparsellm: the row of step {row['step']:,} cannot be written to {self.metrics.path} ({error}):"
                    " rows wait in memory until the next checkpoint, where the run ends if there is no room"
                )
        self.wandb.write(row)
        self.progress.row(row)

    def unwritten(self, step: int) -> str | None:
        """Bring the rows to disk; what ends the run at `step` if that fails."""
        path = self.metrics.path
        try:
            self.metrics.sync()
        except OSError as problem:
            free = spelled(shutil.disk_usage(path.parent).free)
            return (
                f"{path.parent.name} ends at step {step:,}: its rows cannot be written to {path} ({problem}; {free}"
                " free there). Free some space: the same command resumes from the newest checkpoint"
            )
        return None

    def gone(self, step: int) -> str | None:
        """What ends a run at `step` whose folder was removed: its rows go nowhere."""
        if not self.metrics.is_gone():
            return None
        return (
            f"{self.metrics.path.parent.name} ends at step {step:,}: {self.metrics.path} was removed or replaced while"
            " it trained, and its rows with it. The checkpoint of this step is saved: the same command goes on from"
            " there with run.skip_damaged=true, without the rows"
        )

    def failed_save(self, failure: str | None) -> None:
        """Warn of each failure of a save once, as soon as it is known. None: there is none."""
        if failure not in (None, self._warned_of):
            self._warned_of = failure
            warn(f"{failure}\nTraining goes on, and saves again at the next checkpoint")
