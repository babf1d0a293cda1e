"""Ranks, their devices, and the process groups: one of every process, torchrun or not.

A single process forms a group of one, so that no caller distinguishes the two cases. Checkpoints are written by a
thread while training goes on, so they have a CPU group of their own: collectives of two threads must not share one.

    gather(value)        every rank's value
    first_error(error)   the error of the first rank that has one: all go on, or none
    on_main(ranks, work) the main rank's result; where the main rank fails, no rank goes on
    agreed(found, view)  before there is a group: what keeps a rank of any node from going on
    require_shared(...)  what all ranks must see alike, in files that the nodes share
    whole(tensor)        a tensor that ranks hold in shards, in one piece on each of them

So ranks agree, and nothing else of this package exchanges objects. Sums of numbers that a step waits for anyway carry
more: whether a rank was asked to stop comes with the row of a logged step (runs/metrics.py).

A rank that ends or hangs ends all others through their lifelines (lifeline.py), from their first word to one another
until they leave the group.
"""

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from sparsellm.distributed.lifeline import ARRIVAL, PATIENCE, Lifeline, RanksMissing
from sparsellm.system.console import say, warn
from sparsellm.system.errors import SparsellmError

TIMEOUT = timedelta(seconds=PATIENCE)  # of collectives; lifelines end ranks sooner, and with a sentence


T = TypeVar("T")


class MainRankFailed(RuntimeError):
    """Raised on the other ranks when the main rank cannot go on; the main rank says why."""


class NotShared(SparsellmError, RuntimeError):
    """Raised alike on all ranks when some do not see the files that the main rank sees."""


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
def process_group(device_type: str, connect: bool = True) -> Iterator[Ranks]:
    """Join the ranks that torchrun started (or form a group of one), and leave them at the end.

    `device_type` is "cpu" or "cuda"; with "cuda" each rank of a node has a GPU of its own. connect: NCCL connects the
    GPUs now, and not at the first collective of their tensors, if there is one.
    """
    rank, local_rank = _rank(), int(os.environ.get("LOCAL_RANK", "0"))
    world_size = world_size_from_environment()
    if device_type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    try:
        dist.init_process_group(
            backend, store=_meet(), rank=rank, world_size=world_size, timeout=TIMEOUT,
            device_id=device if connect and device_type == "cuda" else None,
        )  # fmt: skip
        yield Ranks(rank, local_rank, world_size, device, dist.new_group(backend="gloo", timeout=TIMEOUT))
    except BaseException as error:
        if type(error) is RuntimeError or isinstance(error, dist.DistError):  # as of a collective
            explain_failure()
        leave(error)
        raise
    finally:
        leave()
        if dist.is_initialized():
            dist.destroy_process_group()


def explain_failure() -> None:
    """Of a collective that failed on this rank: if another rank's end is why, end this process with a sentence."""
    if _lifeline is not None:
        _lifeline.explain()


def leave(error: BaseException | None = None) -> None:
    """Tell the other ranks, if this one has met them, that it ends in order, or of what. They go on, or end too."""
    global _lifeline
    if _lifeline is not None:
        _lifeline.leave(error)
        _lifeline = None


def begin_step(step: int) -> None:
    """This rank has what it needs for `step`: the others hear who has not come as far."""
    if _lifeline is not None:
        _lifeline.reached(step)


def hurry() -> None:
    """This rank was asked to stop: wait no longer than it has time for a rank that hangs."""
    if _lifeline is not None:
        _lifeline.hurry()


def _come_to_exchange() -> None:
    if _lifeline is not None:
        _lifeline.reached()


_lifeline: Lifeline | None = None  # from the ranks' first word to one another until this one leaves
_store: dist.Store | None = None  # through which they find one another; theirs alone


def _meet() -> dist.Store:
    """What the ranks find one another through, once all of them have come. Says why, and exits, if some do not."""
    global _lifeline, _store
    if "RANK" not in os.environ:
        return dist.HashStore()
    if _lifeline is None or _store is None:
        try:
            store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(seconds=ARRIVAL)))
            store.set_timeout(TIMEOUT)
            _lifeline = Lifeline(store, os.environ["MASTER_ADDR"], rank, world_size)
        except RanksMissing as error:
            warn(str(error))
            sys.exit(1)
        except dist.DistError as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            warn(f"rank {_rank()} cannot meet the others at {where}: {' '.join(str(error).split())}")
            sys.exit(1)
        _store = dist.PrefixStore(_lifeline.start, store)
    return _store


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def agreed(found: list[str], view: str = "") -> list[str]:
    """Before there is a group: what is `found` to keep ranks from going on, on all nodes. Collective on several nodes.

    On one node all ranks find the same, and nothing is exchanged. On several, what only some find, or what differs in
    their `view` of the files, is said with their names.
    """
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1:
        return found
    store, rank, world_size = _meet(), _rank(), world_size_from_environment()
    store.set(f"found/{rank}", json.dumps([socket.gethostname(), found, view]))
    if rank == 0:
        ranks = [json.loads(store.get(f"found/{each}")) for each in range(world_size)]
        everywhere = [mistake for mistake in found if all(mistake in theirs for _, theirs, _ in ranks)]
        store.set("found", json.dumps(everywhere + _differences(ranks, everywhere)))
    found = json.loads(store.get("found"))
    if found:
        leave()
    return found


SHARED = "what they read and write must be on a file system that all nodes share, under the same path"


def _differences(ranks: list[tuple[str, list[str], str]], everywhere: list[str]) -> list[str]:
    """What some of the `ranks`, each a host, what it found and its view, found or see otherwise than others."""
    by_finding: dict[str, list[str]] = {}
    for rank, (host, theirs, view) in enumerate(ranks):
        differs = [f"the main rank sees {ranks[0][2]}, and these see {view}"] if view != ranks[0][2] else []
        for mistake in [*theirs, *differs]:
            if mistake not in everywhere:
                by_finding.setdefault(mistake, []).append(f"rank {rank} (host {host})")
    found = []
    for mistake, names in by_finding.items():
        of_files = not mistake.startswith("runtime.")
        found.append(f"only on {', '.join(names)}: {mistake}{f'; {SHARED}' if of_files else ''}")
    return found


def require_shared(what: str, seen: object) -> None:
    """Raise NotShared, alike on all ranks, unless every rank has `seen` of `what` the same as rank 0. Collective.

    Compared are digests of `repr(seen)`: it may be long.
    """
    views = gather((socket.gethostname(), xxhash.xxh3_64_hexdigest(repr(seen).encode())))
    host, first = views[0]
    others = [f"rank {rank} (host {where})" for rank, (where, view) in enumerate(views) if view != first]
    if others:
        raise NotShared(f"{what} is not on {', '.join(others)} what it is on rank 0 (host {host}): {SHARED}")


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's `value`, which must pickle, by rank. Collective on `group`, by default on all ranks."""
    if dist.get_world_size(group) == 1:
        return [value]
    if group is None:  # the thread that writes checkpoints has a group of its own, and an order of its own
        _come_to_exchange()
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
            with nullcontext() if _lifeline is None else _lifeline.alone():
                answer[0] = work()
    except BaseException as exception:
        answer[1] = f"{type(exception).__name__}: {exception}"
        raise
    finally:
        _come_to_exchange()
        dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise MainRankFailed(f"rank 0 failed: {answer[1]}")
    return answer[0]
