"""The gate product in FP8: rounding to rows of e4m3, and the driver with stand-ins for the kernels."""

import pytest
import torch
from test_feedforward import tokens, weights

from sparsellm.inference.engine_choice import EngineChoice
from sparsellm.ops import cuda, float8_gate, reference, twell
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
