"""Converts between our weights and plain Hugging Face checkpoints, which transformers loads without this package.

Gated models (hidden_act relu or silu) are stock Qwen3 if they have qk_norm, stock Qwen2 if they have biases, otherwise
stock Llama, or Mistral if num_heads does not divide hidden_size, which Llama's configuration refuses. Non-gated models
are stock Arcee with hidden_act relu, which is Llama with down(relu(up(x))). Our parameter names are the stock names
without the leading "model.". Models of any of these classes can be read; the rule above decides which class is written.
"""

import shutil
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sparsellm.config import ROPE_KEYS, Activation, ModelConfig, RopeParameters, RopeType, architecture_mistakes
from sparsellm.config.values import build
from sparsellm.hf import pretrained, tokenizer_file

# Our key -> Hugging Face's key, where both hold the same value.
FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "context_length": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
    "tie_embeddings": "tie_word_embeddings",
}
# Transformers classes by model_type.
CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "arcee": "Arcee"}
# Features that the decoder lacks: keys of config.json, and the values that disable each feature.
ABSENT: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),  # true would add a bias to o_proj too
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "rope_interleaved": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "quantization_config": (),
}
CANNOT = "is not a model that the decoder can represent"
PREFIX = "model."
HEAD = "lm_head.weight"
WEIGHTS = "model.safetensors"


def export(
    weights: dict[str, Tensor],
    config: ModelConfig,
    activation: Activation,
    folder: Path,
    tokenizer_folder: Path,
    end_of_text_id: int,
    dtype: torch.dtype = torch.float32,
    begin_of_text_id: int | None = None,
    other_ends: Sequence[int] = (),
) -> None:
    """Write config.json, generation_config.json, the tokenizer, and `weights` (by our names) in `dtype`.

    `begin_of_text_id`: None means `end_of_text_id`, the token that ends the previous document. `other_ends`: other ids
    that end a document.
    """
    from transformers import GenerationConfig

    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    tokenizer_file.settle_file(folder / "tokenizer.json")
    hub_config = stock_config(config, activation, end_of_text_id, dtype)
    if begin_of_text_id is not None:
        hub_config.bos_token_id = begin_of_text_id
    if other_ends:
        hub_config.eos_token_id = [end_of_text_id, *other_ends]
    hub_config.save_pretrained(folder)
    GenerationConfig.from_model_config(hub_config).save_pretrained(folder)
    tensors = {their_name(name): weight.to("cpu", dtype).contiguous() for name, weight in weights.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    shutil.copymode(folder / "config.json", folder / WEIGHTS)  # safetensors creates a file that only the owner can read


def view(weights: dict[str, Tensor], config: ModelConfig, activation: Activation, end_of_text_id: int) -> Any:
    """The Hugging Face model that `export` would write, in memory, for inference. The model shares the memory of the
    float32 `weights`, so it always has their current values while they are trained."""
    from transformers import AutoModelForCausalLM

    hub_config = stock_config(config, activation, end_of_text_id, torch.float32)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hub_config, trust_remote_code=False)
    embedding = weights["embed_tokens.weight"]
    theirs = {HEAD: embedding} | {their_name(name): weight for name, weight in weights.items()}
    model.load_state_dict(theirs, assign=True)
    model.tie_weights()
    # Rotary frequencies are not in the state_dict. They are computed on the CPU, as in transformers, for equal bits.
    model.model.rotary_emb = type(model.model.rotary_emb)(hub_config).to(embedding.device)
    return model.requires_grad_(False).eval()


def architecture(path: str | Path) -> tuple[ModelConfig, Activation]:
    """The architecture of the model in an hf/ folder or under a hub name, from its config.json alone.

    Raises BrokenModel for damaged files, and ValueError with every difference that the decoder cannot represent.
    """
    hub = pretrained.read_config(path)
    return config_of(hub, path), Activation[hub.hidden_act]


def config_of(hub: Any, path: str | Path) -> ModelConfig:
    """Our configuration from that of a transformers model. Raises ValueError like `architecture`."""
    if problems := _differences(hub):
        raise ValueError(f"{path} {CANNOT}: {'; '.join(problems)}")
    rope, heads, head_dim = hub.rope_parameters, hub.num_attention_heads, getattr(hub, "head_dim", None)
    values = {ours: getattr(hub, theirs) for ours, theirs in FIELDS.items()} | {
        # null where the value equals the default that null means, so that equal models have equal configurations
        "num_key_value_heads": None if hub.num_key_value_heads == heads else hub.num_key_value_heads,
        "head_dim": None if head_dim == hub.hidden_size // heads else head_dim,
        "attention_bias": hub.model_type == "qwen2",
        "qk_norm": hub.model_type == "qwen3",
        "rope_theta": rope["rope_theta"],
        "rope_parameters": {each.name: rope[each.name] for each in fields(RopeParameters) if each.name in rope},
        "gated": hub.model_type != "arcee",
    }
    config: ModelConfig = build(ModelConfig, values)
    if problems := architecture_mistakes(config):
        raise ValueError(f"{path} {CANNOT}: {'; '.join(problems)}")
    return config


def load(path: str | Path) -> tuple[ModelConfig, Activation, dict[str, Tensor]]:
    """The inverse of `export`, from an hf/ folder or a hub name: (config, activation, float32 weights by our names).

    Raises BrokenModel and ValueError like `architecture`.
    """
    config, activation = architecture(path)
    model = pretrained.read_model(path, torch.float32)
    weights = {
        name.removeprefix(PREFIX): weight
        for name, weight in model.state_dict().items()
        if not (config.tie_embeddings and name == HEAD)  # a tied head is the embedding's tensor
    }
    return config, activation, weights


def stock_config(config: ModelConfig, activation: Activation, end_of_text_id: int, dtype: torch.dtype) -> Any:
    """The transformers configuration of the class that `class_name` gives."""
    from transformers import AutoConfig

    kind, rope = _model_type(config), config.rope_parameters
    own: dict[str, dict[str, Any]] = {
        "llama": {"attention_bias": False, "mlp_bias": False},
        "arcee": {"attention_bias": False, "mlp_bias": False},
        "mistral": {"sliding_window": None},
        "qwen2": {"use_sliding_window": False},
        "qwen3": {"attention_bias": False, "use_sliding_window": False},
    }
    return AutoConfig.for_model(
        kind,
        architectures=[class_name(config)],
        **{theirs: getattr(config, ours) for ours, theirs in FIELDS.items()},
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_width,
        hidden_act=activation.name,
        rope_parameters={"rope_type": rope.rope_type.name, "rope_theta": config.rope_theta, **rope.given()},
        **own[kind],
        bos_token_id=end_of_text_id,
        eos_token_id=end_of_text_id,
        dtype=dtype,
    )


def class_name(config: ModelConfig) -> str:
    """The transformers class that `export` writes."""
    return f"{CLASSES[_model_type(config)]}ForCausalLM"


def their_name(name: str) -> str:
    """transformers' name for our parameter `name`."""
    return name if name == HEAD else PREFIX + name


def _differences(hub: Any) -> list[str]:
    """Every setting of a transformers configuration that the decoder does not support."""
    found = []

    def require(key: str, value: Any, *allowed: Any) -> None:
        if value not in allowed:
            found.append(f"{key} is {value!r}: it should be {' or '.join(map(repr, allowed))}")

    require("model_type", hub.model_type, *CLASSES)
    require("hidden_act", getattr(hub, "hidden_act", None), "relu", *(() if hub.model_type == "arcee" else ("silu",)))
    for key, neutral in ABSENT.items():
        if key == "attention_bias" and hub.model_type == "qwen2":
            continue  # Qwen2 has biases on q, k and v, and none on o_proj, whatever this key says
        if (value := getattr(hub, key, None)) is not None:
            require(key, value, *(neutral or ("absent",)))
    window, kinds = getattr(hub, "sliding_window", None), getattr(hub, "layer_types", None)
    if kinds is None and window is not None and window < getattr(hub, "max_position_embeddings", 0):
        found.append(f"sliding_window is {window!r}: it should be null, or at least max_position_embeddings")
    for kind in sorted(set(kinds or ()) - {"full_attention"}):
        found.append(f"layer_types has {kind!r}: all layers should have 'full_attention'")
    if hub.model_type in CLASSES:  # other model types have rope_parameters of a different form
        found += _rope_differences(getattr(hub, "rope_parameters", None) or {})
    return found


def _rope_differences(rope: dict[str, Any]) -> list[str]:
    kind = rope.get("rope_type", "default")
    if kind not in RopeType.__members__:
        return [f"rope_type is {kind!r}: it should be {' or '.join(map(repr, RopeType.__members__))}"]
    required, optional = ROPE_KEYS[RopeType[kind]]
    given = {key: value for key, value in rope.items() if value is not None}
    found = [f"rope_parameters has no {key}, which rope_type {kind!r} needs" for key in sorted(required - given.keys())]
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        found.append(f"partial_rotary_factor is {rope['partial_rotary_factor']!r}: it should be 1.0")
    known = required | optional | {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    for key in sorted(given.keys() & (required | optional)):
        if not isinstance(given[key], int | float):
            found.append(f"rope_parameters has {key} {given[key]!r}: it should be a number")
    for key in sorted(given.keys() - known):
        found.append(f"rope_parameters has {key} {given[key]!r}, which rope_type {kind!r} does not know")
    return found


def _model_type(config: ModelConfig) -> str:
    if not config.gated:
        return "arcee"
    if config.qk_norm:
        return "qwen3"
    if config.attention_bias:
        return "qwen2"
    return "mistral" if config.hidden_size % config.num_heads else "llama"
