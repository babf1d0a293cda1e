"""Being asked to stop: SIGTERM and SIGINT, and for a subclass others."""

import signal
from types import FrameType
from typing import Self


class StopSignals:
    """While entered, remembers NUMBERS instead of dying of them; a subclass may do more by `_remember`."""

    NUMBERS: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.received: list[int] = []

    @property
    def signal(self) -> int | None:
        """The first of them, if any."""
        return self.received[0] if self.received else None

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._remember) for number in self.NUMBERS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)
