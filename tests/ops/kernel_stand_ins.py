"""The operators of kernels/bindings.cpp, by their schemas, in Python that computes the same on the CPU.

Every tensor that they get starts as garbage, unless the caller zeroed it, and must have the shape and dtype that
kernels/launch.h states. Where there is no room, the tile engine's leave zeros, and all to row_rest and rest_backward.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from sparsellm.ops import cuda, reference, twell

ROWS = 5  # what stands for the rows
PER_TOKEN = []  # the plan's room, where it is not the default
REST = 1  # of the totals (launch.h: kRest)
RESTS = []  # which of row_rest and rest_backward were called
BINDINGS = Path(__file__).parents[2] / "kernels" / "bindings.cpp"


def schemas() -> list[str]:
    """The schemas as C++ would concatenate them."""
    text = BINDINGS.read_text()
    macros = re.findall(r"#define (SPARSELLM_\w+)\s*\\?\s*\"(.*)\"", text)
    for name, value in macros:
        text = re.sub(rf"(?<!define ){name}", f'"{value}"', text)
    return ["".join(re.findall(r'"(.*?)"', body)) for body in re.findall(r"library\.def\((.*?)\);", text, re.S)]


def expect(tensor, dtype, *shape, alignment=16):
    assert tensor.dtype == dtype
    assert tuple(tensor.shape) == shape
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % alignment == 0


def expect_packed(words, wide, mask, row_counts, fired, counters):
    m, n = wide.shape
    expect(words, torch.int32, m, words.shape[1], twell.tiles(n, 256), 8)
    expect(wide, torch.bfloat16, m, n)
    expect(mask, torch.int32, twell.tiles(m, 128), twell.tiles(n, 256) * 8)
    expect(row_counts, torch.int32, m)
    if m <= 64:  # behind them, room for the tiles' counts
        assert row_counts.untyped_storage().nbytes() >= 4 * 64 + 2 * 64 * twell.tiles(n, 256)
    expect(fired, torch.uint8, n)
    expect(counters, torch.int64, 4 + 164)


def rows_length(m, n):
    return min(m * 512 + cuda.tile_room(m, n, *PER_TOKEN), cuda.MAX_WORDS)


def expect_plan(wide, rows, tokens, slots, starts, lists, tiles, order, items, totals):
    (m, n), token_tiles, column_tiles = wide.shape, twell.tiles(wide.shape[0], 128), twell.tiles(wide.shape[1], 256)
    expect(rows, torch.int32, rows_length(m, n))
    if tokens is not None:
        expect(tokens, torch.int32, m, alignment=4)
    expect(slots, torch.int16, token_tiles, column_tiles * 256)
    expect(starts, torch.int32, token_tiles, 2, column_tiles * 4 + 1, alignment=4)
    expect(lists, torch.int32, cuda.tile_room(m, n, *PER_TOKEN))
    expect(tiles, torch.int32, token_tiles, 4)
    expect(order, torch.int32, token_tiles, 4)
    expect(items, torch.int32, token_tiles * column_tiles, 4)
    expect(totals, torch.int32, 8)


def unpacked(packed):
    nothing = torch.zeros(())
    return twell.unpack(twell.PackedGate(*packed[:5], nothing, nothing, nothing), packed[1].shape[1])


def hidden(x, w_up, packed):
    g = unpacked(packed)
    return g if x is None else g * (x @ w_up.T)


def gate_pack(x, w, *args):
    packed, for_row = args[:6], args[6]
    expect_packed(*packed)
    made = twell.pack(torch.relu(x @ w.T), 256 // (8 * packed[0].shape[1]))
    packed[5].zero_()
    for tensor, value in zip(packed[:5], made[:5], strict=True):
        tensor.copy_(value)
    packed[5][:3] = torch.stack([made.nnz, made.overflow, made.union])
    if for_row:  # what may be left to row_ffn
        packed[3].fill_(-1)
        packed[5][:3] = -1


def pack_rows(*args):
    expect_packed(*args[:6])
    expect_plan(args[1], *args[6:])
    assert not args[-1].any()
    args[6].fill_(ROWS)


def order_workspace(m, n):
    return m + n


def token_order(rows, row_counts, n, workspace, tokens):
    m = len(row_counts)
    assert (rows == ROWS).all()
    expect(row_counts, torch.int32, m)
    expect(workspace, torch.uint8, m + n)
    expect(tokens, torch.int32, m)
    tokens.copy_(torch.arange(m - 1, -1, -1))


PACKED = []  # what tile_plan was given: the kernels would find it in the lists,
MATRICES = {}  # and here the matrix [rows, slots' rows] that a list stands for, by its address
BY_NEURON = set()  # the addresses of those whose rows are neurons


def tile_plan(*args):
    expect_packed(*args[:6])
    expect_plan(args[1], *args[6:])
    (m, _), row_counts, counters = args[1].shape, *(args[i] for i in (3, 5))
    rows, tokens, _, _, lists, *_, totals = args[6:]
    assert (rows == ROWS).all()
    assert (tokens is None) == (m < cuda.MIN_ORDERED_TOKENS)
    PACKED[:] = args[:6]
    in_long_rows = row_counts[row_counts > 512].sum()
    totals[REST] = (counters[0] > len(lists)) | (in_long_rows > len(rows) - m * 512)
    counters[1] += m * totals[REST]


def tile_up(x, w_up, m, n, *args):
    plan, (lists, ups, l1_partials, l1) = args[:9], args[9:]
    assert PACKED[1].shape == (m, n)
    expect_plan(PACKED[1], *plan)
    expect(lists, torch.int32, len(plan[4]))
    assert (ups is None) == (x is None or lists.data_ptr() == plan[4].data_ptr())
    if ups is not None:
        expect(ups, torch.bfloat16, len(lists))
    expect(l1_partials, torch.float32, twell.tiles(m, 128) * twell.tiles(n, 256) * 8)
    h = MATRICES[lists.data_ptr()] = hidden(x, w_up, PACKED[:6]) * (plan[-1][REST] == 0)
    BY_NEURON.discard(lists.data_ptr())
    l1.copy_(h.abs().sum(dtype=torch.float32))
    SAVED[:] = [unpacked(PACKED), None if x is None else x @ w_up.T]


SAVED = []  # g (non-gated: h) and u: the kernels would find them in what backward is given


def expect_saved_plan(m, n, rows, *rest):
    expect(rows, torch.int32, 0)
    expect_plan(torch.empty(m, n), torch.empty(rows_length(m, n), dtype=torch.int32), *rest)


def neuron_plan(m, k, n, *args):
    expect_saved_plan(m, n, *args[:9])
    token_tiles, halves = twell.tiles(m, 128), 2 * twell.tiles(n, 128)
    names = cuda.NeuronPlan(*args[9:])
    for zeroed in (names.frequencies, names.counts, names.totals):
        assert not zeroed.any()
    expect(names.frequencies, torch.int32, n)
    expect(names.ranks, torch.int32, n)
    expect(names.neurons, torch.int32, n)
    expect(names.masks, torch.int32, halves, token_tiles * 4)
    expect(names.before, torch.int32, halves // 2, 3, token_tiles * 4)
    expect(names.slots, torch.int32, halves // 2, token_tiles * 128)
    expect(names.counts, torch.int32, halves, token_tiles * 2)
    expect(names.bases, torch.int32, token_tiles, halves * 6)
    expect(names.starts, torch.int32, halves // 2, 2, token_tiles * 2 + 1)
    expect(names.tiles, torch.int32, halves // 2, 4)
    expect(names.order, torch.int32, halves // 2 + 384, 4)
    expect(names.at, torch.int32, len(args[4]))
    expect(names.places, torch.int16, len(args[4]))
    expect(names.totals, torch.int32, 4)


def tile_gradient(dy, w_down_t, *args):
    plan, (ups, dl1, dz, du, at, places, dz_by_neuron, du_by_neuron, h_by_neuron, tickets) = args[:9], args[9:]
    expect(tickets, torch.int32, 2)
    assert not tickets.any()
    expect(at, torch.int32, len(plan[4]))
    expect(places, torch.int16, len(plan[4]))
    (m, _), n = dy.shape, len(w_down_t)
    expect_saved_plan(m, n, *plan)
    expect(dl1, torch.float32, 1)
    g, u = SAVED
    assert (ups is None) == (du is None) == (du_by_neuron is None) == (u is None)
    h = g if u is None else g * u
    dh = (dy @ w_down_t.T).float() + dl1 * h.float().sign()
    found = {dz: torch.where(g != 0, dh if u is None else dh * u, 0), du: dh * g, h_by_neuron: h}
    found |= {dz_by_neuron: found[dz], du_by_neuron: found[du]}
    for lists, matrix in found.items():
        if lists is not None:
            expect(lists, torch.int32, len(plan[4]))
            by_neuron = any(lists is t for t in (dz_by_neuron, du_by_neuron, h_by_neuron))
            matrix = matrix.bfloat16() * (plan[-1][REST] == 0)
            MATRICES[lists.data_ptr()] = matrix.T if by_neuron else matrix
            (BY_NEURON.add if by_neuron else BY_NEURON.discard)(lists.data_ptr())


def transpose(matrix, transposed):
    assert transposed.dtype in (matrix.dtype, torch.bfloat16)
    expect(transposed, transposed.dtype, *reversed(matrix.shape))
    transposed.copy_(matrix.t())


def tile_spmm(lists, weights, more_lists, more_weights, slots, starts, order, tokens, y):
    matrix = MATRICES[lists.data_ptr()]
    assert lists.data_ptr() not in BY_NEURON
    assert (more_lists is None) == (more_weights is None)
    expect(weights, torch.bfloat16, matrix.shape[1], y.shape[1])
    assert slots.dtype == torch.int16
    assert starts.shape[:2] == (len(slots), 2)
    expect(order, torch.int32, len(slots), 4)
    sums = matrix.float() @ weights.float()
    if more_weights is not None:
        sums += MATRICES[more_lists.data_ptr()].float() @ more_weights.float()
    y.copy_(sums)


def tile_operands(lists, more_lists, m, n, *args):
    names, (operand, more_operand) = cuda.NeuronPlan(*args[:14]), args[14:]
    assert (more_lists is None) == (more_operand is None)
    expect(names.starts, torch.int32, twell.tiles(n, 128), 2, 2 * twell.tiles(m, 128) + 1, alignment=4)
    for found, to in ((lists, operand), (more_lists, more_operand)):
        if found is not None:
            assert found.data_ptr() in BY_NEURON
            expect(to, torch.bfloat16, twell.tiles(m, 128) * 128 * twell.tiles(n, 128) * 128)
            MATRICES[to.data_ptr()] = MATRICES[found.data_ptr()]


def tile_weights(operand, more_operand, source, *args):
    names, (partials, tickets, *gradients) = cuda.NeuronPlan(*args[:14]), args[14:]
    expect(names.order, torch.int32, len(names.slots) + 384, 4)
    expect(partials, torch.float32, 384 * 2 * 128 * 256)
    expect(tickets, torch.int32, 384 * 4 + 1)
    assert not tickets.any()
    for found, dw in zip((operand, more_operand), gradients, strict=True):
        assert (found is None) == (dw is None)
        if found is not None:
            expect(source, torch.bfloat16, MATRICES[found.data_ptr()].shape[1], dw.shape[1])
            dw.copy_(MATRICES[found.data_ptr()].float() @ source.float())


def recomputed_backward(ws):
    return reference.gated_recomputed_backward if len(ws) == 3 else reference.nongated_recomputed_backward


def rest_backward_workspace(m, n):
    return m + n


def rest_backward(totals, x, dy, w_gate, w_up, w_down_t, dl1, dx, dw_gate, dw_up, dw_down_t, planes, arrivals):
    expect(totals, torch.int32, 8)
    expect(dx, torch.bfloat16, *x.shape)
    assert dw_gate.dtype in (torch.bfloat16, torch.float32)
    for like, gradient in ((w_gate, dw_gate), (w_up, dw_up), (w_down_t, dw_down_t)):
        if like is not None:
            expect(gradient, dw_gate.dtype, *like.shape)
    expect(planes, torch.uint8, len(x) + len(w_gate))
    expect(arrivals, torch.int32, 2)
    assert not arrivals.any()
    RESTS.append("rest_backward")
    if totals[REST]:
        ws = [w for w in (w_gate, w_up, w_down_t.T) if w is not None]
        gradients = [gradient for gradient in (dx, dw_gate, dw_up, dw_down_t.T) if gradient is not None]
        for gradient, value in zip(gradients, recomputed_backward(ws)(x, *ws, dy, dl1), strict=True):
            gradient.copy_(value)


def pointwise_gradient(z, u, dh, dl1, dz, du, h):
    expect(dl1, torch.float32, 1)
    g = torch.relu(z)
    h.copy_(g if u is None else g * u)
    total = dh.float() + dl1 * (h.float().sign() if u is not None else 1)
    if du is not None:
        du.copy_(total * g)
    dz.copy_(torch.where(g != 0, total * u if u is not None else total, 0))


def row_rest_workspace(m, k):
    return m + k


def row_rest(x, w_up, w_down_t, *args):
    packed, (totals, workspace, tickets, l1, y) = args[:6], args[6:]
    expect_packed(*packed)
    expect(totals, torch.int32, 8)
    expect(workspace, torch.uint8, sum(y.shape))
    expect(tickets, torch.int32, 320)
    assert not tickets.any()
    RESTS.append("row_rest")
    if totals[REST]:
        h = hidden(x, w_up, packed)
        l1.copy_(h.abs().sum(dtype=torch.float32))
        y.copy_(h @ w_down_t)


def row_workspace(m, k, n):
    return m + k + n


def row_ffn(x, w_up, w_down_t, *args):
    packed, (workspace, tickets, l1, y) = args[:6], args[6:]
    m, n = packed[1].shape
    expect_packed(*packed)
    expect(workspace, torch.uint8, m + y.shape[1] + n)
    expect(tickets, torch.int32, 320)
    assert not tickets.any()
    g = unpacked(packed)
    made = twell.pack(g, 256 // (8 * packed[0].shape[1]))
    packed[5][:3] = torch.stack([made.nnz, made.overflow, made.union])
    h = hidden(x, w_up, packed)
    l1.copy_(h.abs().sum(dtype=torch.float32))
    y.copy_(h @ w_down_t)


def give_hidden(parts, z, u, h, l1_partials, l1, fired, counters):
    m, n = z.shape
    expect(h, z.dtype, m, n)
    expect(l1_partials, torch.float32, twell.tiles(m, 128) * parts)
    expect(fired, torch.uint8, n)
    expect(counters, torch.int64, 5)
    g = torch.relu(z)
    h.copy_(g if u is None else g * u)
    l1.copy_(h.abs().sum(dtype=torch.float32))
    made = twell.pack(g, 8)
    fired.copy_(made.fired)
    counters[:3] = torch.stack([made.nnz, made.overflow * 0, made.union])


def pointwise(z, *args):
    assert len(z) < cuda.MIN_FUSED_TOKENS
    give_hidden(twell.tiles(z.shape[1], 64), z, *args)


def dense_hidden(x, w_gate, w_up, g, u, *args):
    assert len(x) >= cuda.MIN_FUSED_TOKENS
    z, up = x @ w_gate.T, None if w_up is None else x @ w_up.T
    for kept, value in ((g, torch.relu(z)), (u, up)):
        if kept is not None:
            expect(kept, x.dtype, len(x), len(w_gate))
            kept.copy_(value)
    give_hidden(2 * twell.tiles(len(w_gate), 256), z, up, *args)


def dense_gradient(dy, w_down, g, u, dl1, dz, du, h, counters):
    assert len(dy) >= cuda.MIN_FUSED_TOKENS
    expect(counters, torch.int64, 4)
    expect(w_down, dy.dtype, dy.shape[1], g.shape[1])
    pointwise_gradient(g, u, dy @ w_down, dl1, dz, du, h)


@contextmanager
def registered() -> Iterator[None]:
    functions = (
        gate_pack, pack_rows, order_workspace, token_order, tile_plan, tile_up, neuron_plan, tile_gradient, tile_spmm,
        tile_operands, tile_weights, transpose, row_workspace, row_rest_workspace, row_ffn, row_rest, dense_hidden,
        dense_gradient, pointwise, pointwise_gradient, rest_backward_workspace, rest_backward,
    )  # fmt: skip
    found = schemas()
    assert [s.split("(")[0] for s in found] == [f.__name__ for f in functions]
    RESTS.clear()
    torch.use_deterministic_algorithms(True)  # with which torch fills new memory with NaN or the largest integer
    try:
        with torch.library._scoped_library("sparsellm_cuda", "DEF") as library:
            for schema, function in zip(found, functions, strict=True):
                library.define(schema)
                device = "CompositeExplicitAutograd" if function.__name__.endswith("_workspace") else "CPU"
                library.impl(function.__name__, function, device)
            yield
    finally:
        torch.use_deterministic_algorithms(False)
