"""Ranks, their devices, and their process groups, with or without torchrun.

A single process forms a group of one, so that callers need not distinguish the two cases. Checkpoints are written by a
background thread and use a separate CPU group, because two threads must not share a group for collectives.

Only this file exchanges objects between ranks. A stop request is sent along with a reduction that happens anyway: the
one for the row of a logged step (runs/step_metrics.py).

If a rank ends or hangs between rendezvous and leaving the group, its lifeline ends all other ranks (lifeline.py).
"""

import json
import os
import socket
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
from sparsellm.system.console import say
from sparsellm.system.errors import SparsellmError

TIMEOUT = timedelta(seconds=PATIENCE)  # timeout of collectives; lifelines end ranks sooner, with an explanation
SHARED = "what they read and write must be on a file system that all nodes share, under the same path"

T = TypeVar("T")


class MainRankFailed(SparsellmError, RuntimeError):
    """Raised on the other ranks when the main rank failed; the main rank reports why."""


class NotShared(SparsellmError, RuntimeError):
    """Raised on all ranks when some do not see the same files as the main rank."""


@dataclass(frozen=True)
class Ranks:
    rank: int
    world_size: int
    device: torch.device
    checkpoint_group: dist.ProcessGroup  # gloo, for the checkpoint-writing thread

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def say(self, text: str) -> None:
        """Print a line on stderr, on the main rank only."""
        if self.is_main:
            say(text)


def device_type(choice: str) -> str:
    """Resolves "auto" to "cuda" if there is a GPU, otherwise to "cpu"; returns "cuda" and "cpu" unchanged."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if choice == "auto" else choice


def world_size_from_environment() -> int:
    """The number of ranks that torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def process_group(device_type: str, connect: bool = True) -> Iterator[Ranks]:
    """Join the ranks that torchrun started (or form a group of one), and leave the group on exit.

    `device_type`: "cpu" or "cuda"; with "cuda" each rank of a node has its own GPU. `connect`: let NCCL connect the
    GPUs now instead of at the first collective on GPU tensors.
    """
    rank, world_size = _rank(), world_size_from_environment()
    device, backend = torch.device("cpu"), "gloo"
    if device_type == "cuda":
        device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            backend, store=_meet(), rank=rank, world_size=world_size, timeout=TIMEOUT,
            device_id=device if connect and device_type == "cuda" else None,
        )  # fmt: skip
        yield Ranks(rank, world_size, device, dist.new_group(backend="gloo", timeout=TIMEOUT))
    except BaseException as error:
        if type(error) is RuntimeError or isinstance(error, dist.DistError):  # for example raised by a collective
            explain_failure()
        leave(error)
        raise
    finally:
        leave()
        if dist.is_initialized():
            dist.destroy_process_group()


def explain_failure() -> None:
    """Call this after a collective failed: if another rank has ended, report that and end this process."""
    if _lifeline is not None:
        _lifeline.explain()


def leave(error: BaseException | None = None) -> None:
    """Tell the other ranks that this rank leaves: normally, or with `error`, after which the others end too."""
    global _lifeline
    if _lifeline is not None:
        _lifeline.leave(error)
        _lifeline = None


def report_progress(step: int | None = None) -> None:
    """Report that this rank starts `step` (if None, an exchange of objects), so that lagging ranks can be named."""
    if _lifeline is not None:
        _lifeline.reached(step)


def hurry() -> None:
    """Report that this rank was asked to stop, which shortens the wait for a rank that hangs."""
    if _lifeline is not None:
        _lifeline.hurry()


_lifeline: Lifeline | None = None  # from rendezvous until this rank leaves
_store: dist.Store | None = None  # for rendezvous, used by nothing else


def _meet() -> dist.Store:
    """Waits until all ranks have joined. Returns the rendezvous store. Raises RanksMissing if some do not join."""
    global _lifeline, _store
    if "RANK" not in os.environ:
        return dist.HashStore()
    if _lifeline is None or _store is None:
        try:
            store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(seconds=ARRIVAL)))
            store.set_timeout(TIMEOUT)
            _lifeline = Lifeline(store, os.environ["MASTER_ADDR"], rank, world_size)
        except dist.DistError as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            reason = " ".join(str(error).split())
            raise RanksMissing(f"rank {_rank()} cannot connect to the other ranks at {where}: {reason}") from error
        _store = dist.PrefixStore(_lifeline.launch, store)
    return _store


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def agreed(found: list[str], view: str = "") -> list[str]:
    """The error messages `found` on any node, exchanged before the group exists. Collective on several nodes.

    On one node all ranks find the same errors, so nothing is exchanged. On several nodes, errors found by only some
    ranks, and differences between the ranks' `view` of the files, are reported with the ranks' names.
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


def _differences(ranks: list[tuple[str, list[str], str]], everywhere: list[str]) -> list[str]:
    """Messages saying how `ranks`, each (host, error messages, view), differ from each other."""
    by_finding: dict[str, list[str]] = {}
    for rank, (host, theirs, view) in enumerate(ranks):
        differs = [f"the main rank sees {ranks[0][2]}, but these ranks see {view}"] if view != ranks[0][2] else []
        for mistake in [*theirs, *differs]:
            if mistake not in everywhere:
                by_finding.setdefault(mistake, []).append(f"rank {rank} (host {host})")
    return [
        f"only on {', '.join(names)}: {mistake}{'' if mistake.startswith('runtime.') else f'; {SHARED}'}"
        for mistake, names in by_finding.items()
    ]


def require_shared(what: str, seen: object) -> None:
    """Raise NotShared on all ranks unless `seen`, a rank's view of `what`, is the same on every rank. Collective.

    The ranks compare digests of `repr(seen)`, because the repr may be long.
    """
    views = gather((socket.gethostname(), xxhash.xxh3_64_hexdigest(repr(seen).encode())))
    host, first = views[0]
    others = [f"rank {rank} (host {where})" for rank, (where, view) in enumerate(views) if view != first]
    if others:
        raise NotShared(f"{what} on {', '.join(others)} differs from rank 0 (host {host}): {SHARED}")


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's `value` (picklable), by rank. Collective on `group`, by default all ranks."""
    if dist.get_world_size(group) == 1:
        return [value]
    if group is None:  # the checkpoint-writing thread, on its own group, does not count as progress
        report_progress()
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def whole(tensor: Tensor) -> Tensor:
    """`tensor`, gathered if it is sharded. Collective on the ranks that share it."""
    from torch.distributed.tensor import DTensor  # slow to import: a second

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def first_error(error: str | None) -> str | None:
    """The error of the first rank that has one, the same on all ranks. Collective."""
    return next(filter(None, gather(error)), None)


def on_main(ranks: Ranks, work: Callable[[], T]) -> T:
    """The result (picklable) of the main rank's `work()`, on all ranks. Collective.

    An exception from `work` is raised on the main rank, and MainRankFailed with its message on the others.
    """
    answer: list[Any] = [None, None]  # result, error
    try:
        if ranks.is_main:
            with nullcontext() if _lifeline is None else _lifeline.alone():
                answer[0] = work()
    except BaseException as exception:
        answer[1] = f"{type(exception).__name__}: {exception}"
        raise
    finally:
        report_progress()
        dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise MainRankFailed(f"rank 0 failed: {answer[1]}")
    return answer[0]
