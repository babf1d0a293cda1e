"""Traces a few steps with torch.profiler, in Chrome's format, one file per rank, in the run's folder.

Open a trace with https://ui.perfetto.dev or chrome://tracing. It shows host and GPU work, with each step named. Other
steps have no overhead; traced steps are slower, which shows in metrics.jsonl.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as profiler

from sparsellm.distributed.groups import Ranks
from sparsellm.system.console import say, warn

PROFILE = "profile"  # in the run's folder


class Profile:
    """Traces steps first to last of `steps` = [first, last], inclusive, or none if []; after a resume, the remaining
    ones.

    A context around a run. Leaving it early, when the run is asked to stop, writes the steps so far; an exception
    writes nothing.
    """

    def __init__(self, steps: list[int], folder: Path, ranks: Ranks) -> None:
        self.steps, self.folder, self.ranks = range(steps[0], steps[1] + 1) if steps else range(0), folder, ranks
        self._profiler: profiler | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Context of one step of the run."""
        if step not in self.steps:
            yield
            return
        if self._profiler is None:
            self._begin(step)
        with record_function(f"step {step}"):
            yield
        self._done = step
        if step == self.steps[-1]:
            self._write()

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._profiler is not None and kind is None:
            self._write()

    def _begin(self, step: int) -> None:
        self._first = step
        self._wait()
        self._profiler = profiler(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._on_gpu)
        self._profiler.start()

    @property
    def _on_gpu(self) -> bool:
        return self.ranks.device.type == "cuda"

    def _wait(self) -> None:
        """Synchronize, so that a trace has all kernels of its steps and no others."""
        if self._on_gpu:
            torch.cuda.synchronize(self.ranks.device)

    def _write(self) -> None:
        assert self._profiler is not None
        self._wait()
        self._profiler.stop()
        trace, self._profiler = self._profiler, None
        path = self.folder / PROFILE / f"steps_{self._first}-{self._done}.rank_{self.ranks.rank:05}.json.gz"
        partial = path.with_name(f"partial-{path.name}")  # the suffix decides the format
        try:
            path.parent.mkdir(exist_ok=True)
            partial.unlink(missing_ok=True)  # otherwise a link in its place would be followed
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
