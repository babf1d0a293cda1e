"""Anneals the gate from SiLU to ReLU during training (sparsity.relu_tokens, DESIGN §2).

Over relu_tokens tokens the gate is (1 - a) silu(z) + a relu(z), where a grows linearly from 0 to 1, and PyTorch
computes the layers (sparsellm.ops.mixed). Once a is 1, the layers are ordinary ReLU layers, on the kernels if
available. The share a is a tensor on the device, so a new value recompiles nothing; the switch to ReLU recompiles once.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sparsellm.config import SparsityConfig, relu_share
from sparsellm.model import Decoder
from sparsellm.ops import FeedForwardOutput
from sparsellm.ops.mixed import mixed_feedforward
from sparsellm.training.plans import Plans


class MixedFeedForward(nn.Module):
    """A gated block whose activation blends SiLU and ReLU, weighted by `mix`. It shares the parameters of `block`.

    x [B, T, K] -> y [B, T, K] and statistics.
    """

    mix: Tensor

    def __init__(self, block: nn.Module, mix: Tensor) -> None:
        super().__init__()
        for name, child in block.named_children():
            self.add_module(name, child)
        self.register_buffer("mix", mix, persistent=False)

    def forward(self, x: Tensor) -> FeedForwardOutput:
        blocks: Any = self
        weights = blocks.gate_proj.weight, blocks.up_proj.weight, blocks.down_proj.weight
        out = mixed_feedforward(x.flatten(0, 1), *weights, self.mix)
        return out._replace(y=out.y.view(x.shape))


class ReluAnnealing:
    """Sets the mix of SiLU and ReLU in a decoder's blocks for each step.

    Create this object after `decoder` is accelerated and sharded. `plans`: the plans of the decoder's layers.
    """

    def __init__(self, config: SparsityConfig, decoder: Decoder, plans: Plans | None, device: torch.device) -> None:
        self.config, self.decoder, self.plans = config, decoder, plans
        self.mix = torch.zeros((), device=device)  # a, shared by all layers
        self.share = 0.0
        self.blocks: list[Any] = [layer.mlp for layer in decoder.layers]
        self._take([MixedFeedForward(block, self.mix) for block in self.blocks])

    def at(self, tokens: int) -> None:
        """Set the mix for the step that ends after `tokens` tokens. Does not synchronize."""
        before, self.share = self.share, relu_share(tokens, self.config)
        if self.share < 1:
            self.mix.fill_(self.share)
        elif before < 1:
            self._take(self.blocks)

    def _take(self, blocks: list[Any]) -> None:
        for layer, block in zip(self.decoder.layers, blocks, strict=True):
            layer.mlp = block
        if self.plans is not None:
            self.plans.idle = blocks is not self.blocks
