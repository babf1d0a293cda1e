"""The gate product in FP8 on a GPU: exact for integers, as accurate as cuBLAS's FP8, and what fires is computed."""

import kernel_cases as cases
import pytest
import torch
from kernel_cases import DEVICE, GATED, assert_as_accurate, assert_equal, check_packed, check_statistics

from sparsellm import accelerate, restore
from sparsellm.inference.engine_choice import EngineChoice
from sparsellm.ops import Plan, borders, cuda, float8, float8_gate, twell
from sparsellm.ops.feedforward import output_of
from sparsellm.ops.float8_gate import Float8Rows
from sparsellm.policy import Policy

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

EXACT = 2**12  # tensor cores sum e4m3 products in fewer bits than float32; integers up to this value are exact
MANY = 1537  # an odd number of tokens for which accelerated layers use FP8


def integer_rows(m, k, n, seed=0):
    """x [m, k] and w [n, k] of integers up to 16, which e4m3 holds exactly, with powers of two as scales."""
    generator = cases.random(seed)

    def draw(low, high, *shape):
        return torch.randint(low, high + 1, shape, device=DEVICE, generator=generator).float()

    x = draw(-16, 16, m, k) * (torch.rand((m, k), device=DEVICE, generator=generator) < 8 / k)
    w = draw(-16, 16, n, k)
    sums = x.abs() @ w.abs().T
    x *= (sums.amax(1, keepdim=True) < EXACT).float()
    powers = torch.tensor([2.0**power for power in range(-3, 5)], device=DEVICE)
    rows = [Float8Rows(v.to(torch.float8_e4m3fn), powers[draw(0, 7, len(v)).long()]) for v in (x, w)]
    assert all(torch.equal(r.values.float(), v) for r, v in zip(rows, (x, w), strict=True))
    assert (x != 0).any()
    return rows


def exact_gate(x, w):
    return torch.relu(x.exact() @ w.exact().T)


def gate_pack(x, w):
    cases.poison()
    return cuda.gate_pack_float8(x, w)


@pytest.mark.parametrize("m", [1, 17, 64, 65, 127, 128, 129, 257, MANY, 4089])
def test_integers_are_exact_at_any_shape(m):
    for seed, (k, n) in enumerate([(16, 8), (48, 264), (272, 1000), (1008, 5632), (2048, 5640), (2064, 256)]):
        x, w = integer_rows(m, k, n, seed)
        check_packed(gate_pack(x, w), exact_gate(x, w).bfloat16(), f"M {m}, K {k}, N {n}")


@pytest.mark.parametrize(("m", "k", "n"), [(40_001, 16, 2048), (20_000, 144, 2056), (2600, 4096, 16_384)])
def test_integers_are_exact_in_many_rounds_and_bands(m, k, n):
    x, w = integer_rows(m, k, n)
    check_packed(gate_pack(x, w), exact_gate(x, w).bfloat16(), f"M {m}, K {k}, N {n}")


def test_every_bit_is_the_same_in_every_call():
    x, w = (float8_gate.quantize_rows(t) for t in normal(4096, 2048, 5632))
    first = twell.unpack(gate_pack(x, w), 5632)
    for _ in range(3):
        assert_equal(twell.unpack(gate_pack(x, w), 5632), first, "another call")


def normal(m, k, n):
    x, (w, *_) = cases.normal(m, k, n)
    return x, w


@pytest.mark.parametrize(("m", "k", "n"), [(65, 272, 1008), (1000, 2048, 5632), (4088, 4096, 1008)])
def test_errors_are_those_of_cublas_in_float8(m, k, n):
    """Both differ from the exact product of the rounded inputs by the tensor cores' sums and by one rounding."""
    x, w = (float8_gate.quantize_rows(t) for t in normal(m, k, n))
    packed = gate_pack(x, w)
    g = twell.unpack(packed, n)
    theirs = torch._scaled_mm(
        x.values, w.values.T, scale_a=x.scales[:, None], scale_b=w.scales[None], out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )  # fmt: skip
    assert_as_accurate(g, torch.relu(theirs), exact_gate(x, w), f"M {m}, K {k}, N {n}", factor=1.25)
    check_packed(packed, g, "the packed form of its own values")


@pytest.mark.parametrize(("m", "k"), [(1, 16), (17, 48), (1000, 2048), (33, 65_536)])
def test_rows_are_rounded_as_in_pytorch(m, k):
    x, _ = normal(m, k, 8)
    x[0] = 0
    x[m // 2] *= 1e30
    x[m // 3] *= 1e-30
    cases.poison()
    ours, right = cuda.quantize_rows(x), float8_gate.quantize_rows(x)
    assert_equal(ours.scales, right.scales, "scales")
    assert_equal(ours.values.float(), right.values.float(), "values")


def test_not_a_number_stays_in_the_row_of_its_token():
    x, w = normal(300, 64, 264)
    x[7, 3], x[130, 5] = torch.nan, torch.inf
    rows = [cuda.quantize_rows(t) for t in (x, w)]
    g = twell.unpack(gate_pack(*rows), 264)
    assert g[[7, 130]].isnan().all()
    assert g.isnan().sum() == 2 * 264


def integers(m, k, n, gated, seed=0):
    """A layer of integers that rounding to FP8 does not change: a column of 448 makes every scale 1."""
    x, ws = cases.integers(m, k, n, gated, seed)
    x[:, 1], x[:, 2] = 448, 0
    ws[0][:, 1], ws[0][:, 2] = 0, 448
    for w in ws[1:-1]:
        w[:, 1] = 0
    return x, ws


@GATED
@pytest.mark.parametrize(("m", "k", "n"), [(129, 48, 264), (MANY, 768, 1000), (16_390, 272, 1000)])
def test_what_fires_is_computed(m, k, n, gated):
    """Exactly, with tokens in their own order and reordered, and where the tile engine's lists overflow."""
    x, ws = integers(m, k, n, gated)
    w_gate, w_up, w_down = cases.layer(ws)
    g, _, y = cases.stepwise(x, ws)
    assert g.count_nonzero()
    for room in (n, 1):
        cases.poison()
        found = cuda.float8_forward(x, w_gate, w_up, w_down.T.contiguous(), cuda.quantize_rows(ws[0]), room)
        out = output_of(*found[:4])
        name = f"M {m}, K {k}, N {n}, room for {room}"
        assert_equal(out.y, y, f"{name}: y")
        overflows = g.count_nonzero() > cuda.capacity_of(m, n, room)
        assert out.rest_calls == overflows, name
        if not overflows:
            check_statistics(out, g, "tile", name)


@GATED
@pytest.mark.parametrize("saving", [False, True], ids=["forward", "saving"])
def test_tokens_that_overflow_have_the_bits_of_a_bfloat16_gate(saving, gated, monkeypatch):
    """y and l1, where all tiles overflow."""
    monkeypatch.setattr(borders, "capacity", lambda *_: 128)
    x, ws = cases.normal(1536, 768, 1000, gated)
    w_gate, w_up, w_down = cases.layer(ws)
    w_down_t = w_down.T.contiguous()
    found = cuda.float8_forward(x, w_gate, w_up, w_down_t, cuda.quantize_rows(ws[0]), 1, saving=saving)
    right = cuda.forward(x, w_gate, w_up, w_down, Plan.of("tile"), w_down_t, False)
    assert output_of(*found[:4]).overflow_tiles == output_of(*right[:4]).overflow_tiles == 12
    for name, ours, theirs in zip(("y", "l1"), found, right, strict=False):
        assert_equal(ours, theirs, name)


@GATED
def test_a_layer_takes_float8_from_many_tokens_on_and_follows_its_weight(gated):
    x, ws = cases.normal(MANY, 768, 1000, gated)
    choice, exact = EngineChoice("tile", Policy(), float8=True), EngineChoice("tile", Policy())
    for _ in range(2):
        ours, theirs = (each.run(x, *cases.layer(ws))[0].float() for each in (choice, exact))
        assert 0 < (ours - theirs).norm() < 0.2 * theirs.norm()
        few = [each.run(x[:1535], *cases.layer(ws))[0] for each in (choice, exact)]
        assert_equal(*few, "1,535 tokens are bfloat16")
        ws[0].mul_(-1)


@torch.no_grad()
def test_a_model_computes_attention_and_gates_in_float8_eager_and_compiled():
    if obstacle := float8.obstacle():
        pytest.skip(obstacle)
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=128, hidden_act="relu"))
    model = model.to(DEVICE, torch.bfloat16).eval().requires_grad_(False)
    tokens = torch.randint(128, (2, 1024), device=DEVICE, generator=cases.random(0))
    exact = model(tokens).logits.float()
    accelerate(model, "cuda", "tile", float8=True)
    found = [model(tokens).logits.float()]
    for layer in model.model.layers:
        assert type(layer.self_attn.q_proj.weight).__name__.startswith("Float8")
        assert layer.mlp.choice.float8_copy is not None
        layer.compile(dynamic=False)
    found.append(model(tokens).logits.float())
    for logits in found:
        assert 0 < (logits - exact).norm() < 0.2 * exact.norm()
    restore(model)
