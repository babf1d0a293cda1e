"""Which engine computes a feedforward call, and with how much room: the one encoding of it that operators take."""

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

MAX_ROOM = 65_536  # nonzeros per token: a row has no more neurons (twell.MAX_COLUMNS)
ROOM = 320  # nonzeros per token that the tile engine's lists hold, unless a plan says otherwise


class Engine(IntEnum):
    """dense: matrix products. row: each token's own weight rows, without gradients. tile: products over the neurons
    that fire in each tile of 128 tokens."""

    dense = 0
    row = 1
    tile = 2


ENGINES = tuple(engine.name for engine in Engine)


class Plan(NamedTuple):
    """engine: who computes. room: nonzeros per token, on average over a call, that the tile engine's lists hold; of a
    call with more, a slower exact path computes everything, and `rest_calls` counts it."""

    engine: Engine = Engine.dense
    room: int = ROOM

    @classmethod
    def of(cls, engine: str, room: int = ROOM) -> "Plan":
        """The plan of an engine by its name. Raises ValueError for another name or room than there is."""
        if engine not in ENGINES:
            raise ValueError(f"engine is {engine!r}: it should be {', '.join(ENGINES[:-1])} or {ENGINES[-1]}")
        return cls.read(cls(Engine[engine], room).tensor())

    def tensor(self) -> Tensor:
        """int32 [2] on the CPU: what compiled code takes, so that a new plan, written into it, recompiles nothing."""
        return torch.tensor(self, dtype=torch.int32)

    @classmethod
    def read(cls, tensor: Tensor) -> "Plan":
        """The plan that `tensor` holds. Raises ValueError for what `tensor` cannot have written."""
        if tensor.dtype != torch.int32 or tensor.device.type != "cpu" or tensor.shape != (2,):
            raise ValueError(
                f"plan is {tensor.dtype} {list(tensor.shape)} on {tensor.device}: it should be torch.int32 [2] on cpu"
            )
        engine, room = tensor.tolist()
        if not 0 <= engine < len(Engine):
            numbers = ", ".join(f"{member.value} ({member.name})" for member in Engine)
            raise ValueError(f"plan[0], the engine, is {engine}: it should be one of {numbers}")
        if not 1 <= room <= MAX_ROOM:
            raise ValueError(f"plan[1], the room per token, is {room}: it should be between 1 and {MAX_ROOM}")
        return cls(Engine(engine), room)
