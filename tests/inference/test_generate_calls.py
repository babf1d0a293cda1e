"""transformers' `generate()` on accelerated models: the tokens equal those of the original model.

On the CPU's float32 both agree whole. Engines are stand-ins (conftest), and change under way.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from accelerate import dispatch_model
from inference.small_models import blocks, make, tokens
from transformers import (
    CompileConfig,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    StaticCache,
)

import sparsellm
from sparsellm.policy import Policy

NEW = 12
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
COMPILED = CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
COMPILED._compile_all_devices = True  # on the CPU too
STATIC = {"cache_implementation": "static", "compile_config": COMPILED}
PROMPTS = [tokens(9)[0].tolist(), tokens(5)[0].tolist(), tokens(40)[0].tolist()]


def padded(prompts):
    """(ids, mask) of prompts, padded on the left with token 0, which is also a token of text."""
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, prompts=PROMPTS, **settings):
    """The new tokens of each prompt."""
    given = padded(prompts)
    return model.generate(**given, **GREEDY | settings)[:, given["input_ids"].shape[1] :].tolist()


def one_by_one(model, **settings):
    return [generate(model, [prompt], **settings)[0] for prompt in PROMPTS]


def generate_batch(model):
    """Generates with transformers' continuous batching, which uses its own thread."""
    found = model.generate_batch(
        inputs=PROMPTS,
        generation_config=GenerationConfig(**GREEDY | {"eos_token_id": -1}),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32),
        progress_bar=False,
    )
    return [found[name].generated_tokens for name in sorted(found)]


def compiled(model):
    model.compile(backend="aot_eager")
    return generate(model, PROMPTS[:2], max_new_tokens=5)


def in_inference_mode(model):
    with torch.inference_mode():
        return generate(model)


def in_threads(model):
    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(lambda prompt: generate(model, [prompt])[0], PROMPTS))


WAYS = {
    "one by one": one_by_one,
    "padded": generate,
    "static cache, compiled": lambda model: generate(model, **STATIC),
    "generate_batch": generate_batch,
    "prompt lookup": lambda model: one_by_one(model, prompt_lookup_num_tokens=3),
    "assistant": lambda model: one_by_one(model, assistant_model=make("llama", num_hidden_layers=1)),
    "beams": lambda model: generate(model, num_beams=2),
    "compiled": compiled,
    "inference mode": in_inference_mode,
    "threads": in_threads,
}


class Alternating:
    """Alternates row and dense, so that engines change in the middle of a text."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *_counts, current):
        self.calls += 1
        return self.calls // 2 % 2


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.exhaustive) if way == "compiled" else way for way in WAYS]
)
@pytest.mark.slow
def test_the_tokens_are_those_of_the_model_as_it_was(way, hollow, monkeypatch):
    found = []
    for accelerated in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = make("llama")
        if accelerated:
            monkeypatch.setattr(Policy, "choose_engine", staticmethod(Alternating()))
            sparsellm.accelerate(model, "cuda")
            hollow.nnz, hollow.union = 1, 1
        found.append((WAYS[way](model), graphs()))
    assert {"row", "dense"} <= set(hollow.engines)
    assert found[0] == found[1]  # new engines recompile nothing
    assert (graphs() > 0) == ("compiled" in way)


# Padding.


def qwen():
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, hidden_act="relu", initializer_range=0.2)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zero in a new model, so values of padding would be zeros
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def mistral():
    """Its layers have a sliding window, which the longer prompts fill."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 3}
    return MistralForCausalLM(MistralConfig(**sizes, **heads, hidden_act="relu", initializer_range=0.2)).eval()


def fired(model, **given):
    """The nonzeros of each token, [B, T] of each layer, in the first call of `generate`."""
    found = []
    hooks = [
        block.register_forward_pre_hook(lambda block, args: found.append((block.gate_proj(args[0]) > 0).sum(-1)))
        for block in blocks(model)
    ]
    model.generate(**given, **GREEDY | {"max_new_tokens": 1})
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
@pytest.mark.parametrize("build", [lambda: make("llama"), qwen, mistral], ids=["llama", "qwen", "mistral"])
def test_padding_fires_nothing_and_changes_no_bit(build, cache, hollow):
    model, given = build(), padded(PROMPTS)
    there = given["attention_mask"].bool()
    settings = GREEDY | cache | {"output_logits": True, "return_dict_in_generate": True}
    before, expected = fired(model, **given, **cache), model.generate(**given, **settings)
    assert all((nonzeros[~there] > 10).all() for nonzeros in before)  # the cost in a model that is not accelerated
    sparsellm.accelerate(model, "cuda", "dense")
    for ours, theirs in zip(fired(model, **given, **cache), before, strict=True):
        assert not ours[~there].any()
        assert torch.equal(ours[there], theirs[there])
    found = model.generate(**given, **settings)
    assert torch.equal(found.sequences, expected.sequences)
    sparsellm.restore(model)
    for ours, theirs in zip(fired(model, **given, **cache), before, strict=True):
        assert torch.equal(ours, theirs)


def test_padding_counts_nowhere(hollow):
    model = sparsellm.accelerate(make("llama"), "cuda")
    counts = [sum(int(nonzeros.sum()) for nonzeros in fired(model, **padded([prompt]))) for prompt in PROMPTS[:2]]
    for block in blocks(model):
        block.choice.counted = 0
    model.generate(**padded(PROMPTS[:2]), **GREEDY | {"max_new_tokens": 1})
    assert sum(block.choice.counts[0].item() for block in blocks(model)) == sum(counts)


def test_padding_fires_nothing_where_attention_gives_a_mean_to_tokens_that_see_nothing(hollow, monkeypatch):
    """Like some CUDA kernels."""
    attention = torch.nn.functional.scaled_dot_product_attention

    def with_means(query, key, value, attn_mask=None, **settings):
        nothing = ~attn_mask.any(-1, keepdim=True) if attn_mask is not None else torch.tensor(False)
        means = value.mean(2, keepdim=True).repeat_interleave(query.shape[1] // value.shape[1], 1)
        return torch.where(nothing, means, attention(query, key, value, attn_mask=attn_mask, **settings))

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", with_means)
    model, given = sparsellm.accelerate(make("llama"), "cuda", "dense"), padded(PROMPTS)
    for cache in ({}, {"cache_implementation": "static"}):
        assert all(not nonzeros[~given["attention_mask"].bool()].any() for nonzeros in fired(model, **given, **cache))


@pytest.mark.parametrize("cache", [DynamicCache, lambda config: StaticCache(config=config, max_cache_len=64)])
def test_a_mask_may_have_more_columns_than_there_are_tokens_so_far(hollow, cache):
    """As for the capacity of a static cache, or for prompts, padded on the right, that are computed in two pieces."""
    model, ids = make("llama"), tokens(12).expand(2, 12)
    mask = torch.zeros(2, 64, dtype=torch.int64)
    mask[0, :12], mask[1, :7] = 1, 1

    def logits():
        kept = cache(config=model.config)
        pieces = [model(input_ids=piece, attention_mask=mask, past_key_values=kept).logits for piece in ids.split(6, 1)]
        return torch.cat(pieces, 1)[mask[:, :12].bool()]

    with torch.no_grad():
        expected = logits()
        sparsellm.accelerate(model, "cuda", "dense")
        torch.testing.assert_close(logits(), expected)


def test_calls_with_gradients_are_left_alone_and_embeddings_may_be_given(hollow):
    model, given = make("llama"), padded(PROMPTS)
    embedded = {"inputs_embeds": model.model.embed_tokens(given["input_ids"]), **given}
    del embedded["input_ids"]
    expected = model(**given).logits
    sparsellm.accelerate(model, "cuda", "dense")
    torch.testing.assert_close(model(**given).logits, expected)
    there = given["attention_mask"].bool()
    with torch.no_grad():
        torch.testing.assert_close(model(**embedded).logits[there], expected[there])


# Models in several places, with the hooks that device_map gives to every module.

PLACES = {
    **dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.norm", "lm_head"), "cpu"),
    "model.layers.1": "cpu",
}


def test_a_dispatched_model_gives_its_own_tokens(hollow):
    model = dispatch_model(make("llama"), PLACES, force_hooks=True)
    before, expected = blocks(model), generate(make("llama"))
    assert all(hasattr(block, "_hf_hook") for block in before)
    sparsellm.accelerate(model, "cuda")
    assert generate(model) == expected
    assert "row" in hollow.engines
    assert blocks(sparsellm.restore(model)) == before
    assert generate(model) == expected


def test_offloaded_blocks_are_refused_by_name(tmp_path, hollow):
    places = PLACES | {"model.layers.1": "disk"}
    model = dispatch_model(make("llama"), places, main_device="cpu", offload_dir=tmp_path)
    before = blocks(model)
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.gate_proj.weight is on the meta device: it should be"):
        sparsellm.accelerate(model, "cuda")
    assert blocks(model) == before
