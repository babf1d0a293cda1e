"""Small files: written atomically, and validated when read.

    write_whole(path, content)                 any content; a kill at any instant leaves the old file or the new one
    whole(path)                                the same for a file written piece by piece
    read_json(path, SomeError, remedy)         a JSON object; raises one sentence for any damage
    write_sealed, read_sealed                  the same with a checksum in the file, which detects any changed bit
    unused(path)                               a free name in the same folder

A sealed file is a JSON object whose last key, "xxh3", is the checksum of all bytes before that key.
"""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import xxhash

from sparsellm.system import locks, regular

_SEAL = b',\n "xxh3": "'


def write_whole(path: Path, content: str | bytes) -> None:
    """Write `content` to `path` atomically; it is synced to disk when this returns.

    Raises OSError on failure, such as a full disk, and leaves the old file.
    """
    with whole(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """`write_whole` for content written piece by piece: yields an open file that replaces `path` when the block ends.

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

    The previous holder of the lock may have renamed or removed the file that was opened here; then it is opened again.
    A link or a FIFO, which our writers never leave there, is removed: in a folder that others may write to, it may have
    been planted to redirect the write to another file of this user.
    """

    def keeping(name: str, flags: int) -> int:  # no O_TRUNC: another process may be writing the file
        return regular.itself(name, flags & ~os.O_TRUNC)

    while True:
        if _is_planted(partial):
            partial.unlink(missing_ok=True)
        with open(partial, "wb", opener=keeping) as file:
            locks.take(file)
            if _is_at(partial, file):
                file.truncate()
                yield file
                return


def _is_planted(partial: Path) -> bool:
    try:
        found = partial.lstat()
    except FileNotFoundError:
        return False
    return not stat.S_ISDIR(found.st_mode) and not (stat.S_ISREG(found.st_mode) and found.st_nlink == 1)


def _is_at(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def sync(path: Path) -> None:
    """Sync a file, or a folder's list of files, to disk: without it, a power failure may undo a rename."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unused(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, ... that does not exist, not even as a dangling link."""
    candidate, number = path, 1
    while os.path.lexists(candidate):
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def read_json(path: Path, error: type[Exception], remedy: str) -> dict[str, Any]:
    """The JSON object in `path`. Raises `error` with one sentence that ends with `remedy` if it cannot be read."""
    return _parsed(_content(path, error, remedy), path, error, remedy)


def write_sealed(path: Path, values: dict[str, Any]) -> None:
    """Write `values` atomically as JSON, with a checksum as the last key."""
    body = json.dumps(values, indent=1, allow_nan=False).removesuffix("\n}").encode()
    write_whole(path, body + _ending(body))


def read_sealed(path: Path, error: type[Exception], remedy: str) -> dict[str, Any]:
    """The values that `write_sealed` wrote. Raises `error` with one sentence for any other content of `path`."""
    content = _content(path, error, remedy)
    body = content.rpartition(_SEAL)[0]
    if content != body + _ending(body):
        # For content that is not JSON, this raises with its position.
        _parsed(content, path, error, remedy)
        _refuse(path, error, "its content does not match its own checksum", remedy)
    values = _parsed(content, path, error, remedy)
    del values["xxh3"]
    return values


def _ending(body: bytes) -> bytes:
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
    except (ValueError, RecursionError) as problem:  # a number of thousands of digits, or deeply nested brackets
        _refuse(path, error, f"its JSON cannot be read: {problem}", remedy)
    if not isinstance(values, dict):
        _refuse(path, error, f"it holds a JSON {type(values).__name__}: it should hold an object", remedy)
    return values


def _refuse(path: Path, error: type[Exception], why: str, remedy: str) -> NoReturn:
    raise error(f"{path} is damaged ({why}): {remedy}") from None
