"""A run's rows as TensorBoard event files, in the run's folder: `tensorboard --logdir runs` shows all runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparsellm.runs.metrics import METRICS, scalars
from sparsellm.system.console import warn
from sparsellm.system.errors import one_line
from sparsellm.system.packages import needed_by

FOLDER = "tensorboard"  # in the run's folder


class TensorboardRun:
    """Writes the rows after step `begin`. TensorBoard then hides rows after `begin` from earlier starts of the run."""

    def __init__(self, folder: Path, begin: int) -> None:
        self.folder = folder / FOLDER
        self._writer: Any = None
        self._lacking = False  # whether writing has failed; no more rows are written then
        with needed_by("logging.tensorboard=true"):
            from torch.utils.tensorboard import SummaryWriter

        def begin_files() -> None:
            self._writer = SummaryWriter(str(self.folder), purge_step=begin + 1)

        self._attempt(begin_files)

    def write(self, row: dict[str, Any]) -> None:
        def add() -> None:
            for key, value in scalars(row).items():
                self._writer.add_scalar(key, value, row["step"])
            self._writer.flush()  # torch flushes every two minutes, so a run that fails would lose rows

        self._attempt(add)

    def close(self) -> None:
        self._attempt(lambda: self._writer.close())

    def _attempt(self, work: Callable[[], object]) -> None:
        if self._lacking:
            return
        try:
            work()
        except Exception as error:
            self._lacking = True
            why = error if isinstance(error, OSError) else one_line(error)
            warn(f"the TensorBoard files in {self.folder} are missing rows ({why}); {METRICS} has them all")
