"""What sparsellm.ops.cuda asks of the kernels, without a GPU: stand-ins take their place (kernel_stand_ins.py)."""

import kernel_stand_ins
import pytest
import torch
from kernel_stand_ins import RESTS, recomputed_backward
from test_feedforward import operator, tokens, weights

from sparsellm.ops import build, cuda, feedforward, plan_of, saved_bytes, twell


@pytest.fixture
def stand_ins():
    if build.loaded():
        pytest.skip("the kernels themselves are loaded")
    with kernel_stand_ins.registered():
        yield


def forward(x, ws, plan, w_down_t=None, saving=False):
    """(y, l1, fired, counts), and what is saved."""
    w_up = ws[1] if len(ws) == 3 else None
    *outputs, saved = cuda.forward(x, ws[0], w_up, ws[-1], plan, w_down_t, saving)
    return outputs, saved


def gradients(x, ws, dy, dl1, saved):
    """(dx, dw ...)"""
    w_up = ws[1] if len(ws) == 3 else None
    return [t for t in cuda.backward(x, ws[0], w_up, ws[-1], dy, dl1, saved) if t is not None]


def assert_as_accurate(found, x, ws, dy, dl1):
    backward = recomputed_backward(ws)
    exact, theirs = backward(*(t.double() for t in (x, *ws, dy, dl1))), backward(x, *ws, dy, dl1)
    for i, (ours, other, right) in enumerate(zip(found, theirs, exact, strict=True)):
        assert ours.shape == right.shape
        assert (ours.double() - right).norm() <= 2 * (other.double() - right).norm(), f"gradient {i}"


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
@pytest.mark.parametrize("engine", ["dense", "row", "tile"])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 8, 8), (127, 16, 264), (129, 24, 1000), (16_390, 8, 16), (0, 8, 16)])
def test_every_engine_gives_what_the_reference_gives(m, k, n, engine, gated):
    x, ws = tokens(m, k, torch.bfloat16), weights(k, n, gated, torch.bfloat16, requires_grad=False)
    expected = operator(gated)(x, *ws, plan_of())
    for w_down_t in (None, ws[-1].T.contiguous(), ws[-1].T.float().contiguous()):
        found, _ = forward(x, ws, plan_of(engine, 4), w_down_t)
        for name in ("y", "l1", "nnz", "fired", "union"):
            ours, theirs = getattr(feedforward._output(*found), name), getattr(expected, name)
            torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")
        storages = {t.untyped_storage().data_ptr() for t in found if t.numel()}
        assert len(storages) == sum(t.numel() > 0 for t in found)  # an operator's results share no memory


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
@pytest.mark.parametrize("engine", ["dense", "tile"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 8, 8), (127, 16, 264), (129, 24, 1000), (16_390, 8, 16), (0, 8, 16)])
def test_every_engine_gives_the_gradients_of_the_reference(m, k, n, stored, engine, gated):
    x, in_bf16 = tokens(m, k, torch.bfloat16), weights(k, n, gated, torch.bfloat16, requires_grad=False)
    ws = [w.to(stored) for w in in_bf16]
    dy, dl1 = tokens(m, k, torch.bfloat16, seed=3), torch.tensor(0.37)
    outputs, saved = forward(x, ws, plan_of(engine), saving=True)
    assert sum(t.nbytes for t in saved) == saved_bytes(plan_of(engine), m, n, gated, torch.bfloat16)
    for ours, theirs in zip(outputs, forward(x, ws, plan_of(engine))[0], strict=True):
        assert torch.equal(ours, theirs)
    found = gradients(x, ws, dy, dl1, saved)
    if engine == "tile":
        assert [t.dtype for t in found] == [torch.bfloat16] + [stored] * len(ws)
    assert_as_accurate(found, x, in_bf16, dy, dl1)
    assert not RESTS


def test_the_room_is_for_all_or_for_so_many_of_each_token():
    assert cuda.tile_room(1024, 4096, 1) == 1024 * 4096
    assert cuda.tile_room(1024, 4104, 96) == 1024 * 96
    assert cuda.tile_room(100_000, 64, 96) == 100_000 * 64
    assert cuda.tile_room(1 << 20, 65_536, 65_536) == cuda.MAX_WORDS < 1 << 32


def check_the_rest(plan, stored, gated, left):
    """Forward and backward of 129 tokens, about half of 1,000 neurons firing for each. left: tokens left to the rest's
    kernels. Returns what was saved."""
    x, in_bf16 = tokens(129, 16, torch.bfloat16), weights(16, 1000, gated, torch.bfloat16, requires_grad=False)
    ws = [w.to(stored) for w in in_bf16]
    dy, dl1 = tokens(129, 16, torch.bfloat16, seed=3), torch.tensor(0.37)
    outputs, saved = forward(x, ws, plan, saving=True)
    found, expected = feedforward._output(*outputs), operator(gated)(x, *in_bf16, plan_of())
    torch.testing.assert_close(found[:2], expected[:2])
    assert found.overflow == twell.pack(torch.relu(x @ in_bf16[0].T), 8).overflow + left
    assert_as_accurate(gradients(x, ws, dy, dl1, saved), x, in_bf16, dy, dl1)
    assert RESTS == ["row_rest", "rest_backward"]
    return saved


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "nongated"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("per_token", "left"), [(3, 129), (64, 129), (900, 0)])
def test_the_plan_gives_the_room(per_token, left, stored, gated, monkeypatch):
    """In the lists, and so many for long rows, which the stand-ins look at."""
    monkeypatch.setattr(cuda, "ALL_FIT", 0)
    monkeypatch.setattr(kernel_stand_ins, "PER_TOKEN", [per_token])
    plan = plan_of("tile", room=per_token)
    saved = check_the_rest(plan, stored, gated, left)
    assert len(saved.lists) == 129 * per_token
    assert len(saved.first) == (129 * per_token if gated else 0)
    assert sum(t.nbytes for t in saved) == saved_bytes(plan, 129, 1000, gated, torch.bfloat16)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(("long_room", "left"), [(100, 129), (129 * 1000 - 1, 0)])
def test_long_rows_may_have_less_room_than_the_lists(long_room, left, monkeypatch):
    monkeypatch.setattr(cuda, "MAX_WORDS", 129 * 512 + long_room)
    saved = check_the_rest(plan_of("tile"), torch.bfloat16, False, left)
    assert len(saved.lists) == 129 * 1000


@pytest.mark.parametrize(
    ("engine", "saving", "message"),
    [
        ("row", True, "where gradients are asked for"),
        ("tile", True, "x has 9 tokens: for the tile engine with gradients it should have up to 8"),
        ("tile", False, "x has 9 tokens: for the tile engine it should have up to 7"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_before_any_kernel(engine, saving, message, monkeypatch):
    """Without stand-ins a kernel would be another error."""
    monkeypatch.setattr(cuda, "MAX_TOKENS", 8)
    monkeypatch.setattr(cuda, "MAX_WORDS", 8 * 512 - 1)
    x, ws = tokens(9, 16, torch.bfloat16), weights(16, 264, True, torch.bfloat16, requires_grad=False)
    with pytest.raises(ValueError, match=message):
        forward(x, ws, plan_of(engine), saving=saving)


@pytest.mark.usefixtures("stand_ins")
def test_inputs_of_any_layout_are_read():
    k, n = 16, 264
    x, ws = tokens(9, k, torch.bfloat16), weights(k, n, True, torch.bfloat16, requires_grad=False)
    expected, _ = forward(x, ws, plan_of("tile"))
    strided = torch.empty(9, 2 * k, dtype=torch.bfloat16)[:, ::2].copy_(x)
    misaligned = torch.empty(9 * k + 1, dtype=torch.bfloat16)[1:].view(9, k).copy_(x)
    column_major = torch.empty(k * n + 1, dtype=torch.bfloat16)[1:].view(n, k).copy_(ws[-1].T).T
    assert cuda._transposed(column_major, None, torch.bfloat16).data_ptr() % 16 == 0
    for layout in (strided, misaligned):
        for ours, theirs in zip(forward(layout, ws, plan_of("tile"))[0], expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("compression", twell.COMPRESSIONS)
def test_gate_pack_gives_the_packed_form(compression):
    x, w = tokens(130, 16, torch.bfloat16), weights(16, 264, True, torch.bfloat16, requires_grad=False)[0]
    packed = cuda.gate_pack(x, w, compression)
    expected = twell.pack(torch.relu(x @ w.T), compression)
    for ours, theirs in zip(packed, expected, strict=True):
        assert torch.equal(ours, theirs)
