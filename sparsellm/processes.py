"""How processes end together: on Linux a process may ask for a signal at the end of its parent, however that ended.

The kernel sends the signal when the thread ends that started the process, perhaps once for each thread of the parent.
"""

import ctypes
import multiprocessing
import os
import signal
import sys

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
