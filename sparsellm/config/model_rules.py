"""Validates a decoder's architecture: heads and rotary embedding."""

import math

from sparsellm.config.architecture import ROPE_KEYS, ModelConfig


def architecture_mistakes(model: ModelConfig) -> list[str]:
    """Mistakes in the heads and the rotary embedding of `model`, each with its remedy."""
    return (_head_mistakes(model) if model.num_heads >= 1 else []) + _stock_mistakes(model) + _rope_mistakes(model)


def _head_mistakes(model: ModelConfig) -> list[str]:
    found = []
    if model.head_dim is None and model.hidden_size % (2 * model.num_heads):
        found.append(
            f"model.hidden_size {model.hidden_size} cannot be divided into {model.num_heads} heads of even dimension:"
            " change model.num_heads"
        )
    if model.head_dim is not None and (model.head_dim < 2 or model.head_dim % 2):
        found.append(f"model.head_dim is {model.head_dim}: it should be an even number, or null")
    if model.kv_heads < 1 or model.num_heads % model.kv_heads:
        found.append(
            f"model.num_key_value_heads is {model.num_key_value_heads}: it should divide model.num_heads"
            f" {model.num_heads}, or be null"
        )
    return found


def _stock_mistakes(model: ModelConfig) -> list[str]:
    """Combinations that no transformers class supports, so they could not be exported."""
    found = []
    if model.attention_bias and model.qk_norm:
        found.append(
            "model.attention_bias is true with model.qk_norm=true: transformers has no such model; set one to false"
        )
    if not model.gated and (model.attention_bias or model.qk_norm):
        key = "attention_bias" if model.attention_bias else "qk_norm"
        found.append(
            f"model.{key} is true with model.gated=false: transformers has no such model; set model.{key} to false"
        )
    if not model.gated and model.num_heads >= 1 and model.hidden_size % model.num_heads:
        found.append(
            f"model.num_heads is {model.num_heads} with model.gated=false: it should divide model.hidden_size"
            f" {model.hidden_size}, because transformers requires it"
        )
    return found


def _rope_mistakes(model: ModelConfig) -> list[str]:
    rope, given, found = model.rope_parameters, model.rope_parameters.given(), []
    required, optional = ROPE_KEYS[rope.rope_type]
    for name in sorted(required - given.keys()):
        found.append(f"model.rope_parameters.{name} is null: rope_type={rope.rope_type.name} requires it")
    for name, value in given.items():
        if name not in required | optional:
            found.append(
                f"model.rope_parameters.{name} is {value}: rope_type={rope.rope_type.name} does not use it; set it to"
                " null"
            )
        elif not isinstance(value, bool) and not 0 < value < math.inf:
            found.append(f"model.rope_parameters.{name} is {value}: it should be a positive number")
    if rope.factor is not None and rope.factor < 1:
        found.append(f"model.rope_parameters.factor is {rope.factor}: it should be at least 1")
    for least, most in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        if least in given and most in given and not given[least] < given[most]:
            found.append(
                f"model.rope_parameters.{least} is {given[least]}: it should be below {most}, which is {given[most]}"
            )
    return found
