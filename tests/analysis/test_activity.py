import numpy as np
import pytest
import torch
from transformers import ArceeConfig, ArceeForCausalLM, LlamaConfig, LlamaForCausalLM

from sparsellm.analysis import activity, speed
from sparsellm.ops import ENGINES

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3,
}  # fmt: skip
BATCH = 3  # of 5 sequences of 100 tokens: tiles of 128 cross sequences, and the last batch is smaller


def small_model(gated, dtype=torch.float32, **shape):
    kind, config = (LlamaForCausalLM, LlamaConfig) if gated else (ArceeForCausalLM, ArceeConfig)
    torch.manual_seed(3)
    return kind(config(hidden_act="relu", **SHAPE | shape)).to(dtype).eval()


def small_blocks():
    return torch.randint(64, (5, 100), generator=torch.Generator().manual_seed(1))


def gate_inputs(model, blocks):
    """The input of each layer's gate, recorded independently of the tested code: [L][S * T, K]."""
    seen = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(0, 1)))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(blocks)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [True, False])
def test_counts_equal_those_of_dense_activations(gated, dtype):
    model, blocks = small_model(gated, dtype), small_blocks()
    steps = []
    counted = activity.count(model, blocks, BATCH, steps.append)
    assert steps == [3, 2]
    assert counted.tokens == 500
    assert counted.tiles == 3 + 2  # ceil(300 / 128) + ceil(200 / 128)
    of_batches = [gate_inputs(model, batch) for batch in blocks.split(BATCH)]
    for layer, block in enumerate(model.model.layers):
        weight = (block.mlp.gate_proj if gated else block.mlp.up_proj).weight
        batches = [(torch.nn.functional.linear(xs[layer], weight) > 0).detach().numpy() for xs in of_batches]
        active = np.concatenate(batches)
        assert 0 < active.mean() < 1
        np.testing.assert_array_equal(counted.nonzeros[..., layer].ravel(), active.sum(1))
        np.testing.assert_array_equal(counted.fired[layer], active.sum(0))
        expected = sum(batch[i : i + 128].any(0).sum() for batch in batches for i in range(0, len(batch), 128))
        assert counted.union[layer] == expected


def test_a_model_is_left_as_it_was():
    model = small_model(True)
    activity.count(model, small_blocks(), BATCH)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_other_blocks_are_refused_by_name():
    model = LlamaForCausalLM(LlamaConfig(hidden_act="silu", **SHAPE))
    with pytest.raises(ValueError, match=r"act_fn is SiLU\w*: it should be ReLU"):
        activity.count(model, small_blocks(), BATCH)


@pytest.mark.parametrize("gated", [True, False])
def test_each_layer_is_timed_on_its_own_inputs(gated, monkeypatch):
    """Everything except the clock runs on a CPU, with the dense engine for so few tokens."""
    model, blocks = small_model(gated, torch.bfloat16), small_blocks()
    results = []

    def clock(candidates):
        results.append((candidates["eager"](0), candidates["engine"](0)[0]))
        return {"eager": 3.0, "compiled": 2.0, "engine": 1.0 + len(results)}

    monkeypatch.setattr(speed, "gpu_milliseconds", clock)
    rows = speed.layer_speeds(model, blocks)
    counted = activity.count(model, blocks, batch_size=5)
    assert [row["layer"] for row in rows] == [0, 1, 2]
    assert [row["speedup"] for row in rows] == [2 / 2, 2 / 3, 2 / 4]
    for layer, (row, (dense, ours)) in enumerate(zip(rows, results, strict=True)):
        assert row["engine"] == ENGINES[0]
        assert row["tokens"] == 500
        assert row["nonzeros"] == counted.fired[layer].sum() / 500
        assert row["union"] == counted.union[layer] / counted.tiles
        torch.testing.assert_close(ours, dense)
