"""One model on several ranks: replicated (DistributedDataParallel) or sharded (FSDP2, `fully_shard`).

docs/TRAINING.md, "Shard a model across GPUs", describes the values of runtime.shard, several nodes, and why losses
equal those of `none` up to float32 rounding. Matrices are sharded by rows (dimension 0; the last shard may be smaller),
and each layer is gathered and reduced separately. Embedding, head and last norm stay gathered from forward to backward,
even with `full`.
"""

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from sparsellm.config import (
    Activation,
    ConfigError,
    DdpCompress,
    ModelConfig,
    RuntimeConfig,
    Shard,
    embedding_weights,
    parameters,
    ranks_that_share,
)
from sparsellm.distributed.groups import Ranks, gather
from sparsellm.model import Decoder
from sparsellm.model.decoder import initialize
from sparsellm.training.memory import UNSHARED, Sharing


def decoder(model: ModelConfig, activation: Activation, runtime: RuntimeConfig, ranks: Ranks) -> Decoder:
    """A new decoder for a run: on this rank's device, or on the "meta" device if `distributed` will shard it."""
    sharded = runtime.shard != Shard.none
    if sharded and ranks.world_size == 1:
        ranks.say(f"runtime.shard={runtime.shard.name} has no effect with one rank")
    with torch.device("meta") if sharded and ranks.world_size > 1 else ranks.device:
        return Decoder(model, activation)


def distributed(
    model: Decoder, runtime: RuntimeConfig, init_std: float, ranks: Ranks
) -> Decoder | DistributedDataParallel:
    """The module that training steps call: `model` wrapped in DDP, sharded, or unchanged with one rank. Collective.

    `model` comes from `decoder`; accelerate and compile it before this call. Sharded weights are initialized here, one
    whole matrix at a time, and are bit-identical to those of an unsharded model. Raises ConfigError on all ranks if
    sharding is requested and nodes have different numbers of ranks.
    """
    device = ranks.device
    if ranks.world_size == 1:
        return model
    if runtime.shard == Shard.none:
        torch._dynamo.config.optimize_ddp = False  # it splits graphs for DDP, but layers are compiled separately anyway
        with warnings.catch_warnings():
            # torch 2.13 warns on each rank, and earlier versions have no replacement for broadcast_buffers.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            copies = DistributedDataParallel(
                model, device_ids=[device.index] if device.type == "cuda" else None,
                gradient_as_bucket_view=True, bucket_cap_mb=runtime.ddp_bucket_mb,
                broadcast_buffers=False,  # the only buffers are the constant handles of accelerated blocks
            )  # fmt: skip
        arrange(copies, runtime)
        return copies
    mesh = _mesh(ranks)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=runtime.shard == Shard.full)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    model.to_empty(device=device)
    _draw_what_constructors_draw(model, device)
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape, device=device)
        initialize(name, whole, init_std)
        dist.broadcast(whole, src=0)  # other GPU models draw different bits from the same seed
        write(parameter, whole)
    return model


def arrange(model: DistributedDataParallel, runtime: RuntimeConfig) -> None:
    """Configure the dtype and the buckets of DDP's gradient reduction. Collective, before the first step."""
    if runtime.ddp_compress == DdpCompress.bf16:
        model.register_comm_hook(None, bf16_compress_hook)
    if runtime.deterministic:
        # DDP rebuilds its buckets after a process's first step. With three ranks or more, the order of summation
        # depends on a gradient's position in its bucket, so the first step of a resumed run would be rounded
        # differently. Buckets that are rebuilt now, in parameter order, are not rebuilt again.
        model.reducer._push_all_rebuilt_params()
        model.reducer._rebuild_buckets()


def sharing(model: ModelConfig, shard: Shard, ranks: Ranks) -> Sharing:
    """How many ranks share one model, and how many elements a rank gathers temporarily. Collective."""
    if shard == Shard.none or ranks.world_size == 1:
        return UNSHARED
    over = ranks_that_share(ranks.world_size, _ranks_of_a_node(ranks))
    # Weights and unreduced gradients of two layers (one computing, one prefetched), embedding and head.
    at_work = 2 * (parameters(model) - parameters(replace(model, num_layers=0))) // model.num_layers
    at_work += embedding_weights(model)
    return Sharing(over, at_work + (parameters(model) if shard == Shard.optimizer else at_work))


def _mesh(ranks: Ranks) -> DeviceMesh:
    """The device mesh: [S] sharing ranks, or [nodes, S] with one replica per node. Collective."""
    here = _ranks_of_a_node(ranks)
    sharing = ranks_that_share(ranks.world_size, here)
    if sharing == ranks.world_size:
        return init_device_mesh(ranks.device.type, (sharing,))
    copies = ranks.world_size // sharing
    return init_device_mesh(ranks.device.type, (copies, sharing), mesh_dim_names=("replicate", "shard"))


def mesh_of(parameter: Tensor) -> DeviceMesh | None:
    """The ranks that hold copies or shards of `parameter`; None with one rank. Collective."""
    if isinstance(parameter, DTensor):
        return parameter.device_mesh
    copies = dist.get_world_size()
    return init_device_mesh(parameter.device.type, (copies,)) if copies > 1 else None


def _ranks_of_a_node(ranks: Ranks) -> int:
    """The number of ranks per node. Collective. Raises ConfigError on all ranks if nodes differ."""
    sizes = gather(int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size)))
    if len(set(sizes)) > 1:
        raise ConfigError([
            f"runtime.shard: nodes have {' and '.join(map(str, sorted(set(sizes))))} ranks, but sharding needs the same"
            " number on each: start torchrun with the same --nproc_per_node everywhere, or use runtime.shard=none"
        ])  # fmt: skip
    return sizes[0]


def _draw_what_constructors_draw(model: Decoder, device: torch.device) -> None:
    """Draw as many random numbers as constructing an unsharded decoder on `device`, so that later draws are equal."""
    with device:
        for module in model.modules():  # modules() yields them in construction order
            if isinstance(module, nn.Embedding):
                nn.Embedding(module.num_embeddings, module.embedding_dim)
            elif isinstance(module, nn.Linear):
                nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)


def micro_batch(
    model: Decoder | DistributedDataParallel, runtime: RuntimeConfig, last: bool
) -> AbstractContextManager[None]:
    """Context manager for a micro-batch's forward and backward pass. DDP reduces gradients only in a step's `last`
    micro-batch. A sharded model reduces them within a node in every micro-batch, and between nodes in the last."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(last)
        model.set_reshard_after_backward(last or runtime.shard == Shard.full)
        return nullcontext()
    return nullcontext() if last or isinstance(model, Decoder) else model.no_sync()


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks share the weights of `model`, which comes from `distributed`."""
    return isinstance(model, FSDPModule)


def shard_of(whole: Tensor, like: Tensor) -> Tensor:
    """`whole` (the same on all ranks), sharded like `like` without communication, or unchanged if `like` is whole."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def write(parameter: Tensor, whole: Tensor) -> None:
    """Copy `whole` (the same on all ranks) into `parameter`, which may be sharded."""
    parameter.copy_(shard_of(whole.to(parameter.device), parameter))
