"""Turns SIGTERM, SIGINT and SIGHUP into requests to stop a run, so that it can save a checkpoint before it ends."""

import os
import signal
import threading
import time
from types import FrameType
from typing import ClassVar, Self

from sparsellm.distributed import groups
from sparsellm.system.processes import PARENT_ENDED
from sparsellm.system.streams import write_now

# Seconds in which a repeated signal does not count as a second request: torchrun and a scheduler may send one each.
SECOND = 2
STOPPING = "\nstopping at the next logged step, with a checkpoint; repeat to stop without one\n"
TORCHRUN_ENDED = "\ntorchrun has ended: stopping at the next logged step, with a checkpoint\n"
HUNG_UP = "\nthe terminal is closed (SIGHUP): stopping at the next logged step, with a checkpoint\n"


class StopSignals:
    """Context manager that records the signals in NUMBERS instead of letting them end the process.

    SIGHUP stays ignored if it was ignored before, as under nohup.
    """

    NUMBERS: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def __init__(self) -> None:
        self.received: list[int] = []

    @property
    def signal(self) -> int | None:
        """The first signal received, if any."""
        return self.received[0] if self.received else None

    def __enter__(self) -> Self:
        nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        numbers = [number for number in self.NUMBERS if not (number == signal.SIGHUP and nohup)]
        self._before = {number: signal.signal(number, self._remember) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)


class StopRequest(StopSignals):
    """A run's stop request. The first signal prints what the run will do; a second SIGTERM or SIGINT ends the
    process at once.

    The end of torchrun or of the terminal is a request too. Its signal may arrive several times (both the system and
    the shell report a closed terminal), so a repetition does not end the process.

    Python runs no signal handler while the main thread waits in a collective, perhaps for a rank that hangs. So a
    thread reads every signal from Python's wakeup file descriptor: it prints what the run will do, shortens the wait
    for ranks that do not answer, and ends the process at a second request.
    """

    NUMBERS = (*StopSignals.NUMBERS, PARENT_ENDED)
    REPEATED: ClassVar = {PARENT_ENDED: TORCHRUN_ENDED, signal.SIGHUP: HUNG_UP}

    def __enter__(self) -> Self:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._woken_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._listener = threading.Thread(target=self._listen, name="stop_request", daemon=True)
        self._listener.start()
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        signal.set_wakeup_fd(self._woken_before)
        os.write(self._writing, b"\0")
        self._listener.join()
        os.close(self._writing)
        os.close(self._reading)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        super()._remember(number, frame)
        if number not in self.REPEATED:
            for each in (signal.SIGTERM, signal.SIGINT):
                signal.signal(each, signal.SIG_DFL)

    def _listen(self) -> None:
        heard: dict[bool, float] = {}  # time of the first request; key: whether repeating it ends the process
        while (number := os.read(self._reading, 1)[0]) != 0:
            kills = number not in self.REPEATED
            if number not in self.NUMBERS:
                continue
            if kills and kills in heard and time.monotonic() - heard[True] >= SECOND:
                os._exit(128 + number)
            if kills not in heard and (kills or not heard):
                write_now(STOPPING if kills else self.REPEATED[signal.Signals(number)])
            heard.setdefault(kills, time.monotonic())
            groups.hurry()


# A forked process, such as a data worker, inherits the wakeup descriptor. Without this reset, a signal to the worker
# would write to the parent's pipe, and the run would stop.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
