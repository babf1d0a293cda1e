"""Training in FP8: which layers are converted, that weights stay the same, and losses."""

import importlib

import float8_stand_in
import pytest
import torch
from small_run import small_config, small_trainer
from torch import nn

from sparsellm.config import Activation, Float8Recipe
from sparsellm.inference.feedforward import SparseFeedForward
from sparsellm.model import Decoder
from sparsellm.ops import Plan, backend, build, cuda, feedforward, float8_gate
from sparsellm.policy import Policy, first_use
from sparsellm.training import float8, loop

CONFIG = small_config("model.attention_bias=true").model
ATTENTION = {f"self_attn.{name}_proj" for name in "qkvo"}
FEEDFORWARD = {f"mlp.{name}_proj" for name in ("gate", "up", "down")}


@pytest.fixture(autouse=True)
def _torchao(monkeypatch):
    float8_stand_in.install(monkeypatch)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("whole", [False, True])
def test_the_layers_that_are_named_compute_in_float8_on_the_same_weights(whole, activation):
    decoder = Decoder(CONFIG, activation)
    before = dict(decoder.named_parameters())
    float8.convert(decoder, whole, Float8Recipe.rowwise)
    after = dict(decoder.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    for layer in decoder.layers:
        converted = {n: m.recipe for n, m in layer.named_modules() if isinstance(m, float8_stand_in.Float8Linear)}
        assert converted == dict.fromkeys(ATTENTION | (FEEDFORWARD if whole else set()), "rowwise")


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


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Trainers find the CUDA kernels; their layers stay on the dense engine, which runs anywhere."""
    monkeypatch.setattr(loop, "takes_kernels", lambda *_: True)
    monkeypatch.setattr(build, "load", lambda: None)
    monkeypatch.setattr(backend, "loaded", lambda: "cuda")
    monkeypatch.setattr(first_use, "policy_for", lambda *_: Policy())
    monkeypatch.setattr(cuda, "quantize_rows", float8_gate.quantize_rows)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("layers", ["attention", "all"])
def test_sparse_layers_get_their_tokens_in_float8_in_training_and_in_validation(layers, tmp_path, monkeypatch):
    calls, module = [], importlib.import_module("sparsellm.inference.feedforward")

    def recorded(x, w_gate, w_up, w_down, plan, rounded):
        calls.append((torch.is_grad_enabled(), plan))
        assert (rounded is not None) == (layers == "all")
        if rounded is not None:
            assert torch.equal(rounded.exact(), float8_gate.quantize_rows(x.detach()).exact())
            assert not rounded.values.requires_grad
        return feedforward(x, w_gate, w_up, w_down, plan, rounded)

    monkeypatch.setattr(module, "feedforward", recorded)
    with small_trainer(tmp_path / "run", f"runtime.float8={layers}", "runtime.micro_batch_size=4") as trainer:
        for layer in trainer.decoder.layers:
            assert type(layer.mlp) is SparseFeedForward
            assert all(type(linear) is nn.Linear for linear in layer.mlp.children())
            assert isinstance(layer.self_attn.q_proj, float8_stand_in.Float8Linear)
        assert trainer.advance(trainer.data.batches(None))[0].ce.item() > 0
        assert [gradients for gradients, _ in calls] == [True] * 2 * 2
        calls.clear()
        assert trainer._validate().ce > 0
        assert bool(calls) == (layers == "all")  # in bfloat16, validation has its own engine choice
        for i, (gradients, plan) in enumerate(calls):
            assert not gradients
            assert plan is trainer.plans.tensors[i % 2]
            assert Plan.read(plan) == Plan()


@pytest.mark.usefixtures("on_a_gpu")
def test_a_run_in_float8_without_its_kernels_is_an_error_and_not_bfloat16(tmp_path, monkeypatch):
    def unavailable():
        raise build.KernelsUnavailable("no nvcc")

    monkeypatch.setattr(build, "load", unavailable)
    monkeypatch.setattr(backend, "loaded", lambda: None)
    with pytest.raises(build.KernelsUnavailable, match="no nvcc"), small_trainer(tmp_path, "runtime.float8=all"):
        pass
