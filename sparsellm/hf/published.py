"""Converts published sparse checkpoints (`model_type: llama_sparse_relu`) to stock Llama or Arcee models.

The configuration is Llama's plus keys `sparsity_*`. Its hidden_act says silu, but the model computes ReLU: the model is
a stock Llama with hidden_act relu if `sparsity_gated_mlp` is true, otherwise a stock Arcee. Tensors have Llama's names,
except for counters (`tracker.*`, `metrics_accumulator.*`), which do not affect the logits, and the feedforward weights,
whose names have two spellings (K model width, N neurons; nn.Linear needs [N, K] for gate and up, [K, N] for down):

    gate_proj.weight, up_proj.weight [N, K]          gate_weight [K, N]
    down_proj.weight [K, N] or [N, K]                up_weight   [N, K] if gated, otherwise [K, N]
                                                     down_weight [N, K]

This file works on data in memory; pretrained.py reads the files and refuses bad ones.
"""

import re
from typing import Any

from torch import Tensor

MODEL_TYPE = "llama_sparse_relu"
GATED = "sparsity_gated_mlp"
NEURONS = "sparsity_new_intermediate_size"  # replaces intermediate_size, unless null
COUNTERS = ("tracker", "metrics_accumulator")
NOT_STOCK = ("model_type", "architectures", "auto_map", "transformers_version")
WEIGHT = re.compile(r"(?P<layer>model\.layers\.\d+\.mlp\.)(?P<part>gate|up|down)_(?P<spelling>proj\.weight|weight)")


def stock_config(given: dict[str, Any]) -> Any:
    """The LlamaConfig or ArceeConfig of the same model. `given`: the content of config.json. Raises ValueError if the
    model is quantized or keys are wrong."""
    from transformers import ArceeConfig, LlamaConfig

    if not isinstance(gated := given.get(GATED), bool):
        raise ValueError(f"{GATED} is {gated!r}: it should be true or false")
    if given.get("quantization_config") is not None:
        raise ValueError("it has quantization_config: the weights should be plain floating-point numbers")
    kind, name = (LlamaConfig, "LlamaForCausalLM") if gated else (ArceeConfig, "ArceeForCausalLM")
    kept = {key: value for key, value in given.items() if not key.startswith("sparsity_") and key not in NOT_STOCK}
    neurons = given.get(NEURONS)
    neurons = given.get("intermediate_size") if neurons is None else neurons
    return kind.from_dict(kept | {"hidden_act": "relu", "intermediate_size": neurons, "architectures": [name]})


def is_counter(name: str) -> bool:
    """Whether the tensor `name` is a counter of training, not part of the model."""
    return any(part in COUNTERS for part in name.split("."))


def stock_tensors(tensors: dict[str, Tensor], config: Any) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """`tensors` with the names and layouts of the stock model of `config` (a `stock_config`), and {problem: names} for
    feedforward weights that cannot be converted. Tensors outside the feedforward layers are returned unchanged."""
    gated, stock = config.model_type == "llama", {}
    shape = [config.intermediate_size, config.hidden_size]
    wrong: dict[str, list[str]] = {
        "present in both spellings": [],
        "with unknown layout": [],
        "square, so ambiguous": [],
    }
    for name, tensor in tensors.items():
        match = WEIGHT.fullmatch(name)
        if is_counter(name):
            continue
        if match is None:
            stock[name] = tensor
            continue
        part, proj = match["part"], match["spelling"] == "proj.weight"
        theirs = f"{match['layer']}{part}_proj.weight"
        found, expected = list(tensor.shape), shape[::-1] if part == "down" else shape
        if proj and part == "down":
            transposed = found != expected
            if shape[0] == shape[1]:
                wrong["square, so ambiguous"].append(name)
        else:
            transposed = not proj and not (gated and part == "up")
        if found != (expected[::-1] if transposed else expected):
            wrong["with unknown layout"].append(f"{name} {found}")
        if theirs in stock:
            wrong["present in both spellings"].append(theirs)
        stock[theirs] = tensor.t().contiguous() if transposed and tensor.dim() == 2 else tensor
    return stock, wrong
