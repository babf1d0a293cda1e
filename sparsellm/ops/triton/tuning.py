"""The block sizes of the Triton kernels by GPU.

None of it changes a result but in its rounding, so a calibration may replace any of it (sparsellm.policy).
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch

TOKENS = 128  # of a tile of the tile engine; the union that is counted is of so many, so it is not to be tuned
FEW = 16  # tokens of a tile of the row engine: as few as tl.dot multiplies
PITCH_MULTIPLE = 128  # a row of a tile matrix has a multiple of so many values, and so of every block and depth below
FEWEST_SLOTS = 32  # of a block: what arrays with an entry for each block have room for


class Shape(NamedTuple):
    """How one kernel multiplies. columns: of the result, in one program. depth: of the sum, in one step."""

    columns: int
    depth: int
    warps: int
    stages: int


class Tuning(NamedTuple):
    """columns of `sampled` and `few_sampled` are slots, and divide PITCH_MULTIPLE; so do all depths of gathered
    products, which may not exceed the slots of the product before. A gathered product loads a row's number before the
    row: with 3 or 4 stages it loads one step ahead, with 5 or 6 two.
    """

    sampled: Shape  # u and dh: tiles of 128 tokens, times a block of slots
    gathered: Shape  # y and dx: tiles of 128 tokens, times columns of K
    neurons: int  # of a tile of the weights' gradients
    weights: Shape  # dW_g with dW_u: two times `neurons` rows, times columns of K
    down_weights: Shape  # dW_d: `neurons` rows, times columns of K
    few_sampled: Shape  # as `sampled` and `gathered`, of the row engine
    few_gathered: Shape
    resident: int  # programs of a kernel whose programs take items in turn, for each multiprocessor


# Within 64 KB of shared memory: every GPU has it.
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
# From LARGE_BYTES of shared memory on: Hopper, data centre Blackwell. (On an A100 these would spill registers.)
LARGE = SMALL._replace(
    sampled=Shape(128, 64, 8, 3),
    gathered=Shape(256, 64, 8, 5),
    weights=Shape(256, 64, 8, 5),
    down_weights=Shape(256, 64, 4, 5),
)
LARGE_BYTES = 200 << 10


def shared_bytes(properties: Any) -> int:
    """Bytes of shared memory that a block of a CUDA device may have."""
    return properties.shared_memory_per_block_optin


# What was measured on a device. The process keeps it, because a registered operator runs the kernels, and gets tensors
# and a plan: a device's block sizes must be found when it runs, and in backward by another thread.
_by_device: dict[torch.device, Tuning] = {}


def use(tuning: Tuning | None, device: torch.device) -> None:
    """Compute on `device` with these block sizes from now on; None: with those that the package has for it."""
    if tuning is None:
        _by_device.pop(device, None)
    else:
        _by_device[device] = tuning


def of(device: torch.device) -> tuple[Tuning, int]:
    """(the block sizes for a device; how many programs take items in turn). A CPU, on which only Triton's interpreter
    runs, has three programs."""
    if device.type == "cpu":
        return SMALL, 3
    packaged, processors = _packaged(device)
    tuning = _by_device.get(device, packaged)
    return tuning, tuning.resident * processors


@lru_cache
def _packaged(device: torch.device) -> tuple[Tuning, int]:
    properties = torch.cuda.get_device_properties(device)
    return LARGE if shared_bytes(properties) >= LARGE_BYTES else SMALL, properties.multi_processor_count
