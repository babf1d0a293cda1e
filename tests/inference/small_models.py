"""Small models of each kind that can be accelerated, with test helpers."""

import torch
from transformers import ArceeConfig, ArceeForCausalLM, LlamaConfig, LlamaForCausalLM

from sparsellm.config import Activation, ModelConfig
from sparsellm.model import Decoder

SIZE = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
# Sums of K and of N float32 products in another order, once per layer, relative to the largest logit.
TOLERANCE = torch.finfo(torch.float32).eps * (32 + 64) * 2
MODELS = ["llama", "arcee", "decoder", "nongated_decoder"]


def is_float32(tensor):
    """Compiled code may call this function, whose module it imports by name: a conftest's name is not unique."""
    return tensor.dtype == torch.float32


def make(name, **changes):
    torch.manual_seed(0)
    if "decoder" in name:
        layer_count = changes.get("num_hidden_layers", 2)
        config = ModelConfig(96, 32, 64, layer_count, 4, context_length=256, init_std=0.2, gated=name == "decoder")
        return Decoder(config, changes.get("activation", Activation.relu)).eval()
    config, model = (LlamaConfig, LlamaForCausalLM) if name == "llama" else (ArceeConfig, ArceeForCausalLM)
    settings = {**SIZE, "hidden_act": "relu", "initializer_range": 0.2, "max_position_embeddings": 256, **changes}
    return model(config(**settings)).eval()


def layers(model):
    return model.layers if isinstance(model, Decoder) else model.model.layers


def blocks(model):
    return [layer.mlp for layer in layers(model)]


def tokens(positions, sequences=1):
    return torch.randint(96, (sequences, positions), generator=torch.Generator().manual_seed(positions))


def logits(model, ids):
    with torch.no_grad():
        return model.logits(ids) if isinstance(model, Decoder) else model(ids).logits


def assert_same(ours, expected):
    torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())
