"""The decoder: a Llama-style transformer (DESIGN §3) with Hugging Face's parameter names and layout.

Letters: B sequences, T positions, K model width, N neurons, L layers, H heads of width D, H_kv key/value heads, each
shared by H / H_kv query heads, V vocabulary; M = B x T.

Numerics: weights are float32. Under autocast, matmuls, attention and the feedforward operator run in bfloat16 with
float32 accumulation; the residual stream, normalisation and rotation stay float32. Without dropout, a forward pass
draws no random numbers.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sparsellm import ops
from sparsellm.config import Activation, ModelConfig
from sparsellm.model.cross_entropy import (
    TeacherOutput,
    distilled_cross_entropy,
    distilled_softmax_cross_entropy,
    linear_cross_entropy,
    softmax_cross_entropy,
)
from sparsellm.model.rotary import rotary_tables, rotate
from sparsellm.ops import FeedForwardOutput


class DecoderOutput(NamedTuple):
    """Sums over the M tokens of a forward pass; the caller normalises (DESIGN §2)."""

    ce: Tensor  # 0-d float32: summed cross entropy, in nats
    l1: Tensor | None  # [L] float32: sum of |h| per layer; None without a ReLU
    nnz: Tensor | None  # [L] int64: nonzero activations per layer
    fired: Tensor | None  # [L, N] bool: neurons that fired for at least one token
    wide_segments: Tensor | None  # [L] int64: see FeedForwardOutput
    rest_calls: Tensor | None  # [L] int64: see FeedForwardOutput
    union: Tensor | None  # [L] int64: active neurons of each 128-token tile, summed; -1: not measured
    overflow_tiles: Tensor | None  # [L] int64: see FeedForwardOutput
    kl: Tensor | None = None  # 0-d float32: summed KL(teacher || student); None without a teacher
    loss: Tensor | None = None  # 0-d float32: ce + weighted kl. If not None, only loss has a gradient, and ce has none


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. x [..., K] -> [..., K]."""

    eps: float  # torch's RMSNorm allows None


class Attention(nn.Module):
    """Causal attention with rotary positions, grouped-query if H_kv < H. x [B, T, K] -> [B, T, K]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, self.head_dim, bias = config.hidden_size, config.head_width, config.attention_bias
        self.heads = config.num_heads, config.kv_heads, config.kv_heads  # heads of q, k and v
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, n * self.head_dim, bias=bias) for n in self.heads)
        self.o_proj = nn.Linear(config.num_heads * self.head_dim, width, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (proj(x).view(heads) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.positioned(q, k, cos[:, None], sin[:, None])
        # Transpose last: attention's output takes the layout of q, and o_proj would save a copy of any other layout.
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return self.o_proj(causal_attention(q, k, v).transpose(1, 2).flatten(2))

    def positioned(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [..., D], normalised if qk_norm, and rotated: in float32, returned in the input's dtype."""
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
        return ops.feedforward(x, *weights, plan=None)


class NonGatedFeedForward(nn.Module):
    """h = relu(up(x)), y = down(h). x [B, T, K] -> y [B, T, K] and the operator's statistics."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> FeedForwardOutput:
        return ops.feedforward(x, None, self.up_proj.weight, self.down_proj.weight, plan=None)


class SiluFeedForward(GatedFeedForward):
    """The dense baseline, h = silu(gate(x)) * up(x). Returns y alone: no activation is zero, so nothing is counted."""

    def forward(self, x: Tensor) -> tuple[Tensor]:  # type: ignore[override]
        return (self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)),)


def feedforward(config: ModelConfig, activation: Activation) -> nn.Module:
    if activation == Activation.silu:
        return SiluFeedForward(config)
    return GatedFeedForward(config) if config.gated else NonGatedFeedForward(config)


class DecoderLayer(nn.Module):
    """x [B, T, K] float32 -> (x, *feedforward statistics)."""

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
    """Initialize in place: matrices from N(0, std) (torch's default generator), norms to one, biases to zero."""
    if parameter.dim() == 2:
        nn.init.normal_(parameter, std=std)
    else:
        nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)


class Decoder(nn.Module):
    """Token ids to cross entropy (`forward`) or to logits (`logits`). Embedding and head may share one weight [V, K].

    Matrices are drawn from N(0, init_std) in a fixed order from torch's default generator.
    """

    def __init__(self, config: ModelConfig, activation: Activation) -> None:
        super().__init__()
        self.config = config
        self.recompute = False  # whether layers are recomputed in the backward pass; may change between steps
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
        """Compile the layers, which share one graph, and the loss. The decoder is not compiled as a whole, so that
        backward can hand gradients to DDP or FSDP between compiled parts, which overlaps their reduction with compute.

        Each shape compiles one graph, and dynamo raises at the ninth graph of the layers. A run uses at most two shapes
        with gradients (`runtime.micro_batch_size` and a smaller last micro-batch, or the two sizes of `auto`, see
        training/micro_batch.py) and one without (a whole micro-batch, see evaluation/perplexity.py).
        `sparsity.relu_tokens` doubles these three graphs. A teacher adds two graphs and raises the limit."""
        for layer in self.layers:
            layer.compile(fullgraph=True, dynamic=False)
        self.softmax_cross_entropy = torch.compile(softmax_cross_entropy, fullgraph=True, dynamic=False)
        self.distilled_softmax_cross_entropy = torch.compile(
            distilled_softmax_cross_entropy, fullgraph=True, dynamic=False
        )

    def hidden(self, tokens: Tensor) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """tokens [B, T] int64 -> the normalised last hidden state [B, T, K] float32, and each layer's statistics.

        Raises ValueError if T exceeds the model's context.
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

    def forward(self, tokens: Tensor, targets: Tensor, teacher: TeacherOutput | None = None) -> DecoderOutput:
        """tokens [B, T], targets [C, T] int64 -> sums over tokens. `teacher`: the teacher's output for `tokens`.

        Usually C = B. If C < B, only the first C sequences count in the cross entropy; the others pad the batch to a
        compiled shape. The layers' statistics cover all B sequences.
        """
        x, statistics = self.hidden(tokens)
        if len(targets) < len(x):
            x = x[: len(targets)]
        inputs, kl, loss = (x.flatten(0, 1), self.head, targets.flatten()), None, None
        if teacher is None:
            ce = linear_cross_entropy(*inputs, self.softmax_cross_entropy)
        else:
            loss, ce, kl = distilled_cross_entropy(*inputs, teacher, self.distilled_softmax_cross_entropy)
        stacked: list[Any] = [torch.stack(of_layers) for of_layers in zip(*statistics, strict=True)] or [None] * 7
        return DecoderOutput(ce, *stacked)._replace(kl=kl, loss=loss)
