"""The operators against the formulas of DESIGN §2, which are repeated here and differentiated by autograd."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

from sparsellm.ops import Engine, Plan, feedforward, saved_bytes

SHAPES = [(1, 8, 8), (5, 16, 24), (127, 48, 264), (0, 16, 8), (300, 8, 40)]


def weights(k, n, gated, dtype=torch.float64, seed=0, requires_grad=True):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(n, k), (n, k), (k, n)] if gated else [(n, k), (k, n)]
    made = [torch.randn(s, generator=generator, dtype=torch.float64) / s[1] ** 0.5 for s in shapes]
    return [w.to(dtype).requires_grad_(requires_grad) for w in made]


def tokens(m, k, dtype=torch.float64, seed=1):
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def operator(gated):
    """f(x, *weights, plan), with two weights in a non-gated layer."""
    return feedforward if gated else lambda x, *arguments: feedforward(x, None, *arguments)


def specification(x, *ws):
    """(y, h, gate values) by autograd's own formulas."""
    if len(ws) == 3:
        g = torch.relu(x @ ws[0].T)
        h = g * (x @ ws[1].T)
    else:
        g = h = torch.relu(x @ ws[0].T)
    return h @ ws[-1].T, h, g


def tile_union(g):
    return sum(tile.any(0).sum() for tile in (g != 0).split(128))


@pytest.mark.parametrize("plan", [None, Plan()], ids=["traced", "registered"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_values_and_gradients_are_those_of_the_formulas(m, k, n, gated, plan):
    x, ws = tokens(m, k).requires_grad_(), weights(k, n, gated)
    dy = tokens(m, k, seed=2)
    out = operator(gated)(x, *ws, plan)
    grads = torch.autograd.grad((out.y * dy).sum() + 0.37 * out.l1, [x, *ws])
    y, h, g = specification(x, *ws)
    expected = torch.autograd.grad((y * dy).sum() + 0.37 * h.abs().sum(), [x, *ws])
    torch.testing.assert_close(out.y, y)
    torch.testing.assert_close(out.l1, h.abs().sum())
    assert out.nnz.dtype == torch.int64
    assert out.nnz == (g != 0).sum()
    assert torch.equal(out.fired, (g != 0).any(0))
    assert out.wide_segments == out.rest_calls == out.overflow_tiles == 0
    assert out.union == (-1 if plan is None else tile_union(g))
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("plan", [None, Plan()], ids=["traced", "registered"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
def test_gradcheck(gated, plan):
    ws = weights(8, 16, gated)
    x = tokens(6, 8).requires_grad_()
    assert torch.autograd.gradcheck(lambda *a: tuple(operator(gated)(*a, plan))[:2], (x, *ws))


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
@pytest.mark.parametrize(
    ("dtype", "stored"),
    [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_opcheck(gated, dtype, stored):
    x = tokens(5, 16, dtype).requires_grad_()
    ws = weights(16, 24, gated, stored)
    layer = ws if gated else (None, *ws)
    for saving in (True, False):
        args = (x if saving else x.detach(), *(w if saving or w is None else w.detach() for w in layer))
        torch.library.opcheck(torch.ops.sparsellm.feedforward, (*args, Plan().tensor(), saving))


@pytest.mark.parametrize("plan", [None, Plan()], ids=["traced", "registered"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
def test_bfloat16_is_as_accurate_as_dense_pytorch(gated, plan):
    ws64 = [w.detach().bfloat16().double().requires_grad_() for w in weights(64, 256, gated)]
    x64 = tokens(96, 64).bfloat16().double().requires_grad_()
    dy = tokens(96, 64, seed=2).bfloat16()

    def run(function, dtype):
        inputs = [t.detach().to(dtype).requires_grad_() for t in (x64, *ws64)]
        y, l1 = function(*inputs)
        return [y, *torch.autograd.grad([y, l1], inputs, [dy.to(dtype), torch.tensor(0.1, dtype=l1.dtype)])]

    def ours(*inputs):
        out = operator(gated)(*inputs, plan)
        return out.y, out.l1

    def dense(*inputs):
        y, h, _ = specification(*inputs)
        return y, h.float().abs().sum() if h.dtype == torch.bfloat16 else h.abs().sum()

    exact = run(dense, torch.float64)
    names = ["y", "dx", *(f"dw{i}" for i in range(len(ws64)))]
    runs = exact, run(ours, torch.bfloat16), run(dense, torch.bfloat16)
    for name, e, o, d in zip(names, *runs, strict=True):
        error, allowed = ((t.double() - e).norm() / e.norm() for t in (o, d))
        assert error <= 2 * allowed, f"{name}: error {error:.2e}, dense bfloat16 {allowed:.2e}"


@pytest.mark.parametrize("plan", [None, Plan()], ids=["traced", "registered"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
def test_a_second_derivative_is_refused(gated, plan):
    """A gradient penalty, for example, would be wrong without the derivatives of g and u."""
    x, ws = tokens(9, 16).requires_grad_(), weights(16, 24, gated)
    gradients = torch.autograd.grad(operator(gated)(x, *ws, plan).y.square().sum(), [x, *ws], create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiated twice|no autograd formula was registered"):
        sum(gradient.square().sum() for gradient in gradients).backward()


@pytest.mark.parametrize("plan", [None, Plan()], ids=["traced", "registered"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
def test_forward_mode_is_refused(gated, plan):
    """torch would treat the registered operator as a constant."""
    x, ws = tokens(9, 16), weights(16, 24, gated, requires_grad=False)
    with forward_ad.dual_level(), pytest.raises((RuntimeError, NotImplementedError), match="forward mode"):
        operator(gated)(forward_ad.make_dual(x, x), *ws, plan)


@pytest.mark.parametrize("plan", [None, Plan()], ids=["traced", "registered"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
def test_the_meta_device_gets_shapes(gated, plan):
    x, ws = tokens(9, 16, torch.float32), weights(16, 24, gated, torch.float32, requires_grad=False)
    found = operator(gated)(x.to("meta"), *(w.to("meta") for w in ws), plan)
    for ours, theirs in zip(found, operator(gated)(x, *ws, plan), strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)


@pytest.mark.parametrize("plan", [None, Plan()], ids=["traced", "registered"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
def test_either_output_may_go_without_a_gradient(gated, plan):
    x, ws = tokens(9, 16).requires_grad_(), weights(16, 24, gated)
    out = operator(gated)(x, *ws, plan)
    of_both = torch.autograd.grad(out.y.sum() + out.l1, [x, *ws], retain_graph=True)
    of_y, of_l1 = (torch.autograd.grad(part, [x, *ws], retain_graph=True) for part in (out.y.sum(), out.l1))
    for both, one, other in zip(of_both, of_y, of_l1, strict=True):
        torch.testing.assert_close(one + other, both)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
def test_silent_neurons_have_zero_gradients(gated):
    """No gradient flows where the gate is zero, not even that of the L1 term."""
    ws = weights(16, 24, gated)
    x = tokens(7, 16).abs().requires_grad_()
    with torch.no_grad():
        ws[0][:12] = -ws[0][:12].abs()  # negative for every positive token
    out = operator(gated)(x, *ws, None)
    (out.y.sum() + out.l1).backward()
    assert not out.fired[:12].any()
    assert out.fired[12:].any()
    assert not any(w.grad[:12].any() for w in ws[:-1])
    assert not ws[-1].grad[:, :12].any()


@pytest.mark.parametrize("plan", [None, Plan()], ids=["traced", "registered"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
def test_saves_only_inputs_and_packed_activations(gated, plan):
    m, k, n = 32, 16, 64
    saved: dict[int, int] = {}

    def keep(t):
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    x, ws = tokens(m, k, torch.float32).requires_grad_(), weights(k, n, gated, torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        operator(gated)(x, *ws, plan)
    inputs = sum(t.numel() * 4 for t in (x, *ws))
    activations = (2 if gated else 1) * m * n * 4
    assert sum(saved.values()) == inputs + activations


@pytest.mark.parametrize("plan", [None, Plan()], ids=["traced", "registered"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
def test_compiles_without_graph_breaks_under_autocast(gated, plan):
    """And autocast casts: float32 weights, bfloat16 compute, float32 gradients."""

    def step(x, *ws):
        out = operator(gated)(x, *ws, plan)
        return out.y, out.l1, out.nnz, out.fired

    torch._dynamo.reset()
    x, ws = tokens(9, 16, torch.float32).requires_grad_(), weights(16, 24, gated, torch.float32)
    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        with torch.autocast("cpu", torch.bfloat16):
            y, l1, nnz, fired = function(x, *ws)
        assert y.dtype == torch.bfloat16
        assert l1.dtype == torch.float32
        grads = torch.autograd.grad(y.float().sum() + l1, [x, *ws])
        assert all(g.dtype == torch.float32 for g in grads)
        results.append([y, l1, nnz, fired, *grads])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
def test_under_autocast_no_copy_of_a_weight_is_kept_for_backward(gated, compiled):
    torch._dynamo.reset()
    m, k, n, plan = 40, 64, 96, Plan()
    x, ws = tokens(m, k, torch.float32).requires_grad_(), weights(k, n, gated, torch.float32)
    function = torch.compile(operator(gated), fullgraph=True, backend="aot_eager") if compiled else operator(gated)
    saved = {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = function(x, *ws, plan)
    for given in (x, *ws):
        saved.pop(given.untyped_storage().data_ptr(), None)
    cast_x = m * k * torch.bfloat16.itemsize
    assert sum(saved.values()) == cast_x + saved_bytes(plan, m, n, gated, torch.bfloat16)
    out.y.float().sum().backward()
    assert all(w.grad.dtype == torch.float32 for w in ws)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
def test_backward_computes_as_forward_whatever_autocast_says_then(gated):
    x, ws = tokens(9, 16, torch.float32).requires_grad_(), weights(16, 24, gated, torch.float32)
    y, l1, *_ = operator(gated)(x, *ws, Plan())
    expected = torch.autograd.grad([y, l1], [x, *ws], [torch.ones_like(y), torch.ones_like(l1)], retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad([y, l1], [x, *ws], [torch.ones_like(y), torch.ones_like(l1)])
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_new_plan_does_not_recompile():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(feedforward, fullgraph=True, backend=counter)
    x, ws = tokens(9, 16, torch.float32), weights(16, 24, True, torch.float32, requires_grad=False)
    expected = feedforward(x, *ws, Plan())
    for room in (2, 40, 320):
        for ours, theirs in zip(function(x, *ws, Plan(room=room).tensor()), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match=r"plan\[0\], the engine, is 9"):
        function(x, *ws, torch.tensor([9, 320], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"x.device is cpu: it should be a CUDA device for the tile engine"):
        function(x, *ws, Plan.of("tile").tensor())
    function(x, *ws, Plan().tensor())
    assert counter.frame_count == 1


@pytest.mark.parametrize("plan", [None, Plan()], ids=["traced", "registered"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(3, 12)}, "K, the width of x, is 12|w_down is"),
        ({"x": torch.ones(())}, "x is 0-dimensional"),
        ({"x": torch.ones(3, 16, dtype=torch.float16)}, "x.dtype is torch.float16"),
        ({"w_gate": torch.ones(8, 16)}, r"w_gate is \[8, 16\]: it should be \[N, K\] = \[24, 16\]"),
        ({"w_up": torch.ones(24, 16, dtype=torch.float64)}, "w_up.dtype is torch.float64"),
        ({"x": torch.ones(3, 16, dtype=torch.bfloat16)}, "the dtype of x, unless torch.autocast is on"),
        ({"w_down": torch.ones(16, 23)}, "N, the columns of w_down, is 23"),
        ({"w_down": torch.ones(24, 16)}, r"w_down is \[24, 16\]"),
        ({"w_down": torch.ones(16, 65_544)}, "N, the columns of w_down, is 65544"),
    ],
)
def test_other_inputs_are_refused_by_name(change, message, plan):
    inputs = {
        "x": torch.ones(3, 16), "w_gate": torch.ones(24, 16), "w_up": torch.ones(24, 16),
        "w_down": torch.ones(16, 24), "plan": plan,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        feedforward(**(inputs | change))


@pytest.mark.parametrize("plan", [None, Plan()], ids=["traced", "registered"])
def test_float16_autocast_is_refused(plan):
    inputs = [torch.ones(3, 16), torch.ones(24, 16), torch.ones(24, 16), torch.ones(16, 24)]
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match=r"x.dtype is torch.float16"):
        feedforward(*inputs, plan)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (torch.tensor([0, 1]), r"plan is torch.int64 \[2\]"),
        (torch.tensor([0, 8, 320], dtype=torch.int32), r"plan is torch.int32 \[3\]"),
        (torch.tensor([3, 1], dtype=torch.int32), r"is 3: it should be one of 0 \(dense\), 1 \(row\), 2 \(tile\)"),
        (torch.tensor([0, 0], dtype=torch.int32), r"plan\[1\], the nonzeros per token, is 0: .* between 1 and 65536"),
    ],
)
def test_other_plans_are_refused(plan, message):
    inputs = [torch.ones(3, 16), torch.ones(24, 16), torch.ones(24, 16), torch.ones(16, 24)]
    with pytest.raises(ValueError, match=message):
        feedforward(*inputs, plan)


def test_plans_are_made_of_known_engines():
    assert Plan().tensor().tolist() == [0, 320]
    assert Plan.of("tile", 64).tensor().tolist() == [2, 64]
    assert Plan.read(Plan(Engine.row, 7).tensor()) == Plan(Engine.row, 7)
    with pytest.raises(ValueError, match="engine is 'sparse': it should be dense, row or tile"):
        Plan.of("sparse")
    with pytest.raises(ValueError, match="nonzeros per token, is 65537"):
        Plan.of("tile", room=65_537)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("engine", ["row", "tile"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
def test_no_engine_stands_in_for_another(gated, engine, dtype):
    ws = weights(16, 24, gated, dtype)
    with pytest.raises(ValueError, match=f"x.device is cpu: it should be a CUDA device for the {engine} engine"):
        operator(gated)(tokens(3, 16, dtype), *ws, Plan.of(engine))
