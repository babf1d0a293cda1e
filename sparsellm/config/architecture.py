"""The keys of a decoder, and how many numbers it has."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from sparsellm.config.keys import key


class RopeType(Enum):
    """How a model that was trained on short sequences turns its rotary frequencies to longer ones, as transformers."""

    default = "default"  # not at all
    linear = "linear"  # all divided by one factor
    llama3 = "llama3"  # low ones divided by it, high ones kept, those between interpolated
    yarn = "yarn"  # likewise, over another range; and cos and sin are multiplied by a factor


@dataclass
class RopeParameters:
    """How rotary frequencies are scaled: `rope_parameters` of transformers; null is what transformers takes then."""

    rope_type: RopeType = key(RopeType.default, "of the frequencies")
    factor: float | None = key(None, "by which frequencies are divided; not of default")
    original_max_position_embeddings: int | None = key(None, "tokens of the context before; of llama3 and yarn")
    low_freq_factor: float | None = key(None, "rotations in that context, below which all is divided; of llama3")
    high_freq_factor: float | None = key(None, "rotations above which nothing is; of llama3")
    beta_fast: float | None = key(None, "rotations above which nothing is divided; of yarn; null: 32")
    beta_slow: float | None = key(None, "rotations below which all is; of yarn; null: 1")
    truncate: bool | None = key(None, "whether the range between them ends at whole frequencies; of yarn; null: true")
    attention_factor: float | None = key(None, "of cos and sin; of yarn; null: by `factor`, mscale and mscale_all_dim")
    mscale: float | None = key(None, "see attention_factor; of yarn")
    mscale_all_dim: float | None = key(None, "see attention_factor; of yarn")

    def given(self) -> dict[str, Any]:
        """The keys that are not null, but for `rope_type`."""
        return {name: value for name, value in vars(self).items() if name != "rope_type" and value is not None}


# The keys of RopeParameters that each type must have, and those that it may have.
ROPE_KEYS: dict[RopeType, tuple[set[str], set[str]]] = {
    RopeType.default: (set(), set()),
    RopeType.linear: ({"factor"}, set()),
    RopeType.llama3: ({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}, set()),
    RopeType.yarn: (
        {"factor", "original_max_position_embeddings"},
        {"beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"},
    ),
}


@dataclass
class ModelConfig:
    """The decoder, Llama-style (DESIGN §3). Defaults: the width that all of the paper's sizes share."""

    vocab_size: int = key(49_152, "rows of the embedding: at least the tokenizer's ids")
    hidden_size: int = key(2_048, "K, the width of the residual stream")
    intermediate_size: int = key(5_632, "N, neurons of a layer; 8448 without a gate has as many parameters")
    num_layers: int = key(28, "L")
    num_heads: int = key(32, "attention heads")
    context_length: int = key(2_048, "the longest sequence, in tokens")
    rope_theta: float = key(100_000.0, "base of the rotary embedding")
    norm_eps: float = key(1e-5, "epsilon of RMSNorm")
    init_std: float = key(0.02, "standard deviation of the initial weights")
    gated: bool = key(True, "h = relu(x W_g) * (x W_u); false: h = relu(x W_u)")
    num_key_value_heads: int | None = key(None, "heads of keys and values, shared by query heads; null: num_heads")
    head_dim: int | None = key(None, "D, the width of a head; null: hidden_size / num_heads")
    attention_bias: bool = key(False, "biases of queries, keys and values, as Qwen2 has them")
    qk_norm: bool = key(False, "RMSNorm of each head's queries and keys, as in Qwen3")
    tie_embeddings: bool = key(True, "the output matrix is the embedding")
    rope_parameters: RopeParameters = field(default_factory=RopeParameters)

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def head_width(self) -> int:
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim


def attention_weights(model: ModelConfig) -> int:
    """Numbers in a layer's matrices of queries, keys, values and output."""
    return 2 * model.hidden_size * model.head_width * (model.num_heads + model.kv_heads)


def embedding_weights(model: ModelConfig) -> int:
    """Numbers in the embedding, and in the output matrix if that is another one."""
    return model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)


# Of what training holds and saves of each parameter:
FLOAT32 = 4  # bytes of its weight, of its gradient, and of each of AdamW's moments
MOMENTS = 2


def parameters(model: ModelConfig) -> int:
    """Of the whole decoder, a tied embedding once."""
    width, matrices = model.hidden_size, 3 if model.gated else 2
    layer = attention_weights(model) + matrices * width * model.intermediate_size + 2 * width
    if model.attention_bias:
        layer += model.head_width * (model.num_heads + 2 * model.kv_heads)
    if model.qk_norm:
        layer += 2 * model.head_width
    return embedding_weights(model) + model.num_layers * layer + width
