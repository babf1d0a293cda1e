"""Small models of the supported families with random weights, created by transformers.

All numbers that could be mixed up differ: width 48, four heads of 16 (of 12 where the width decides), 64 neurons; all
weights are random, biases and norms too, and epsilon is large enough for a wrong one to be seen.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

CONTEXT, VOCABULARY = 64, 96
SIZE = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": CONTEXT, "initializer_range": 0.2, "rms_norm_eps": 1e-2,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
# Sixteen original positions, so that frequencies for 64 are kept, interpolated and divided.
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 0.5, "high_freq_factor": 2.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


def plain(theta):
    return {"rope_type": "default", "rope_theta": theta}


# model_type, what differs from SIZE, and whether there are models of it with a tied head, without one, or both
FAMILIES = {
    "llama2": ("llama", {"rope_parameters": plain(1e4)}, [False]),
    "llama2_linear": ("llama", {"rope_parameters": LINEAR}, [False]),
    "llama3": ("llama", GROUPED | {"rope_parameters": LLAMA3}, [False, True]),
    "smollm2": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "rope_parameters": plain(1e3)}, [True]),
    "mistral": ("mistral", GROUPED | {"sliding_window": None, "rope_parameters": plain(1e6)}, [False]),
    # 48 does not divide into five heads
    "mistral_nemo": (
        "mistral",
        {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": None,
         "rope_parameters": plain(1e6)},
        [False],
    ),
    "qwen2p5": ("qwen2", GROUPED | {"rope_parameters": plain(1e6)}, [False, True]),
    "qwen2p5_yarn": ("qwen2", GROUPED | {"rope_parameters": YARN}, [False]),
    "qwen3": ("qwen3", GROUPED | {"head_dim": 16, "rope_parameters": plain(1e6)}, [False, True]),
    "arcee": ("arcee", GROUPED | {"rope_parameters": YARN}, [False]),
}  # fmt: skip
CASES = [
    (family, activation, tied)
    for family, (_, _, heads) in FAMILIES.items()
    for activation in ("silu", "relu")
    for tied in heads
    if (family, activation) != ("arcee", "silu")
]
# Sums of K, N and H D float32 products in another order, once per layer, relative to the largest logit.
TOLERANCE = torch.finfo(torch.float32).eps * (48 + 64 + 64) * 2


def stock_model(family, activation="silu", tied=None, **changes):
    """A float32 transformers model. tied: default is the family's first value."""
    kind, differs, heads = FAMILIES[family]
    config = AutoConfig.for_model(
        kind, **SIZE | differs | {"hidden_act": activation, "tie_word_embeddings": heads[0] if tied is None else tied}
        | changes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model


def ids(sequences=2):
    return torch.randint(VOCABULARY, (sequences, CONTEXT), generator=torch.Generator().manual_seed(1))


def assert_same_logits(ours, expected):
    torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())
