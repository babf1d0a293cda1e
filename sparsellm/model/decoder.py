"""The decoder: a Llama-style transformer (DESIGN §3) with Hugging Face's parameter names and layout.

Letters: B sequences, T positions, K model width, N neurons, L layers, H heads of width D, H_kv heads of keys and
values, each of which H / H_kv query heads share, V vocabulary; M = B x T.

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
from sparsellm.model.cross_entropy import (
    Lesson,
    distilled_cross_entropy,
    distilled_softmax_cross_entropy,
    linear_cross_entropy,
    softmax_cross_entropy,
)
from sparsellm.model.rotary import rotary_tables, rotate
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
    kl: Tensor | None = None  # 0-d float32: the sum of KL(teacher || student); None without a teacher
    loss: Tensor | None = None  # 0-d float32: ce and kl as the teacher's Lesson weighs them, which has their gradient


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. x [..., K] -> [..., K]."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Causal attention with rotary positions, grouped where H_kv < H. x [B, T, K] -> [B, T, K]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, self.head_dim, bias = config.hidden_size, config.head_width, config.attention_bias
        self.heads = config.num_heads, config.kv_heads, config.kv_heads  # of q, k and v
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, n * self.head_dim, bias=bias) for n in self.heads)
        self.o_proj = nn.Linear(config.num_heads * self.head_dim, width, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (proj(x).view(heads) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.positioned(q, k, cos[:, None], sin[:, None])
        # Transposed last: attention's output has the layout of q, and o_proj would keep a copy of any other for itself.
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return self.o_proj(causal_attention(q, k, v).transpose(1, 2).flatten(2))

    def positioned(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [..., D], normalised if the model does that, and rotated; in float32, returned in theirs."""
        dtype = q.dtype
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q.float()), self.k_norm(k.float())
        return rotate(q, cos, sin).to(dtype), rotate(k, cos, sin).to(dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [B, H, T, D], k and v [B, H_kv, T, D] -> [B, H, T, D]."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


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


def initialize(name: str, parameter: Tensor, std: float) -> None:
    """Draw a matrix from N(0, std) from torch's default generator, norms are ones, biases zeros."""
    if parameter.dim() == 2:
        nn.init.normal_(parameter, std=std)
    else:
        nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)


class Decoder(nn.Module):
    """Token ids to cross entropy (`forward`) or to logits (`logits`). Embedding and head may share one weight [V, K].

    Matrices are drawn from N(0, init_std) in a fixed order from torch's default generator.
    """

    def __init__(self, config: ModelConfig, activation: Activation, recompute: bool = False) -> None:
        super().__init__()
        self.config, self.recompute = config, recompute
        self.softmax_cross_entropy = softmax_cross_entropy
        self.distilled_softmax_cross_entropy = distilled_softmax_cross_entropy
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, activation) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = None if config.tie_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            initialize(name, parameter, config.init_std)

    @property
    def head(self) -> Tensor:
        """The output matrix [V, K]."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def compile_parts(self) -> None:
        """Compile the layers, which share one graph, and the loss. The decoder is not compiled as a whole: between
        compiled parts, backward hands gradients to DDP, or to a layer's shards, which reduce them while the next part
        still runs.

        Each shape is a graph of its own, and dynamo raises at the ninth graph of the layers. A run calls them with
        gradients in two shapes at most: a size that `runtime.micro_batch_size` gives and the last micro-batch where it
        does not divide, or the two that `auto` takes (training/micro_batch.py); and without gradients in one, a whole
        micro-batch (evaluation/perplexity.py). With `sparsity.relu_tokens` each of these exists twice: six graphs. A
        teacher adds two, and raises the limit."""
        for layer in self.layers:
            layer.compile(fullgraph=True, dynamic=False)
        self.softmax_cross_entropy = torch.compile(softmax_cross_entropy, fullgraph=True, dynamic=False)
        self.distilled_softmax_cross_entropy = torch.compile(
            distilled_softmax_cross_entropy, fullgraph=True, dynamic=False
        )

    def hidden(self, tokens: Tensor) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """tokens [B, T] int64 -> the normalised last hidden state [B, T, K] float32, and each layer's statistics.

        Raises ValueError for more positions than the model's context.
        """
        length = tokens.shape[1]
        if length > self.config.context_length:
            raise ValueError(f"tokens has {length} positions: the model's context is {self.config.context_length}")
        x = self.embed_tokens(tokens)
        cos, sin = rotary_tables(length, self.config, tokens.device)
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
        return F.linear(self.hidden(tokens)[0], self.head)

    def forward(self, tokens: Tensor, targets: Tensor, lesson: Lesson | None = None) -> DecoderOutput:
        """tokens [B, T], targets [C, T] int64 -> sums over tokens. `lesson`: what a teacher says of them.

        C is B, and M = B x T; or less, where only the first C sequences count in the cross entropy, and the others give
        the layers a shape that they are compiled for. The layers' statistics are of all B.
        """
        x, statistics = self.hidden(tokens)
        if len(targets) < len(x):
            x = x[: len(targets)]
        inputs, kl, loss = (x.flatten(0, 1), self.head, targets.flatten()), None, None
        if lesson is None:
            ce = linear_cross_entropy(*inputs, self.softmax_cross_entropy)
        else:
            loss, ce, kl = distilled_cross_entropy(*inputs, lesson, self.distilled_softmax_cross_entropy)
        stacked: list[Any] = [torch.stack(of_layers) for of_layers in zip(*statistics, strict=True)] or [None] * 6
        return DecoderOutput(ce, *stacked)._replace(kl=kl, loss=loss)
