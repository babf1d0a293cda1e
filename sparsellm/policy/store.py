"""Cache of measured costs on disk: ~/.cache/sparsellm/calibrations/GPU-KERNELS-VERSION.json.

There is one file per GPU model, kind of kernels, kernel version and torch version, because costs depend on all four.
"""

import hashlib
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from sparsellm.ops import backend, build, compiler
from sparsellm.ops.triton import tuning
from sparsellm.ops.triton.tuning import Shape, Tuning
from sparsellm.policy.costs import Costs
from sparsellm.policy.measure import METHOD
from sparsellm.system import locks, regular
from sparsellm.system.console import warn, warn_on_main
from sparsellm.system.errors import SparsellmError
from sparsellm.system.files import read_sealed, write_sealed
from sparsellm.system.packages import PackageMissing

PATIENCE = 300  # seconds to wait for another process to measure, including compilation of Triton kernels

warn_once = lru_cache(warn)  # a file is read several times per process, but reported once


class DamagedCalibration(SparsellmError, RuntimeError):
    """A calibration file cannot be read."""


def file() -> Path:
    """The cache file for this GPU and the loaded kernels."""
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    return build.cache() / "calibrations" / f"{name}-{backend.loaded()}-{_version()}.json"


def keep(costs: Costs, sizes: Tuning | None) -> Path:
    """Write a layer's costs, and the Triton kernels' block sizes if they were tuned. Raises OSError on failure."""
    path = file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with regular.to_write(path.with_suffix(".lock"), "w") as lock:  # two layers may be measured at the same time
        locks.take(lock)
        values = _read(path) or {"layers": {}, "block_sizes": None}
        values["layers"][_name(costs.width, costs.neurons)] = costs.as_json()
        if sizes is not None:
            values["block_sizes"] = list(sizes)
        write_sealed(path, values)
    return path


@contextmanager
def measuring() -> Iterator[bool]:
    """Hold the lock for measurements that `file()` stores: one process per machine holds it while the others wait.

    Yields True with the lock, and False if another process still holds the lock after PATIENCE seconds. If the cache
    cannot be written, there is no lock, and the result is True.
    """
    path, deadline = file(), time.monotonic() + PATIENCE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = regular.to_write(path.with_suffix(".measuring"), "w")
    except OSError:
        yield True
        return
    with lock:
        waiting = partial(warn_on_main, "another process is measuring this GPU model; waiting for it")
        yield locks.take(lock, waiting, lambda: time.monotonic() >= deadline)


def kept(layers: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Costs]:
    """The cached costs of these layers on this GPU model, by (K, N); layers without costs are left out. A file that
    cannot be read is ignored with a warning. Also activates the cached Triton block sizes on the current device."""
    values = _read(file())
    if values is None:
        return {}
    if values["block_sizes"] is not None:
        sizes: list[Any] = [Shape(*size) if isinstance(size, list) else size for size in values["block_sizes"]]
        tuning.use(Tuning(*sizes), torch.device("cuda", torch.cuda.current_device()))
    by_name = values["layers"]
    return {layer: Costs.of_json(by_name[_name(*layer)]) for layer in layers if _name(*layer) in by_name}


def _name(width: int, neurons: int) -> str:
    return f"{width}x{neurons}"


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    remedy = "`sparsellm calibrate` measures again; until then the package's constants choose the engines"
    try:
        values = read_sealed(path, DamagedCalibration, remedy)
        for costs in values["layers"].values():
            Costs.of_json(costs)
    except (DamagedCalibration, PackageMissing) as error:
        warn_once(str(error))
        return None
    except (KeyError, TypeError, ValueError) as error:
        warn_once(f"{path} was written by a different version ({error}): {remedy}")
        return None
    return values


def _version() -> str:
    """12 hexadecimal digits that identify the measuring method and all else that changes costs, except the GPU."""
    digest = hashlib.sha256(f"{torch.__version__} {METHOD}".encode())
    if backend.loaded() == "triton":
        import triton

        digest.update(triton.__version__.encode())
        for source in sorted(Path(tuning.__file__).parent.glob("*.py")):
            digest.update(source.read_bytes())
    else:
        digest.update(compiler.build_id().encode())
    return digest.hexdigest()[:12]
