"""Weight-only FP8 on a GPU: the row engine and its gate on e4m3 weights, products of few tokens, generated texts.

Scales are powers of two, so the rounded weights are exact in bfloat16, and integers have one right answer.
"""

import kernel_cases as cases
import pytest
import torch
from kernel_cases import DEVICE, GATED, assert_as_accurate, assert_equal, check_statistics

from sparsellm.config import Activation, ModelConfig
from sparsellm.inference import generation, layer_forward
from sparsellm.inference.generation import Generator, Sampling
from sparsellm.inference.kernels import decoding
from sparsellm.model import Decoder
from sparsellm.ops import cuda
from sparsellm.ops.feedforward import output_of
from sparsellm.ops.float8_weights import Float8Layer, round_weight

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

TOKENS = pytest.mark.parametrize("m", [1, 2, 8, 15, 16, 17, 33, 63, 64])
SHAPES = [(16, 8), (48, 264), (272, 1000), (1008, 5632), (2048, 5640), (2064, 256), (4096, 1008)]


def row_engine(x, layer):
    """(y, statistics) of the operator that cuda.row_output_float8 calls without statistics."""
    w_gate, w_up, w_down_t = layer
    gate, scales = (None, (w_up.scales, None)) if w_gate is None else (w_gate.values, (w_gate.scales, w_up.scales))
    cases.poison()
    y, l1, fired, counts = torch.ops.sparsellm_cuda.row_forward_float8(
        x, gate, w_up.values, w_down_t, *scales, True
    )  # fmt: skip
    out = output_of(y, l1, fired, counts)
    assert_equal(cuda.row_output_float8(x, layer), out.y, "without statistics")
    return out


def rounded(ws):
    """The layer in e4m3, and its weights in bfloat16, which have the same values."""
    made = [round_weight(w).to(torch.bfloat16) for w in ws[:-1]]
    return Float8Layer.of(*cases.layer(ws)), [*made, round_weight(ws[-1].T).to(torch.bfloat16).T.contiguous()]


def with_powers(ws, seed):
    """`ws` with some neurons' rows of the first and of the last weight multiplied by two."""
    first, last = torch.randint(1, 3, (2, len(ws[0])), device=DEVICE, generator=cases.random(seed)).bfloat16()
    return [ws[0] * first[:, None], *ws[1:-1], ws[-1] * last]


@GATED
@TOKENS
def test_integers_are_exact_at_any_shape(m, gated):
    for seed, (k, n) in enumerate(SHAPES):
        x, ws = cases.integers(m, k, n, gated, seed)
        ws = with_powers(ws, seed)
        layer, same = rounded(ws)
        assert all(torch.equal(ours, w) for ours, w in zip(same, ws, strict=True))
        g, _, y = cases.stepwise(x, ws)
        out = row_engine(x, layer)
        assert_equal(out.y, y, f"M {m}, K {k}, N {n}: y")
        # In a non-gated layer, g includes the scales of w_down; what fires is the same.
        check_statistics(out, g, "row", f"M {m}, K {k}, N {n}")


@GATED
@pytest.mark.parametrize("m", [1, 16, 61])
@pytest.mark.parametrize("pattern", ["all", "none", "full rows", "one too many", "synthetic5632"])
def test_rows_of_any_length(pattern, m, gated):
    gate = cases.firing(pattern, m, 5632) * 2.0
    x, ws = cases.layer_of(gate.bfloat16(), gated, k=64)
    layer, _ = rounded(ws)
    g, _, y = cases.stepwise(x, ws)
    out = row_engine(x, layer)
    assert_equal(out.y, y, f"{pattern}, M {m}: y")
    check_statistics(out, g, "row", f"{pattern}, M {m}")


@GATED
@TOKENS
@pytest.mark.parametrize(("k", "n"), [(768, 1000), (2048, 5632), (4096, 1008)])
def test_bits_are_those_of_the_engine_in_bfloat16(m, k, n, gated):
    """With a gate that has one right answer: of integers, on columns of x that are integers."""
    x, ws = cases.normal(m, k, n, gated)
    integers, of_integers = cases.integers(m, 16, n, gated)
    x[:, :16] = integers
    ws[0].zero_()
    ws[0][:, :16] = of_integers[0]
    ws[-1] *= 10 ** torch.linspace(-3, 3, n, device=DEVICE).bfloat16()
    layer, same = rounded(ws)
    w_gate, w_up, w_down_t = layer.to(torch.bfloat16)
    if gated:
        assert_equal(w_gate, same[0], "w_gate")
    expected = cuda.row_output(x, w_gate, w_up, w_down_t.contiguous())
    assert_equal(row_engine(x, layer).y, expected, f"M {m}, K {k}, N {n}")


@GATED
@TOKENS
@pytest.mark.parametrize(("k", "n"), [(272, 264), (2048, 5632), (4096, 1008)])
def test_errors_are_those_of_dense_bfloat16_with_the_rounded_weights(m, k, n, gated):
    x, ws = cases.normal(m, k, n, gated)
    layer, same = rounded(ws)
    exact, theirs = cases.dense(x.double(), *(w.double() for w in same)), cases.dense(x, *same)
    assert_as_accurate(row_engine(x, layer).y, theirs, exact, f"M {m}, K {k}, N {n}")


@GATED
@pytest.mark.parametrize("m", [1, 40])
def test_rows_of_zeros_and_of_any_magnitude(m, gated):
    x, ws = cases.normal(m, 272, 264, gated)
    magnitudes = 10 ** torch.linspace(-10, 10, 264, device=DEVICE)
    ws[0] = (ws[0] * magnitudes[:, None]).bfloat16()
    ws[-1] = (ws[-1] / magnitudes).bfloat16()
    for w in ws[:-1]:
        w[5] = 0
    ws[-1][:, [5, 7]] = 0
    layer, same = rounded(ws)
    exact, theirs = cases.dense(x.double(), *(w.double() for w in same)), cases.dense(x, *same)
    assert_as_accurate(row_engine(x, layer).y, theirs, exact, f"M {m}")


@pytest.mark.parametrize(("m", "k"), [(65, 32), (1, 4112)])
def test_more_tokens_or_columns_raise(m, k):
    x, ws = cases.normal(m, k, 264)
    with pytest.raises(RuntimeError, match="invalid argument"):
        cuda.row_output_float8(x, Float8Layer.of(*ws))


@pytest.mark.parametrize("m", [1, 2, 17, 64])
@pytest.mark.parametrize(
    ("k", "n", "biased"), [(2048, 2048, False), (5632, 2048, False), (272, 7, True), (100, 1000, False)]
)
def test_products_with_an_e4m3_matrix(m, k, n, biased):
    x, (w, *_) = cases.normal(m, k, max(n, 8))
    w = w[:n] * torch.logspace(-6, 6, n, 10, device=DEVICE)[:, None]
    bias = torch.randn(n, device=DEVICE, generator=cases.random(1)).bfloat16() if biased else None
    matrix, added = round_weight(w), 0 if bias is None else bias.double()
    exact = x.double() @ matrix.exact().T + added
    cases.poison()
    found = decoding.multiply(matrix, x, bias=bias)[1] if m == 1 else decoding.multiply_few(matrix, x, bias)
    error = (found.double() - exact).abs()
    allowed = 2**-8 * exact.abs() + 1e-5 * (x.double().abs() @ matrix.exact().abs().T)  # one rounding; float32 sums
    assert (error <= allowed).all(), (error / allowed).max()


def generator(kernels, activation=Activation.relu, **settings):
    torch.manual_seed(0)
    model = ModelConfig(96, 256, 512, 2, 4, init_std=0.1, context_length=2048)
    with torch.device(DEVICE):
        decoder = Decoder(model, activation)
    return Generator(decoder, dtype=torch.bfloat16, kernels=kernels, **settings)


PROMPTS = [[5, 17, 3, 80, 11] * 20, [3], [44, 2, 9]]
MADE = pytest.mark.parametrize(
    ("kernels", "activation"),
    [("cuda", Activation.relu), (None, Activation.relu), (None, Activation.silu)],
    ids=["sparse", "dense", "silu"],
)


@MADE
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 0.9)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1], PROMPTS * 9], ids=["three", "one", "27"])
def test_captured_steps_give_the_same_tokens(kernels, activation, prompts, sampling, monkeypatch):
    made = generator(kernels, activation, float8=True)
    captured = list(made.stream(prompts, 40, sampling, seed=5))
    (batch,) = made._idle.values()
    assert list(batch.graphs) == [sampling]
    assert list(made.stream(prompts, 40, sampling, seed=5)) == captured
    monkeypatch.setattr(generation, "UNCAPTURED_STEPS", 1 << 30)
    assert list(made.stream(prompts, 40, sampling, seed=5)) == captured


@MADE
@pytest.mark.parametrize("size", [1, 3, 40])
@torch.no_grad()
def test_a_step_is_that_of_the_rounded_weights_in_bfloat16(kernels, activation, size):
    made = generator(kernels, activation, float8=True)
    theirs, source = generator(None, activation), generator(None, activation)
    for layer, rounded_layer in zip(source.layers, theirs.layers, strict=True):
        for name, linear in layer.named_modules():
            if isinstance(linear, torch.nn.Linear):
                matrix = linear.weight
                by_neuron = kernels is not None and name.endswith("down_proj")
                values = round_weight(matrix.T if by_neuron else matrix).to(torch.bfloat16)
                rounded_layer.get_submodule(name).weight.data.copy_(values.T if by_neuron else values)
    batch = generation.Batch(made.config, size, 192, made.device, torch.bfloat16)
    batch.lengths.copy_(torch.linspace(1, 191, size, device=DEVICE).long())
    random = cases.random(0)
    x = torch.randn(size, 256, device=DEVICE, generator=random)
    y = torch.randn(size, 256, device=DEVICE, generator=random).bfloat16()
    keys = torch.randn(batch.keys.shape[1:], device=DEVICE, generator=random).bfloat16()
    found = []
    for each in (made, theirs):
        caches = keys.clone(), keys.clone()
        inputs = each.layers[0], each.weights[0], x, y, batch.tables, batch.lengths
        found.append((*layer_forward.of_step(*inputs, caches), *caches))
    for ours, other in zip(*found, strict=True):
        apart, length = ((t.float().flatten(1).norm(dim=1)) for t in (ours - other, other))
        assert (apart <= 0.02 * length).all(), (apart / length).max()


@pytest.mark.parametrize("tokens", [60, 700, 1900])
def test_prompts_of_any_length_continue_as_with_dense_layers(tokens):
    """The gate product of the long prompt rounds its inputs too, so only the first logits are compared, roughly."""
    prompt, logits = [5, 17, 3, 80, 11, 44, 2, 9, 7, 31] * (tokens // 10), []
    for kernels in ("cuda", None):
        made = generator(kernels, float8=True)
        first_logits = made._logits
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(made, "_logits", lambda *xy, f=first_logits: logits.append(f(*xy)) or logits[-1])
            assert len(list(made.stream([prompt], 1))) == 1
    assert (logits[0] - logits[1]).norm() < 0.2 * logits[1].norm()


def test_weights_are_stored_once_in_half_of_the_memory():
    generator("cuda")  # measures engines, whose products leave a workspace
    bytes_of = []
    for float8 in (False, True):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        made = generator("cuda", float8=float8)
        bytes_of.append(torch.cuda.memory_allocated() - before)
        del made
    embedding = 96 * 256 * 2
    assert bytes_of[1] < 0.5 * bytes_of[0] + embedding, bytes_of  # the sparse engines in bfloat16 keep W_d twice


def test_more_sequences_than_the_row_engine_takes_are_refused():
    with pytest.raises(ValueError, match="65 prompts were passed: pass at most 64 per call in FP8"):
        generator("cuda", float8=True).stream([[1]] * 65, 1)
