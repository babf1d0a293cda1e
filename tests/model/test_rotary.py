"""Rotary frequencies are those of transformers, with the settings of published models."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sparsellm.config import ModelConfig, RopeParameters, RopeType
from sparsellm.model.rotary import rotary_tables

LENGTH = 8_192
CASES = {
    "llama 2": (1e4, RopeParameters()),
    "vicuna": (1e4, RopeParameters(RopeType.linear, 4.0)),
    "llama 3.1": (5e5, RopeParameters(RopeType.llama3, 8.0, 8_192, 1.0, 4.0)),
    "llama 3.2": (5e5, RopeParameters(RopeType.llama3, 32.0, 8_192, 1.0, 4.0)),
    "qwen": (1e6, RopeParameters(RopeType.yarn, 4.0, 32_768)),
    "gpt-oss": (1.5e5, RopeParameters(RopeType.yarn, 32.0, 4_096, beta_fast=32.0, beta_slow=1.0, truncate=False)),
    "mscale": (1e4, RopeParameters(RopeType.yarn, 40.0, 4_096, mscale=0.707, mscale_all_dim=1.0)),
    "attention_factor": (1e4, RopeParameters(RopeType.yarn, 4.0, 4_096, attention_factor=1.5, beta_fast=8.0)),
    "short": (1e4, RopeParameters(RopeType.yarn, 4.0, 4)),  # no pair turns once within four positions
}


@pytest.mark.parametrize("name", CASES)
def test_tables_are_those_of_transformers(name):
    theta, rope = CASES[name]
    config = ModelConfig(hidden_size=512, num_heads=4, context_length=LENGTH, rope_theta=theta, rope_parameters=rope)
    given = {"rope_type": rope.rope_type.name, "rope_theta": theta, **rope.given()}
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=512, num_attention_heads=4, max_position_embeddings=LENGTH, rope_parameters=given)
    )
    positions = torch.arange(LENGTH)[None]
    expected = theirs(torch.zeros(1), positions)
    ours = rotary_tables(LENGTH, config, torch.device("cpu"))
    # A frequency is three roundings from exact, in theirs and in ours, and multiplies a position of up to LENGTH.
    angle = LENGTH * 6 * torch.finfo(torch.float32).eps / 2
    for mine, their in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, their[0], rtol=0, atol=angle * theirs.attention_scaling)
    if name != "llama 2":
        unscaled = rotary_tables(
            LENGTH, ModelConfig(hidden_size=512, num_heads=4, rope_theta=theta), torch.device("cpu")
        )
        assert (ours[0] - unscaled[0]).abs().max() > 0.1
