"""A sweep's progress line while runs are concurrent, computed from the metrics rows that the runs have written."""

import json
import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from tqdm import tqdm

from sparsellm.runs.metrics import METRICS
from sparsellm.sweep.plan import Point
from sparsellm.system.console import LINE_EVERY, quantity, say

TAIL = 1 << 16  # bytes to read at the end of metrics.jsonl, enough for its last row
SHOWN_EVERY = 1  # seconds between updates on a terminal


class Progress:
    """Shows the number of finished runs, the fraction of training tokens done over all `points`, and an ETA.

    On a terminal the line is updated in place; elsewhere a new line appears every few seconds if something has changed.
    """

    def __init__(self, points: list[Point]) -> None:
        self.points, self.ended = points, set[str]()  # names of runs that ended, successfully or not
        self.began, self.tokens_before = time.monotonic(), sum(map(trained, points))
        self.shown, self.line = float("-inf"), ""
        self.terminal = tqdm(total=0, bar_format="{desc}", leave=False) if sys.stderr.isatty() else None

    def show(self, running: list[Point]) -> None:
        if time.monotonic() - self.shown < (SHOWN_EVERY if self.terminal is not None else LINE_EVERY):
            return
        self.shown = time.monotonic()
        line = self.text(running)
        if self.terminal is not None:
            self.terminal.set_description_str(line)
        elif line != self.line:
            say(line)
        self.line = line

    def text(self, running: list[Point]) -> str:
        total = done = rest = 0
        for point in self.points:
            whole, tokens = point.config.training.steps * point.config.training.tokens_per_step, trained(point)
            total, done = total + whole, done + tokens
            if point.name not in self.ended:  # a run that failed has no tokens left to train
                rest += whole - tokens
        pace = (done - self.tokens_before) / (time.monotonic() - self.began)
        ends = f"ETA {timedelta(seconds=round(rest / pace))}" if pace > 0 else "no ETA yet"
        count = f"{len(self.ended)}/{quantity(len(self.points), 'run')} done, {len(running)} running"
        return f"sweep  {count}, {done / total:.0%} of the training tokens, {ends}"

    def close(self) -> None:
        if self.terminal is not None:
            self.terminal.close()


def trained(point: Point) -> int:
    """Number of tokens trained, according to the last complete row in the point's metrics.jsonl."""
    return last_step(point.folder / METRICS) * point.config.training.tokens_per_step


def last_step(path: Path) -> int:
    """The step of the last complete row in the file `path`; 0 if there is none."""
    with suppress(OSError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL))
        for line in reversed(file.read().split(b"\n")[:-1]):  # the text after the last newline is still being written
            with suppress(ValueError, KeyError, TypeError):
                return int(json.loads(line)["step"])
    return 0
