"""Converts between our weights and plain Hugging Face checkpoints, which transformers loads without this package.

Gated models are stock `LlamaForCausalLM` (hidden_act relu or silu); non-gated ones are stock `ArceeForCausalLM` with
hidden_act relu, which is Llama with down(relu(up(x))). Our parameter names are theirs without the leading "model.".
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sparsellm.config import Activation, ModelConfig
from sparsellm.model import pretrained

# Our configuration's names and Hugging Face's, for values that are the same under both.
FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "context_length": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
}
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
) -> None:
    """Write config.json, the weights (given by our names) in `dtype`, and the tokenizer into `folder`."""
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    hub_config = _hub_config(config, activation, end_of_text_id, dtype)
    hub_config.save_pretrained(folder)
    tensors = {PREFIX + name: weight.to("cpu", dtype).contiguous() for name, weight in weights.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    shutil.copymode(folder / "config.json", folder / WEIGHTS)  # safetensors lets only the owner read its file


def view(weights: dict[str, Tensor], config: ModelConfig, activation: Activation, end_of_text_id: int) -> Any:
    """The Hugging Face model that `export` would write, in memory, for inference. It shares the memory of `weights`,
    which are float32, so it follows them as they are trained."""
    from transformers import AutoModelForCausalLM

    hub_config = _hub_config(config, activation, end_of_text_id, torch.float32)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hub_config, trust_remote_code=False)
    embedding = weights["embed_tokens.weight"]
    theirs = {PREFIX + name: weight for name, weight in weights.items()} | {HEAD: embedding}
    model.load_state_dict(theirs, assign=True)
    model.tie_weights()
    rotary = type(model.model.rotary_emb)(hub_config)  # in no state_dict, so made here, on the CPU as transformers does
    model.model.rotary_emb = rotary.to(embedding.device)
    return model.requires_grad_(False).eval()


def load(path: str | Path) -> tuple[ModelConfig, Activation, dict[str, Tensor]]:
    """The inverse of `export`, from an hf/ folder or a hub name: (config, activation, float32 weights by our names).

    Raises BrokenModel for damaged files, and ValueError for a model that the decoder cannot hold, naming every property
    in which it differs.
    """
    hub = pretrained.read_config(path)
    wanted = {
        "model_type": ("llama", "arcee"),
        "hidden_act": ("relu", "silu") if hub.model_type == "llama" else ("relu",),
        "num_key_value_heads": (getattr(hub, "num_attention_heads", None),),
        "head_dim": (getattr(hub, "hidden_size", 0) // getattr(hub, "num_attention_heads", 1),),
        "tie_word_embeddings": (True,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
    }
    problems = [
        f"{key} is {getattr(hub, key, None)!r}: it should be {' or '.join(map(repr, allowed))}"
        for key, allowed in wanted.items()
        if getattr(hub, key, None) not in allowed
    ]
    rope = getattr(hub, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        problems.append(f"rope_type is {rope['rope_type']!r}: it should be 'default'")
    if problems:
        raise ValueError(f"{path} is not a model that the decoder can hold: " + "; ".join(problems))
    config = ModelConfig(
        **{ours: getattr(hub, theirs) for ours, theirs in FIELDS.items()},
        rope_theta=rope["rope_theta"],
        gated=hub.model_type == "llama",
    )
    model = pretrained.read_model(path, torch.float32)
    weights = {
        name.removeprefix(PREFIX): weight
        for name, weight in model.state_dict().items()
        if name != HEAD  # tied: the same tensor as the embedding
    }
    return config, Activation[hub.hidden_act], weights


def _hub_config(config: ModelConfig, activation: Activation, end_of_text_id: int, dtype: torch.dtype) -> Any:
    from transformers import ArceeConfig, LlamaConfig

    kind, architecture = (LlamaConfig, "LlamaForCausalLM") if config.gated else (ArceeConfig, "ArceeForCausalLM")
    return kind(
        architectures=[architecture],
        **{theirs: getattr(config, ours) for ours, theirs in FIELDS.items()},
        num_key_value_heads=config.num_heads,
        head_dim=config.hidden_size // config.num_heads,
        hidden_act=activation.name,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=end_of_text_id,
        eos_token_id=end_of_text_id,
        dtype=dtype,
    )
