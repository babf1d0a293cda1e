"""The decoder compared with transformers' own models, and conversion to Hugging Face and back."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from sparsellm.config import Activation, ModelConfig, parameters
from sparsellm.hf import conversion
from sparsellm.model import Decoder
from sparsellm.model import decoder as module

CONFIG = ModelConfig(
    vocab_size=96, hidden_size=48, intermediate_size=64, num_layers=3, num_heads=4, context_length=32, rope_theta=5e3
)
KINDS = [(True, Activation.relu), (True, Activation.silu), (False, Activation.relu)]


def decoder(gated=True, activation=Activation.relu, **changes):
    torch.manual_seed(0)
    config = ModelConfig(**{**vars(CONFIG), "gated": gated, "init_std": 0.2, **changes})
    return Decoder(config, activation)


def batch(config, sequences=2):
    shape, generator = (sequences, config.context_length + 1), torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocab_size, shape, generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize(("gated", "activation"), KINDS)
def test_export_loads_in_transformers_with_equal_logits_and_loss(gated, activation, tmp_path, tokenizer_folder):
    model = decoder(gated, activation)
    conversion.export(model.state_dict(), model.config, activation, tmp_path / "hf", tokenizer_folder, 0)
    stock, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    ends = json.loads((tmp_path / "hf/generation_config.json").read_text())
    assert (ends["bos_token_id"], ends["eos_token_id"]) == (0, 0)
    assert type(stock).__name__ == ("LlamaForCausalLM" if gated else "ArceeForCausalLM")
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert stock.config.hidden_act == activation.name
    tokens, targets = batch(model.config)
    with torch.no_grad():
        expected = stock(tokens).logits
        torch.testing.assert_close(model.logits(tokens), expected, rtol=2e-5, atol=2e-5)
        ce = torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum")
        torch.testing.assert_close(model(tokens, targets).ce, ce)


@pytest.mark.parametrize(("gated", "activation"), KINDS)
def test_import_is_the_inverse_of_export(gated, activation, tmp_path, tokenizer_folder):
    model = decoder(gated, activation)
    conversion.export(model.state_dict(), model.config, activation, tmp_path / "hf", tokenizer_folder, 0)
    config, read_activation, weights = conversion.load(tmp_path / "hf")
    assert (config, read_activation) == (model.config, activation)
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())


def test_bfloat16_export_is_the_rounded_weights(tmp_path, tokenizer_folder):
    model = decoder()
    conversion.export(
        model.state_dict(), model.config, Activation.relu, tmp_path / "hf", tokenizer_folder, 0, torch.bfloat16
    )
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert stock.dtype == torch.bfloat16
    assert torch.equal(stock.model.norm.weight, model.norm.weight.bfloat16())
    assert torch.equal(stock.model.layers[1].mlp.up_proj.weight, model.layers[1].mlp.up_proj.weight.bfloat16())


def test_other_architectures_are_refused_with_every_reason(tmp_path):
    config = LlamaConfig(
        vocab_size=96, hidden_size=48, num_attention_heads=4, hidden_act="gelu", attention_bias=True, mlp_bias=True,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"hidden_act is 'gelu'.*attention_bias is True.*mlp_bias is True"):
        conversion.load(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"


def test_a_decoder_begins_with_drawn_matrices_norms_of_ones_and_biases_of_zeros():
    for attention in ({"attention_bias": True, "tie_embeddings": False}, {"qk_norm": True}):
        for name, parameter in decoder(num_key_value_heads=2, **attention).named_parameters():
            if parameter.dim() == 2:
                assert parameter.std().item() == pytest.approx(0.2, rel=0.1), name
            else:
                assert parameter.unique().tolist() == [0.0 if name.endswith("proj.bias") else 1.0], name


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("gated", "activation"), [KINDS[0], KINDS[2]])
def test_statistics_are_per_layer_and_counted_once(gated, activation, recompute):
    model = decoder(gated, activation)
    model.recompute = recompute
    tokens, targets = batch(model.config)
    hidden = []
    for layer in model.layers:
        layer.post_attention_layernorm.register_forward_hook(lambda _m, _i, out: hidden.append(out.detach()))
    out = model(tokens, targets)
    seen = len(hidden)
    (out.ce + out.l1.sum()).backward()
    assert (len(hidden) > seen) == recompute  # recomputed, and still counted once:
    for i, layer in enumerate(model.layers):
        x = hidden[i].flatten(0, 1)
        first = torch.relu(x @ (layer.mlp.gate_proj if gated else layer.mlp.up_proj).weight.T)
        h = first * (x @ layer.mlp.up_proj.weight.T) if gated else first
        assert out.nnz[i] == (first != 0).sum()
        assert torch.equal(out.fired[i], (first != 0).any(0))
        torch.testing.assert_close(out.l1[i], h.abs().sum())
    assert (
        out.wide_segments.tolist() == out.rest_calls.tolist() == out.overflow_tiles.tolist() == [0] * len(model.layers)
    )
    assert out.union.tolist() == [-1] * len(model.layers)


def test_recomputation_changes_no_gradient():
    grads = []
    for recompute in (False, True):
        model = decoder()
        model.recompute = recompute
        out = model(*batch(model.config))
        (out.ce + 1e-2 * out.l1.sum()).backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("architecture", [{}, {"qk_norm": True, "num_key_value_heads": 2, "head_dim": 16}])
def test_what_attention_returns_is_what_its_output_projection_keeps(architecture, monkeypatch):
    """Another layout of the heads would be copied: one more plane per layer, kept until backward."""
    model, returned, taken = decoder(**architecture), [], []
    attend = module.causal_attention
    monkeypatch.setattr(module, "causal_attention", lambda *qkv: returned.append(attend(*qkv)) or returned[-1])
    for layer in model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0]))
    model(*batch(model.config))
    assert [x.data_ptr() for x in taken] == [y.data_ptr() for y in returned]
    assert len(taken) == 3


def test_silu_has_no_statistics():
    model = decoder(activation=Activation.silu)
    out = model(*batch(model.config))
    assert out[1:8] == (None,) * 7


def test_a_longer_sequence_than_the_context_is_refused():
    model = decoder()
    with pytest.raises(ValueError, match="tokens has 33 positions: the model's context is 32"):
        model.logits(torch.zeros(1, 33, dtype=torch.long))


@pytest.mark.slow
def test_compiled_parts_equal_eager_and_compile_once_for_all_layers():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = decoder()
    tokens, targets = batch(model.config)
    eager = model(tokens, targets)
    model.compile_parts()
    compiled = model(tokens, targets)
    torch.testing.assert_close(compiled.ce, eager.ce)
    assert torch.equal(compiled.nnz, eager.nnz)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # one layer, one loss


@pytest.mark.parametrize("gated", [True, False])
def test_parameters_are_counted_without_building_them(gated):
    config = ModelConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=2, gated=gated)
    with torch.device("meta"):
        decoder = Decoder(config, Activation.relu)
    assert parameters(config) == sum(p.numel() for p in decoder.parameters())
