"""Ranks, their devices, and the process groups: one of every process, torchrun or not.

A single process forms a group of one, so that no caller distinguishes the two cases. Checkpoints are written by a
thread while training goes on, so they have a CPU group of their own: collectives of two threads must not share one.

    gather(value)        every rank's value
    first_error(error)   the error of the first rank that has one: all go on, or none
    on_main(ranks, work) the main rank's result; where the main rank fails, no rank goes on
    whole(tensor)        a tensor that ranks hold in shards, in one piece on each of them

So ranks agree, and nothing else of this package exchanges objects. Sums of numbers that a step waits for anyway carry
more: whether a rank was asked to stop comes with the row of a logged step (training/metrics.py).
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sparsellm.console import say

# Preparing the embedded corpus, loading 25 GB from a slow disk: rank 0 may work this long while the others wait.
TIMEOUT = timedelta(minutes=60)


T = TypeVar("T")


class MainRankFailed(RuntimeError):
    """Raised on the other ranks when the main rank cannot go on; the main rank says why."""


@dataclass(frozen=True)
class Ranks:
    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    checkpoint_group: dist.ProcessGroup  # gloo, for the thread that writes checkpoints

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def say(self, text: str) -> None:
        """On the main rank: a line on stderr."""
        if self.is_main:
            say(text)


def device_type(choice: str) -> str:
    """ "cuda" or "cpu", for "auto", "cuda" or "cpu": auto is a GPU where there is one."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if choice == "auto" else choice


def world_size_from_environment() -> int:
    """The number of ranks that torchrun announces; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def process_group(device_type: str) -> Iterator[Ranks]:
    """Join the ranks that torchrun started (or form a group of one), and leave them at the end.

    `device_type` is "cpu" or "cuda"; with "cuda" each rank of a node has a GPU of its own.
    """
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    world_size = world_size_from_environment()
    if device_type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    dist.init_process_group(
        backend, store=_meeting_place(), rank=rank, world_size=world_size, timeout=TIMEOUT,
        device_id=device if device_type == "cuda" else None,
    )  # fmt: skip
    try:
        yield Ranks(rank, local_rank, world_size, device, dist.new_group(backend="gloo", timeout=TIMEOUT))
    finally:
        dist.destroy_process_group()


def _meeting_place() -> dist.Store | None:
    """Where the ranks find one another; None: where torch has them do.

    torchrun (of torch 2.13) keeps its store when it starts ranks again, and in it the addresses of those that ended, to
    which the new ones would connect: each start on one node has a part of the store for itself. On several nodes
    torchrun counts the starts of each node alone, so there is no number that all ranks know.
    """
    if "RANK" not in os.environ:
        return dist.HashStore()
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if start == "0" or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return None
    store, _rank, _world_size = next(dist.rendezvous("env://", timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    return dist.PrefixStore(f"start_{start}", store)


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's `value`, which must pickle, by rank. Collective on `group`, by default on all ranks."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def whole(tensor: Tensor) -> Tensor:
    """`tensor` gathered, if it is in shards, or else itself. Collective on the ranks that share it."""
    from torch.distributed.tensor import DTensor  # takes a second, that a refused command need not wait

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def first_error(error: str | None) -> str | None:
    """The error of the first rank that has one, the same on all ranks. Collective."""
    return next(filter(None, gather(error)), None)


def on_main(ranks: Ranks, work: Callable[[], T]) -> T:
    """The main rank's `work()`, which must pickle, on all ranks. Collective.

    What `work` raises is raised on the main rank, and MainRankFailed with its message on the others.
    """
    answer: list[Any] = [None, None]  # the result, and the error
    try:
        if ranks.is_main:
            answer[0] = work()
    except BaseException as exception:
        answer[1] = f"{type(exception).__name__}: {exception}"
        raise
    finally:
        dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise MainRankFailed(f"rank 0 failed: {answer[1]}")
    return answer[0]
