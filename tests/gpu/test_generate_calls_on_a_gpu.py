"""`generate()` of transformers on accelerated bfloat16 models, on the kernels: texts differ from the dense model's only
at near-ties (tests/inference/near_ties.py), padding fires nothing, and captured graphs give the bits of eager calls."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from inference.near_ties import assert_texts_part_at_near_ties
from inference.small_models import blocks
from kernel_cases import DEVICE
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

import sparsellm
from sparsellm.ops import Engine, Plan

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

NEW = 24
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
LENGTHS = (1, 5, 70, 33, 128, 12, 64, 9)


def llama(**changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2} | changes
    settings = {"num_attention_heads": 4, "max_position_embeddings": 512, "hidden_act": "relu"}
    config = LlamaConfig(**sizes, **settings, initializer_range=0.1)
    return LlamaForCausalLM(config).to(DEVICE, torch.bfloat16).eval()


def prompts():
    random = torch.Generator().manual_seed(0)
    return [torch.randint(512, (length,), generator=random).tolist() for length in LENGTHS]


def padded(sequences):
    length = max(map(len, sequences))
    ids = [[0] * (length - len(sequence)) + sequence for sequence in sequences]
    mask = [[0] * (length - len(sequence)) + [1] * len(sequence) for sequence in sequences]
    return {"input_ids": torch.tensor(ids, device=DEVICE), "attention_mask": torch.tensor(mask, device=DEVICE)}


def generate(model, sequences, **settings):
    given = padded(sequences)
    return model.generate(**given, **GREEDY | settings)[:, given["input_ids"].shape[1] :].tolist()


def generate_batch(model, sequences):
    found = model.generate_batch(
        inputs=sequences,
        generation_config=GenerationConfig(**GREEDY | {"eos_token_id": -1}),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256),
        progress_bar=False,
    )
    return [found[f"req_{i}"].generated_tokens for i in range(len(sequences))]


def in_threads(model, sequences):
    def on_a_stream(sequence):
        with torch.cuda.stream(torch.cuda.Stream()):
            return generate(model, [sequence])[0]

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(on_a_stream, sequences))


WAYS = {
    "padded": generate,
    "static": lambda model, sequences: generate(model, sequences, cache_implementation="static"),
    "generate_batch": generate_batch,
    "prompt lookup": lambda model, given: [generate(model, [p], prompt_lookup_num_tokens=3)[0] for p in given[:3]],
    "assistant": lambda model, given: [
        generate(model, [p], assistant_model=llama(num_hidden_layers=1))[0] for p in given[:3]
    ],
    "threads": in_threads,
}


@pytest.mark.parametrize(
    ("way", "engine"),
    [(way, engine) for way in WAYS for engine in (None, "row", "tile") if way == "padded" or engine == "row"],
)
def test_texts_part_from_the_dense_models_at_near_ties_only(way, engine):
    torch._dynamo.reset()
    dense, sequences = llama(), prompts()
    expected = WAYS[way](dense, sequences)
    model = sparsellm.accelerate(llama(), "cuda", engine)
    found = WAYS[way](model, sequences)
    assert_texts_part_at_near_ties(dense, sequences[: len(found)], expected, found)
    # With one engine, earlier generations change no bit. generate_batch is the exception: which prompts it computes
    # together depends on when its thread picks them up.
    if engine is not None and way != "generate_batch":
        others = WAYS[way](model, [sequence[::-1] for sequence in sequences])
        assert others != found
        assert WAYS[way](model, sequences) == found


def test_padding_counts_nowhere():
    sequences = prompts()[:2] + prompts()[-3:-2]  # 1, 5 and 12 tokens
    model, counts = sparsellm.accelerate(llama(), "cuda"), []
    for batch in ([sequences[0]], [sequences[1]], [sequences[2]], sequences):
        for block in blocks(model):
            block.choice.counted, block.choice.calls = 0, [0] * len(block.choice.calls)
        generate(model, batch, max_new_tokens=1)
        torch.cuda.synchronize()
        counts.append(sum(block.choice.counts[0].item() for block in blocks(model)))
    # Only by rounding: products of another number of tokens may round differently, so a neuron near 0 may fire or not.
    assert counts[3] == pytest.approx(sum(counts[:3]), rel=0.01)


@pytest.mark.parametrize("engine", ["dense", "row", "tile", None])
@pytest.mark.parametrize("tokens", [3, 48, 200])
def test_a_captured_graph_gives_the_bits_of_eager_calls(tokens, engine):
    model = sparsellm.accelerate(llama(), "cuda", engine)
    for block in blocks(model):
        block.choice.plans = [Plan(Engine[engine or "row"])] * len(block.choice.plans)
    random = torch.Generator(DEVICE).manual_seed(tokens)
    inputs = [torch.randint(512, (1, tokens), device=DEVICE, generator=random) for _ in range(3)]
    with torch.no_grad():

        def run(ids):
            return model(ids, use_cache=False).logits

        if engine is None:  # counts must not change the engine between the eager calls and the capture
            for block in blocks(model):
                block.choice.calls = [1] * len(block.choice.calls)
        eager = [run(ids).clone() for ids in inputs]
        given = inputs[0].clone()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = run(given)
        for ids, expected in ((inputs[i], eager[i]) for i in (1, 0, 2, 1)):
            given.copy_(ids)
            graph.replay()
            assert torch.equal(captured, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_on_two_gpus_gives_the_texts_of_one():
    from accelerate import dispatch_model

    dense, sequences = llama(), prompts()
    expected = generate(dense, sequences)
    devices = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": 1}
    model = dispatch_model(llama(), devices | {"model.norm": 1, "lm_head": 1}, main_device=0)
    sparsellm.accelerate(model, "cuda", "row")
    assert {block.up_proj.weight.device.index for block in blocks(model)} == {0, 1}
    assert_texts_part_at_near_ties(dense, sequences, expected, generate(model, sequences))
