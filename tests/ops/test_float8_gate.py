"""The gate product in FP8: rounding to rows of e4m3, and the driver with stand-ins for the kernels."""

import importlib

import pytest
import torch
from test_feedforward import tokens, weights

from sparsellm.inference.engine_choice import EngineChoice
from sparsellm.ops import Engine, Plan, backend, cuda, feedforward, float8_gate, reference, twell
from sparsellm.policy import Policy


def test_rows_are_rounded_by_at_most_half_a_unit_of_the_last_place():
    x = torch.randn(9, 48) * 10.0 ** torch.arange(-4, 5)[:, None]
    x[3] = 0
    rows = float8_gate.quantize_rows(x)
    largest = x.abs().amax(1)
    torch.testing.assert_close(rows.scales, largest.clamp(min=1e-12) / 448)
    assert ((rows.exact() - x).abs() <= x.abs() * 2**-4 + largest[:, None] * 2**-16).all()
    assert not rows.exact()[3].any()
    assert rows.values.float().abs().amax(1)[largest > 0].eq(448).all()


def test_the_reference_is_the_gate_of_the_rounded_matrices():
    x, w = (float8_gate.quantize_rows(torch.randn(rows, 32)) for rows in (5, 24))
    exact = torch.relu(x.exact() @ w.exact().T)
    torch.testing.assert_close(float8_gate.gate(x, w).double(), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.usefixtures("stand_ins")
def test_the_gate_is_packed():
    x, w = (cuda.quantize_rows(torch.randn(rows, 32).bfloat16()) for rows in (5, 24))
    packed = cuda.gate_pack_float8(x, w)
    assert torch.equal(twell.unpack(packed, 24), float8_gate.gate(x, w))


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
def test_a_layer_computes_what_fires_in_float8_and_follows_its_weight(gated, monkeypatch):
    monkeypatch.setattr("sparsellm.inference.engine_choice.sparse_engines_take", lambda _: True)
    x, ws = tokens(1536, 16, torch.bfloat16), weights(16, 24, gated, torch.bfloat16, requires_grad=False)
    w_gate, w_up, w_down = ws if gated else [None, *ws]
    choice = EngineChoice("tile", Policy(), float8=True)
    for _ in range(2):
        y, _, fired, counts = choice.run(x, w_gate, w_up, w_down)
        g = float8_gate.gate(float8_gate.quantize_rows(x), float8_gate.quantize_rows(ws[0]))
        right = (g * (x @ w_up.T) if gated else g) @ w_down.T
        # Products of bfloat16 on a CPU may sum in another order for the stand-in's layout of the same weight.
        assert (y - right).float().norm() < 2**-7 * right.float().norm()
        assert torch.equal(fired, (g != 0).any(0))
        assert counts.tolist() == [g.count_nonzero(), 0, 0, reference.union(g != 0), 0]
        ws[0].neg_()


def on_kernels(monkeypatch, driver=cuda):
    """Let the operator call the kernels' stand-ins for tensors on the CPU."""
    monkeypatch.setattr(importlib.import_module("sparsellm.ops.feedforward"), "_kernels", lambda *_: driver)


def straight_through(x, ws, g, dy, dl1):
    """(y, gradients) of the layer whose activations after the ReLU are g, in the dtype of x."""
    w_gate, w_up, w_down = ws if len(ws) == 3 else [None, *ws]
    planes = [g] if w_gate is None else [g, x @ w_up.T]
    h = g if w_gate is None else g * planes[1]
    return h @ w_down.T, *reference.backward(x, w_gate, w_up, w_down, planes, dy, dl1)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_gradients_are_straight_through_what_fires_in_float8(gated, stored, monkeypatch):
    on_kernels(monkeypatch)
    in_bf16 = weights(32, 72, gated, torch.bfloat16, requires_grad=False)
    ws = [w.to(stored).requires_grad_() for w in in_bf16]
    x, dy = tokens(200, 32, torch.bfloat16).requires_grad_(), tokens(200, 32, torch.bfloat16, seed=3)
    rounded = float8_gate.quantize_rows(x.detach())
    with torch.autocast("cpu", torch.bfloat16, enabled=stored == torch.float32):
        out = feedforward(x, *(ws if gated else [None, *ws]), Plan(Engine.tile), rounded)
    found = [out.y, *torch.autograd.grad((out.y, out.l1), (x, *ws), (dy, torch.tensor(0.37)))]
    g = float8_gate.gate(rounded, float8_gate.quantize_rows(in_bf16[0]))
    assert not torch.equal(g != 0, x @ in_bf16[0].T > 0)
    assert out.nnz == g.count_nonzero()
    assert torch.equal(out.fired, (g != 0).any(0))
    assert [t.dtype for t in found[2:]] == [stored] * len(ws)
    dl1 = torch.tensor(0.37)
    theirs = straight_through(x.detach(), in_bf16, g, dy, dl1)
    exact = straight_through(x.detach().double(), [w.double() for w in in_bf16], g.double(), dy.double(), dl1.double())
    for i, (ours, other, right) in enumerate(zip(found, theirs, exact, strict=True)):
        assert (ours.double() - right).norm() <= 2 * (other.double() - right).norm(), i


@pytest.mark.usefixtures("stand_ins")
def test_the_dense_engine_and_calls_without_rounded_tokens_stay_bfloat16(monkeypatch):
    on_kernels(monkeypatch)
    x, ws = tokens(200, 32, torch.bfloat16), weights(32, 72, True, torch.bfloat16, requires_grad=False)
    rounded = float8_gate.quantize_rows(x)
    for engine, given in ((Engine.dense, rounded), (Engine.tile, None)):
        ours, theirs = (feedforward(x, *ws, Plan(engine), each) for each in (given, None))
        assert torch.equal(ours.y, theirs.y)
        assert ours.nnz == theirs.nnz == (x @ ws[0].T > 0).sum()


def test_only_the_cuda_kernels_take_rounded_tokens(monkeypatch):
    on_kernels(monkeypatch, driver=reference)
    x, ws = tokens(20, 32, torch.bfloat16), weights(32, 72, True, torch.bfloat16, requires_grad=False)
    with pytest.raises(backend.KernelsUnavailable, match="Triton kernels have no gate product in FP8"):
        feedforward(x, *ws, Plan(Engine.tile), float8_gate.quantize_rows(x))


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
def test_compiled_code_rounds_tokens_and_gives_the_same_bits(gated, monkeypatch):
    on_kernels(monkeypatch)
    ws = weights(32, 72, gated, torch.bfloat16)
    x, plan = tokens(200, 32, torch.bfloat16).requires_grad_(), Plan(Engine.tile).tensor()

    def step(x, *ws):
        out = feedforward(x, *(ws if gated else [None, *ws]), plan, float8_gate.quantize_rows(x.detach()))
        return out.y, out.l1

    results = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        y, l1 = function(x, *ws)
        results.append([y, l1, *torch.autograd.grad(y.float().square().sum() + 0.1 * l1, (x, *ws))])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
