"""Block sizes of the Triton kernels for each GPU.

Block sizes affect results only through rounding, so a calibration (sparsellm.policy.block_sizes) may replace them.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch

TOKENS = 128  # per tile of the tile engine; unions are counted per tile, so this is not tunable
FEW = 16  # tokens per tile of the row engine: the minimum for tl.dot
PITCH_MULTIPLE = 128  # row length of tile matrices is a multiple of this, and so of every block size below
FEWEST_SLOTS = 32  # smallest block of slots; arrays with one entry per block are sized for this minimum


class Shape(NamedTuple):
    """Block sizes of one kernel. columns: result columns per program. depth: length of the sum (K) per step."""

    columns: int
    depth: int
    warps: int
    stages: int


class Tuning(NamedTuple):
    """Columns of `sampled` and `few_sampled` are slots and divide PITCH_MULTIPLE. Depths of gathered GEMMs also divide
    PITCH_MULTIPLE, and may not exceed the slots of the preceding sampled GEMM. A gathered GEMM loads a row's index
    before the row, so 3 or 4 stages load one step ahead, and 5 or 6 stages load two steps ahead.
    """

    sampled: Shape  # u and dh: output tile of 128 tokens by a block of slots
    gathered: Shape  # y and dx: output tile of 128 tokens by columns of K
    neurons: int  # per tile of the weight gradients
    weights: Shape  # dW_g and dW_u: output tiles of 2 * `neurons` rows by columns of K
    down_weights: Shape  # dW_d: output tile of `neurons` rows by columns of K
    few_sampled: Shape  # like `sampled` and `gathered`, for the row engine
    few_gathered: Shape
    resident: int  # programs per multiprocessor in persistent kernels


# Fits into 64 KB of shared memory, which every supported GPU has.
SMALL = Tuning(
    sampled=Shape(128, 32, 8, 4),
    gathered=Shape(128, 32, 8, 5),
    neurons=64,
    weights=Shape(128, 32, 8, 5),
    down_weights=Shape(128, 32, 4, 5),
    few_sampled=Shape(32, 128, 4, 4),
    few_gathered=Shape(64, 32, 4, 4),
    resident=2,
)
# For GPUs with at least LARGE_BYTES of shared memory: Hopper, data centre Blackwell. (On an A100, these sizes spill.)
LARGE = SMALL._replace(
    sampled=Shape(128, 64, 8, 3),
    gathered=Shape(256, 64, 8, 5),
    weights=Shape(256, 64, 8, 5),
    down_weights=Shape(256, 64, 4, 5),
)
LARGE_BYTES = 200 << 10


def shared_bytes(properties: Any) -> int:
    """Maximum bytes of shared memory per thread block on a CUDA device."""
    return properties.shared_memory_per_block_optin


# Tuned block sizes. The dict is global to the process, because a registered operator receives only tensors and a plan,
# and its backward runs in another thread, so the operator must find the device's block sizes itself.
_by_device: dict[torch.device, Tuning] = {}


def use(tuning: Tuning | None, device: torch.device) -> None:
    """Set the block sizes used on `device`. None restores the package's defaults."""
    if tuning is None:
        _by_device.pop(device, None)
    else:
        _by_device[device] = tuning


def of(device: torch.device) -> tuple[Tuning, int]:
    """(block sizes for a device, number of programs of persistent kernels). On a CPU, where only Triton's interpreter
    runs, the number is three."""
    if device.type == "cpu":
        return SMALL, 3
    packaged, processors = _packaged(device)
    tuning = _by_device.get(device, packaged)
    return tuning, tuning.resident * processors


@lru_cache
def _packaged(device: torch.device) -> tuple[Tuning, int]:
    properties = torch.cuda.get_device_properties(device)
    return LARGE if shared_bytes(properties) >= LARGE_BYTES else SMALL, properties.multi_processor_count
