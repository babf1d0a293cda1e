"""COMMITTED: the sizes and checksums of a checkpoint's files, which prove that the checkpoint is complete and intact.

xxh3_128 detects accidental damage at memory speed. The checksums do not prove who saved the checkpoint.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from sparsellm.runs.layout import ADDED, COMMITTED
from sparsellm.system import regular
from sparsellm.system.files import sync

# Exceptions that `recorded` raises if COMMITTED is missing, unreadable or damaged.
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
HASH_THREADS = 8  # one file per thread; the ranks of an 8-GPU node write 8 files
HASH_CHUNK = 1 << 23  # bytes; large enough for full disk speed, and xxhash releases the GIL


def seal(folder: Path, step: int) -> None:
    """Sync everything in `folder` to disk and write COMMITTED, with the size and checksum of each file."""
    files = _files(folder)
    for path in [*files.values(), *(path for path in folder.rglob("*") if path.is_dir())]:
        sync(path)
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        checksums = pool.map(file_digest, files.values())
        entries = {
            name: {"bytes": path.stat().st_size, "xxh3_128": checksum}
            for (name, path), checksum in zip(files.items(), checksums, strict=True)
        }
    (folder / COMMITTED).write_text(json.dumps({"step": step, "files": entries}, indent=1))
    sync(folder / COMMITTED)
    sync(folder)


def recorded(folder: Path, prefix: str = "") -> tuple[Any, dict[str, tuple[int, str]]]:
    """Read COMMITTED. Returns (step, {name: (bytes, checksum)}) for files whose names begin with `prefix`. Raises an
    exception in UNREADABLE if COMMITTED is missing or damaged."""
    commit = json.loads(regular.content(folder / COMMITTED))
    files = {name: (entry["bytes"], entry["xxh3_128"]) for name, entry in commit["files"].items()}
    return commit["step"], {name: entry for name, entry in files.items() if name.startswith(prefix)}


def problems(folder: Path, step: int | None, prefix: str = "") -> list[str]:
    """How the files in `folder` differ from COMMITTED; empty if the checkpoint is intact.

    `step`: the checkpoint's step, or None if unknown. Only files whose names begin with `prefix` are compared.
    """
    try:
        committed_step, wanted = recorded(folder, prefix)
    except FileNotFoundError:
        return [f"{COMMITTED} is missing"]
    except UNREADABLE as error:
        return [f"{COMMITTED} cannot be read ({type(error).__name__}: {error})"]
    files = {name: path for name, path in _files(folder).items() if name.startswith(prefix)}
    found = [] if step in (None, committed_step) else [f"{COMMITTED} belongs to step {committed_step}"]
    found += [f"{name} is missing" for name in sorted(wanted.keys() - files.keys())]
    found += [f"{name} is not listed in {COMMITTED}" for name in sorted(files.keys() - wanted.keys())]

    def compare(name: str) -> list[str]:
        size, checksum = wanted[name]
        try:
            if (held := files[name].stat().st_size) != size:
                return [f"{name} has {held} bytes instead of {size}"]
            if (digest := file_digest(files[name])) != checksum:
                return [f"{name} has checksum {digest} instead of {checksum}"]
        except OSError as error:
            return [f"{name} cannot be read ({error})"]
        return []

    with ThreadPoolExecutor(HASH_THREADS) as pool:
        return sum(pool.map(compare, sorted(wanted.keys() & files.keys())), found)


def file_digest(path: Path) -> str:
    """Hex xxh3_128 digest of a file, as recorded in COMMITTED."""
    digest, chunk = xxhash.xxh3_128(), memoryview(bytearray(HASH_CHUNK))
    with regular.to_read(path, buffering=0) as file:
        while count := file.readinto(chunk):
            digest.update(chunk[:count])
    return digest.hexdigest()


def _files(folder: Path) -> dict[str, Path]:
    """Every file under `folder` that belongs to the checkpoint, by its path relative to `folder`."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if not path.is_dir()}
    return {name: path for name, path in paths.items() if name.split("/")[0] not in (COMMITTED, *ADDED)}
