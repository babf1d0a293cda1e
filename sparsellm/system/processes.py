"""Processes that start and end together.

On Linux a process can request a signal for when its parent ends, however it ends. The kernel sends the signal when the
thread that started the process ends, perhaps once per thread of the parent.
"""

import ctypes
import multiprocessing
import os
import signal
import sys

PARENT_ENDED = signal.SIGUSR2  # kills by default; a run treats it as one stop request, however often it arrives
PR_SET_PDEATHSIG = 1  # linux/prctl.h

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent(number: int) -> None:
    """Ask the kernel to send signal `number` to this process when its parent ends. Does nothing outside of Linux."""
    if _libc is None:
        return
    _libc.prctl(PR_SET_PDEATHSIG, int(number))
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # the parent ended before the request
        os.kill(os.getpid(), number)


def end_with_torchrun() -> None:
    """If torchrun started this process, request PARENT_ENDED for when torchrun ends. Called on all ranks."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(PARENT_ENDED)


RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun, or by hand under srun


def rank_mistake() -> str | None:
    """Error message if some environment variables that define this process's rank are stale or missing, else None."""
    found = {name: os.environ[name] for name in RANK_VARIABLES if name in os.environ}
    if "RANK" not in found and found.get("WORLD_SIZE", "1") == "1":
        return None  # a single process
    remedy = f"`unset {' '.join(found)}` to start one process, or start the ranks with torchrun --nproc_per_node=N"
    if missing := [name for name in RANK_VARIABLES if name not in found]:
        there = ", ".join(f"{name}={found[name]}" for name in ("RANK", "WORLD_SIZE") if name in found)
        return f"{there} is set in the environment without {', '.join(missing)}, so ranks cannot connect: {remedy}"
    rank, world_size = found["RANK"], found["WORLD_SIZE"]
    if not (rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
        return f"RANK={rank} is not a rank of WORLD_SIZE={world_size}: {remedy}"
    return None
