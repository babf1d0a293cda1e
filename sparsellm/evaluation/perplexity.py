"""Cross entropy on held-out blocks, and perplexity."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparsellm.distributed.groups import Ranks
from sparsellm.model import Decoder

SEQUENCES = 16  # per forward pass, if the run used micro_batch_size=auto


@torch.no_grad()
def cross_entropy(
    model: Decoder, blocks: Tensor, micro_batch_size: int, autocast: torch.autocast, ranks: Ranks
) -> float:
    """The mean cross entropy in nats per token of `blocks` [V, T + 1] int64, the same on all ranks. Collective.

    The blocks are distributed over the ranks, which run equally many passes because a sharded model's forward is
    collective. Each pass has `micro_batch_size` sequences, because another shape would be compiled again: a rank with
    fewer blocks left, or none, pads with the first block, which is not counted. Synchronizes with the host once.
    """
    total = torch.zeros((), dtype=torch.float64, device=ranks.device)
    mine = blocks[ranks.rank :: ranks.world_size]  # empty if there are fewer blocks than ranks
    for first in range(0, math.ceil(len(blocks) / ranks.world_size), micro_batch_size):
        counted = mine[first : first + micro_batch_size]
        filler = blocks[:1].expand(micro_batch_size - len(counted), -1)
        block = torch.cat([counted, filler]).to(ranks.device)
        with autocast:
            total += model(block[:, :-1], block[: len(counted), 1:]).ce
    dist.all_reduce(total)
    return total.item() / (blocks.shape[0] * (blocks.shape[1] - 1))


def round_linears(decoder: Decoder) -> None:
    """Round the weights and inputs of the layers' linear modules to bfloat16, for FP8 modules in their place.

    Autocast rounds both to the same bits when the modules are called, but torchao's FP8 modules ignore autocast, and
    accept bfloat16 alone.
    """
    layer: Any
    for layer in decoder.layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.bfloat16()
        layer.self_attn.register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16(), *inputs[1:]))


def perplexity(loss: float) -> float | None:
    """exp(`loss`); None if it overflows (a loss above 709)."""
    try:
        return math.exp(loss)
    except OverflowError:
        return None
