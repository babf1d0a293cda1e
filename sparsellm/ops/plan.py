"""A layer's engine choice: which engine computes a call, and the capacity of the tile engine's lists."""

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from sparsellm.ops.twell import MAX_COLUMNS

ROOM = 320  # default capacity of the tile engine's lists, in nonzeros per token


class Engine(IntEnum):
    """dense multiplies every token by every neuron. row multiplies each token by the weight rows of the neurons that
    fire for that token, and has no gradients. tile multiplies each tile of 128 tokens by the weight rows of the neurons
    that fire in it.

    These numbers are stored in the plan's tensor and encoded in a saved buffer's length (sparsellm.ops.cuda.engine_of).
    """

    dense = 0
    row = 1
    tile = 2


ENGINES = tuple(engine.name for engine in Engine)


class Plan(NamedTuple):
    """engine: which engine computes. room: the capacity of the tile engine's lists, in nonzeros per token on average
    over a call. If a call has more nonzeros, its fullest token tiles take the overflow path, which is
    exact but slower: `rest_calls` counts the call, `overflow_tiles` the tiles."""

    engine: Engine = Engine.dense
    room: int = ROOM

    @classmethod
    def of(cls, engine: str, room: int = ROOM) -> "Plan":
        """The plan for the engine named `engine`. Raises ValueError for an unknown name or an invalid room."""
        if engine not in ENGINES:
            raise ValueError(f"engine is {engine!r}: it should be {', '.join(ENGINES[:-1])} or {ENGINES[-1]}")
        return cls.read(cls(Engine[engine], room).tensor())

    def tensor(self) -> Tensor:
        """The plan as int32 [2] on the CPU. Compiled code takes this tensor as an input, so writing a new plan into the
        tensor triggers no recompilation."""
        return torch.tensor(self, dtype=torch.int32, device="cpu")  # also inside `with torch.device`

    @classmethod
    def read(cls, tensor: Tensor) -> "Plan":
        """The plan encoded by a tensor from `Plan.tensor`. Raises ValueError for any other tensor."""
        if tensor.dtype != torch.int32 or tensor.device.type != "cpu" or tensor.shape != (2,):
            raise ValueError(
                f"plan is {tensor.dtype} {list(tensor.shape)} on {tensor.device}: it should be torch.int32 [2] on cpu"
            )
        engine, room = tensor.tolist()
        if not 0 <= engine < len(Engine):
            numbers = ", ".join(f"{member.value} ({member.name})" for member in Engine)
            raise ValueError(f"plan[0], the engine, is {engine}: it should be one of {numbers}")
        if not 1 <= room <= MAX_COLUMNS:
            raise ValueError(f"plan[1], the nonzeros per token, is {room}: it should be between 1 and {MAX_COLUMNS}")
        return cls(Engine(engine), room)
