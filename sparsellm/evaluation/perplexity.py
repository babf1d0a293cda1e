"""Cross entropy on held-out blocks, and the perplexity that it is."""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from sparsellm.distributed.groups import Ranks
from sparsellm.model import Decoder

SEQUENCES = 16  # per forward pass, where the run itself chose how many fit


@torch.no_grad()
def cross_entropy(
    model: Decoder, blocks: Tensor, micro_batch_size: int, autocast: torch.autocast, ranks: Ranks
) -> float:
    """The mean cross entropy in nats per token of `blocks` [V, T + 1] int64, the same on all ranks. Collective.

    The ranks share the blocks between them, and make equally many passes, as a model in shards needs, whose forward is
    collective. Each pass has `micro_batch_size` sequences, because layers that are compiled would be compiled again for
    another shape: where a rank has fewer blocks left, or none, the first block fills the pass up and does not count.
    Synchronises with the host once.
    """
    total = torch.zeros((), dtype=torch.float64, device=ranks.device)
    mine = blocks[ranks.rank :: ranks.world_size]  # none, if there are fewer blocks than ranks
    for first in range(0, math.ceil(len(blocks) / ranks.world_size), micro_batch_size):
        counted = mine[first : first + micro_batch_size]
        filler = blocks[:1].expand(micro_batch_size - len(counted), -1)
        block = torch.cat([counted, filler]).to(ranks.device)
        with autocast:
            total += model(block[:, :-1], block[: len(counted), 1:]).ce
    dist.all_reduce(total)
    return total.item() / (blocks.shape[0] * (blocks.shape[1] - 1))


def perplexity(loss: float) -> float | None:
    """exp(`loss`); None where no float is so large, above 709."""
    try:
        return math.exp(loss)
    except OverflowError:
        return None
