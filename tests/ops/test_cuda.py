"""The calls that sparsellm.ops.cuda makes, without a GPU: stand-ins replace the kernels (kernel_stand_ins.py)."""

import kernel_stand_ins
import pytest
import torch
from kernel_stand_ins import ASKED
from test_feedforward import operator, tokens, weights

from sparsellm.ops import Engine, Plan, borders, cuda, reference, saved_bytes, twell
from sparsellm.ops.feedforward import output_of

SIZES = pytest.mark.parametrize(
    ("m", "k", "n"), [(1, 8, 8), (127, 16, 264), (129, 24, 1000), (16_390, 8, 16), (0, 8, 16)]
)


def layer(ws):
    """(w_gate or None, w_up, w_down)"""
    return ws if len(ws) == 3 else [None, *ws]


def forward(x, ws, plan, w_down_t=None, saving=False):
    """FeedForwardOutput's fields, and the saved buffer."""
    y, l1, fired, counts, saved = cuda.forward(x, *layer(ws), plan, w_down_t, saving)
    return output_of(y, l1, fired, counts), saved


def assert_as_accurate(found, x, ws, dy, dl1):
    def backward(x, *tensors):
        *ws, dy, dl1 = tensors
        return reference.backward(x, *layer(ws), reference.forward(x, *layer(ws))[4:], dy, dl1)

    exact, theirs = backward(*(t.double() for t in (x, *ws, dy, dl1))), backward(x, *ws, dy, dl1)
    for i, (ours, other, right) in enumerate(zip(found, theirs, exact, strict=True)):
        assert ours.shape == right.shape
        assert (ours.double() - right).norm() <= 2 * (other.double() - right).norm(), f"gradient {i}"


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
@pytest.mark.parametrize("engine", list(Engine))
@SIZES
def test_every_engine_gives_what_the_reference_gives(m, k, n, engine, gated):
    x, ws = tokens(m, k, torch.bfloat16), weights(k, n, gated, torch.bfloat16, requires_grad=False)
    expected = operator(gated)(x, *ws, Plan())
    for w_down_t in (None, ws[-1].T.contiguous(), ws[-1].T.float().contiguous()):
        found, saved = forward(x, ws, Plan(engine), w_down_t)
        assert not len(saved)
        for name, ours, theirs in zip(found._fields, found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
@pytest.mark.parametrize("engine", [Engine.dense, Engine.tile])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@SIZES
def test_every_engine_gives_the_gradients_of_the_reference(m, k, n, stored, engine, gated):
    x, in_bf16 = tokens(m, k, torch.bfloat16), weights(k, n, gated, torch.bfloat16, requires_grad=False)
    ws = [w.to(stored) for w in in_bf16]
    dy, dl1 = tokens(m, k, torch.bfloat16, seed=3), torch.tensor(0.37)
    outputs, saved = forward(x, ws, Plan(engine), saving=True)
    assert len(saved) == saved_bytes(Plan(engine), m, n, gated, torch.bfloat16)
    assert cuda.engine_of(saved) == (engine if m else Engine.dense)
    for ours, theirs in zip(outputs, forward(x, ws, Plan(engine))[0], strict=True):
        assert torch.equal(ours, theirs)
    found = cuda.backward(x, *layer(ws), dy, dl1, saved)
    if engine == Engine.tile:
        assert [t.dtype for t in found] == [torch.bfloat16] + [stored] * len(ws)
    assert_as_accurate(found, x, in_bf16, dy, dl1)


@pytest.mark.parametrize("rest", [1, 3, 4, 5, 7, 8, 10, 14, 15])
def test_a_saved_buffer_of_a_length_that_no_engine_gives_it_is_refused(rest):
    saved = torch.empty(16 * 1000 + rest, dtype=torch.uint8)
    with pytest.raises(
        ValueError, match=rf"saved has 16,\d+ bytes, {rest} more than a multiple of 16: it should have 0"
    ):
        cuda.engine_of(saved)


def test_planes_of_another_length_are_refused():
    saved = torch.empty(2 * 3 * 264 * 2, dtype=torch.uint8)
    assert len(cuda.planes_of(saved, 2, 3, 264, torch.bfloat16)) == 2
    with pytest.raises(
        ValueError, match="saved has 3,168 bytes: it should have 4,224, which the dense engine saves for"
    ):
        cuda.planes_of(saved, 2, 4, 264, torch.bfloat16)


@pytest.mark.usefixtures("stand_ins")
def test_the_tile_engine_is_asked_for_what_the_policy_says(monkeypatch):
    monkeypatch.setattr(borders, "ALL_FIT", 0)
    monkeypatch.setattr(borders, "MIN_ORDERED_TOKENS", 100)
    ws = weights(16, 264, True, torch.bfloat16, requires_grad=False)
    for m, saving in ((99, True), (100, False)):
        _, saved = forward(tokens(m, 16, torch.bfloat16), ws, Plan(Engine.tile, 8), saving=saving)
        assert ASKED.pop() == (8 * m, m == 100, saving)
        assert len(saved) == (saved_bytes(Plan(Engine.tile, 8), m, 264, True, torch.bfloat16) if saving else 0)
    monkeypatch.setitem(kernel_stand_ins.LIMITS, "tile capacity", 512)
    forward(tokens(100, 16, torch.bfloat16), ws, Plan(Engine.tile, 64))
    cuda.limit.cache_clear()
    forward(tokens(100, 16, torch.bfloat16), ws, Plan(Engine.tile, 64))
    assert [capacity for capacity, *_ in ASKED] == [6400, 512]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("engine", "saving", "message"),
    [
        (Engine.row, True, "for gradients it should be dense or tile"),
        (Engine.tile, True, "x has 9 tokens: for the tile engine with gradients it should have at most 8"),
        (Engine.tile, False, "x has 9 tokens: for the tile engine it should have at most 7"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(engine, saving, message, monkeypatch):
    monkeypatch.setitem(kernel_stand_ins.LIMITS, "tile tokens", 7)
    monkeypatch.setitem(kernel_stand_ins.LIMITS, "tile tokens with gradients", 8)
    x, ws = tokens(9, 16, torch.bfloat16), weights(16, 264, True, torch.bfloat16, requires_grad=False)
    with pytest.raises(ValueError, match=message):
        forward(x, ws, Plan(engine), saving=saving)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("engine", list(Engine))
def test_inputs_of_any_layout_are_read(engine):
    k, n = 16, 264
    x, ws = tokens(9, k, torch.bfloat16), weights(k, n, True, torch.bfloat16, requires_grad=False)
    expected, _ = forward(x, ws, Plan(engine))
    strided = torch.empty(9, 2 * k, dtype=torch.bfloat16)[:, ::2].copy_(x)
    misaligned = torch.empty(9 * k + 1, dtype=torch.bfloat16)[1:].view(9, k).copy_(x)
    column_major = torch.empty(k * n + 1, dtype=torch.bfloat16)[1:].view(n, k).copy_(ws[-1].T).T
    for layout in (strided, misaligned):
        for weight in (ws[-1], column_major):
            for ours, theirs in zip(forward(layout, [*ws[:-1], weight], Plan(engine))[0], expected, strict=True):
                assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("engine", [Engine.dense, Engine.tile])
def test_gradients_of_any_layout_are_read(engine):
    """If the l1 of several layers are stacked and weighted, autograd gives each a piece of one gradient."""
    x, ws = tokens(9, 16, torch.bfloat16), weights(16, 264, True, torch.bfloat16, requires_grad=False)
    dy, pieces = tokens(9, 16, torch.bfloat16, seed=3), torch.tensor([0.25, 0.37]).unbind()
    _, saved = forward(x, ws, Plan(engine), saving=True)
    assert pieces[1].data_ptr() % cuda.ALIGNMENT
    strided = torch.empty(9, 32, dtype=torch.bfloat16)[:, ::2].copy_(dy)
    expected = cuda.backward(x, *ws, dy, pieces[1].clone(), saved)
    column_major = [w.t().contiguous().t() for w in ws]
    for weights_read in (ws, column_major):
        for ours, theirs in zip(cuda.backward(x, *weights_read, strided, pieces[1], saved), expected, strict=True):
            assert torch.equal(ours, theirs)
            assert ours.is_contiguous()


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("gated", [True, False])
def test_the_tile_engine_adds_to_float32_sums_only_if_none_is_missing(gated):
    x, ws = tokens(9, 16, torch.bfloat16), weights(16, 264, gated, torch.float32, requires_grad=False)
    three = [None] * (3 - len(ws)) + ws
    dy, dl1 = tokens(9, 16, torch.bfloat16, seed=3), torch.tensor(0.5)
    _, saved = forward(x, [w.bfloat16() for w in ws], Plan(Engine.tile), saving=True)
    dx, *dws = cuda.backward(x, *three, dy, dl1, saved)
    sums = [torch.ones_like(w) for w in ws]
    found = cuda.backward(x, *three, dy, dl1, saved, sums)
    assert torch.equal(found[0], dx)
    for ours, total, dw in zip(found[1:], sums, dws, strict=True):
        assert ours is total
        assert torch.equal(ours, 1 + dw)
    for ignored in ([None, *sums[1:]], [total.bfloat16() for total in sums], []):
        for ours, dw in zip(cuda.backward(x, *three, dy, dl1, saved, ignored)[1:], dws, strict=True):
            assert torch.equal(ours, dw)


@pytest.mark.usefixtures("stand_ins")
def test_an_allocation_that_fails_is_raised_as_torch_raises_it(monkeypatch):
    def fail(*_arguments):
        raise RuntimeError(f"sparsellm_cuda: {cuda.NO_MEMORY}")

    source = kernel_stand_ins.BINDINGS.read_text()
    assert '"sparsellm_cuda: torch could not "' in source
    assert cuda.NO_MEMORY.removeprefix("torch could not ") in source
    monkeypatch.setattr(torch.ops.sparsellm_cuda, "row_forward", fail)
    x, ws = tokens(3, 16, torch.bfloat16), weights(16, 264, True, torch.bfloat16, requires_grad=False)
    with pytest.raises(torch.OutOfMemoryError, match="could not allocate memory"):
        forward(x, ws, Plan(Engine.row))


@pytest.mark.usefixtures("stand_ins")
def test_gate_pack_gives_the_packed_form():
    x, w = tokens(130, 16, torch.bfloat16), weights(16, 264, True, torch.bfloat16, requires_grad=False)[0]
    packed = cuda.gate_pack(x, w)
    for ours, theirs in zip(packed, twell.pack(torch.relu(x @ w.T)), strict=True):
        assert torch.equal(ours, theirs)
