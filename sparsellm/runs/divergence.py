"""Detects a diverging loss from the cross entropy of logged steps.

The cross entropy is smoothed by the median of the last SPAN steps, which short spikes do not change. A loss diverges
when the median is more than NATS, and more than DEVIATIONS typical deviations, above the best median so far. The L1
loss is left out, because its schedule may make it rise.
"""

from collections.abc import Iterable
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

SPAN = 100  # number of steps covered by the median
LEAST = 5  # minimum number of rows in the median; with fewer, nothing counts as divergence
NATS = 1.0  # when dense models become sparse, or restart with a warm-up, the loss rises by up to 0.4 (docs/results)
DEVIATIONS = 10  # a loss over few tokens per step is noisy, so its range is wider


class Best(NamedTuple):
    """The best smoothed cross entropy."""

    step: int
    ce: float


def noise(values: list[float]) -> float:
    """Median absolute deviation of the change from one value to the next."""
    changes = [after - before for before, after in pairwise(values)]
    trend = median(changes)
    return median(abs(change - trend) for change in changes)


class LossRange:
    """Tracks whether the loss is in its normal range, over `rows` of metrics.jsonl and then over each added step."""

    def __init__(self, rows: Iterable[dict[str, Any]] = ()) -> None:
        self.recent: list[tuple[int, float]] = []  # step and cross entropy of the rows of the last SPAN steps
        self.best: Best | None = None
        self.deviation: float | None = None  # noise at the best; None before LEAST rows
        self.ce: float | None = None  # the last smoothed cross entropy
        self.exits: list[int] = []  # steps at which the loss left its range
        self.outside = False
        for row in rows:
            self.add(row["step"], row.get("ce"), row.get("relu_share"))

    def add(self, step: int, ce: float | None, relu_share: float | None = None) -> bool:
        """Add a logged step. Returns whether the loss left its range at this step.

        Two kinds of steps are left out: those whose cross entropy is not finite (None), because the optimizer skipped
        them, and those that anneal SiLU to ReLU (`relu_share` below 1), because annealing raises a good model's loss.
        """
        if ce is None or (relu_share is not None and relu_share < 1):
            return False
        self.recent = [each for each in self.recent if each[0] > step - SPAN] + [(step, ce)]
        values = [value for _, value in self.recent]
        self.ce = median(values)
        if self.best is None:
            self.best = Best(step, ce)
        if len(values) < LEAST:
            return False
        lower = self.ce < self.best.ce
        if lower or self.deviation is None:  # None as long as the first row, low by chance, is the best
            self.deviation = noise(values)
        if lower:
            self.best = Best(step, self.ce)
        inside = self.ce <= self.best.ce + max(NATS, DEVIATIONS * self.deviation)
        leaves, self.outside = not (inside or self.outside), not inside
        if leaves:
            self.exits.append(step)
        return leaves

    def __str__(self) -> str:
        """The smoothed loss, compared with its best value."""
        if self.best is None or self.ce is None:
            return "there is no cross entropy yet"
        rise = f"{self.ce - self.best.ce:,.3f} above its best at step {self.best.step:,}"
        return f"the cross entropy is {self.ce:,.3f} (median of the last {SPAN} steps), {rise}"
