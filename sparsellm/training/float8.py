"""Trains a decoder's linear layers in FP8 (runtime.float8): attention's projections, and with runtime.float8=all the
feedforward layers. If those run on the CUDA kernels, their tile engine computes the gate product in FP8
(SparseFeedForward.trains_in_float8, sparsellm.ops.feedforward); otherwise torchao computes all of their products.

Weights stay float32, with the same names: optimizer, sharding, checkpoints and resumes see no difference. Validation
during training uses the same layers, so its loss includes the rounding to FP8. Exported models do not.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sparsellm.config import Float8Recipe
from sparsellm.model import Decoder
from sparsellm.model.decoder import SiluFeedForward
from sparsellm.ops import FeedForwardOutput, float8
from sparsellm.ops.feedforward import uncounted
from sparsellm.ops.reference import statistics


class LinearFeedForward(nn.Module):
    """The ReLU layer of `block`, computed by calls of its linear layers, which may compute in FP8. x [B, T, K] -> y
    [B, T, K] and the operator's statistics."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        for name, child in block.named_children():
            self.add_module(name, child)
        self.gated = "gate_proj" in self._modules

    def forward(self, x: Tensor) -> FeedForwardOutput:
        layers: Any = self
        g = torch.relu((layers.gate_proj if self.gated else layers.up_proj)(x))
        h = g * layers.up_proj(x) if self.gated else g
        return uncounted(layers.down_proj(h), *statistics(h.flatten(0, -2), (g != 0).flatten(0, -2)))


def convert(decoder: Decoder, feedforward: bool, recipe: Float8Recipe) -> None:
    """Make attention's projections and, if `feedforward`, the linear layers of the feedforward blocks compute in FP8 by
    torchao, in place. Call this before the decoder is compiled, replicated or sharded. `feedforward`: no kernels may
    compute these blocks."""
    layer: Any
    for layer in decoder.layers:
        float8.train_linears(layer.self_attn, recipe.name)
        if feedforward:
            if not isinstance(layer.mlp, SiluFeedForward):
                layer.mlp = LinearFeedForward(layer.mlp)
            float8.train_linears(layer.mlp, recipe.name)
