"""Traces a few steps with torch.profiler, in Chrome's format, one file per rank, in the run's folder.

Open a trace with https://ui.perfetto.dev or chrome://tracing. It shows host and GPU work, with each step named. Traced
steps are slower, which metrics.jsonl shows; all other steps have no overhead.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as profiler

from sparsellm.distributed.groups import Ranks
from sparsellm.system.console import say, warn

PROFILE = "profile"  # in the run's folder


class Profile:
    """Traces steps `steps[0]` to `steps[1]`, or none if `steps` is empty. A resumed run traces those that remain."""

    def __init__(self, steps: list[int], folder: Path, ranks: Ranks) -> None:
        self.steps, self.folder, self.ranks = range(steps[0], steps[1] + 1) if steps else range(0), folder, ranks
        self._profiler: profiler | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Context manager around one training step."""
        if step not in self.steps:
            yield
            return
        if self._profiler is None:
            self._first = step
            self._wait()
            gpu = [ProfilerActivity.CUDA] if self.ranks.device.type == "cuda" else []
            self._profiler = profiler(activities=[ProfilerActivity.CPU, *gpu])
            self._profiler.start()
        with record_function(f"step {step}"):
            yield
        self._done = step
        if step == self.steps[-1]:
            self.write()

    def _wait(self) -> None:
        """Synchronize, so that a trace has exactly the kernels launched in its steps."""
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)

    def write(self) -> None:
        """Write the steps traced so far, if any. A run that stops early calls this too, so that its trace is kept."""
        if self._profiler is None:
            return
        self._wait()
        self._profiler.stop()
        trace, self._profiler = self._profiler, None
        path = self.folder / PROFILE / f"steps_{self._first}-{self._done}.rank_{self.ranks.rank:05}.json.gz"
        partial = path.with_name(f"partial-{path.name}")  # the profiler chooses the format by suffix
        try:
            path.parent.mkdir(exist_ok=True)
            partial.unlink(missing_ok=True)  # the profiler would write through a link with this name
            trace.export_chrome_trace(str(partial))
            partial.replace(path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            warn(f"the profile of steps {self._first} to {self._done} cannot be written to {path}: {error}")
            return
        if self.ranks.is_main:
            others = "" if self.ranks.world_size == 1 else f", and one for each of the {self.ranks.world_size} ranks"
            say(f"profile of steps {self._first} to {self._done}: {path}{others} (https://ui.perfetto.dev opens it)")
