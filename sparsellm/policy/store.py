"""What was measured of this GPU, kept in the cache beside the kernels, and taken from there.

    keep(...)          write what was measured of a layer, beside what is there of others
    kept(layers)       what is there of these layers
    tried(...)         how many tokens there was memory for when that was measured
    measuring()        one process of a machine at a time
    file()             ~/.cache/sparsellm/calibrations/GPU-KERNELS-VERSION.json

A file is of one GPU model, one kind of kernels, their version and torch's, since each of these changes what calls cost.
"""

import hashlib
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from sparsellm.ops import backend, build, compiler
from sparsellm.ops.triton import tuning
from sparsellm.ops.triton.tuning import Shape, Tuning
from sparsellm.policy.costs import Costs
from sparsellm.policy.measure import METHOD
from sparsellm.system import locks, regular
from sparsellm.system.console import is_main_rank, warn
from sparsellm.system.errors import SparsellmError
from sparsellm.system.files import read_sealed, write_sealed

PATIENCE = 300  # seconds for another process to measure in; Triton compiles its kernels first

warn_once = lru_cache(warn)  # a file is read more than once


class DamagedCalibration(SparsellmError, RuntimeError):
    """A file of calibrations cannot be read."""


def file() -> Path:
    """The file for this GPU and the kernels that are loaded."""
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    return build.cache() / "calibrations" / f"{name}-{backend.loaded()}-{_version()}.json"


def keep(costs: Costs, sizes: Tuning | None, tried: int | None = None) -> Path:
    """Write the costs of a layer, and the Triton kernels' block sizes if they were looked for. Raises OSError.

    tried: up to how many tokens the free memory was thought to do, where that was not for all sizes.
    """
    path = file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with regular.to_write(path.with_suffix(".lock"), "w") as lock:  # two layers may be measured at a time
        locks.take(lock)
        values: dict[str, Any] = (_read(path) if path.is_file() else None) or {"layers": {}, "block_sizes": None}
        values["layers"][_name(costs.width, costs.neurons)] = {**costs.as_json(), "tried": tried}
        if sizes is not None:
            values["block_sizes"] = list(sizes)
        write_sealed(path, values)
    return path


@contextmanager
def measuring() -> Iterator[bool]:
    """The right to measure for `file()`, which one process of a machine has at a time; the others wait.

    Yields False, without the right, where another process has it for longer than PATIENCE. Where the cache cannot be
    written there is nothing to wait for.
    """
    path, deadline = file(), time.monotonic() + PATIENCE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = regular.to_write(path.with_suffix(".measuring"), "w")
    except OSError:
        yield True
        return
    with lock:
        yield locks.take(lock, _say_waiting, lambda: time.monotonic() >= deadline)


def _say_waiting() -> None:
    if is_main_rank():
        warn("another process is measuring this GPU model; waiting for it")


def kept(layers: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Costs]:
    """By (K, N), what was measured of these layers on this GPU model, where it was. A file that cannot be read is said,
    and not taken. On the current device, the Triton kernels compute with the block sizes that are kept from now on."""
    path = file()
    values = _read(path) if path.is_file() else None
    if values is None:
        return {}
    if values["block_sizes"] is not None:
        tuning.use(block_sizes(values["block_sizes"]), torch.device("cuda", torch.cuda.current_device()))
    by_name = values["layers"]
    return {layer: Costs.of_json(by_name[_name(*layer)]) for layer in layers if _name(*layer) in by_name}


def tried(width: int, neurons: int) -> int | None:
    """Up to how many tokens there was memory when what is kept of such layers was measured; None: for all sizes."""
    path = file()
    values = (_read(path) if path.is_file() else None) or {"layers": {}}
    found: int | None = values["layers"].get(_name(width, neurons), {}).get("tried")
    return found


def block_sizes(values: list[Any]) -> Tuning:
    """The block sizes that JSON has as nested lists."""
    found: list[Any] = [Shape(*value) if isinstance(value, list) else value for value in values]
    return Tuning(*found)


def _name(width: int, neurons: int) -> str:
    return f"{width}x{neurons}"


def _read(path: Path) -> dict[str, Any] | None:
    remedy = "`sparsellm calibrate` measures anew; until then engines are chosen by the package's constants"
    try:
        values = read_sealed(path, DamagedCalibration, remedy)
        for costs in values["layers"].values():
            Costs.of_json(costs)
    except DamagedCalibration as error:
        warn_once(str(error))
        return None
    except (KeyError, TypeError, ValueError) as error:
        warn_once(f"{path} is of another version ({error}): {remedy}")
        return None
    return values


def _version() -> str:
    """12 hexadecimal digits of all that changes what calls cost, but the GPU, and of how they are measured."""
    digest = hashlib.sha256(f"{torch.__version__} {METHOD}".encode())
    if backend.loaded() == "triton":
        import triton

        digest.update(triton.__version__.encode())
        for source in sorted(Path(tuning.__file__).parent.glob("*.py")):
            digest.update(source.read_bytes())
    else:
        digest.update(compiler.build_id().encode())
    return digest.hexdigest()[:12]
