"""Locks between processes: an open file that one of them holds. The system frees what a killed process held."""

import fcntl
import time
from collections.abc import Callable
from typing import IO

POLL = 0.1  # seconds between looks at a lock, where waiting may end before it is free


def take(
    file: IO[str] | IO[bytes],
    waiting: Callable[[], object] = lambda: None,
    give_up: Callable[[], bool] | None = None,
) -> bool:
    """Lock the open `file` until it is closed; whether that succeeded, as it does unless `give_up()` becomes true.

    Where another process holds the lock, this calls `waiting` once, to say so, and waits.
    """
    if _is_taken(file):
        return True
    if give_up is not None and give_up():
        return False
    waiting()
    if give_up is None:
        fcntl.flock(file, fcntl.LOCK_EX)
        return True
    while not give_up():
        time.sleep(POLL)
        if _is_taken(file):
            return True
    return False


def _is_taken(file: IO[str] | IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
