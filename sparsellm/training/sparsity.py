"""The L1 loss's weight over time, and the neurons that have fallen silent.

The coefficient of `sparsity.l1_coefficient` multiplies, per token, either the SUM of |h| over neurons and layers (the
default; 2e-5 then reproduces the paper) or the MEAN over both, which is the sum divided by N x L (DESIGN §2).
"""

import torch
import torch.distributed as dist
from torch import Tensor

from sparsellm.config import L1Normalization, L1Schedule, ModelConfig, SparsityConfig


def l1_coefficient(step: int, config: SparsityConfig) -> float:
    """The coefficient at step 1..steps, in the normalisation of the config."""
    if config.l1_schedule == L1Schedule.linear_warmup and step < config.l1_warmup_steps:
        return config.l1_coefficient * step / config.l1_warmup_steps
    return config.l1_coefficient


def l1_denominator(config: SparsityConfig, model: ModelConfig) -> int:
    """What a token's sum of |h| over neurons and layers is divided by before the coefficient multiplies it."""
    if config.l1_normalization == L1Normalization.mean:
        return model.intermediate_size * model.num_layers
    return 1


class SilentNeurons:
    """How many tokens of the global batch have passed since each neuron last fired; int64 [L, N] on the device.

    A rank sees only its own share fire, so its counts are upper bounds; their minimum over ranks is exact. Taking it
    only where it is read spares a collective in every step.
    """

    def __init__(self, model: ModelConfig, device: torch.device) -> None:
        self.tokens = torch.zeros(model.num_layers, model.intermediate_size, dtype=torch.int64, device=device)

    def update(self, fired: Tensor, tokens: int) -> None:
        """Account for a step of `tokens` tokens over all ranks, of which this rank saw `fired` (bool [L, N])."""
        self.tokens.add_(tokens).masked_fill_(fired, 0)

    def reduced(self) -> Tensor:
        """The exact counts, the same on all ranks. Collective."""
        tokens = self.tokens.clone()
        dist.all_reduce(tokens, op=dist.ReduceOp.MIN)
        return tokens
