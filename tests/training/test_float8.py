"""Training in FP8: which layers are converted, that weights stay the same, and losses."""

import float8_stand_in
import pytest
import torch
from small_run import small_config, small_trainer

from sparsellm.config import Activation, Float8, Float8Recipe
from sparsellm.model import Decoder
from sparsellm.ops import feedforward
from sparsellm.training import float8

CONFIG = small_config("model.attention_bias=true").model
ATTENTION = {f"self_attn.{name}_proj" for name in "qkvo"}
FEEDFORWARD = {f"mlp.{name}_proj" for name in ("gate", "up", "down")}


@pytest.fixture(autouse=True)
def _torchao(monkeypatch):
    float8_stand_in.install(monkeypatch)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("layers", Float8)
def test_the_layers_that_are_named_compute_in_float8_on_the_same_weights(layers, activation):
    decoder = Decoder(CONFIG, activation)
    before = dict(decoder.named_parameters())
    float8.convert(decoder, layers, Float8Recipe.rowwise)
    after = dict(decoder.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    for layer in decoder.layers:
        converted = {n: m.recipe for n, m in layer.named_modules() if isinstance(m, float8_stand_in.Float8Linear)}
        assert converted == dict.fromkeys(ATTENTION | (FEEDFORWARD if layers == Float8.all else set()), "rowwise")


@pytest.mark.parametrize("gated", [True, False])
def test_linear_layers_compute_what_the_operator_does(gated):
    config = small_config(f"model.gated={str(gated).lower()}").model
    block = Decoder(config, Activation.relu).layers[0].mlp
    x = torch.randn(2, 5, config.hidden_size)
    weights = block.gate_proj.weight if gated else None, block.up_proj.weight, block.down_proj.weight
    gradients = []
    for out in (feedforward(x, *weights, plan=None), float8.LinearFeedForward(block)(x)):
        results = out
        (out.y.square().sum() + 0.1 * out.l1).backward()
        gradients.append([w.grad for w in weights if w is not None])
        block.zero_grad()
    expected = feedforward(x, *weights, plan=None)
    for name, ours, theirs in zip(results._fields, results, expected, strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda m, n=name: f"{n}: {m}")
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("layers", ["attention", "all"])
def test_the_loss_differs_from_that_without_float8_by_rounding(layers, tmp_path):
    found = []
    for overrides in ([], [f"runtime.float8={layers}", "runtime.micro_batch_size=3"]):
        with small_trainer(tmp_path / str(len(found)), *overrides) as trainer:
            found.append(trainer.advance(trainer.data.batches(None))[0].ce.item())
    assert 0 < abs(found[1] / found[0] - 1) < 2**-4  # half a unit in the last of e4m3's three bits
