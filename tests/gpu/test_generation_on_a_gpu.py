"""Text generation on a GPU: a captured step gives the bits of the same step run operator by operator."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from inference.kept_logits import KeptLogits
from inference.near_ties import assert_texts_part_at_near_ties
from kernel_cases import DEVICE

from sparsellm.config import Activation, ModelConfig
from sparsellm.hf import conversion
from sparsellm.inference import generation, layer_forward
from sparsellm.inference.feedforward import SparseFeedForward
from sparsellm.inference.generation import Generator, Sampling
from sparsellm.inference.kernels import pointwise
from sparsellm.model import Decoder

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


def shift_vectors(made, random):
    """Makes norms other than one, and biases other than zero."""
    vectors = [parameter for parameter in made.decoder.parameters() if parameter.dim() == 1]
    for vector in [*vectors, *(weights.bias for weights in made.weights if weights.bias is not None)]:
        vector.data += 0.3 * torch.randn(vector.shape, generator=random, device=DEVICE)


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["three", "one"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 0.9)], ids=["greedy", "drawn"])
@pytest.mark.parametrize(
    ("engine", "attention"),
    [(None, {}), ("dense", {}), ("row", {}), ("row", QWEN3), (None, QWEN2)],
    ids=["torch", "dense", "row", "row_qwen3", "torch_qwen2"],
)
def test_captured_steps_give_the_same_tokens(engine, attention, sampling, prompts, monkeypatch):
    made = generator(engine, **attention)
    captured = list(made.stream(prompts, 60, sampling, seed=5))
    assert len(captured) == 60
    (batch,) = made._idle.values()
    assert list(batch.graphs) == [sampling]
    assert list(made.stream(prompts, 60, sampling, seed=5)) == captured  # with the graph from the first step on
    cache = batch.keys.clone(), batch.values.clone()
    monkeypatch.setattr(generation, "UNCAPTURED_STEPS", 1 << 30)
    assert list(made.stream(prompts, 60, sampling, seed=5)) == captured
    assert torch.equal(batch.keys, cache[0])
    assert torch.equal(batch.values, cache[1])
    other = list(made.stream(prompts, 60, Sampling(1.0), seed=6))
    assert other != captured


def test_replays_wait_for_the_capture(monkeypatch):
    """torch resets the random state on the capturing stream; on a busy GPU the first replay could draw before that."""
    begin, resets = torch.cuda.CUDAGraph.capture_begin, []

    def begin_late(*arguments, **settings):
        torch.cuda._sleep(2_000_000_000)  # cycles, about a second
        resets.append(torch.cuda.current_stream().record_event())
        begin(*arguments, **settings)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", begin_late)
    tokens = list(generator(None).stream(PROMPTS, generation.UNCAPTURED_STEPS + 2, Sampling(1.0), seed=5))
    assert len(tokens) == generation.UNCAPTURED_STEPS + 2  # of the prompt, of two steps, and of the first replay
    assert [reset.query() for reset in resets] == [True]


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["three", "one"])
@pytest.mark.parametrize("engine", [None, "row"])
def test_kernels_that_start_early_compute_the_same_bits(engine, prompts, monkeypatch):
    made, found = generator(engine, context_length=4096), []
    for early in (True, False):
        made._idle.clear()
        with monkeypatch.context() as patched:
            if not early:
                patched.setattr(pointwise, "_starts_early", lambda _: False)
            for _ in range(3):
                tokens = list(made.stream(prompts, 200, Sampling(1.0), seed=5))
                (batch,) = made._idle.values()
                found.append((tokens, batch.keys.clone(), batch.values.clone()))
    for tokens, *caches in found[1:]:
        assert tokens == found[0][0]
        assert all(torch.equal(ours, first) for ours, first in zip(caches, found[0][1:], strict=True))


@pytest.mark.parametrize("size", [1, 3, 40])
@pytest.mark.parametrize("attention", [{}, QWEN3, QWEN2], ids=["llama", "qwen3", "qwen2"])
def test_a_step_by_kernels_is_that_of_pytorch_operator_by_operator(attention, size, monkeypatch):
    made = generator(None, context_length=4096, **attention)
    layer, merged, random = made.layers[0], made.weights[0], torch.Generator(DEVICE).manual_seed(0)
    shift_vectors(made, random)

    def draw(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, generator=random, device=DEVICE, dtype=dtype)

    for positions in (192, 2048):  # in one part; in two for few sequences
        batch = generation.Batch(made.config, size, positions, made.device, torch.bfloat16)
        batch.lengths.copy_(torch.linspace(1, positions - 1, size, device=DEVICE).long())
        x, y = draw(size, 256, dtype=torch.float32), draw(size, 256)
        inputs = layer, merged, x, y, batch.tables, batch.lengths
        caches = draw(*batch.keys.shape[1:]), draw(*batch.keys.shape[1:])
        theirs = caches[0].clone(), caches[1].clone()
        with torch.no_grad():
            found = layer_forward.of_step(*inputs, caches)
            with monkeypatch.context() as patched:
                patched.setattr(layer_forward, "by_kernels", lambda _: False)
                expected = layer_forward.of_step(*inputs, theirs)
        for ours, other in zip((*found, *caches), (*expected, *theirs), strict=True):
            apart, length = ((t.float().flatten(1).norm(dim=1)) for t in (ours - other, other))
            assert (apart <= 0.02 * length).all(), (positions, (apart / length).max())  # bfloat16 rounds by 0.004


@pytest.mark.parametrize(
    "prompts", [PROMPTS, [[5, 17, 3] * 40, [44, 2, 9] * 40], [[7]]], ids=["unequal", "equal", "one"]
)
@pytest.mark.parametrize("attention", [{}, QWEN3, QWEN2], ids=["llama", "qwen3", "qwen2"])
def test_prompts_by_kernels_are_those_of_pytorch_operator_by_operator(attention, prompts, monkeypatch):
    made, found = generator(None, **attention), []
    shift_vectors(made, torch.Generator(DEVICE).manual_seed(0))
    for by_kernels in (True, False):
        batch, drawn = generation.Batch(made.config, len(prompts), 192, made.device, torch.bfloat16), KeptLogits()
        for cache in (batch.keys, batch.values):  # as if an earlier stream had left NaN
            cache.fill_(torch.nan)
        with monkeypatch.context() as patched, torch.no_grad():
            if not by_kernels:
                patched.setattr(layer_forward, "by_kernels", lambda _: False)
            made._prefill(batch, prompts, drawn)
        caches = (cache[:, :, : max(map(len, prompts))].flatten(0, 2) for cache in (batch.keys, batch.values))
        found.append((*caches, drawn.logits))
    for ours, theirs in zip(*found, strict=True):
        apart, length = ((t.float().flatten(1).norm(dim=1)) for t in (ours - theirs, theirs))
        assert (apart <= 0.03 * length).all(), (apart / length).max()  # bfloat16 rounds by 0.004, in two layers


@pytest.mark.parametrize("engine", [None, "dense", "row"])
def test_texts_part_from_those_of_transformers_at_near_ties_only(engine):
    made = generator(engine)
    weights = {name: parameter.detach().float() for name, parameter in made.decoder.named_parameters()}
    theirs, expected = conversion.view(weights, made.config, Activation.relu, 0).bfloat16(), []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=DEVICE)
        settings = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        text = theirs.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        expected.append(text[0, len(prompt) :].tolist())
    found = [list(tokens) for tokens in zip(*made.stream(PROMPTS, 30), strict=True)]
    assert_texts_part_at_near_ties(theirs, PROMPTS, expected, found, agreeing=0.3)


def test_threads_generate_at_once_each_with_a_graph_of_its_own():
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
    expected = list(generator("row", "cuda:0").stream(PROMPTS, 40))
    with torch.cuda.device(0):
        assert list(generator("row", "cuda:1").stream(PROMPTS, 40)) == expected
