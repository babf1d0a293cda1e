"""Opens regular files in folders that others may write to as well, or raises an OSError that says what is there.

    to_write(path, mode)   the file itself: a link in its place would lead to a file elsewhere
    to_read(path)          through links, as `runs` may be one
    content(path)          all of a file that is small where nobody has tampered with it

Opened by `open` alone, a FIFO in a file's place would wait for ever, and a device would be written to.
"""

import errno
import os
import stat
from pathlib import Path
from typing import Any

MOST = 1 << 28  # bytes of a small file; the largest tokenizers take 35 MB


def to_write(path: Path, mode: str, buffering: int = -1) -> Any:
    """`open(path, mode, buffering)` of a regular file that is no link, and is made if need be. Raises OSError."""
    return open(path, mode, buffering, opener=itself)


def to_read(path: Path, buffering: int = -1) -> Any:
    """`open(path, "rb", buffering)` of a regular file. Raises OSError."""
    return open(path, "rb", buffering, opener=_regular)


def content(path: Path, most: int = MOST) -> bytes:
    """The bytes of a regular file, `most` of them at the most. Raises OSError."""
    with to_read(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and should have {most:,} at the most", str(path))
        found: bytes = file.read()
        return found


def itself(name: str, flags: int) -> int:
    """An opener for `open`, of `to_write`."""
    try:
        return _regular(name, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, which is not followed: remove it", name) from None
        raise


def _regular(name: str, flags: int) -> int:
    # Without O_NONBLOCK a FIFO opens when somebody opens its other end; it changes nothing for a regular file.
    truncated = flags & os.O_TRUNC
    try:
        descriptor = os.open(name, (flags & ~os.O_TRUNC) | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a FIFO that nobody reads, or a socket
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
    return OSError(errno.EINVAL, f"it is {what}, and should be a file: remove it", name)
