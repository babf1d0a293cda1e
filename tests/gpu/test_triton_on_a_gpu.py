"""Results of the Triton kernels on a GPU: the adversarial cases of the CUDA kernels, but fewer and smaller.

Tests call the driver as the operator would, so that the CUDA kernels may be loaded in the same process.
"""

import kernel_cases as cases
import pytest
import torch
from kernel_cases import DEVICE, GATED, assert_as_accurate, assert_equal, layer

from sparsellm.ops import Plan, backend, borders, feedforward, reference
from sparsellm.ops.compiler import KernelsUnavailable
from sparsellm.ops.feedforward import output_of
from sparsellm.ops.triton import engines

pytestmark = pytest.mark.gpu
DL1 = 0.5
ENGINES = ("dense", "tile", "row")


@pytest.fixture(autouse=True)
def triton(monkeypatch):
    """Make the process use the Triton kernels, and dense PyTorch its most accurate products."""
    try:
        backend.check("triton")
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    monkeypatch.setattr(backend, "_triton", engines)
    flags = torch.backends.cuda.matmul
    before = flags.allow_bf16_reduced_precision_reduction
    flags.allow_bf16_reduced_precision_reduction = False
    yield
    flags.allow_bf16_reduced_precision_reduction = before


def forward(engine, x, ws, saving=False, room=320):
    """(the operator's output, the saved buffer)"""
    cases.poison()
    *results, saved = backend.driver().forward(x, *layer(ws), Plan.of(engine, room), None, saving)
    return output_of(*results), saved


def by_position(x, ws, active):
    """The rows of `active` in the tile engine's order of the tokens, which is checked against the specification."""
    from triton_order import order_of

    _, saved = forward("tile", x, ws, saving=True)
    kept = backend.driver()._found(saved, x, active.shape[1], len(ws) == 3)
    assert_equal(kept.order, order_of(active).int(), "order")
    assert_equal(kept.positions[kept.order.long()], torch.arange(len(x), device=DEVICE).int(), "positions")
    return active[kept.order.long()]


def check_forward(x, ws, what, engines=ENGINES):
    g, h, y = cases.stepwise(x, ws)
    driver = backend.driver()
    l1 = h.abs().sum(dtype=torch.float64)
    for engine in engines:
        name = f"{what}, {engine}"
        out, _ = forward(engine, x, ws)
        assert_equal(out.y, y, f"{name}: y")
        cases.assert_close(out.l1, l1, cases.LONGEST_CHAIN * 2**-24, f"{name}: l1")
        active = g != 0
        assert_equal(out.nnz, active.sum(), f"{name}: nnz")
        assert_equal(out.fired, active.any(0), f"{name}: fired")
        tiled = by_position(x, ws, active) if engine == "tile" and driver.orders(len(x), saving=False) else active
        assert_equal(out.union, reference.union(tiled), f"{name}: union")
        assert not out.wide_segments + out.rest_calls, name


def stepwise_gradients(x, ws, dy):
    """(dx, dw ...) with exact products, rounded where the operator rounds."""
    first, *up, w_down = ws
    g, h, _ = cases.stepwise(x, ws)
    u = cases.product(x, up[0]).float() if up else torch.ones_like(g, dtype=torch.float32)
    dh = cases.product(dy, w_down.T).float() + DL1 * (h.float().sign() if up else 1)
    du = (dh * g.float()).bfloat16()
    dz = torch.where(g != 0, dh * u, 0).bfloat16()
    dx = dz.double() @ first.double() + (du.double() @ up[0].double() if up else 0)
    turned = [cases.product(dz.T, x.T), *([cases.product(du.T, x.T)] if up else []), cases.product(dy.T, h.T)]
    return dx.bfloat16(), *turned


def check_gradients(x, ws, dy, what, engines=("dense", "tile"), room=320):
    expected = stepwise_gradients(x, ws, dy)
    for engine in engines:
        _, saved = forward(engine, x, ws, saving=True, room=room)
        cases.poison()
        found = backend.driver().backward(x, *layer(ws), dy, torch.tensor(DL1, device=DEVICE), saved)
        for i, (ours, right) in enumerate(zip(found, expected, strict=True)):
            if engine == "dense" and i == 0 and len(ws) == 3:
                continue  # the dense engine adds two rounded products
            assert_equal(ours, right, f"{what}, {engine}: gradient {i}")


def small(m, k, seed):
    return torch.randint(-2, 3, (m, k), device=DEVICE, generator=cases.random(seed)).bfloat16()


@GATED
@pytest.mark.parametrize("pattern", cases.PATTERNS)
def test_exact_whatever_fires(pattern, gated, monkeypatch):
    monkeypatch.setattr(borders, "MIN_ORDERED_TOKENS", 70)  # a forward pass alone orders the 300 tokens, not 129
    for m, n in ((300, 1000), (129, 264)):
        gate = cases.small_integers(cases.firing(pattern, m, n), seed=n)
        check_forward(*cases.layer_of(gate, gated), f"{pattern}, M {m}, N {n}")
        x, ws = cases.layer_of(gate.sign(), gated)
        check_gradients(x, ws, small(m, x.shape[1], seed=n), f"{pattern}, M {m}, N {n}")


@GATED
@pytest.mark.parametrize("m", [1, 16, 65, 128, 257])
def test_exact_at_any_shape(m, gated):
    for i, (k, n) in enumerate(((8, 8), (264, 264), (768, 1000), (2048, 5632))):
        check_forward(*cases.integers(m, k, n, gated, seed=i), f"M {m}, K {k}, N {n}")


@GATED
@pytest.mark.parametrize("m", [8192, 20_001])  # the policy orders the second
def test_exact_for_many_tokens(m, gated, monkeypatch):
    monkeypatch.setattr(backend.driver(), "ALONE", 1)  # also in a forward pass alone
    fires = cases.firing("synthetic29", 256, 5632)
    x, ws = cases.layer_of(torch.where(fires, 1, -1).bfloat16(), gated)
    drawn = torch.randint(256, (m,), device=DEVICE, generator=cases.random(m))
    check_forward(x[drawn], ws, f"M {m}")
    if gated:  # integers small enough for exact sums over so many tokens
        check_gradients(x[drawn], ws, small(m, x.shape[1], seed=3).sign(), f"M {m}", engines=("tile",))


@GATED
def test_nonzeros_that_overflow_the_lists_are_not_lost(gated):
    m, n = 4352, 1000  # more entries than the lists of a small call, which hold all
    fires = cases.firing("synthetic300", m, n)
    x, ws = cases.normal(m, 264, n, gated, rate=0.1)
    assert fires.any()
    dy = torch.randn(x.shape, device=DEVICE, generator=cases.random(5)).bfloat16()
    gradients = {}
    for room, rest in ((320, 0), (1, 1)):
        out, saved = forward("tile", x, ws, saving=True, room=room)
        assert out.rest_calls == rest
        gradients[rest] = backend.driver().backward(x, *layer(ws), dy, torch.tensor(DL1, device=DEVICE), saved)
    dl1 = torch.tensor(DL1, device=DEVICE)
    theirs, exact = cases.gradients(x, ws, dy, dl1), cases.exact_gradients(x, ws, dy, dl1)
    for rest, found in gradients.items():
        for i, three in enumerate(zip(found, theirs, exact, strict=True)):
            assert_as_accurate(*three, f"rest {rest}: gradient {i}")


@GATED
@pytest.mark.parametrize("pattern", ["synthetic29", "layer4"])
def test_as_accurate_as_dense(pattern, gated):
    """Through the operator and autograd, with float32 weights under autocast."""
    block = cases.recorded(pattern, 4096)
    x, ws = block.x, [block.w_gate, *([block.w_up] if gated else []), block.w_down]
    dy, dl1 = (
        torch.randn(x.shape, device=DEVICE, generator=cases.random(5)).bfloat16(),
        torch.tensor(DL1, device=DEVICE),
    )
    theirs, exact = cases.gradients(x, ws, dy, dl1), cases.exact_gradients(x, ws, dy, dl1)
    y = cases.dense(x.double(), *(w.double() for w in ws))
    for engine in ("dense", "tile"):
        leaves = [t.detach().requires_grad_() for t in (x, *(w.float() for w in ws))]
        with torch.autocast("cuda", torch.bfloat16):
            out = feedforward(leaves[0], *layer(leaves[1:]), Plan.of(engine))
        assert_as_accurate(out.y, cases.dense(x, *ws), y, f"{pattern}, {engine}: y")
        found = torch.autograd.grad((out.y, out.l1), leaves, (dy, dl1.float()))
        assert all(gradient.dtype == torch.float32 for gradient in found[1:])
        for i, three in enumerate(zip(found, theirs, exact, strict=True)):
            assert_as_accurate(*three, f"{pattern}, {engine}: gradient {i}")


@GATED
def test_results_repeat_bit_for_bit_and_nothing_waits(gated):
    x, ws = cases.normal(20_000, 264, 1000, gated, rate=0.02)
    dy = torch.randn(x.shape, device=DEVICE, generator=cases.random(1)).bfloat16()
    results = []
    for _ in range(3):  # kernels are compiled and loaded in the first round, which may wait
        with cases.no_waiting(bool(results)):
            *forward, saved = backend.driver().forward(x, *layer(ws), Plan.of("tile"), None, True)
            backward = backend.driver().backward(x, *layer(ws), dy, forward[1], saved)
        results.append([*forward, *backward])
    for i, (a, b) in enumerate(zip(*results[1:], strict=True)):
        assert_equal(a, b, f"result {i}, twice")


def test_a_cuda_graph_replays_and_nothing_is_compiled_for_another_number_of_tokens(monkeypatch):
    from sparsellm.ops.triton import clusters, nonzeros, plan, products

    monkeypatch.setattr(borders, "MIN_ORDERED_TOKENS", 1)
    monkeypatch.setattr(backend.driver(), "ALONE", 1)
    x, ws = cases.normal(3000, 264, 1000, rate=0.02)
    for m in (3000, 2999, 2048):
        forward("tile", x[:m], ws)

    def kernels():
        found = [vars(module).values() for module in (plan, clusters, products, nonzeros)]
        caches = [kernel.device_caches for values in found for kernel in values if hasattr(kernel, "device_caches")]
        return sum(len(cache[0]) for of_kernel in caches for cache in of_kernel.values())

    before = kernels()
    for m in (1, 77, 1024, 1531):
        forward("tile", x[:m], ws)
    assert kernels() == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, *_ = backend.driver().forward(x, *ws, Plan.of("tile"), None, False)
    once = forward("tile", x, ws)[0].y
    y.zero_()
    graph.replay()
    assert_equal(y, once, "y of the graph")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("engine", ENGINES)
def test_layers_of_a_gpu_that_is_not_the_current_one(engine):
    x, ws = cases.integers(130, 64, 264, gated=True)
    expected, _ = forward(engine, x, ws)
    with torch.cuda.device(0):
        found, _ = forward(engine, x.to("cuda:1"), [w.to("cuda:1") for w in ws])
    for name, ours, theirs in zip(found._fields, found, expected, strict=True):
        assert_equal(ours.to(theirs.device), theirs, f"{engine}: {name}")
