"""Progress of a run: one line per logged step, and on a terminal a progress bar below these lines."""

import sys
import time
from statistics import median
from typing import Any

from tqdm import tqdm

from sparsellm.runs.step_metrics import StepClock
from sparsellm.system.console import say

FIRST = 3  # steps that are timed for the first estimate, after the process's first step, which may compile
BAR = "{desc}  {percentage:3.0f}% {bar} {postfix[0]}"


class Progress:
    """Shows a run's progress on stderr, after it has completed `first` of its `steps` steps."""

    def __init__(self, name: str, first: int, steps: int, tokens_per_step: int) -> None:
        self.steps, self.tokens_per_step = steps, tokens_per_step
        self.early: list[StepClock] | None = []  # clocks of the first steps; None after the first estimate
        self.pace = Pace()
        self.bar = None
        if sys.stderr.isatty():
            self.bar = tqdm(
                total=steps, initial=first, desc=name, bar_format=BAR, postfix=[""], leave=False, miniters=1,
                dynamic_ncols=True,
            )  # fmt: skip

    def step(self, step: int, clock: StepClock) -> None:
        """Show that `step` is running or done. Waits once, for the previous step, to estimate the remaining time."""
        if self.early is not None:
            self.early.append(clock)
            if len(self.early) == FIRST + 2:
                seconds = median(clock.seconds() for clock in self.early[1:-1])
                self.early, remaining = None, self.steps - step + 1
                self.pace.seconds_per_step = self.pace.seconds_per_step or seconds
                if remaining > 0:
                    say(f"about {duration(seconds * remaining)} left, {self.tokens_per_step / seconds:,.0f} tokens/s")
        if self.bar is not None:
            left = self.pace.left(self.steps - step)
            self.bar.postfix[0] = f"step {step:,}/{self.steps:,}" + ("" if left is None else f"  {duration(left)} left")
            self.bar.update()

    def row(self, row: dict[str, Any]) -> None:
        """Show the row of a logged step, and its scores on a separate line."""
        self.pace.mark(row["step"], time.monotonic())
        say(line(row, self.steps, self.pace.left(self.steps - row["step"])))
        if row["evaluation"] is not None:
            scores = {name: "-" if score is None else f"{score:.4f}" for name, score in row["evaluation"].items()}
            say("  ".join([_step(row, self.steps), "accuracy", *(" ".join(each) for each in scores.items())]))

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


class Pace:
    """Estimates the time per step, including all work between steps, from the later half of the marked steps."""

    def __init__(self) -> None:
        self.marks: list[tuple[int, float]] = []
        self.seconds_per_step: float | None = None

    def mark(self, step: int, now: float) -> None:
        """Note that `step` was done at time `now`, in seconds."""
        self.marks.append((step, now))
        begun, then = self.marks[(len(self.marks) - 1) // 2]
        if step > begun:
            self.seconds_per_step = (now - then) / (step - begun)

    def left(self, steps: int) -> float | None:
        """Estimated seconds for `steps` steps; None if unknown."""
        return None if self.seconds_per_step is None else steps * self.seconds_per_step


def line(row: dict[str, Any], steps: int, left: float | None) -> str:
    """The line for a logged step, in columns. The held-out loss comes last, because few rows have one."""
    words = [_step(row, steps), f"loss {_nats(row['loss'])}"]
    if row["l1"] is not None:
        words += [f"ce {_nats(row['ce'])}", f"nonzeros {row['nnz_mean']:7,.1f}"]
    if "distill_kl" in row:
        words.append(f"kl {_nats(row['distill_kl'])}")
    words.append(f"{row['tokens_per_s']:9,.0f} tokens/s")
    words.append(f"{duration(left):>10} left" if left and row["step"] < steps else " " * 15)
    if row["val_ce"] is not None:
        words.append(f"held-out {_nats(row['val_ce'])}")
    return "  ".join(words).rstrip()


def duration(seconds: float) -> str:
    """Formats `seconds` as 45 s, 3 min 20 s, 12 min, 1 h 20 min or 3 d 4 h."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 600:
        return f"{seconds // 60} min {seconds % 60} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(minutes / 60)
    return f"{hours // 24} d {hours % 24} h"


def _step(row: dict[str, Any], steps: int) -> str:
    return f"step {row['step']:>{len(f'{steps:,}')},}/{steps:,}"


def _nats(value: float | None) -> str:
    return "not finite" if value is None else f"{value:6.3f}"
