"""Finds or builds the library of the CUDA kernels, and loads it.

`load` uses the first of these libraries that exists:
    1. the library named by SPARSELLM_KERNELS (a file or its folder); an unusable library is an error
    2. the library in the installed package, if it was built from the package's sources
    3. the library in the cache
    4. a new library, built into the cache; only this step needs nvcc, and none needs a GPU

`python -m sparsellm.ops.build [FOLDER]` (make kernels, make wheel) builds ahead of time, reports each kernel's
resources, and copies the library into FOLDER.

The cache is ~/.cache/sparsellm/kernels/<build ID>/ (SPARSELLM_CACHE_DIR replaces ~/.cache/sparsellm). A build runs in a
temporary folder, which is renamed to the build ID only when it is complete, so an interrupted build leaves nothing that
looks complete to a later one. The builder holds a file lock, so one of many ranks builds while the others wait. The
system releases the lock if the builder dies.
"""

import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path

import torch

from sparsellm.ops import borders, compiler
from sparsellm.ops.compiler import LIBRARY, KernelsUnavailable, require_gpu
from sparsellm.ops.resources import resources, table
from sparsellm.system import locks, regular
from sparsellm.system.console import warn, warn_on_main

LOG = "build.log"
NAMED = "SPARSELLM_KERNELS"
CAPABILITY = (9, 0)  # Hopper: the kernels use instructions (wgmma) that only this generation has

_lock = threading.Lock()
_failure: KernelsUnavailable | None = None
_loaded = False


class NamedKernelsUnusable(KernelsUnavailable):
    """SPARSELLM_KERNELS names a library that cannot be used. Nothing replaces it, not even PyTorch."""


def load() -> None:
    """Make torch.ops.sparsellm_cuda.* callable, building the library first if necessary. Raises KernelsUnavailable if
    that fails; later calls in the same process then raise the same error without trying again."""
    global _failure, _loaded
    with _lock:
        if _loaded:
            return
        if _failure is not None:
            raise _failure
        try:
            _check_device()
            _load(library())
        except KernelsUnavailable as error:
            _failure = error
            raise
        _loaded = True


def check() -> None:
    """Raise KernelsUnavailable if `load` would, as far as can be known without compiling or loading."""
    _check_device()
    if prebuilt() is None:
        compiler.nvcc()


def loaded() -> bool:
    """Whether the kernels are loaded in this process."""
    return _loaded


def _check_device() -> None:
    require_gpu()
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != CAPABILITY:
        raise KernelsUnavailable(
            f"the GPU is a {torch.cuda.get_device_name()} of compute capability {major}.{minor}: the kernels need a"
            " Hopper GPU (9.0), such as an H100 or H200"
        )


def _load(path: Path) -> None:
    """Load the library. Check that the driver supports the library's CUDA runtime, and that the kernels change their
    algorithms at the token counts given in borders.py."""
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        if os.environ.get(NAMED):
            raise NamedKernelsUnusable(
                f"the kernels that {NAMED} names do not load ({error}): name a library that was built for this system,"
                f" or unset {NAMED}"
            ) from error
        raise KernelsUnavailable(
            f"the built kernels do not load ({error}): remove {path} to build them again"
        ) from error
    limit = torch.ops.sparsellm_cuda.limit
    driver, needed = limit("driver version"), limit("runtime version") // 1000  # 13020 is CUDA 13.2
    if driver // 1000 < needed:  # a driver supports all runtimes of its major version
        raise KernelsUnavailable(
            f"the NVIDIA driver supports CUDA {driver // 1000}.{driver % 1000 // 10}: it should support CUDA {needed},"
            " for which the kernels were built; update the driver (CUDA 13 needs 580 or later)"
        )
    for name, ours in (("few tokens", borders.FEW_TOKENS), ("many tokens", borders.MANY_TOKENS)):
        if (theirs := limit(name)) != ours:
            raise KernelsUnavailable(
                f"the kernels' limit for {name} is {theirs:,}: it should be {ours:,}, as in sparsellm/ops/borders.py"
            )


def library() -> Path:
    """The library matching this package's sources, built if none exists. Raises KernelsUnavailable on failure."""
    return prebuilt() or build()


def prebuilt() -> Path | None:
    """The path of the named, packaged or cached library; None if nvcc must build one."""
    if named := os.environ.get(NAMED):
        return _named(Path(named))
    packaged = compiler.KERNELS / LIBRARY
    if packaged.is_file():
        if compiler.fits(packaged):
            return packaged
        warn_on_main(
            f"{packaged} is not used, because it was not built from the sources next to it: reinstall sparsellm, or"
            " remove this library"
        )
    cached = _cached()
    return cached if cached.is_file() else None


def _named(path: Path) -> Path:
    found = path / LIBRARY if path.is_dir() else path
    if not found.is_file():
        what = f"a folder without {LIBRARY}" if path.is_dir() else "neither a library nor a folder"
        raise NamedKernelsUnusable(f"{NAMED}={path} is {what}: name the library or its folder, or unset {NAMED}")
    if not compiler.fits(found):
        raise NamedKernelsUnusable(
            f"{NAMED}={path} was not built from the sources and flags of the installed sparsellm (build ID"
            f" {compiler.build_id()}): name a library of this version, made by `make kernels`, or unset {NAMED}"
        )
    return found


def build() -> Path:
    """The path of the cached library, built if necessary. Raises KernelsUnavailable if the build fails."""
    path = _cached()
    if path.is_file():
        return path
    nvcc, folder = compiler.nvcc(), path.parent
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with regular.to_write(folder.with_name(f"{folder.name}.lock"), "w") as lock:
            if waited := not locks.take(lock, give_up=lambda: True):
                warn(f"another process is building the CUDA kernels into {folder}; waiting for it")
                locks.take(lock)
            if not path.is_file():
                _build_into(folder, nvcc, waited)
    except OSError as error:
        raise KernelsUnavailable(
            f"the kernels cannot be built in {folder.parent} ({error}): set SPARSELLM_CACHE_DIR to a folder that can"
            " be written and locked"
        ) from error
    return path


def _build_into(folder: Path, nvcc: Path, waited: bool) -> None:
    """Build the library; the caller must hold the lock for `folder`.

    waited: whether another process held the lock just before. If that process's build failed, this call fails with the
    same log, so that ranks do not repeat a failing build one after another.
    """
    failed = folder.with_name(f"{folder.name}.failed.log")
    if waited and failed.is_file():
        raise _compile_error(failed)
    failed.unlink(missing_ok=True)
    for abandoned in folder.parent.glob(f"{folder.name}.build.*"):
        shutil.rmtree(abandoned)
    warn(f"building the CUDA kernels into {folder}: a minute or two, once")
    private = Path(tempfile.mkdtemp(prefix=f"{folder.name}.build.", dir=folder.parent))
    try:
        done, log = compiler.compile_into(private, nvcc)
        (private / LOG).write_text(log)
        if not done:
            (private / LOG).rename(failed)
            raise _compile_error(failed)
        for path in private.iterdir():
            if path.name not in (LIBRARY, LOG):
                path.unlink()
        private.rename(folder)
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _compile_error(log: Path) -> KernelsUnavailable:
    last = "\n".join(log.read_text().strip().splitlines()[-12:])
    return KernelsUnavailable(f"the kernels do not compile; the whole log is {log}, its last lines are:\n{last}")


def cache() -> Path:
    """The folder for files that are created once per machine: ~/.cache/sparsellm, or SPARSELLM_CACHE_DIR."""
    root = os.environ.get("SPARSELLM_CACHE_DIR")
    return (Path(root) if root else Path.home() / ".cache" / "sparsellm").absolute()


def _cached() -> Path:
    return cache() / "kernels" / compiler.build_id() / LIBRARY


def main(arguments: list[str]) -> int:
    """Build and report. arguments: [], or the folder to copy the library into. Returns the exit code: 0 if all sources
    compile and no kernel spills registers, else 1."""
    try:
        path = build()
    except KernelsUnavailable as error:
        warn(str(error))
        return 1
    log = path.with_name(LOG).read_text()
    rows = resources(log)
    print(table(rows))
    for line in log.splitlines():
        if "warning" in line or "Performance Loss" in line:
            print(line)
    if arguments:
        folder = Path(arguments[0])
        folder.mkdir(parents=True, exist_ok=True)
        path = Path(shutil.copy(path, folder))
    print(f"The kernels are built: {path}")
    spilling = [row.function for row in rows if row.spills]
    if spilling:
        warn(f"registers spill to memory in {', '.join(spilling)}: no kernel should spill")
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
