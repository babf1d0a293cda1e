"""Weights rounded to e4m3: what the scales are, and a layer of them with stand-ins for the kernels."""

import pytest
import torch
from kernel_stand_ins import ASKED
from test_feedforward import tokens, weights

from sparsellm.inference.feedforward import SparseFeedForward
from sparsellm.inference.float8_feedforward import Float8FeedForward
from sparsellm.ops import Plan, float8_gate
from sparsellm.ops.float8_weights import Float8Layer, round_weight


def matrix():
    x = torch.randn(9, 48) * 10.0 ** torch.arange(-8, 10, 2)[:, None]
    x[3] = 0
    x[4, 0], x[5, 0] = x[4].abs().max(), 448.0
    return x


def test_rows_have_the_smallest_power_of_two_that_holds_them():
    x = matrix()
    rows = round_weight(x)
    assert rows.scales.log2().frac().eq(0).all()
    quotients = x.abs().amax(1) / rows.scales
    assert (quotients <= 448).all()
    assert (quotients[x.any(1)] > 224).all()
    assert not rows.exact()[3].any()
    assert rows.scales[5] == 1
    largest = x.abs().amax(1, keepdim=True)
    assert ((rows.exact() - x).abs() <= x.abs() * 2**-4 + largest * 2**-16).all()


def test_rounded_rows_are_exact_in_bfloat16_and_contiguous():
    for x in (matrix(), matrix().T):
        rows = round_weight(x)
        assert rows.values.is_contiguous()
        assert torch.equal(rows.to(torch.bfloat16).double(), rows.exact())
        assert torch.equal(round_weight(rows.to(torch.float32)).exact(), rows.exact())


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
def test_a_neurons_scales_of_two_weights_are_one(gated):
    """y is that of the layer with each weight rounded on its own."""
    x = tokens(5, 16, torch.float64)
    ws = [w * 2.0 ** torch.arange(w.shape[0])[:, None] for w in weights(16, 24, gated, torch.float64)]
    w_gate, w_up, w_down = ws if gated else [None, *ws]
    layer = Float8Layer.of(w_gate, w_up, w_down)

    def y(gate, up, down):
        h = torch.relu(x @ (up if gate is None else gate).T)
        return (h if gate is None else h * (x @ up.T)) @ down.T

    made = [w if w is None else round_weight(w).exact() for w in (w_gate, w_up)]
    expected = y(*made, round_weight(w_down.T).exact().T)
    gate, up, down_t = layer.to(torch.float64)
    torch.testing.assert_close(y(gate, up, down_t.T), expected)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
def test_a_block_reads_e4m3_up_to_64_tokens_and_multiplies_long_prompts_by_the_same_weights(gated, monkeypatch):
    monkeypatch.setattr("sparsellm.inference.engine_choice.sparse_engines_take", lambda _: True)
    block = SparseFeedForward(16, 24, gated).bfloat16().eval()
    made = Float8FeedForward(block)
    gate, up, down_t = made.layer.to(torch.bfloat16)
    assert list(made.parameters()) == []
    for count in (1, 64, 65, 1536):
        x = tokens(count, 16, torch.bfloat16)
        ASKED.clear()
        with torch.no_grad():
            y = made(x)
        first = up if gate is None else gate
        g = torch.relu(x.float() @ first.float().T).bfloat16()
        if count == 1536:  # the gate product rounds x, too
            g = float8_gate.gate(float8_gate.quantize_rows(x), made.layer.thresholded)
            assert ASKED[-1][-1] == "float8"
        h = g if gate is None else g * (x.float() @ up.float().T).bfloat16()
        torch.testing.assert_close(y.float(), h.float() @ down_t.float(), rtol=0.02, atol=0.02)
        assert ([(count, "row, float8")] == ASKED) == (count <= 64)
    made.choice.plans = [Plan.of("dense")] * 3
    with torch.no_grad():
        torch.testing.assert_close(made(x).float(), y.float(), rtol=0.2, atol=0.2 * y.float().abs().max().item())


def test_widths_that_the_kernels_do_not_read_are_refused():
    for width in (24, 8192):
        with pytest.raises(ValueError, match=f"hidden size is {width}: for float8=True it should be a multiple of 16"):
            Float8FeedForward(SparseFeedForward(width, 24))
