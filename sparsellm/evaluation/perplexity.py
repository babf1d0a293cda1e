"""Cross entropy on held-out blocks."""

import torch
import torch.distributed as dist
from torch import Tensor

from sparsellm.distributed import Ranks
from sparsellm.model import Decoder

SEQUENCES = 16  # per forward pass, where the run itself chose how many fit


@torch.no_grad()
def cross_entropy(
    model: Decoder, blocks: Tensor, micro_batch_size: int, autocast: torch.autocast, ranks: Ranks
) -> float:
    """The mean cross entropy in nats per token of `blocks` [V, T + 1] int64, the same on all ranks. Collective.

    The ranks share the blocks between them. Synchronises with the host once.
    """
    total = torch.zeros((), dtype=torch.float64, device=ranks.device)
    mine = blocks[ranks.rank :: ranks.world_size]  # none, if there are fewer blocks than ranks
    for first in range(0, len(mine), micro_batch_size):
        block = mine[first : first + micro_batch_size].to(ranks.device)
        with autocast:
            total += model(block[:, :-1], block[:, 1:]).ce
    dist.all_reduce(total)
    return total.item() / (blocks.shape[0] * (blocks.shape[1] - 1))
