"""Writes a run's metrics rows on the main rank: to metrics.jsonl, Weights & Biases, TensorBoard and the terminal."""

import shutil
from collections.abc import Callable
from typing import Any

from sparsellm.runs.checkpoint import spelled
from sparsellm.runs.divergence import LossRange
from sparsellm.runs.metrics import MetricsFile
from sparsellm.runs.step_metrics import Rows
from sparsellm.runs.tensorboard_record import TensorboardRun
from sparsellm.runs.wandb_record import WandbRun
from sparsellm.system.console import warn
from sparsellm.training.progress import Progress


class RunLog:
    """Writes rows to all outputs, and reports failures."""

    def __init__(
        self, rows: Rows, metrics: MetricsFile, wandb: WandbRun, tensorboard: TensorboardRun | None, progress: Progress
    ) -> None:
        self.rows, self.metrics, self.progress = rows, metrics, progress
        self.wandb, self.tensorboard = wandb, tensorboard
        self._warned_of: str | None = None  # error of the last failed save that was reported

    def write(self, row: dict[str, Any], give_back: Callable[[], None]) -> None:
        """Write a row. On a full disk, `give_back()` frees the space used by a failed save; if that is not enough, the
        row stays in memory. `unwritten` requires all rows on disk before the next save."""
        try:
            try:
                self.metrics.write(row)
            except OSError:
                give_back()
                self.metrics.sync()
        except OSError as error:
            if len(self.metrics.waiting) == 1:
                warn(
                    f"the row of step {row['step']:,} cannot be written to {self.metrics.path} ({error}):"
                    " rows are kept in memory until the next checkpoint; the run ends there if the disk is still full"
                )
        self.wandb.write(row)
        if self.tensorboard is not None:
            self.tensorboard.write(row)
        self.progress.row(row)

    def diverges(self, loss_range: LossRange, ends: bool) -> None:
        """Report that the loss has left its range. `ends`: whether the run ends for that reason."""
        text = f"the loss diverges at step {loss_range.exits[-1]:,}: {loss_range}"
        self.wandb.alert("The loss diverges", text)
        what_now = "The run ends with a checkpoint"
        if not ends:
            what_now = "Training continues; training.stop_on_divergence=true would end it"
        warn(f"{text}. {what_now}. In another run, lower optimizer.learning_rate")

    def unwritten(self, step: int) -> str | None:
        """Sync all rows to disk. If that fails, returns the error that ends the run at `step`."""
        path = self.metrics.path
        try:
            self.metrics.sync()
        except OSError as problem:
            free = spelled(shutil.disk_usage(path.parent).free)
            return (
                f"{path.parent.name} ends at step {step:,}: its rows cannot be written to {path} ({problem}; {free}"
                " free). Free some space, and run the same command to resume from the newest checkpoint"
            )
        return None

    def gone(self, step: int) -> str | None:
        """The error that ends the run at `step` because metrics.jsonl was removed or replaced, losing rows; or None."""
        if not self.metrics.is_gone():
            return None
        return (
            f"{self.metrics.path.parent.name} ends at step {step:,}: {self.metrics.path} was removed or replaced during"
            " training, with its rows. The checkpoint of this step is saved; add run.skip_damaged=true to the same"
            " command to resume from it without the rows"
        )

    def failed_save(self, failure: str | None) -> None:
        """Warn once per failed save. `failure`: the error of the last save, None if the save has not failed."""
        if failure not in (None, self._warned_of):
            self._warned_of = failure
            warn(f"{failure}\nTraining continues, and saves again at the next checkpoint")
