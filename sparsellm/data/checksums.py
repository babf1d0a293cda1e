"""Checksums of large files, cached so that unchanged files are not read again.

    verified.json       in a folder of prepared tokens: for each file, its xxh3, and its size and times when it was read

A file with the same size, modification time and change time (which every write updates) is not read again. If
verified.json is missing or damaged, for example after a copy to another disk, all files are read.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import xxhash
from tqdm import tqdm

from sparsellm.system.files import read_sealed, write_sealed

VERIFIED = "verified.json"
THREADS, PIECE = 8, 1 << 24  # several readers, because a network file system serves them faster than one
ENDS = 1 << 20  # bytes at either end of a file
# In ns. The resolution of file times is 10 ms or finer, or 2 s on file systems that store whole seconds.
TICK, COARSE_TICK, SECOND = 20_000_000, 2_000_000_000, 1_000_000_000


class Stamp(NamedTuple):
    """A file's size and times, at least one of which changes with every write."""

    bytes: int
    mtime_ns: int
    ctime_ns: int

    @property
    def settled_ns(self) -> int:
        """The time from which on any further write results in a different stamp."""
        coarse = self.mtime_ns % SECOND == 0 or self.ctime_ns % SECOND == 0
        return max(self.mtime_ns, self.ctime_ns) + (COARSE_TICK if coarse else TICK)


def stamp(path: Path) -> Stamp | None:
    """The file's stamp; None if it does not exist."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Stamp(found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def digest_of(path: Path, size: int, bar: tqdm | None = None) -> xxhash.xxh3_64:
    """The xxh3 hash object of the first `size` bytes of `path`; may be updated with further bytes."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        for piece in _pieces(file.fileno(), size):
            digest.update(piece)
            if bar is not None:
                bar.update(len(piece))
    return digest


def digest_of_ends(path: Path) -> xxhash.xxh3_64:
    """The xxh3 of the first and last ENDS bytes of `path`."""
    with path.open("rb") as file:
        digest = xxhash.xxh3_64(file.read(ENDS))
        file.seek(max(file.tell(), file.seek(0, os.SEEK_END) - ENDS))
        digest.update(file.read(ENDS))
    return digest


def _pieces(descriptor: int, size: int) -> Iterator[bytes]:
    """The first `size` bytes of a file, in order. Several threads read a large file."""
    if size <= PIECE:
        yield os.pread(descriptor, size, 0)
        return
    with ThreadPoolExecutor(THREADS) as threads:
        ahead: deque[Future[bytes]] = deque()
        for start in range(0, size, PIECE):
            ahead.append(threads.submit(os.pread, descriptor, min(PIECE, size - start), start))
            if len(ahead) == THREADS:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


class Verified:
    """The checksums cached in verified.json of `folder`. again=True ignores cached entries."""

    def __init__(self, folder: Path, again: bool = False) -> None:
        self._path, self._changed = folder / VERIFIED, False
        self._marks: dict[str, tuple[Stamp, str]] = {}
        with suppress(_Unusable, TypeError, ValueError):
            if not again and self._path.is_file():
                values = read_sealed(self._path, _Unusable, "")
                self._marks = {key: (Stamp(*stamp), digest) for key, (stamp, digest) in values.items()}

    def knows(self, key: str) -> bool:
        return key in self._marks

    def is_known(self, key: str, path: Path) -> bool:
        """Whether the checksum of `path`, stored under `key`, is known without reading."""
        return key in self._marks and self._marks[key][0] == stamp(path)

    def checksum(
        self, key: str, path: Path, bar: tqdm | None = None, digest: Callable[[Path], xxhash.xxh3_64] | None = None
    ) -> str:
        """The checksum of `path`, stored under `key`: its `digest`, or that of all bytes. Raises OSError."""
        if self.is_known(key, path):
            return self._marks[key][1]
        before = stamp(path)
        if before is None:
            raise FileNotFoundError(2, os.strerror(2), str(path))
        # A further write within the same clock tick would leave the same stamp, so wait until the tick is over.
        if 0 < (rest := before.settled_ns - time.time_ns()) <= COARSE_TICK:
            time.sleep(rest / 1e9)
        settled = before.settled_ns <= time.time_ns()
        found = (digest_of(path, before.bytes, bar) if digest is None else digest(path)).hexdigest()
        if settled and stamp(path) == before:
            self._marks[key], self._changed = (before, found), True
        return found

    def keep(self) -> None:
        """Write verified.json if possible; otherwise the next start reads the files again."""
        if self._changed:
            with suppress(OSError):
                write_sealed(self._path, dict(self._marks))
                self._changed = False


class _Unusable(Exception):
    """verified.json is damaged, so files are read again."""
