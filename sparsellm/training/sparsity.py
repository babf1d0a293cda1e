"""The L1 loss's weight over time, the neurons that have fallen silent, and drawing those anew.

The coefficient of `sparsity.l1_coefficient` multiplies, per token, the SUM of |h| over neurons and layers, or that sum
divided by N x L or by L (`sparsity.l1_normalization`, DESIGN §2).
"""

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
    """The coefficient of the step that ends at `tokens` (those of the global batches so far, its own included).

    In the normalisation of the config. A plain number that meets the loss outside of compiled code, as an argument of a
    kernel: a new value neither recompiles nor waits.
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
    """How many tokens of the global batch have passed since each neuron last fired; int64 [L, N] on the device.

    A rank sees only its own share fire, so its counts are upper bounds; their minimum over ranks is exact. Taking it
    only where it is read spares a collective in every step.
    """

    def __init__(self, model: ModelConfig, device: torch.device) -> None:
        self.tokens = torch.zeros(model.num_layers, model.intermediate_size, dtype=torch.int64, device=device)

    def update(self, fired: Tensor, tokens: int, counts: Tensor) -> None:
        """Account for a step of `tokens` tokens over all ranks, of which this rank saw `fired` (bool [L, N]).

        `counts`: 0-d bool on the device, the same on all ranks. A step that does not count leaves everything as it was.
        """
        self.tokens.add_(counts, alpha=tokens).masked_fill_(fired & counts, 0)

    def reduced(self) -> Tensor:
        """The exact counts, the same on all ranks. Collective."""
        tokens = self.tokens.clone()
        dist.all_reduce(tokens, op=dist.ReduceOp.MIN)
        return tokens


class Reinitialization:
    """Draws the gate rows of silent neurons anew: targeted reinitialisation, an ablation of the paper.

    At 1.5B the paper reports a forward pass 19.1% faster with it, against 17.9% without.

    A neuron is silent when z <= 0 for every token. Its row of W_gate (of W_up in non-gated models) then has no
    gradient, from cross entropy or L1, and weight decay scales z without turning its sign: unless its input changes,
    the neuron stays silent for good. So the row is drawn anew from N(0, model.init_std), like the first one.

    Its row of W_up and column of W_down stay as they are. They too have no gradient while h = 0, but they need no
    rescue: what they learned is there, only shrunk by decay: exp(-weight_decay x learning rate x steps), 0.91 after 1B
    silent tokens at the recipe's peak rate. Being nonzero, they pass a gradient to the new row as soon as it fires.
    Their moments have decayed on their own.

    The row's moments become 0. Adam's step count belongs to the whole matrix and stays: the new row's first updates,
    without bias correction, differ from the usual ones. Under a constant gradient the n-th update after the draw is
    (1 - beta1^n) / sqrt(1 - beta2^n) times the usual one once Adam's own correction has faded: 0.45 at n = 1, above 1
    from n = 9 on, at most 1.10 at n = 20, and 1 in the limit.

    While the gate goes from SiLU to ReLU (`sparsity.relu_tokens`), a row has a gradient where z <= 0, too, and none is
    drawn.

    A drawn neuron has `sparsity.reinit_dead_after_tokens` tokens to fire before it is drawn again, as it has at the
    start of the run. None is drawn in as many tokens at the end: it would stay unlearned. `SilentNeurons` goes on
    counting from when a neuron last fired, so that a drawn neuron counts as dead until it fires.

    With `sparsity.reinit_blend` = a below 1, a silent row w becomes (1 - a) w + a (a new row) at every draw until it
    fires, as the paper blends gate rows a little in every step. After many draws w is N(0, init_std) times
    sqrt(a / (2 - a)), 0.23 for a = 0.1. Whether a neuron fires depends on the direction of w alone.

    Decisions are made on the device, and nothing waits for them. The random numbers come from generators of their own,
    seeded by (training.seed, step, layer): the global ones stay untouched, and a resume draws the same.
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
        # L of [N, K]
        self.weights: list[Tensor] = [(mlp.gate_proj if model.gated else mlp.up_proj).weight for mlp in blocks]
        size, device = (model.num_layers, model.intermediate_size), self.weights[0].device
        self.drawn_at = torch.zeros(size, dtype=torch.int64, device=device)  # tokens of the run; 0: its start
        self.count = torch.zeros(size[0], dtype=torch.int64, device=device)  # draws of rows so far, by layer

    def due(self, step: int) -> bool:
        """Whether rows may be drawn at the end of `step`."""
        done, left = step * self.step_tokens, (self.steps - step) * self.step_tokens
        return step % self.every == 0 and done >= self.relu_tokens and left >= self.silence

    @torch.no_grad()
    def apply(self, step: int, silent_tokens: Tensor) -> None:
        """Draw the rows that are due at the end of `step`, the same on all ranks. Collective.

        `silent_tokens`: exact, int64 [L, N], the same on all ranks. Waits for nothing.
        """
        now = step * self.step_tokens
        if self.blend == 1:
            silent_tokens = torch.minimum(silent_tokens, now - self.drawn_at)
        rows = silent_tokens >= self.silence
        for layer, (weight, of_layer) in enumerate(zip(self.weights, rows, strict=True)):
            seed = int(np.random.SeedSequence((self.seed, step, layer)).generate_state(1, np.uint64)[0])
            generator = torch.Generator(weight.device).manual_seed(seed)
            drawn = torch.empty(weight.shape, device=weight.device).normal_(std=self.std, generator=generator)
            dist.broadcast(drawn, src=0)  # GPUs of another kind would draw other bits from the same seed
            blended = weight.lerp(shard_of(drawn, weight), self.blend)  # the drawn row itself where blend is 1
            weight.copy_(torch.where(shard_of(of_layer[:, None], weight), blended, weight))
            self.optimizer.forget(weight, of_layer)
        self.drawn_at.masked_fill_(rows, now)
        self.count += rows.sum(1)

    def state(self) -> dict[str, Tensor]:
        """Every tensor that the next draw depends on, by name; load by writing into them."""
        return {"drawn_at": self.drawn_at, "reinitialized": self.count}
