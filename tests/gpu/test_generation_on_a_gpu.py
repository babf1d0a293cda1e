"""Text on a GPU: a captured step gives the bits of the same step taken operator by operator."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kernel_cases import DEVICE
from model.near_ties import assert_texts_part_at_near_ties

from sparsellm.config import Activation, ModelConfig
from sparsellm.model import Decoder, generation, huggingface
from sparsellm.model.accelerate import SparseFeedForward
from sparsellm.model.generation import Generator, Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

PROMPTS = [[5, 17, 3, 80, 11] * 20, [3], [44, 2, 9]]


QWEN3 = {"num_key_value_heads": 2, "head_dim": 128, "qk_norm": True, "tie_embeddings": False}
QWEN2 = {"num_key_value_heads": 1, "attention_bias": True}


def generator(engine, device=DEVICE, **attention):
    torch.manual_seed(0)
    model = ModelConfig(96, 256, 512, 2, 4, init_std=0.1, **{"context_length": 512, **attention})
    with torch.device(device):
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
    (batch,) = made._idle.values()
    assert list(batch.graphs) == [sampling]
    assert list(made.stream(PROMPTS, 60, sampling, seed=5)) == captured  # with the graph from the first step on
    cache = batch.keys.clone(), batch.values.clone()
    monkeypatch.setattr(generation, "UNCAPTURED_STEPS", 1 << 30)
    assert list(made.stream(PROMPTS, 60, sampling, seed=5)) == captured
    assert torch.equal(batch.keys, cache[0])
    assert torch.equal(batch.values, cache[1])
    other = list(made.stream(PROMPTS, 60, Sampling(1.0), seed=6))
    assert other != captured


@pytest.mark.parametrize("size", [1, 3, 40])
@pytest.mark.parametrize("attention", [{}, QWEN3, QWEN2], ids=["llama", "qwen3", "qwen2"])
def test_a_compiled_layer_computes_what_pytorch_does_operator_by_operator(attention, size):
    torch._dynamo.reset()
    made = generator(None, context_length=4096, **attention)
    layer, merged, random = made.layers[0], made.merged[0], torch.Generator(DEVICE).manual_seed(0)
    vectors = [parameter for parameter in layer.parameters() if parameter.dim() == 1]
    for vector in vectors if merged.bias is None else [*vectors, merged.bias]:  # not all ones, and not all zeros
        vector.data += 0.3 * torch.randn(vector.shape, generator=random, device=DEVICE)

    def draw(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, generator=random, device=DEVICE, dtype=dtype)

    for positions in (192, 2048):  # in one part; in two, for the few sequences
        batch = generation.Batch(made.config, size, positions, made.device, torch.bfloat16)
        batch.lengths.copy_(torch.linspace(1, positions - 1, size, device=DEVICE).long())
        memory = batch.cos, batch.sin, batch.lengths
        x, y = draw(size, 256, dtype=torch.float32), draw(size, 256)
        caches = draw(*batch.keys.shape[1:]), draw(*batch.keys.shape[1:])
        theirs = [cache.clone() for cache in caches]
        with torch.no_grad():
            found = made._layer(layer, merged, x, y, *memory, *caches)
            expected = generation._decode_layer(layer, merged, x, y, *memory, *theirs)
        for ours, other in zip((*found, *caches), (*expected, *theirs), strict=True):
            apart, length = ((t.float().flatten(1).norm(dim=1)) for t in (ours - other, other))
            assert (apart <= 0.02 * length).all(), (positions, (apart / length).max())  # bfloat16 rounds by 0.004


@pytest.mark.parametrize("engine", [None, "dense", "row"])
def test_texts_part_from_those_of_transformers_at_near_ties_only(engine):
    torch._dynamo.reset()
    made = generator(engine)
    weights = {name: parameter.detach().float() for name, parameter in made.decoder.named_parameters()}
    theirs, expected = huggingface.view(weights, made.config, Activation.relu, 0).bfloat16(), []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=DEVICE)
        settings = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        text = theirs.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        expected.append(text[0, len(prompt) :].tolist())
    found = [list(tokens) for tokens in zip(*made.stream(PROMPTS, 30), strict=True)]
    assert_texts_part_at_near_ties(theirs, PROMPTS, expected, found, agreeing=0.3)


def test_layers_share_one_compiled_step():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    made = generator("row")
    list(made.stream(PROMPTS, 5))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_threads_generate_at_once_each_with_a_graph_of_its_own():
    torch._dynamo.reset()
    made = generator("row")
    lists = [[[seed, 2 * seed, 3], [90 - seed] * 7, [44, seed]] for seed in range(1, 5)]
    alone = [list(made.stream(prompts, 40)) for prompts in lists]

    def on_a_stream(prompts):
        with torch.cuda.stream(torch.cuda.Stream()):
            return list(made.stream(prompts, 40))

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as threads:
        for _ in range(3):
            assert list(threads.map(on_a_stream, lists)) == alone


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_generator_works_on_a_gpu_that_is_not_the_current_one():
    torch._dynamo.reset()
    expected = list(generator("row", "cuda:0").stream(PROMPTS, 40))
    with torch.cuda.device(0):
        assert list(generator("row", "cuda:1").stream(PROMPTS, 40)) == expected
