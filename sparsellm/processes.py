"""How processes end together, and when Python looks for garbage in them.

On Linux a process may ask for a signal at the end of its parent, however that ended. The kernel sends the signal when
the thread ends that started the process, perhaps once for each thread of the parent.
"""

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PARENT_ENDED = signal.SIGUSR2  # kills by default; a run takes it as one request to stop, however often it comes
PR_SET_PDEATHSIG = 1  # linux/prctl.h

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent(number: int) -> None:
    """Ask for signal `number` at the end of this process's parent. Does nothing where the system has no such signal."""
    if _libc is None:
        return
    _libc.prctl(PR_SET_PDEATHSIG, int(number))
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # the parent ended before the request
        os.kill(os.getpid(), number)


def end_with_torchrun() -> None:
    """Ask for PARENT_ENDED at the end of torchrun, if torchrun started this process: its other ranks do the same."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(PARENT_ENDED)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Until the block ends, Python does not look for objects that only refer to each other, and never among those that
    there are by then; others it frees as ever.

    For a block that makes many objects which stay, as importing a library does: Python would look through all of them
    again and again as their number grows, and once more when the process ends.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
