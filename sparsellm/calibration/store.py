"""What was measured of this GPU, kept in the cache beside the kernels, and taken from there.

    keep(...)          write what was measured of a layer, beside what is there of others
    take(layers)       let the policy go by what is there of these layers
    file()             ~/.cache/sparsellm/calibrations/GPU-KERNELS-VERSION.json

A file is of one GPU model, one kind of kernels, their version and torch's, since each of these changes what calls cost.
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from sparsellm import locks
from sparsellm.console import warn
from sparsellm.files import read_sealed, write_sealed
from sparsellm.ops import backend, build, compiler
from sparsellm.ops.costs import Costs
from sparsellm.ops.triton import tuning
from sparsellm.ops.triton.tuning import Shape, Tuning

SHIPPED = "H200"  # in the name of the GPU that the package's constants were measured on,
SHIPPED_LAYER = (2048, 5632)  # K and N of the layer, on the CUDA kernels


class DamagedCalibration(RuntimeError):
    """A file of calibrations cannot be read."""


def file() -> Path:
    """The file for this GPU and the kernels that are loaded."""
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    return build.cache() / "calibrations" / f"{name}-{backend.loaded()}-{_version()}.json"


def keep(costs: Costs, sizes: Tuning | None) -> Path:
    """Write the costs of a layer, and the Triton kernels' block sizes if they were looked for. Raises OSError."""
    path = file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:  # two layers may be measured at a time
        locks.take(lock)
        values: dict[str, Any] = (_read(path) if path.is_file() else None) or {"layers": {}, "block_sizes": None}
        values["layers"][_name(costs.width, costs.neurons)] = costs.as_json()
        values["block_sizes"] = None if sizes is None else list(sizes)
        write_sealed(path, values)
    return path


def take(layers: Iterable[tuple[int, int]]) -> None:
    """Let engines of layers with these (K, N) be chosen by what was measured of them on this GPU model, if it was.

    A file that cannot be read is said, and not taken.
    """
    path = file()
    values = _read(path) if path.is_file() else None
    if values is None:
        return
    found = {(k, n): values["layers"][_name(k, n)] for k, n in layers if _name(k, n) in values["layers"]}
    backend.measured.update({layer: Costs.of_json(costs) for layer, costs in found.items()})
    if values["block_sizes"] is not None:
        tuning.use(block_sizes(values["block_sizes"]))


def block_sizes(values: list[Any]) -> Tuning:
    """The block sizes that JSON has as nested lists."""
    found: list[Any] = [Shape(*value) if isinstance(value, list) else value for value in values]
    return Tuning(*found)


def is_shipped(width: int, neurons: int) -> bool:
    """Whether the package's own constants were measured on such a GPU and layer."""
    layer = width, neurons
    return backend.loaded() == "cuda" and layer == SHIPPED_LAYER and SHIPPED in torch.cuda.get_device_name()


def _name(width: int, neurons: int) -> str:
    return f"{width}x{neurons}"


def _read(path: Path) -> dict[str, Any] | None:
    remedy = "`sparsellm calibrate` measures anew; until then engines are chosen by the package's constants"
    try:
        values = read_sealed(path, DamagedCalibration, remedy)
        for costs in values["layers"].values():
            Costs.of_json(costs)
    except DamagedCalibration as error:
        warn(str(error))
        return None
    except (KeyError, TypeError, ValueError) as error:
        warn(f"{path} is of another version ({error}): {remedy}")
        return None
    return values


def _version() -> str:
    """12 hexadecimal digits of all that changes what calls cost, but the GPU."""
    digest = hashlib.sha256(torch.__version__.encode())
    if backend.loaded() == "triton":
        import triton

        digest.update(triton.__version__.encode())
        for source in sorted(Path(tuning.__file__).parent.glob("*.py")):
            digest.update(source.read_bytes())
    else:
        digest.update(compiler.build_id().encode())
    return digest.hexdigest()[:12]
