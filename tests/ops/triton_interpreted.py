"""Results of the Triton kernels in Triton's interpreter. test_triton.py runs this file in a process of its own.

The layers and patterns are those of the tests on a GPU, but small, in float32 and float16 (the interpreter's bfloat16
products are wrong). Their entries are small integers, so there is one right answer.
"""

import functools
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

sys.path[:0] = [str(Path(__file__).parents[1] / "gpu"), str(Path(__file__).parents[1])]
# ruff: noqa: E402
import kernel_cases as cases
from inference.kept_logits import KeptLogits
from triton_order import order_of

from sparsellm.config import Activation, ModelConfig
from sparsellm.inference import generation, layer_forward
from sparsellm.inference.kernels import decoding, pointwise, prompts
from sparsellm.model import Decoder
from sparsellm.ops import Plan, borders, reference
from sparsellm.ops.feedforward import output_of
from sparsellm.ops.float8_weights import round_weight
from sparsellm.ops.triton import clusters, engines, plan, tuning

cases.DEVICE = "cpu"
DL1 = 0.5
DTYPES = (torch.float32, torch.float16)
# Without the patterns that are equal at 264 neurons ("256 of a tile" is "all"), or that fill words of the packed gate,
# which these kernels do not have, by one more or less.
LEFT_OUT = ("synthetic300", "synthetic900", "synthetic5632", "256 of a tile", "one free slot", "one too many")
PATTERNS = [p for p in cases.PATTERNS if p not in LEFT_OUT]
assert len(PATTERNS) == len(cases.PATTERNS) - len(LEFT_OUT)
assert plan.triton.knobs.runtime.interpret


def spare_the_interpreter() -> None:
    """Leave out what it does in vain, which is most of its time: with each operation it computes whether integers
    overflow, and discards the answer unless `debug`; with each call it replaces the language's functions again, by ones
    that look through their arguments twice; with each result it makes a table of types, and checks and names the
    result's shape and the size of its numbers again; and it compares shapes, number by number, even if both are one."""
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    patch, patched = interpreter._patch_lang, set()

    def patch_once(function):
        if (module := function.__module__) not in patched:
            patch(function)
            patched.add(module)
        return interpreter._LangPatchScope()  # with nothing to restore

    interpreter._patch_lang = patch_once
    checked = core.builtin(patch_once).__code__  # of a function that checks that it is given `_semantic`

    def patch_attribute(owner, name, member, _builder, _scope):
        function = member.__wrapped__ if member.__code__ is checked else member

        def called(*given, **named):
            named["_semantic"] = interpreter.interpreter_semantic
            return function(*given, **named)

        setattr(owner, name, called)

    interpreter._patch_attr = patch_attribute
    interpreter.TensorHandle.__post_init__ = lambda self: None
    of_any = interpreter._get_np_dtype
    of_scalar = functools.cache(of_any)
    interpreter._get_np_dtype = lambda type: of_any(type) if type.scalar.is_ptr() else of_scalar(type.scalar)

    new_block, blocks = core.block_type.__init__, {}

    def block(self, element_ty, shape):
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in blocks:
            new_block(self, element_ty, shape)
            self.of_tensor = sizes(self.shape)
            blocks[key] = self.__dict__
        self.__dict__ |= blocks[key]
        self.lengths = key[1:]

    def sizes(shape):
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))

    scalar = sizes(())

    def tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensor if type.is_block() else scalar

    core.block_type.__init__, core.tensor.__init__ = block, tensor
    interpreter.ReduceOps.generic_reduce = reduce
    broadcast_different = TritonSemantic.broadcast_impl_value

    def broadcast(self, a, b):
        same = getattr(a.type, "lengths", ()) == getattr(b.type, "lengths", ())
        return (a, b) if same else broadcast_different(self, a, b)

    TritonSemantic.broadcast_impl_value = broadcast


def reduce(self, input):
    """`tl.reduce` along an axis, slice after slice: the interpreter's own goes from number to number."""
    slices = (
        [self.to_tensor(part.handle.data.take(i, self.axis), part.dtype) for part in input]
        for i in range(input[0].handle.data.shape[self.axis])
    )
    found = next(slices)
    for more in slices:
        found = self.combine_fn.fn(*found, *more)
        found = found if isinstance(found, tuple) else (found,)
    assert not self.keep_dims
    return list(found)


spare_the_interpreter()


@pytest.fixture(autouse=True)
def small_programs(monkeypatch):
    """Large parts, because the interpreter's time grows with its steps."""
    monkeypatch.setattr(engines, "PLAN", {"ROWS": 16, "WORDS": 16})
    monkeypatch.setattr(engines, "ROWS", 64)
    monkeypatch.setattr(engines, "REGROUP", {"ROWS": 64, "WORDS": 8})
    monkeypatch.setattr(engines, "REGROUP_PROGRAMS", 1)
    monkeypatch.setattr(engines, "RANK", {"ROWS": 128, "COLUMNS": 512})


@pytest.fixture
def ordered(monkeypatch):
    """Order tokens even if there are few, in 16 clusters."""
    monkeypatch.setattr(borders, "MIN_ORDERED_TOKENS", 1)
    for name, value in {"CLUSTERS": 16, "SAMPLES": 100, "MEMBERS": 20}.items():
        monkeypatch.setattr(clusters, name, value)


def layer(ws):
    return ws if len(ws) == 3 else [None, *ws]


def product(a, w):
    """a w^T, computed in float64 and rounded to the dtype of a once."""
    return (a.double() @ w.double().T).to(a.dtype)


def expected(x, ws, dy):
    """(g, h, y, [dx, dw ...]) with exact products, rounded where the operator rounds."""
    first, *up, w_down = ws
    g = torch.relu(product(x, first))
    u = product(x, up[0]).float() if up else torch.ones_like(g, dtype=torch.float32)
    h = (g.float() * u).to(x.dtype)
    dh = product(dy, w_down.T).float() + DL1 * (h.float().sign() if up else 1)
    du, dz = (dh * g.float()).to(x.dtype), torch.where(g != 0, dh * u, 0).to(x.dtype)
    dx = dz.double() @ first.double() + (du.double() @ up[0].double() if up else 0)
    weights = [product(dz.T, x.T), *([product(du.T, x.T)] if up else []), product(dy.T, h.T)]
    return g, h, product(h, w_down), [dx.to(x.dtype), *weights]


def check(x, ws, what, dtype=torch.float32, engine="tile", rest=0, room=320):
    """The results of an engine on a layer; its memory never contains zeros by chance."""
    x, *ws = (t.to(dtype) for t in (x, *ws))
    dy = torch.randint(-2, 3, x.shape, generator=cases.random(len(x))).to(dtype)
    g, h, y, gradients = expected(x, ws, dy)
    saving = engine != "row"
    *results, saved = engines.forward(x, *layer(ws), Plan.of(engine, room), None, saving)
    out, active = output_of(*results), g != 0
    cases.assert_equal(out.y, y, f"{what}: y")
    assert out.l1 == h.float().abs().sum(), f"{what}: l1"
    cases.assert_equal(out.fired, active.any(0), f"{what}: fired")
    tiled = active
    if engine == "tile" and engines.orders(len(x), saving):
        kept = engines._found(saved, x, g.shape[1], len(ws) == 3)
        tiled = active[kept.order.long()]
        cases.assert_equal(kept.order, order_of(active).int(), f"{what}: order")
        cases.assert_equal(kept.positions[kept.order.long()], torch.arange(len(x)).int(), f"{what}: positions")
    counts = [int(count) for count in (out.nnz, out.wide_segments, out.rest_calls, out.union, out.overflow_tiles)]
    assert counts == [int(active.sum()), 0, rest, int(reference.union(tiled)), 0], what
    if saving:
        found = engines.backward(x, *layer(ws), dy, torch.tensor(DL1), saved)
        for i, (ours, right) in enumerate(zip(found, gradients, strict=True)):
            if engine == "tile" or i or len(ws) == 2:  # the dense engine's dx adds two rounded products
                cases.assert_equal(ours.to(dtype), right, f"{what}: gradient {i}")
    return saved


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """New memory is NaN as a float, and -1 as an integer."""
    new_empty = torch.Tensor.new_empty

    def poisoned(self, *arguments, **named):
        made = new_empty(self, *arguments, **named)
        made.view(-1).view(torch.uint8).fill_(0xFF) if made.numel() else None
        return made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_exact_whatever_fires(pattern):
    i = PATTERNS.index(pattern)
    gate = cases.small_integers(cases.firing(pattern, 130, 264)).sign()
    check(*cases.layer_of(gate, gated=i % 2 == 0), pattern, DTYPES[i // 2 % 2])


@pytest.mark.parametrize("pattern", [p for i, p in enumerate(PATTERNS) if i % 4 in (0, 3)])
def test_exact_whatever_fires_in_another_order(pattern, ordered):
    """Half of the patterns, gated and not, of both dtypes: each takes the interpreter seconds."""
    i = PATTERNS.index(pattern)
    gate = cases.small_integers(cases.firing(pattern, 131, 264)).sign()
    check(*cases.layer_of(gate, gated=i % 2 == 1), pattern, DTYPES[i // 2 % 2])


def test_exact_at_any_shape_in_another_order(ordered, monkeypatch):
    for i, (m, k, n, chunk) in enumerate(((1, 8, 8, 128), (3, 8, 2056, 128), (300, 24, 40, 256), (129, 16, 40, 128))):
        monkeypatch.setattr(clusters, "CHUNK", chunk)
        check(*cases.integers(m, k, n, gated=i % 2 == 0, seed=i), f"M {m}, K {k}, N {n}", DTYPES[i % 2])


def test_similar_tokens_share_tiles(monkeypatch):
    """Tokens of 8 kinds; each token fires 30 of its kind's 64 neurons."""
    monkeypatch.setattr(clusters, "CLUSTERS", 32)
    m, kinds = 512, 8
    fires, draw = torch.zeros((m, kinds, 64), dtype=torch.bool), cases.random(1)
    kind = torch.randint(kinds, (m,), generator=draw)
    fires[torch.arange(m), kind] = torch.rand((m, 64), generator=draw).argsort(1).argsort(1) < 30
    fires = fires.view(m, -1)
    bits, order, positions = (torch.empty(shape, dtype=torch.int32) for shape in ((m, kinds * 2), (m,), (m,)))
    plan.mark[m // 8, 1](torch.where(fires, 1.0, -1.0), bits, m, N=kinds * 64, **engines.MARK)
    clusters.order_tokens(bits, order, positions)
    cases.assert_equal(order, order_of(fires).int(), "order")
    natural, ours = (int(reference.union(rows)) for rows in (fires, fires[order.long()]))
    assert natural > 2000  # 4 tiles of 8 kinds
    assert ours < 0.45 * natural  # of 2 or 3 kinds


def test_neurons_that_fire_for_the_same_tokens_share_tiles():
    """Every other of 128 neurons fires for the first half of 256 tokens, the others for the second half."""
    fires = (torch.arange(256)[:, None] < 128) == (torch.arange(128)[None, :] % 2 == 0)
    x, ws = cases.layer_of(torch.where(fires, 1.0, -1.0), gated=True)
    kept = engines._found(check(x, ws, "halves"), x.float(), 128, True)
    assert engines._by_neurons(kept, 256, 128, 64)[0].sizes.tolist() == [128, 128]


@pytest.mark.parametrize("engine", ["row", "dense"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
def test_the_other_engines_are_exact(engine, gated):
    for i, dtype in enumerate(DTYPES):
        x, ws = cases.integers(70, 24, 72, gated, seed=i)
        check(x, ws, engine, dtype, engine)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
def test_exact_at_any_shape(gated, monkeypatch):
    monkeypatch.setattr(engines, "PLAN", {"ROWS": 8, "WORDS": 8})  # so that unions are made in several rounds
    for i, (m, k, n) in enumerate(((1, 8, 8), (128, 136, 40), (129, 72, 264))):
        check(*cases.integers(m, k, n, gated, seed=i), f"M {m}, K {k}, N {n}", DTYPES[i % 2])


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
def test_nonzeros_that_overflow_the_lists_are_not_lost(gated, monkeypatch):
    x, ws = cases.integers(130, 24, 72, gated)
    nonzeros = int((expected(x.float(), [w.float() for w in ws], x.float())[0] != 0).sum())
    rounded = engines.ARRAY_ALIGNMENT
    for capacity, rest in ((nonzeros, 0), (nonzeros // rounded * rounded, 1)):
        monkeypatch.setattr(borders, "capacity", lambda *_, capacity=capacity: capacity)
        assert nonzeros % rounded
        check(x, ws, f"room for {capacity} of {nonzeros}", rest=rest)


def test_float32_weights_get_float32_gradients():
    x, ws = cases.integers(20, 16, 40)
    x, *ws = (t.half() for t in (x, *ws))
    *_, saved = engines.forward(x, *ws, Plan.of("tile"), None, True)
    dx, *weights = engines.backward(x, *(w.float() for w in ws), x, torch.tensor(DL1), saved)
    assert dx.dtype == torch.float16
    assert [w.dtype for w in weights] == [torch.float32] * 3


def test_what_is_not_a_number_fires_and_zero_times_infinity_does_not():
    x, w = torch.zeros((3, 16)), torch.zeros((40, 16))
    x[:, 0], w[:, 0] = -1, torch.inf
    y, l1, fired, counts, _ = engines.forward(x, None, w, torch.ones((16, 40)), Plan.of("tile"), None, False)
    assert not y.any()
    assert not any(found.any() for found in (counts, fired, l1))
    x[1] = torch.nan
    y, l1, fired, counts, _ = engines.forward(x, None, w, torch.ones((16, 40)), Plan.of("tile"), None, False)
    assert counts.tolist() == [40, 0, 0, 40, 0]
    assert all(found.all() for found in (fired, l1.isnan(), y[1].isnan()))


def test_tokens_that_are_not_numbers_are_ordered_too(ordered):
    x, ws = cases.integers(140, 16, 40)
    x = x.float()
    x[3], x[7] = torch.nan, torch.inf
    y, *_, saved = engines.forward(x, *(w.float() for w in ws), Plan.of("tile"), None, True)
    order = engines._found(saved, x, 40, True).order
    assert order.sort().values.tolist() == list(range(140))
    again, *_, none = engines.forward(x, *(w.float() for w in ws), Plan.of("tile"), None, False)
    assert not len(none)
    assert torch.equal(y.isnan(), again.isnan())
    assert torch.equal(y.nan_to_num(), again.nan_to_num())
    assert y[3].isnan().all()
    assert not y[8:].isnan().any()


def test_no_tokens():
    x, ws = cases.integers(3, 16, 40)
    for engine in ("dense", "tile", "row"):
        y, l1, fired, counts, saved = engines.forward(x[:0], *ws, Plan.of(engine), None, engine != "row")
        assert y.shape == (0, 16)
        assert not any(found.any() for found in (l1, fired, counts))
        if engine != "row":
            found = engines.backward(x[:0], *ws, x[:0], torch.tensor(DL1), saved)
            assert not any(gradient.any() for gradient in found)


def test_the_length_of_what_is_saved_is_foretold_and_checked(ordered, monkeypatch):
    x, ws = cases.integers(20, 16, 40)
    x, *ws = (t.half() for t in (x, *ws))  # as wide as bfloat16
    *_, longer = engines.forward(x, *ws, Plan.of("tile"), None, True)
    assert len(longer) == engines.tile_saved_bytes(20, 40, 320, gated=True)
    monkeypatch.setattr(borders, "MIN_ORDERED_TOKENS", 21)
    *_, saved = engines.forward(x, *ws, Plan.of("tile"), None, True)
    assert len(saved) == engines.tile_saved_bytes(20, 40, 320, gated=True) < len(longer)
    with pytest.raises(ValueError, match="saved has 18 bytes: it should have"):
        engines.backward(x, *ws, x, torch.tensor(DL1), saved[:18])
    with pytest.raises(ValueError, match="saved has 19 bytes, 3 more than a multiple of 16: it should have"):
        engines.backward(x, *ws, x, torch.tensor(DL1), saved[:19])
    with pytest.raises(ValueError, match="saved has 16 bytes: it should have 3,200, which the dense engine saves"):
        engines.backward(x, *ws, x, torch.tensor(DL1), saved[:16])
    with pytest.raises(ValueError, match="has no backward"):
        engines.forward(x, *ws, Plan.of("row"), None, True)


def test_block_sizes_fit_each_other():
    for sizes in (tuning.SMALL, tuning.LARGE):
        blocks = [sizes.sampled.columns, sizes.few_sampled.columns]
        assert all(tuning.FEWEST_SLOTS <= block <= tuning.PITCH_MULTIPLE for block in blocks)
        assert not any(tuning.PITCH_MULTIPLE % block for block in blocks)
        assert sizes.gathered.depth <= sizes.sampled.columns
        assert sizes.few_gathered.depth <= sizes.few_sampled.columns
        assert max(sizes.weights.depth, sizes.down_weights.depth) <= tuning.PITCH_MULTIPLE


def turned(heads, kv_heads, norms, cos, sin):
    """Queries and keys of one token's heads [H + 2 H_kv, D], normalized and rotated in float64, and its values: all in
    the dtype of the heads."""
    q, k, v = heads.double().split([len(heads) - 2 * kv_heads, kv_heads, kv_heads])
    if norms is not None:
        q = torch.nn.functional.rms_norm(q, (heads.shape[1],), norms[0].double(), norms[2])
        k = torch.nn.functional.rms_norm(k, (heads.shape[1],), norms[1].double(), norms[2])
    rotated = []
    for each in (q, k):
        first, second = each.chunk(2, -1)
        rotated.append((each * cos + torch.cat([-second, first], -1) * sin).to(heads.dtype))
    return *rotated, v.to(heads.dtype)


def attention(heads, norms, cos, sin, lengths, keys, values):
    """The results of `attend_to_the_past`, sequence by sequence and head by head, in float64."""
    size, _, kv_heads, width = keys.shape
    shared, out = (heads.shape[1] - 2 * kv_heads) // kv_heads, []
    for b, length in enumerate(lengths.tolist()):
        q, keys[b, length], values[b, length] = turned(heads[b], kv_heads, norms, cos[length], sin[length])
        for h in range(shared * kv_heads):
            past = keys[b, : length + 1, h // shared].double(), values[b, : length + 1, h // shared].double()
            chances = (past[0] @ q[h].double() / width**0.5).softmax(-1)
            out.append((chances @ past[1]).to(heads.dtype))
    return torch.stack(out).view(size, -1, width)


# In float16, heads, weights of a sum and results are each rounded by 2^-11, for numbers up to 4.
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.float16, 4e-3)])
@pytest.mark.parametrize(
    ("sharing", "kv_heads", "width", "normed", "positions", "lengths"),
    [
        (1, 2, 64, False, 192, [0, 130, 191]),  # one query head per key head
        (2, 2, 48, True, 64, [1, 16, 63]),  # normalized heads whose width is not a power of two
        (20, 1, 32, False, 64, [1, 40]),  # more query heads than a product's rows
        (2, 1, 64, True, 2048, [3, 1500]),  # in two parts, one of them empty
        (1, 2, 64, False, 2048, [2047]),  # the last position of all
        (1, 3, 32, True, 7000, [900, 6999]),  # in four parts, because six would not be a power of two
        (4, 1, 24, False, 9000, [8000]),  # in eight
    ],
)
def test_attention_of_one_token(sharing, kv_heads, width, normed, positions, lengths, dtype, close):
    random = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=random)

    size = len(lengths)
    heads = draw(size, (sharing + 2) * kv_heads, width).to(dtype)
    norms = (draw(width), draw(width), 0.1) if normed else None
    cos, sin = draw(positions, width), draw(positions, width)
    cos, sin = (torch.cat([table[:, : width // 2]] * 2, -1) for table in (cos, sin))
    keys, values = (draw(size, positions, kv_heads, width).to(dtype) for _ in range(2))
    for cache in (keys, values):  # memory after the last token may have any content
        for b, length in enumerate(lengths):
            cache[b, length:] = torch.nan
    expected_keys, expected_values = keys.clone(), values.clone()
    inputs = heads, norms, cos, sin, torch.tensor(lengths)
    expected = attention(*inputs, expected_keys, expected_values)
    found = decoding.attend_to_the_past(*inputs, keys, values)
    torch.testing.assert_close(found, expected, atol=close, rtol=close)
    torch.testing.assert_close(keys, expected_keys, atol=close, rtol=close, equal_nan=True)
    torch.testing.assert_close(values, expected_values, atol=0, rtol=0, equal_nan=True)


ACTIVATIONS = {"": lambda a: a, "relu": torch.relu, "silu": torch.nn.functional.silu}


# In float16, each factor of a product is rounded by 2^-11, and so is the product.
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.float16, 2e-3)])
@pytest.mark.parametrize("given", ["x", "x + y", "norm(x)", "norm(x + y)"])
@pytest.mark.parametrize(
    ("biased", "activation", "gating"),
    [(False, "", False), (True, "", False), (False, "relu", False), (False, "relu", True), (True, "silu", True)],
)
@pytest.mark.parametrize(("width", "rows"), [(64, 48), (1000, 7)])
def test_products_of_one_token(width, rows, biased, activation, gating, given, dtype, close, monkeypatch):
    monkeypatch.setattr(decoding, "WARPS", {"x": 1 << 20, "norm(x)": 2}.get(given, 5))  # programs of one step, and more
    random = torch.Generator().manual_seed(0)
    x, y, norm, weight, up, bias = (
        torch.randn(shape, generator=random)
        for shape in ((1, width), (1, width), (width,), (rows, width), (rows, width), (rows,))
    )
    y, weight, up, bias = (tensor.to(dtype) for tensor in (y, weight, up, bias))
    if given == "x":
        x = x.to(dtype)
    before = x.clone()
    both, out = decoding.multiply(
        weight, x, y if "y" in given else None, norm if "norm" in given else None, 0.1, bias if biased else None,
        activation, up if gating else None,
    )  # fmt: skip
    a = before + y if "y" in given else before
    assert torch.equal(both, a)
    assert torch.equal(x, before)
    assert out.dtype == dtype
    a = a.double()
    if "norm" in given:
        a = torch.nn.functional.rms_norm(a, (width,), norm.double(), 0.1).to(dtype).double()
    expected = ACTIVATIONS[activation](a @ weight.double().T + (bias.double() if biased else 0))
    if gating:
        expected *= a @ up.double().T
    torch.testing.assert_close(out.double(), expected, atol=close * expected.abs().max(), rtol=close)


@pytest.mark.parametrize("gating", [False, True])
@pytest.mark.parametrize(("width", "rows"), [(64, 48), (1000, 7)])
def test_products_of_one_token_with_e4m3_matrices(width, rows, gating, monkeypatch):
    monkeypatch.setattr(decoding, "WARPS", 5)
    torch.manual_seed(0)  # a sum may come near zero, where its rounding is relatively large
    x, y, norm = (torch.randn(shape) for shape in ((1, width), (1, width), (width,)))
    weight, up = (round_weight(w * 10.0 ** torch.linspace(-5, 5, rows)[:, None]) for w in torch.randn(2, rows, width))
    both, out = decoding.multiply(weight, x, y, norm, 0.1, None, "relu" if gating else "", up if gating else None)
    assert torch.equal(both, x + y)
    a = torch.nn.functional.rms_norm((x + y).double(), (width,), norm.double(), 0.1)
    expected = a @ weight.exact().T
    if gating:
        expected = torch.relu(expected) * (a @ up.exact().T)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("tokens", "width", "rows"), [(2, 64, 48), (17, 1000, 7), (64, 300, 130)])
def test_products_of_few_tokens_with_an_e4m3_matrix(tokens, width, rows, biased):
    x, bias = torch.randn(tokens, width), torch.randn(rows) if biased else None
    matrix = round_weight(torch.randn(rows, width) * 10.0 ** torch.linspace(-5, 5, rows)[:, None])
    found = decoding.multiply_few(matrix, x, bias)
    expected = x.double() @ matrix.exact().T + (0 if bias is None else bias.double())
    allowed = 1e-5 * (x.double().abs() @ matrix.exact().abs().T + expected.abs())
    assert ((found.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("gating", [False, True])
def test_a_gate_times_what_it_gates(gating, activation, dtype):
    random = torch.Generator().manual_seed(0)
    gate, up = torch.randn(2, 37, 61, generator=random).to(dtype)
    gate[3, 5] = torch.nan
    expected = ACTIVATIONS[activation](gate)
    if gating:
        expected = expected * up
    found = pointwise.activate(gate, up if gating else None, activation)
    assert found is gate
    close = 1e-6 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(found, expected, atol=close, rtol=close, equal_nan=True)


MODELS: dict[str, dict] = {
    "llama": {}, "qwen3": {"num_key_value_heads": 2, "qk_norm": True}, "qwen2": {"attention_bias": True},
    "not_gated": {"gated": False}, "silu": {},
}  # fmt: skip


def small_generator(model, width, layers, head_dim):
    """A generator of random weights of the kind `model`; head_dim: of qwen3's heads."""
    torch.manual_seed(0)
    settings = MODELS[model] | ({"head_dim": head_dim} if model == "qwen3" else {})
    config = ModelConfig(96, width, 128, layers, 4, context_length=64, init_std=0.1, **settings)
    decoder = Decoder(config, Activation.silu if model == "silu" else Activation.relu)
    for parameter in decoder.parameters():  # so that norms and biases are not all ones and zeros
        parameter.data += 0.3 * torch.randn(parameter.shape)
    return generation.Generator(decoder, kernels=None)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_a_decoding_step_by_kernels_is_that_of_pytorch(model, size, monkeypatch):
    made = small_generator(model, width=64, layers=1, head_dim=32)
    batch = generation.Batch(made.config, size, 64, made.device, torch.float32)
    batch.lengths.copy_(torch.linspace(1, 63, size).long())
    x, y, keys, values = (torch.randn(shape) for shape in [(size, 64)] * 2 + [batch.keys.shape[1:]] * 2)
    inputs, found = (made.layers[0], made.weights[0], x, y, batch.tables, batch.lengths), []
    for by_kernels in (False, True):
        monkeypatch.setattr(layer_forward, "by_kernels", lambda _, chosen=by_kernels: chosen)
        caches = keys.clone(), values.clone()
        with torch.no_grad():
            found.append((*layer_forward.of_step(*inputs, caches), *caches))
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


# Rounding to float16 or bfloat16 changes a number by up to 2^-11 or 2^-8, so two roundings of about the same number may
# differ by twice that.
ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 96), (3, 1000), (2, 16), (2, 7)])
def test_a_sum_and_its_norm(rows, width, dtype):
    random = torch.Generator().manual_seed(0)
    x, y, weight = (torch.randn(shape, generator=random) for shape in ((rows, width), (rows, width), (width,)))
    x *= torch.logspace(-2, 2, rows)[:, None]  # each row has its own scale
    y = y.to(dtype)
    before = x.clone()
    both, normed = pointwise.sum_norm(x, y, weight, 0.1, dtype)
    assert torch.equal(both, before + y)
    assert torch.equal(x, before)
    expected = torch.nn.functional.rms_norm(both.double(), (width,), weight.double(), 0.1)
    torch.testing.assert_close(normed, expected.to(dtype), atol=1e-6, rtol=ROUNDING[dtype])


def tables(positions, width):
    """Tables of a rotation; the second half of each row must not be read."""
    halves = torch.randn(2, positions, width // 2, generator=torch.Generator().manual_seed(1))
    return halves, torch.cat([halves, torch.full_like(halves, torch.nan)], -1)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    ("sharing", "kv_heads", "width", "normed", "lengths"),
    [
        (1, 2, 64, False, [3, 3]),  # no padding
        (3, 2, 48, True, [1, 5, 2]),  # normalized heads whose width is not a power of two
        (20, 2, 32, False, [2, 1]),  # more heads than one step processes
        (2, 20, 32, True, [4]),  # more key heads than one step processes
        (7, 1, 10, True, [1, 2]),  # fewer and narrower heads than one step processes
    ],
)
def test_heads_of_prompts_are_turned_and_placed(sharing, kv_heads, width, normed, lengths, dtype, monkeypatch):
    monkeypatch.setattr(prompts, "BLOCK", 512)
    random, positions, longest, count = torch.Generator().manual_seed(0), 16, max(lengths), sharing * kv_heads
    heads = torch.randn(sum(lengths), count + 2 * kv_heads, width, generator=random).to(dtype)
    norms = (*torch.randn(2, width, generator=random), 0.1) if normed else None
    halves, (cos, sin) = tables(positions, width)
    keys, values = torch.full((2, len(lengths), positions, kv_heads, width), torch.nan, dtype=dtype)
    theirs = keys.clone(), values.clone()
    expected = torch.zeros(len(lengths), longest, count, width, dtype=dtype)
    for cache in theirs:  # zeros after a sequence's end, nothing after the end of the longest one
        cache[:, :longest] = 0
    places = [(b, t) for b, length in enumerate(lengths) for t in range(length)]
    for row, (b, t) in enumerate(places):
        rotation = (torch.cat([half[t]] * 2) for half in halves)
        expected[b, t], theirs[0][b, t], theirs[1][b, t] = turned(heads[row], kv_heads, norms, *rotation)
    given = torch.tensor(lengths)
    queries = prompts.place(heads, norms, cos, sin, given.cumsum(0), given, longest, keys, values)
    close = {"atol": ROUNDING[dtype], "rtol": ROUNDING[dtype], "equal_nan": True}
    torch.testing.assert_close(queries, expected, **close)
    torch.testing.assert_close(keys, theirs[0], **close)
    torch.testing.assert_close(values, theirs[1], atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("given", [[[5, 17, 3, 80, 11], [3], [44, 2, 9]], [[1, 2, 3], [9, 8, 7]], [[7]]])
@pytest.mark.parametrize("model", MODELS)
def test_prompts_by_kernels_are_those_of_pytorch(model, given, monkeypatch):
    made, found = small_generator(model, width=96, layers=2, head_dim=20), []
    for by_kernels in (False, True):
        monkeypatch.setattr(layer_forward, "by_kernels", lambda _, chosen=by_kernels: chosen)
        batch, drawn = generation.Batch(made.config, len(given), 16, made.device, torch.float32), KeptLogits()
        for cache in (batch.keys, batch.values):  # as if an earlier stream had left NaN
            cache.fill_(torch.nan)
        with torch.no_grad():
            made._prefill(batch, given, drawn)
        assert batch.lengths.tolist() == [len(prompt) for prompt in given]
        assert not drawn.logits.isnan().any()
        found.append((batch.keys, batch.values, drawn.logits))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4, equal_nan=True)
