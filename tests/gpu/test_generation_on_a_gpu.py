"""Text on a GPU: a captured step gives the tokens of the same step taken operator by operator."""

import pytest
import torch
from kernel_cases import DEVICE

from sparsellm.config import Activation, ModelConfig
from sparsellm.model import Decoder, generation
from sparsellm.model.accelerate import SparseFeedForward
from sparsellm.model.generation import Generator, Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

PROMPTS = [[5, 17, 3, 80, 11] * 20, [3], [44, 2, 9]]


QWEN3 = {"num_key_value_heads": 2, "head_dim": 128, "qk_norm": True, "tie_embeddings": False}
QWEN2 = {"num_key_value_heads": 1, "attention_bias": True}


def generator(engine, **attention):
    torch.manual_seed(0)
    model = ModelConfig(96, 256, 512, 2, 4, context_length=512, init_std=0.1, **attention)
    with torch.device(DEVICE):
        decoder = Decoder(model, Activation.relu)
    made = Generator(decoder, dtype=torch.bfloat16, kernels=None if engine is None else "cuda")
    for block in decoder.modules():
        if isinstance(block, SparseFeedForward):
            block.choice.engine = engine
            block.choice.plans = [type(block.choice.plans[0]).of(engine)] * 3
    return made


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 0.9)], ids=["greedy", "drawn"])
@pytest.mark.parametrize(
    ("engine", "attention"),
    [(None, {}), ("dense", {}), ("row", {}), ("row", QWEN3), (None, QWEN2)],
    ids=["torch", "dense", "row", "row_qwen3", "torch_qwen2"],
)
def test_captured_steps_give_the_same_tokens(engine, attention, sampling, monkeypatch):
    torch._dynamo.reset()
    made = generator(engine, **attention)
    captured = list(made.stream(PROMPTS, 60, sampling, seed=5))
    assert len(captured) == 60
    (batch,) = made._batches.values()
    assert list(batch.graphs) == [sampling]
    assert list(made.stream(PROMPTS, 60, sampling, seed=5)) == captured  # with the graph from the first step on
    monkeypatch.setattr(generation, "UNCAPTURED_STEPS", 1 << 30)
    assert list(made.stream(PROMPTS, 60, sampling, seed=5)) == captured
    other = list(made.stream(PROMPTS, 60, Sampling(1.0), seed=6))
    assert other != captured


def test_layers_share_one_compiled_step():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    made = generator("row")
    list(made.stream(PROMPTS, 5))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
