"""The decoder's configuration keys, the rules for its heads and rotary embedding, and its parameter count."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from sparsellm.config.keys import key


class RopeType(Enum):
    """RoPE scaling methods for contexts longer than the pretraining context, as in transformers."""

    default = "default"  # no scaling
    linear = "linear"  # divides all frequencies by one factor
    llama3 = "llama3"  # divides low frequencies, keeps high frequencies, and interpolates in between
    yarn = "yarn"  # like llama3 over another range of frequencies; also scales cos and sin


@dataclass
class RopeParameters:
    """RoPE scaling, as in `rope_parameters` of transformers. null: transformers' default."""

    rope_type: RopeType = key(RopeType.default, "RoPE scaling method.")
    factor: float | None = key(None, "RoPE scaling factor; unused by rope_type=default.")
    original_max_position_embeddings: int | None = key(None, "Context length before scaling, in tokens (llama3, yarn).")
    low_freq_factor: float | None = key(
        None, "Rotations within the original context below which frequencies are divided by `factor` (llama3)."
    )
    high_freq_factor: float | None = key(
        None, "Rotations within the original context above which frequencies are kept (llama3)."
    )
    beta_fast: float | None = key(
        None, "Rotations within the original context above which frequencies are kept (yarn). null: 32."
    )
    beta_slow: float | None = key(
        None, "Rotations within the original context below which frequencies are divided by `factor` (yarn). null: 1."
    )
    truncate: bool | None = key(None, "Round the interpolation range to whole dimensions (yarn). null: true.")
    attention_factor: float | None = key(
        None, "Scaling of cos and sin (yarn). null: derived from factor, mscale and mscale_all_dim."
    )
    mscale: float | None = key(None, "Numerator of the derived attention_factor (yarn).")
    mscale_all_dim: float | None = key(None, "Denominator of the derived attention_factor (yarn).")

    def given(self) -> dict[str, Any]:
        """The values of all keys that are not null, except `rope_type`."""
        return {name: value for name, value in vars(self).items() if name != "rope_type" and value is not None}


# For each RoPE type, the keys of RopeParameters that are required, and those that are optional.
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
    """The decoder, Llama-style (DESIGN §3). Defaults: the shape that all of the paper's sizes share."""

    vocab_size: int = key(49_152, "Vocabulary size (rows of the embedding), at least that of the tokenizer.", minimum=2)
    hidden_size: int = key(2_048, "Model width, K.", minimum=8, maximum=65_536, multiple_of=8)
    intermediate_size: int = key(
        5_632,
        "Feedforward width, N neurons per layer. Without a gate, 8448 gives as many parameters.",
        minimum=8,
        maximum=65_536,
        multiple_of=8,
    )
    num_layers: int = key(28, "Number of layers.", minimum=1)
    num_heads: int = key(32, "Number of attention heads.", minimum=1)
    context_length: int = key(2_048, "Maximum sequence length in tokens.", minimum=2)
    rope_theta: float = key(100_000.0, "Base of the rotary embedding.", above=0)
    norm_eps: float = key(1e-5, "Epsilon of RMSNorm.", above=0)
    init_std: float = key(0.02, "Standard deviation of the initial weights.", above=0)
    gated: bool = key(True, "Gated feedforward layer, h = relu(x W_g) * (x W_u). false: h = relu(x W_u).")
    num_key_value_heads: int | None = key(None, "Number of key/value heads (grouped-query attention). null: num_heads.")
    head_dim: int | None = key(None, "Head dimension. null: hidden_size / num_heads.")
    attention_bias: bool = key(False, "Add biases to the query, key and value projections, as in Qwen2.")
    qk_norm: bool = key(False, "Apply RMSNorm to each head's queries and keys, as in Qwen3.")
    tie_embeddings: bool = key(True, "Share the embedding with the output projection.")
    rope_parameters: RopeParameters = field(default_factory=RopeParameters)

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def head_width(self) -> int:
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim


def attention_weights(model: ModelConfig) -> int:
    """Number of weights in a layer's query, key, value and output projections."""
    return 2 * model.hidden_size * model.head_width * (model.num_heads + model.kv_heads)


def feedforward_weights(model: ModelConfig) -> int:
    """Number of weights in a layer's feedforward block."""
    return (3 if model.gated else 2) * model.hidden_size * model.intermediate_size


def embedding_weights(model: ModelConfig) -> int:
    """Number of weights in the embedding and, if it is not tied, the output projection."""
    return model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)


FLOAT32 = 4  # bytes per element of weights, gradients and moments


def parameters(model: ModelConfig) -> int:
    """Number of parameters in the decoder; a tied embedding counts once."""
    width = model.hidden_size
    layer = attention_weights(model) + feedforward_weights(model) + 2 * width
    if model.attention_bias:
        layer += model.head_width * (model.num_heads + 2 * model.kv_heads)
    if model.qk_norm:
        layer += 2 * model.head_width
    return embedding_weights(model) + model.num_layers * layer + width


def moments(model: ModelConfig, muon: bool) -> int:
    """Number of elements of the optimizer's moments: two per parameter, or one per matrix element of Muon's."""
    layer = attention_weights(model) + feedforward_weights(model)
    return 2 * parameters(model) - muon * model.num_layers * layer


def architecture_mistakes(model: ModelConfig) -> list[str]:
    """Error messages about the heads and the rotary embedding of `model`, each with a remedy; empty if none."""
    heads = _head_mistakes(model) if model.num_heads >= 1 else ()
    return [*heads, *_stock_mistakes(model), *_rope_mistakes(model)]


def _head_mistakes(model: ModelConfig) -> Iterator[str]:
    if model.head_dim is None and model.hidden_size % (2 * model.num_heads):
        yield (
            f"model.hidden_size {model.hidden_size} cannot be divided into {model.num_heads} heads of even dimension:"
            " change model.num_heads"
        )
    if model.head_dim is not None and (model.head_dim < 2 or model.head_dim % 2):
        yield f"model.head_dim is {model.head_dim}: it should be an even number, or null"
    if model.kv_heads < 1 or model.num_heads % model.kv_heads:
        yield (
            f"model.num_key_value_heads is {model.num_key_value_heads}: it should divide model.num_heads"
            f" {model.num_heads}, or be null"
        )


def _stock_mistakes(model: ModelConfig) -> Iterator[str]:
    """Error messages for architectures that no transformers class supports, so that they could not be exported."""
    if model.attention_bias and model.qk_norm:
        yield "model.attention_bias is true with model.qk_norm=true: transformers has no such model; set one to false"
    if not model.gated and (model.attention_bias or model.qk_norm):
        key = "attention_bias" if model.attention_bias else "qk_norm"
        yield f"model.{key} is true with model.gated=false: transformers has no such model; set model.{key} to false"
    if not model.gated and model.num_heads >= 1 and model.hidden_size % model.num_heads:
        yield (
            f"model.num_heads is {model.num_heads} with model.gated=false: it should divide model.hidden_size"
            f" {model.hidden_size}, because transformers requires it"
        )


def _rope_mistakes(model: ModelConfig) -> Iterator[str]:
    rope, given = model.rope_parameters, model.rope_parameters.given()
    required, optional = ROPE_KEYS[rope.rope_type]
    for name in sorted(required - given.keys()):
        yield f"model.rope_parameters.{name} is null: rope_type={rope.rope_type.name} requires it"
    for name, value in given.items():
        if name not in required | optional:
            yield (
                f"model.rope_parameters.{name} is {value}: rope_type={rope.rope_type.name} does not use it; set it to"
                " null"
            )
        elif not isinstance(value, bool) and not 0 < value < math.inf:
            yield f"model.rope_parameters.{name} is {value}: it should be a positive number"
    if rope.factor is not None and rope.factor < 1:
        yield f"model.rope_parameters.factor is {rope.factor}: it should be at least 1"
    for least, most in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        if least in given and most in given and not given[least] < given[most]:
            yield (
                f"model.rope_parameters.{least} is {given[least]}: it should be below {most}, which is {given[most]}"
            )
