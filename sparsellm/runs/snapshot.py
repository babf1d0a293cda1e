"""Writes the tensors of a checkpoint: what each rank copies to the host and writes through DCP.

    a whole tensor        the same on all ranks: one rank copies and writes it; the main rank writes the model's
    a sharded tensor      (DTensor): each rank writes its own shard; of shards replicated over nodes, the first node's

The main rank exports the model as one file. It reads a sharded model's weights back from what the ranks have written,
so that no GPU ever holds all of them.
"""

from pathlib import Path
from typing import cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from sparsellm.distributed.groups import Ranks
from sparsellm.runs.state_reader import StateReader

MODEL_PREFIX = "model."


def own_copies(tensors: dict[str, torch.Tensor], ranks: Ranks) -> dict[str, torch.Tensor]:
    """CPU copies of what this rank writes, whole tensors or its shards, by name. Synchronize before reading."""
    whole = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
    shards = {name: _own_shard(tensor) for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    return {name: to_host(whole[name]) for name in _share(whole, ranks)} | {
        name: to_host(shard) for name, shard in shards.items() if shard is not None
    }


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU copy. From a GPU it is asynchronous, into pinned memory: synchronize before reading.

    The first save pins the memory (6.1 GB on an H200: 5.7 s); torch caches it, and later saves take 0.1 s.
    """
    if tensor.device.type == "cpu":
        return tensor.detach().clone()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor.detach(), non_blocking=True)


def write(
    copies: dict[str, torch.Tensor], shards: dict[str, DTensor], state: Path, ranks: Ranks
) -> dict[str, torch.Tensor]:
    """Write all ranks' `copies` to the folder `state`; on the main rank, return the model's whole weights on the CPU.

    `shards`: the sharded tensors of which `copies` are shards; their values may have changed since the copy.
    Collective on `ranks.checkpoint_group`. Raises DCP's CheckpointException on all ranks.
    """
    # No copying ahead, which is for GPU tensors: it would open a context on GPU 0 in every rank's thread.
    writer = dcp.FileSystemWriter(state, per_thread_copy_ahead=0, overwrite=False)
    described = {name: shards.get(name, copy) for name, copy in copies.items()}
    dcp.save(described, storage_writer=writer, planner=_FromCopies(copies), process_group=ranks.checkpoint_group)
    weights = {name: copy for name, copy in copies.items() if name.startswith(MODEL_PREFIX)}
    if joining := [name for name in shards if name.startswith(MODEL_PREFIX)]:
        weights = {name: torch.empty(shards[name].shape, dtype=shards[name].dtype) for name in joining if ranks.is_main}
        dcp.load(weights, storage_reader=StateReader(state), process_group=ranks.checkpoint_group)
    return weights


class _FromCopies(dcp.DefaultSavePlanner):
    """A DCP planner that takes the tensors' values from copies."""

    def __init__(self, copies: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.copies = copies

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.copies[index.fqn]


def _own_shard(tensor: DTensor) -> torch.Tensor | None:
    """This rank's shard, if it exists and this rank is the one to write it."""
    places = zip(cast(list[int], tensor.device_mesh.get_coordinate()), tensor.placements, strict=True)
    shard = tensor.to_local()
    written_by_another = any(placement.is_replicate() and at > 0 for at, placement in places)
    return None if written_by_another or shard.numel() == 0 else shard


def _share(tensors: dict[str, torch.Tensor], ranks: Ranks) -> list[str]:
    """The names of tensors that this rank copies and writes: one writer per tensor, with balanced bytes.

    DCP would also distribute the writing, but only after every rank had copied everything: 8 x 25 GB at 2B.
    """
    load = [0] * ranks.world_size
    mine = []
    by_size = sorted(tensors, key=lambda name: (-tensors[name].nbytes, name))
    # The main rank needs the model's weights for the export, so it writes them too; the rest is balanced around that.
    for name in sorted(by_size, key=lambda name: not name.startswith(MODEL_PREFIX)):
        owner = 0 if name.startswith(MODEL_PREFIX) else load.index(min(load))
        load[owner] += tensors[name].nbytes
        if owner == ranks.rank:
            mine.append(name)
    return mine
