"""Gradients of the operator on the CUDA kernels, compared with the one right answer if there is one, else with float64.

With layers of integers every sum is exact, so a gradient has one right answer: exact products, rounded where the
operator rounds (sparsellm/ops/reference.py), and dx rounded once.
"""

import kernel_cases as cases
import pytest
import torch
from kernel_cases import DEVICE, GATED, assert_as_accurate, assert_equal, product

from scripts.benchmarks import patterns
from sparsellm.ops import Plan, borders, feedforward
from sparsellm.ops.accumulation import accumulating

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]
ENGINES = ("dense", "tile")
ENGINE = pytest.mark.parametrize("engine", ENGINES)
DL1 = 0.5


def gradients(engine, x, ws, dy):
    """(output, (dx, dw ...)) of `engine`, for the loss y . dy + DL1 l1; all memory is poisoned before each pass."""
    inputs = [t.detach().requires_grad_() for t in (x, *ws)]
    cases.poison()
    out = feedforward(inputs[0], *cases.layer(inputs[1:]), Plan.of(engine))
    cases.poison()
    loss = (out.y.double() * dy.double()).sum() + DL1 * out.l1.double()
    return out, torch.autograd.grad(loss, inputs)


def stepwise(x, ws, dy, float_weights=False):
    """(dx, dw ...) with exact products, rounded where the operator rounds."""
    first, *up, w_down = ws
    g, h, _ = cases.stepwise(x, ws)
    u = product(x, up[0]).float() if up else torch.ones_like(g, dtype=torch.float32)
    dh = product(dy, w_down.T).float() + DL1 * (h.float().sign() if up else 1)
    du = (dh * g.float()).bfloat16()
    dz = torch.where(g != 0, dh * u, 0).bfloat16()
    dx = dz.double() @ first.double() + (du.double() @ up[0].double() if up else 0)
    factors = [(dz, x), *([(du, x)] if up else []), (dy, h)]
    weights = [a.double().T @ b.double() if float_weights else product(a.T, b.T) for a, b in factors]
    return dx.bfloat16(), *(w.float() if float_weights else w for w in weights)


def small(m, k, seed):
    return torch.randint(-2, 3, (m, k), device=DEVICE, generator=cases.random(seed)).bfloat16()


def check(x, ws, dy, what, engines=ENGINES):
    """Assert that the gradients of every engine are exact, and return the last engine's output."""
    names = ("dx", "dw_gate", "dw_up", "dw_down") if len(ws) == 3 else ("dx", "dw_up", "dw_down")
    expected = stepwise(x, ws, dy)
    for way, engine, there in cases.either_way(engines):
        with there:
            out, found = gradients(engine, x, ws, dy)
        for name, ours, right in zip(names, found, expected, strict=True):
            if engine == "dense" and name == "dx" and len(ws) == 3:
                continue  # the dense engine adds two rounded products, so its dx has different bits
            assert_equal(ours, right, f"{what}, {way}: {name}")
    return out


@GATED
@pytest.mark.parametrize("pattern", cases.PATTERNS)
def test_gradients_are_exact_whatever_fires(pattern, gated):
    for m, n in ((300, 1000), (129, 264)):
        fires = cases.firing(pattern, m, n)
        x, ws = cases.layer_of(torch.where(fires, 1, -1).bfloat16(), gated)
        check(x, ws, small(m, x.shape[1], seed=n), f"{pattern}, M {m}, N {n}")


def check_shape(m, k, n, gated, **engines):
    fires = cases.firing("synthetic29", m, n)
    _, (_, *rest) = cases.integers(m, k, n, gated, seed=n)
    generator = cases.random(m + k)
    x = (torch.rand((m, k), device=DEVICE, generator=generator) < 4 / k).bfloat16()
    first = torch.randint(-2, 3, (n, k), device=DEVICE, generator=generator).bfloat16()
    first[:, 0] -= torch.where(fires.any(0), 0, 8)
    check(x, [first, *rest], small(m, k, seed=k), f"M {m}, K {k}, N {n}", **engines)


@GATED
@pytest.mark.parametrize("m", cases.HEIGHTS)
def test_gradients_are_exact_at_any_shape(m, gated):
    for k, n in ((8, 8), (264, 264), (768, 1000)):
        check_shape(m, k, n, gated)


@GATED
def test_gradients_of_the_dense_engine_are_exact_in_many_rounds(gated):
    """A CTA computes more tiles than the fused kernels have places for drawn tiles, so places are reused."""
    check_shape(20_001, 264, 2048, gated, engines=("dense",))


def check_sparse_integers(m, k, n, gated, sparser):
    """Check the tile engine on integers. `sparser` lowers the thresholds, so that fewer neurons fire."""
    x, ws = cases.integers(m, k, n, gated, seed=n)
    ws[0][:, 0] -= sparser
    out = check(x, ws, small(m, k, seed=k), f"M {m}, K {k}, N {n}", engines=("tile",))
    assert out.rest_calls == 0


@GATED
@pytest.mark.parametrize(("m", "k", "n", "sparser"), [(16_385, 72, 5632, 8), (66_000, 2056, 264, 3)])
def test_gradients_of_ordered_tokens_are_exact(m, k, n, sparser, gated):
    """The tokens are ordered, and the tiles of the most frequent neurons are cut into pieces."""
    check_sparse_integers(m, k, n, gated, sparser)


@GATED
@pytest.mark.parametrize(
    ("m", "k", "n", "sparser"),
    [(130, 8, 65_536, 0), (129, 8, 65_528, 0), (130, 65_536, 8, 0), (129, 65_528, 8, 0), (300, 1024, 28_672, 6)],
)
def test_gradients_of_the_widest_layers_are_exact(m, k, n, sparser, gated, monkeypatch):
    monkeypatch.setattr(borders, "capacity", lambda tokens, neurons, room: tokens * neurons)
    check_sparse_integers(m, k, n, gated, sparser)


@GATED
@ENGINE
@pytest.mark.parametrize("pattern", [*patterns.SYNTHETIC, *patterns.RECORDED])
def test_gradients_are_as_accurate_as_dense(pattern, engine, gated):
    block = cases.recorded(pattern, 4096)
    x, ws = block.x, [block.w_gate, *([block.w_up] if gated else []), block.w_down]
    dy = torch.randn(x.shape, device=DEVICE, generator=cases.random(5)).bfloat16()
    dl1 = torch.tensor(DL1, device=DEVICE)
    theirs, exact = cases.gradients(x, ws, dy, dl1), cases.exact_gradients(x, ws, dy, dl1)
    _, found = gradients(engine, x, ws, dy)
    for name, *three in zip(("dx", "dw ...", "dw ...", "dw ..."), found, theirs, exact, strict=False):
        assert_as_accurate(*three, f"{pattern}, {engine}: {name}")


@GATED
def test_gradients_repeat_bit_for_bit(gated):
    x, ws = cases.normal(20_000, 264, 1000, gated, rate=0.02)
    dy = torch.randn(x.shape, device=DEVICE, generator=cases.random(1)).bfloat16()
    for way, engine, there in cases.either_way(ENGINES):
        with there:
            (_, once), (_, again) = (gradients(engine, x, ws, dy) for _ in range(2))
        for i, (a, b) in enumerate(zip(once, again, strict=True)):
            assert_equal(a, b, f"{way}: gradient {i}, twice")


@GATED
def test_nonzeros_that_overflow_the_lists_are_not_lost(gated, monkeypatch):
    fires = cases.firing("synthetic29", 300, 264)
    x, ws = cases.layer_of(torch.where(fires, 1, -1).bfloat16(), gated)
    dy = small(300, x.shape[1], seed=3)
    nnz = int(fires.sum())
    for room, rest_calls in ((nnz, 0), ((nnz - 1) // 128 * 128, 1)):
        monkeypatch.setattr(borders, "capacity", lambda *_, room=room: room)
        out, _ = gradients("tile", x, ws, dy)
        assert out.rest_calls == rest_calls
        check(x, ws, dy, f"room for {room}", engines=("tile",))


@GATED
@pytest.mark.parametrize(("m", "k", "n"), [(513, 8, 72), (1100, 72, 264), (1537, 136, 392), (9600, 8, 5632)])
def test_gradients_of_several_tiles_of_tokens_that_overflow_are_exact(m, k, n, gated, monkeypatch):
    """All tiles leave. In the last shape, rest_backward needs two passes."""
    monkeypatch.setattr(borders, "capacity", lambda *_: 128)
    x, ws = cases.integers(m, k, n, gated)
    out = check(x, ws, small(m, k, seed=n), f"M {m}, K {k}, N {n}", engines=("tile",))
    assert out.rest_calls == 1


@GATED
@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
@pytest.mark.parametrize("heavy", [0, 100, 450, 800, 1500])
def test_gradients_are_exact_whichever_tiles_overflow(heavy, ordered, gated, monkeypatch):
    """None, some or all of twelve tiles leave, the last of which is not full: rest_backward adds to the weights'
    gradients of the tiles that stay. In float32, in which every sum is exact."""
    monkeypatch.setattr(borders, "MIN_ORDERED_TOKENS", 0 if ordered else 1 << 30)
    m, n = 1500, 1000
    fires = cases.firing("synthetic29", m, n)
    fires[m - heavy :] |= torch.rand((heavy, n), device=DEVICE, generator=cases.random(heavy)) < 0.3
    capacity = int(fires[: m - heavy].sum()) + 128 if heavy else m * n
    monkeypatch.setattr(borders, "capacity", lambda *_: capacity)
    x, ws = cases.layer_of(torch.where(fires, 1, -1).bfloat16(), gated)
    dy = small(m, x.shape[1], seed=heavy)
    with torch.autocast("cuda", torch.bfloat16):
        out, found = gradients("tile", x, [w.float() for w in ws], dy)
    assert out.rest_calls == (heavy > 0)
    tiles = int(out.overflow_tiles)
    assert {0: tiles == 0, m: tiles == 12}.get(heavy, 0 < tiles < 12), tiles
    names = ("dx", "dw_gate", "dw_up", "dw_down") if gated else ("dx", "dw_up", "dw_down")
    for name, ours, right in zip(names, found, stepwise(x, ws, dy, float_weights=True), strict=True):
        assert_equal(ours, right, f"{heavy} heavy tokens, {tiles} tiles: {name}")


@GATED
@ENGINE
@pytest.mark.parametrize("keeps_casts", [False, True])
@pytest.mark.parametrize(("m", "k", "n"), [(100, 8, 72), (1500, 264, 1000), (2100, 2048, 5632)])
def test_micro_batches_that_share_casts_and_sums_have_the_gradients_that_autograd_adds(
    m, k, n, keeps_casts, engine, gated
):
    """Bit for bit. A neuron that fires in no token of a micro-batch keeps the sum of the others."""
    x, ws = cases.normal(m, k, n, gated, rate=0.05)
    others = x[:, 1:]  # column 0 is constant; neurons fire more rarely for smaller inputs
    xs = [x, *(torch.cat([x[:, :1], other], 1) for other in (others.roll(3, 1), others * 0.5))]

    def step(shares):
        weights = [w.float().requires_grad_() for w in ws]
        with accumulating(weights if shares else [], keeps_casts) as shared:
            for x in xs:
                shared.next_micro_batch()
                cases.poison()
                with torch.autocast("cuda", torch.bfloat16):
                    out = feedforward(x, *cases.layer(weights), Plan.of(engine))
                ((out.y.double() ** 2).sum() + DL1 * out.l1.double()).backward()
                assert out.rest_calls == 0
        return [w.grad for w in weights]

    for name, ours, right in zip(["gate", "up", "down"][3 - len(ws) :], step(True), step(False), strict=True):
        assert_equal(ours, right, f"M {m}, K {k}, N {n}: dw_{name}")


@GATED
def test_sums_of_gradients_are_exact_where_tiles_overflow(gated, monkeypatch):
    monkeypatch.setattr(borders, "capacity", lambda *_: 20_000)
    x, ws = cases.integers(1100, 72, 264, gated)
    dy, weights = small(*x.shape, seed=1), [w.float().requires_grad_() for w in ws]
    with accumulating(weights, keeps_casts=True) as shared:
        for _ in range(3):
            shared.next_micro_batch()
            cases.poison()
            with torch.autocast("cuda", torch.bfloat16):
                out = feedforward(x, *cases.layer(weights), Plan.of("tile"))
            ((out.y.double() * dy.double()).sum() + DL1 * out.l1.double()).backward()
            assert out.rest_calls == 1
    for w, right in zip(weights, stepwise(x, ws, dy, float_weights=True)[1:], strict=True):
        assert_equal(w.grad, 3 * right, "the sum of three micro-batches")


@GATED
@pytest.mark.parametrize(("engine", "heavy"), [("dense", 0.2), ("tile", 0.2), ("tile", 0.9)])
def test_gradients_with_overflow_are_as_accurate_as_dense_and_repeat(engine, heavy, gated, monkeypatch):
    """Of some tiles, and of all, because the packed gate lacks values of wide segments."""
    monkeypatch.setattr(borders, "capacity", lambda *_: 20_000 * 60)
    x, ws = cases.normal(20_000, 264, 1000, gated, rate=0.05)
    x[torch.rand(len(x), device=DEVICE, generator=cases.random(3)) < heavy, 0] = 0  # lower thresholds: heavy tokens
    dy = torch.randn(x.shape, device=DEVICE, generator=cases.random(1)).bfloat16()
    dl1 = torch.tensor(DL1, device=DEVICE)
    (out, once), (_, again) = (gradients(engine, x, ws, dy) for _ in range(2))
    assert engine == "dense" or (0 < out.overflow_tiles < 157 if heavy < 0.5 else out.overflow_tiles == 157)
    theirs, exact = cases.gradients(x, ws, dy, dl1), cases.exact_gradients(x, ws, dy, dl1)
    for i, (a, b, *others) in enumerate(zip(once, again, theirs, exact, strict=True)):
        assert_equal(a, b, f"gradient {i}, twice")
        assert_as_accurate(a, *others, f"gradient {i}")


@GATED
@pytest.mark.parametrize("enough", [True, False])
def test_gradients_of_float32_weights_are_the_same_but_not_rounded(gated, enough, monkeypatch):
    x, ws = cases.normal(600, 264, 1000, gated, rate=0.05)
    dy = torch.randn(x.shape, device=DEVICE, generator=cases.random(1)).bfloat16()
    if not enough:
        monkeypatch.setattr(borders, "capacity", lambda *_: 128)
    out, expected = gradients("tile", x, ws, dy)
    assert (out.rest_calls > 0) != enough
    with torch.autocast("cuda", torch.bfloat16):
        _, found = gradients("tile", x, [w.float() for w in ws], dy)
    assert_equal(found[0], expected[0], "dx")
    for i, (ours, theirs) in enumerate(zip(found[1:], expected[1:], strict=True)):
        assert ours.dtype == torch.float32
        assert not torch.equal(ours, theirs.float())
        assert_equal(ours.bfloat16(), theirs, f"dw {i}, rounded")


def test_the_tile_engine_saves_little():
    x, ws = cases.normal(16_384, 2048, 5632, rate=36 / 5632)
    inputs = [t.requires_grad_() for t in (x, *ws)]
    saved = {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        feedforward(*inputs, Plan.of("tile"))
    beyond = sum(saved.values()) - sum(t.nbytes for t in inputs)
    assert beyond <= 60 << 20, f"{beyond / 2**20:.0f} MiB beyond the inputs"


def test_the_row_engine_has_no_backward():
    x, ws = cases.normal(16, 64, 64)
    with pytest.raises(ValueError, match="for gradients it should be"):
        feedforward(x.requires_grad_(), *ws, Plan.of("row"))
