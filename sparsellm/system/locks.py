"""Locks between processes, using filelock: a process that locks an open file holds the lock until it closes the file.

The caller opens the file (sparsellm.system.regular), because the locked file is often the one being written: a log, a
partial file, or the lock file with a run's signature. filelock's own `FileLock` would open another path.
"""

import time
from collections.abc import Callable
from typing import IO

from filelock import lock_descriptor

POLL = 0.05  # seconds between attempts


def take(
    file: IO[str] | IO[bytes],
    waiting: Callable[[], object] = lambda: None,
    give_up: Callable[[], bool] = lambda: False,
) -> bool:
    """Lock the open `file` until it is closed. Returns False if `give_up()` is true before the lock is free.

    If another process holds the lock, this calls `waiting` once and waits.
    """
    taken = lock_descriptor(file.fileno(), blocking=False)
    if not taken and not give_up():
        waiting()
        while not taken and not give_up():
            time.sleep(POLL)
            taken = lock_descriptor(file.fileno(), blocking=False)
    return taken
