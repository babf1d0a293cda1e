"""The L1 coefficient over time, dead neurons, and their reinitialization (DESIGN §2)."""

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sparsellm.config import L1Schedule, ModelConfig, SparsityConfig, TrainingConfig
from sparsellm.model import Decoder
from sparsellm.training.optimizer import Optimizer
from sparsellm.training.sharding import shard_of


def l1_coefficient(tokens: int, config: SparsityConfig) -> float:
    """The L1 coefficient (see `config.l1_normalization`) at the step that ends after `tokens` tokens over all ranks.

    The coefficient is a plain number outside of compiled code, so a new value neither recompiles nor synchronizes.
    """
    since_start = tokens - config.l1_start_tokens
    if since_start <= 0:
        return 0.0
    if config.l1_schedule != L1Schedule.constant and since_start < config.l1_warmup_tokens:
        progress = since_start / config.l1_warmup_tokens
        if config.l1_schedule == L1Schedule.cosine:
            progress = 0.5 * (1 - math.cos(math.pi * progress))
        return config.l1_coefficient * progress
    return config.l1_coefficient


class SilentNeurons:
    """Counts the tokens, over all ranks, since each neuron last fired: int64 [L, N] on the device.

    A rank sees neurons fire only on its share of the tokens, so its counts are upper bounds, and the minimum over ranks
    is exact. Taking this minimum only when it is needed saves a collective per step.
    """

    def __init__(self, model: ModelConfig, device: torch.device) -> None:
        self.tokens = torch.zeros(model.num_layers, model.intermediate_size, dtype=torch.int64, device=device)

    def update(self, fired: Tensor, tokens: int, finite: Tensor) -> None:
        """Count a step of `tokens` tokens over all ranks. `fired`: bool [L, N], the neurons that fired on this rank.

        `finite`: 0-d bool on the device, the same on all ranks. If False, the step was skipped and nothing changes.
        """
        self.tokens.add_(finite, alpha=tokens).masked_fill_(fired & finite, 0)

    def reduced(self) -> Tensor:
        """The exact token counts over all ranks. Collective."""
        tokens = self.tokens.clone()
        dist.all_reduce(tokens, op=dist.ReduceOp.MIN)
        return tokens


class Reinitialization:
    """Reinitializes the gate rows (rows of W_up in a non-gated model) of dead neurons, an ablation of the paper.

    DESIGN §2 says which rows are redrawn, when, and why.

    A redrawn row's optimizer moments are zeroed. Adam's step count belongs to the whole matrix and stays, so the first
    updates of the new row lack bias correction. Under a constant gradient the n-th update after the draw is (1 -
    beta1^n) / sqrt(1 - beta2^n) times the usual update: 0.45 at n = 1, above 1 from n = 9 on, at most 1.10 at n = 20,
    and 1 in the limit.

    The row of W_up and the column of W_down get no gradient while h = 0, but keep what they learned except for weight
    decay: exp(-weight_decay x learning rate x steps), 0.91 after 1B tokens at the recipe's peak rate. So the new row
    gets a gradient as soon as it fires.

    With `sparsity.reinit_blend` = a < 1, a dead row w becomes (1 - a) w + a (new row) at every draw. After many draws w
    is distributed as N(0, init_std) times sqrt(a / (2 - a)), 0.23 for a = 0.1. Whether a neuron fires depends only on
    the direction of w.

    Decisions are made on the device without synchronization. Random numbers come from separate generators seeded by
    (training.seed, step, layer), so the global generators are not affected and a resume draws the same rows.
    """

    def __init__(
        self,
        sparsity: SparsityConfig,
        training: TrainingConfig,
        model: ModelConfig,
        decoder: Decoder,
        optimizer: Optimizer,
    ) -> None:
        assert sparsity.reinit_dead_after_tokens is not None
        self.silence, self.every = sparsity.reinit_dead_after_tokens, sparsity.reinit_every
        self.blend, self.relu_tokens = sparsity.reinit_blend, sparsity.relu_tokens
        self.steps, self.step_tokens = training.steps, training.tokens_per_step
        self.seed, self.std, self.optimizer = training.seed, model.init_std, optimizer
        blocks: list[Any] = [layer.mlp for layer in decoder.layers]
        self.weights: list[Tensor] = [(mlp.gate_proj if model.gated else mlp.up_proj).weight for mlp in blocks]
        size, device = (model.num_layers, model.intermediate_size), self.weights[0].device
        self.drawn_at = torch.zeros(size, dtype=torch.int64, device=device)  # training tokens at each row's last draw
        self.count = torch.zeros(size[0], dtype=torch.int64, device=device)  # rows drawn so far, by layer

    def due(self, step: int) -> bool:
        """Whether rows may be drawn at the end of `step`."""
        done, left = step * self.step_tokens, (self.steps - step) * self.step_tokens
        return step % self.every == 0 and done >= self.relu_tokens and left >= self.silence

    @torch.no_grad()
    def apply(self, step: int, silent_tokens: Tensor) -> None:
        """Redraw the rows due after `step`, identically on all ranks. Collective; does not wait for the device.

        `silent_tokens`: exact counts, int64 [L, N], the same on all ranks.
        """
        now = step * self.step_tokens
        if self.blend == 1:
            silent_tokens = torch.minimum(silent_tokens, now - self.drawn_at)
        rows = silent_tokens >= self.silence
        for layer, (weight, of_layer) in enumerate(zip(self.weights, rows, strict=True)):
            seed = int(np.random.SeedSequence((self.seed, step, layer)).generate_state(1, np.uint64)[0])
            generator = torch.Generator(weight.device).manual_seed(seed)
            drawn = torch.empty(weight.shape, device=weight.device).normal_(std=self.std, generator=generator)
            dist.broadcast(drawn, src=0)  # other GPU models draw different bits from the same seed
            blended = weight.lerp(shard_of(drawn, weight), self.blend)  # equals the new row if blend is 1
            weight.copy_(torch.where(shard_of(of_layer[:, None], weight), blended, weight))
            self.optimizer.forget(weight, of_layer)
        self.drawn_at.masked_fill_(rows, now)
        self.count += rows.sum(1)

    def state(self) -> dict[str, Tensor]:
        """All tensors that the next draw depends on, by name. Writing into these tensors restores a state."""
        return {"drawn_at": self.drawn_at, "reinitialized": self.count}
