"""One model on many ranks: copies of it (DistributedDataParallel), or shards (torch's FSDP2, `fully_shard`).

    none         Each rank has all weights, gradients and moments. Gradients are averaged once in a step.
    optimizer    Each of S ranks that share has 1/S of weights, gradients and moments. Weights are gathered once in a
                 step, and kept until its last backward. Gradients are reduced to shards in each micro-batch.
    full         The same, but a layer's weights are gathered for its forward, freed, and gathered again for its
                 backward.

A matrix is cut by rows (dimension 0), the last shard may be smaller, and each layer is gathered and reduced by itself.
The embedding, the head and the last norm stay gathered from forward to backward with `full`, too.

Ranks of one node share: on several nodes each node has a whole model in shards, and the shards' gradients are averaged
between nodes once in a step. Where every node has one rank, all ranks share.

A gathered weight is the float32 weight that a single rank has, and autocast or the kernels' operator casts it there as
they do without shards. The kernels' weight gradients are float32, and so are the sums that are sent: nothing is rounded
to bfloat16 that would not be with runtime.shard=none. Sums over ranks and micro-batches have another order: losses are
those of DDP up to float32 rounding.
"""

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from sparsellm.config import (
    Activation,
    ConfigError,
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
from sparsellm.training import communication
from sparsellm.training.memory import UNSHARED, Sharing


def decoder(model: ModelConfig, activation: Activation, runtime: RuntimeConfig, ranks: Ranks) -> Decoder:
    """The decoder of a run before its first step, on this rank's device; without memory (on "meta") if it is to be in
    shards, which `distributed` then makes."""
    shard = runtime.shard
    in_shards = shard != Shard.none and ranks.world_size > 1
    if shard != Shard.none and not in_shards:
        ranks.say(f"runtime.shard={shard.name}: one rank has nobody to share with, and holds all")
    with torch.device("meta") if in_shards else ranks.device:
        return Decoder(model, activation, runtime.recompute)


def distributed(
    model: Decoder, runtime: RuntimeConfig, init_std: float, ranks: Ranks
) -> Decoder | DistributedDataParallel:
    """What a step calls: `model` under DDP, or in shards, or itself where there is one rank. Collective.

    `model` is that of `decoder`, its blocks accelerated and its layers compiled already if they are to be.
    Weights in shards are drawn here, one whole matrix at a time, and are the same bits as those of a whole model.
    Raises ConfigError, alike on all ranks, if there are to be shards and nodes have different numbers of ranks.
    """
    device = ranks.device
    if ranks.world_size == 1:
        return model
    if runtime.shard == Shard.none:
        torch._dynamo.config.optimize_ddp = False  # the layers are compiled one by one: nothing to split
        with warnings.catch_warnings():
            # torch 2.13 has each rank say so, and what replaces it is in no earlier version.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            copies = DistributedDataParallel(
                model, device_ids=[device.index] if device.type == "cuda" else None,
                gradient_as_bucket_view=True, bucket_cap_mb=runtime.ddp_bucket_mb,
                broadcast_buffers=False,  # the only ones are the handles of accelerated blocks, which never change
            )  # fmt: skip
        communication.arrange(copies, runtime)
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
        dist.broadcast(whole, src=0)  # GPUs of another kind would draw other bits from the same seed
        write(parameter, whole)
    return model


def sharing(model: ModelConfig, shard: Shard, ranks: Ranks) -> Sharing:
    """Over how many ranks each kind of state is divided, and what is whole for a time. Collective."""
    if shard == Shard.none or ranks.world_size == 1:
        return UNSHARED
    over = ranks_that_share(ranks.world_size, _ranks_of_a_node(ranks))
    # Of two layers, one at work and one on its way, of embedding and head: weights, and gradients before they are cut.
    at_work = 2 * (parameters(model) - parameters(replace(model, num_layers=0))) // model.num_layers
    at_work += embedding_weights(model)
    return Sharing(over, over, over, at_work + (parameters(model) if shard == Shard.optimizer else at_work))


def _mesh(ranks: Ranks) -> DeviceMesh:
    """The ranks that share, [S], or [nodes, S] for a copy on each of several nodes. Collective."""
    here = _ranks_of_a_node(ranks)
    sharing = ranks_that_share(ranks.world_size, here)
    if sharing == ranks.world_size:
        return init_device_mesh(ranks.device.type, (sharing,))
    copies = ranks.world_size // sharing
    return init_device_mesh(ranks.device.type, (copies, sharing), mesh_dim_names=("replicate", "shard"))


def _ranks_of_a_node(ranks: Ranks) -> int:
    """Collective. Raises ConfigError, alike on all ranks, if nodes have different numbers of ranks."""
    sizes = gather(int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size)))
    if len(set(sizes)) > 1:
        raise ConfigError([
            f"runtime.shard: nodes have {' and '.join(map(str, sorted(set(sizes))))} ranks, and shards need as many on"
            " each: start torchrun with the same --nproc_per_node everywhere, or take runtime.shard=none"
        ])  # fmt: skip
    return sizes[0]


def _draw_what_constructors_draw(model: Decoder, device: torch.device) -> None:
    """Bring the generator of `device` to where it is once the modules of a whole decoder have been constructed there.

    torch's modules draw weights of their own, which the decoder then draws anew.
    """
    with device:
        for module in model.modules():  # in the order of construction
            if isinstance(module, nn.Embedding):
                nn.Embedding(module.num_embeddings, module.embedding_dim)
            elif isinstance(module, nn.Linear):
                nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)


def micro_batch(
    model: Decoder | DistributedDataParallel, runtime: RuntimeConfig, last: bool
) -> AbstractContextManager[None]:
    """The context of a micro-batch's forward and backward. After the step's `last` one, gradients are averaged over all
    ranks: with DDP not before, in shards in each micro-batch within a node, and between nodes after the last."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(last)
        model.set_reshard_after_backward(last or runtime.shard == Shard.full)
        return nullcontext()
    return nullcontext() if last or isinstance(model, Decoder) else model.no_sync()


def shard_of(whole: Tensor, like: Tensor) -> Tensor:
    """`whole`, the same on all ranks, cut as `like` is: a DTensor of this rank's rows, or itself. Sends nothing."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def write(parameter: Tensor, whole: Tensor) -> None:
    """Give `parameter`, whole or in shards, the values of `whole`, which are the same on all ranks."""
    parameter.copy_(shard_of(whole.to(parameter.device), parameter))
