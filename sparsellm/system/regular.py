"""Opens regular files in folders that other users may write to. If a path is anything else, raises OSError saying what.

With plain `open`, a FIFO in place of the file would block forever, and a device would be written to.
"""

import errno
import os
import stat
from pathlib import Path
from typing import Any

MOST = 1 << 28  # maximum bytes of a small file; the largest tokenizers take 35 MB


def to_write(path: Path, mode: str, buffering: int = -1) -> Any:
    """`open(path, mode, buffering)` for a regular file, created if needed. Raises OSError if `path` cannot be opened.

    Links are refused, because a planted link could lead to another file owned by this user.
    """
    return open(path, mode, buffering, opener=itself)


def to_read(path: Path, buffering: int = -1) -> Any:
    """`open(path, "rb", buffering)` for a regular file. Follows links, because `runs` may be one. Raises OSError."""
    return open(path, "rb", buffering, opener=_regular)


def content(path: Path) -> bytes:
    """The content of a small regular file. Raises OSError if it is larger than MOST bytes or cannot be read."""
    with to_read(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > MOST:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes: it should have at most {MOST:,}", str(path))
        found: bytes = file.read()
        return found


def itself(name: str, flags: int) -> int:
    """The opener that `to_write` passes to `open`."""
    try:
        return _regular(name, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, and links are not followed here: remove it", name) from None
        raise


def _regular(name: str, flags: int) -> int:
    # O_NONBLOCK keeps `os.open` from blocking on a FIFO; it has no effect on regular files.
    truncated = flags & os.O_TRUNC
    try:
        descriptor = os.open(name, (flags & ~os.O_TRUNC) | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a FIFO that no process reads, or a socket
            raise _irregular(name) from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _irregular(name)
        if truncated:
            os.truncate(descriptor, 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _irregular(name: str) -> OSError:
    what = "a folder" if Path(name).is_dir() else "a FIFO, a socket or a device"
    return OSError(errno.EINVAL, f"it is {what}: it should be a regular file; remove it", name)
