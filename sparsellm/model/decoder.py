"""The decoder: a Llama-style transformer (DESIGN §3) with Hugging Face's parameter names and layout.

Letters: B sequences, T positions, K model width, N neurons, L layers, H heads of D = K / H, V vocabulary; M = B x T.

Numerics: weights are float32. Under autocast the matrix products, attention and the feedforward operator run in
bfloat16 with float32 accumulation; the residual stream, normalisation and rotation stay float32. No dropout: a forward
pass draws no random numbers.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sparsellm import ops
from sparsellm.config import Activation, ModelConfig
from sparsellm.model.cross_entropy import linear_cross_entropy, softmax_cross_entropy
from sparsellm.ops import FeedForwardOutput


class DecoderOutput(NamedTuple):
    """Sums over the M tokens of a forward pass; the caller normalises (DESIGN §2)."""

    ce: Tensor  # 0-d float32: the sum of the tokens' cross entropies, in nats
    l1: Tensor | None  # [L] float32: each layer's sum of |h|; None without a ReLU
    nnz: Tensor | None  # [L] int64: each layer's count of nonzero activations
    fired: Tensor | None  # [L, N] bool: the neurons that fired for some token
    wide_segments: Tensor | None  # [L] int64: wide_segments and rest_calls are those of FeedForwardOutput
    rest_calls: Tensor | None  # [L] int64
    union: Tensor | None  # [L] int64: the neurons active in each 128-token tile, summed; -1: not measured


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. x [..., K] -> [..., K]."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotary_tables(length: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [T, D] float32 of rotary embedding, halves repeated (Llama's layout, not interleaved)."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequencies)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, T, D] rotated by its position; computed in float32, returned in the dtype of x."""
    first, second = x.float().chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal multi-head attention with rotary positions. x [B, T, K] -> [B, T, K]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.head_dim = width // config.num_heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (proj(x).view(heads).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class GatedFeedForward(nn.Module):
    """h = relu(gate(x)) * up(x), y = down(h). x [B, T, K] -> y [B, T, K] and the operator's statistics."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> FeedForwardOutput:
        weights = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        out = ops.feedforward(x.flatten(0, 1), *weights, plan=None)
        return out._replace(y=out.y.view(x.shape))


class NonGatedFeedForward(nn.Module):
    """h = relu(up(x)), y = down(h). x [B, T, K] -> y [B, T, K] and the operator's statistics."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> FeedForwardOutput:
        out = ops.feedforward(x.flatten(0, 1), None, self.up_proj.weight, self.down_proj.weight, plan=None)
        return out._replace(y=out.y.view(x.shape))


class SiluFeedForward(GatedFeedForward):
    """The dense baseline, h = silu(gate(x)) * up(x): nothing is zero, so there is nothing to count."""

    def forward(self, x: Tensor) -> tuple[Tensor]:  # type: ignore[override]  # y alone: there are no statistics
        return (self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)),)


def feedforward(config: ModelConfig, activation: Activation) -> nn.Module:
    """The feedforward block that the configuration asks for."""
    if activation == Activation.silu:
        return SiluFeedForward(config)
    return GatedFeedForward(config) if config.gated else NonGatedFeedForward(config)


class DecoderLayer(nn.Module):
    """x [B, T, K] float32 -> (x, then the feedforward statistics)."""

    def __init__(self, config: ModelConfig, activation: Activation) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = feedforward(config, activation)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        y, *statistics = self.mlp(self.post_attention_layernorm(x))
        return x + y, *statistics


def initialize(parameter: Tensor, std: float) -> None:
    """Draw a matrix from N(0, std) from torch's default generator, and fill a norm's weight [K] with ones."""
    if parameter.dim() == 2:
        nn.init.normal_(parameter, std=std)
    else:
        nn.init.ones_(parameter)


class Decoder(nn.Module):
    """Token ids to cross entropy (`forward`) or to logits (`logits`). Embedding and head share one weight [V, K].

    Weights are drawn from N(0, init_std) in a fixed order from torch's default generator, norms are ones.
    """

    def __init__(self, config: ModelConfig, activation: Activation, recompute: bool = False) -> None:
        super().__init__()
        self.config, self.recompute = config, recompute
        self.softmax_cross_entropy = softmax_cross_entropy
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, activation) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        for parameter in self.parameters():
            initialize(parameter, config.init_std)

    def compile_parts(self) -> None:
        """Compile the layers, which share one graph, and the loss. The decoder is not compiled as a whole: between
        compiled parts, backward hands gradients to DDP, or to a layer's shards, which reduce them while the next part
        still runs."""
        for layer in self.layers:
            layer.compile(fullgraph=True, dynamic=False)
        self.softmax_cross_entropy = torch.compile(softmax_cross_entropy, fullgraph=True, dynamic=False)

    def hidden(self, tokens: Tensor) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """tokens [B, T] int64 -> the normalised last hidden state [B, T, K] float32, and each layer's statistics.

        Raises ValueError for more positions than the model's context.
        """
        length = tokens.shape[1]
        if length > self.config.context_length:
            raise ValueError(f"tokens has {length} positions: the model's context is {self.config.context_length}")
        x = self.embed_tokens(tokens)
        head_dim = self.config.hidden_size // self.config.num_heads
        cos, sin = rotary_tables(length, head_dim, self.config.rope_theta, tokens.device)
        statistics = []
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                x, *of_layer = checkpoint(layer, x, cos, sin, use_reentrant=False, preserve_rng_state=False)
            else:
                x, *of_layer = layer(x, cos, sin)
            statistics.append(of_layer)
        return self.norm(x), statistics

    def logits(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] int64 -> logits [B, T, V]."""
        return F.linear(self.hidden(tokens)[0], self.embed_tokens.weight)

    def forward(self, tokens: Tensor, targets: Tensor) -> DecoderOutput:
        """tokens, targets [B, T] int64 -> sums over all M = B x T tokens."""
        x, statistics = self.hidden(tokens)
        ce = linear_cross_entropy(
            x.flatten(0, 1), self.embed_tokens.weight, targets.flatten(), self.softmax_cross_entropy
        )
        stacked: list[Any] = [torch.stack(of_layers) for of_layers in zip(*statistics, strict=True)] or [None] * 6
        return DecoderOutput(ce, *stacked)
