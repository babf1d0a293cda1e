"""Small files: written atomically (a kill at any instant leaves the old file or the new one), and validated when read.

A sealed file is a JSON object whose last key, "xxh3", is the checksum of all bytes before that key, which detects any
changed bit.
"""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from sparsellm.system import locks, regular
from sparsellm.system.packages import needed_by

_SEAL = b',\n "xxh3": "'


def write_whole(path: Path, content: str | bytes) -> None:
    """Write `content` to `path` atomically, and sync it to disk.

    Raises OSError on failure, such as a full disk, and leaves the old file.
    """
    with whole(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """Like `write_whole`, for content written in pieces: yields an open file that replaces `path` when the block ends.

    An exception in the block leaves the old file. Processes that write the same path take turns. A link at `path` is
    replaced, not followed.
    """
    partial = path.with_name(f"{path.name}.partial")
    with _alone(partial) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)  # free the space on a full disk
            raise
    sync(path.parent)


@contextmanager
def _alone(partial: Path) -> Iterator[BinaryIO]:
    """Open `partial` for writing, empty and locked until the block ends.

    While this process waits for the lock, the process that holds the lock may rename or remove the opened file; then
    `partial` is opened again. A link or a FIFO at `partial` is removed: sparsellm creates neither, so in a folder that
    other users may write to, one may have been planted to redirect the write to another file owned by this user.
    """

    def keeping(name: str, flags: int) -> int:  # no O_TRUNC: another process may be writing the file
        return regular.itself(name, flags & ~os.O_TRUNC)

    while True:
        found = _lstat(partial)
        if found and not stat.S_ISDIR(found.st_mode) and (not stat.S_ISREG(found.st_mode) or found.st_nlink > 1):
            partial.unlink(missing_ok=True)
        with open(partial, "wb", opener=keeping) as file:
            locks.take(file)
            found = _lstat(partial)
            if found and os.path.samestat(found, os.fstat(file.fileno())):
                file.truncate()
                yield file
                return


def _lstat(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def sync(path: Path) -> None:
    """Sync a file, or a folder's list of files, to disk: without it, a power failure may undo a rename."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unused(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, ... that does not exist, not even as a dangling link."""
    candidates = chain([path], (path.with_name(f"{path.name}-{number}") for number in count(2)))
    return next(candidate for candidate in candidates if not os.path.lexists(candidate))


def read_json(path: Path, error: type[Exception], remedy: str) -> dict[str, Any]:
    """The JSON object in `path`. If the file is damaged, raises `error` with one sentence that ends with `remedy`."""
    return _parsed(_content(path, error, remedy), path, error, remedy)


def write_sealed(path: Path, values: dict[str, Any]) -> None:
    """Write `values` atomically as JSON, with a checksum as the last key."""
    body = json.dumps(values, indent=1, allow_nan=False).removesuffix("\n}").encode()
    write_whole(path, body + _ending(body))


def read_sealed(path: Path, error: type[Exception], remedy: str) -> dict[str, Any]:
    """The values written by `write_sealed`. If the file has any other content, raises `error` with one sentence."""
    content = _content(path, error, remedy)
    values = _parsed(content, path, error, remedy)
    body = content.rpartition(_SEAL)[0]
    if content != body + _ending(body):
        _refuse(path, error, "its content does not match its own checksum", remedy)
    del values["xxh3"]
    return values


def _ending(body: bytes) -> bytes:
    # Not imported above, because models also run where only torch and transformers are installed.
    with needed_by("a checksum"):
        import xxhash
    return _SEAL + xxhash.xxh3_64_hexdigest(body).encode() + b'"\n}\n'


def _content(path: Path, error: type[Exception], remedy: str) -> bytes:
    try:
        return regular.content(path)
    except FileNotFoundError:
        raise error(f"{path} is missing: {remedy}") from None
    except OSError as problem:
        raise error(f"{path} cannot be read ({problem.strerror or problem}): {remedy}") from problem


def _parsed(content: bytes, path: Path, error: type[Exception], remedy: str) -> dict[str, Any]:
    if not content.strip():
        _refuse(path, error, "it is empty", remedy)
    try:
        values = json.loads(content.decode())
    except UnicodeDecodeError as problem:
        _refuse(path, error, f"byte {problem.start} is not UTF-8", remedy)
    except json.JSONDecodeError as problem:
        _refuse(path, error, f"it is not JSON from line {problem.lineno} column {problem.colno} on", remedy)
    except (ValueError, RecursionError) as problem:  # a number with thousands of digits, or deeply nested brackets
        _refuse(path, error, f"its JSON cannot be read: {problem}", remedy)
    if not isinstance(values, dict):
        _refuse(path, error, f"it holds a JSON {type(values).__name__}: it should hold an object", remedy)
    return values


def _refuse(path: Path, error: type[Exception], why: str, remedy: str) -> NoReturn:
    raise error(f"{path} is damaged ({why}): {remedy}") from None
