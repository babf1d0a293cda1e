"""The operators of kernels/bindings.cpp, with their schemas, in Python that computes the same results on the CPU.

Their tensors must be contiguous, 16-byte aligned and bfloat16 where the kernels read bfloat16. ASKED has the arguments
other than tensors of the tile engine's calls.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from sparsellm.ops import Engine, borders, float8_gate, reference, twell
from sparsellm.ops.float8_gate import Float8Rows

BINDINGS = Path(__file__).parents[2] / "kernels" / "bindings.cpp"
LIMITS = {
    "tile tokens": 1 << 23, "tile tokens with gradients": 1 << 22, "tile capacity": (1 << 32) - (1 << 14),
    "few tokens": borders.FEW_TOKENS, "many tokens": borders.MANY_TOKENS,
    "driver version": 13000, "runtime version": 13020,
}  # fmt: skip
ASKED = []


def schemas() -> list[str]:
    """The schemas as C++ would concatenate them."""
    return [
        "".join(re.findall(r'"(.*?)"', body))
        for body in re.findall(r"library\.def\((.*?)\);", BINDINGS.read_text(), re.S)
    ]


def expect(tensor, dtype, *shape):
    assert tensor.dtype == dtype
    assert tuple(tensor.shape) == shape
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % 16 == 0


def expect_layer(x, w_gate, w_up, w_down_t=None):
    (m, k), n = x.shape, len(w_up)
    assert m > 0
    expect(x, torch.bfloat16, m, k)
    for weight in (w_gate, w_up, w_down_t):
        if weight is not None:
            expect(weight, torch.bfloat16, n, k)


def row_forward_float8(x, w_gate, w_up, w_down_t, gate_scales, up_scales, counting):
    assert 0 < len(x) <= borders.FEW_TOKENS
    expect_float8(w_up if w_gate is None else w_gate, gate_scales)
    if w_gate is not None:
        expect_float8(w_up, up_scales)
    expect(w_down_t, torch.float8_e4m3fn, *w_up.shape)
    gate, up = (w_up, w_gate) if w_gate is None else (w_gate, w_up)
    g = torch.relu(x.float() @ Float8Rows(gate, gate_scales).to(torch.float32).T).bfloat16()
    h = g if up is None else (g * (x.float() @ Float8Rows(up, up_scales).to(torch.float32).T).bfloat16())
    ASKED.append((len(x), "row, float8"))
    return [(h.float() @ w_down_t.float()).bfloat16()]


def expect_float8(values, scales):
    expect(values, torch.float8_e4m3fn, *values.shape)
    assert values.shape[1] % 16 == 0
    expect(scales, torch.float32, len(values))


def computed(x, w_gate, w_up, w_down_t):
    """(y, l1, fired, counts, planes)"""
    y, l1, nnz, fired, *planes = reference.forward(x, w_gate, w_up, w_down_t.T)
    return y, l1, fired, torch.stack([nnz, nnz * 0, nnz * 0, reference.union(planes[0] != 0), nnz * 0]), planes


def gate_pack(x, w):
    expect_layer(x, None, w)
    *fields, nnz, wide_segments, union = twell.pack(torch.relu(x @ w.T))
    return *fields, torch.stack([nnz, wide_segments, nnz * 0, union, nnz * 0])


def gate_pack_float8(x, x_scales, w, w_scales):
    expect_float8(x, x_scales)
    expect_float8(w, w_scales)
    *fields, nnz, wide_segments, union = twell.pack(float8_gate.gate(Float8Rows(x, x_scales), Float8Rows(w, w_scales)))
    return *fields, torch.stack([nnz, wide_segments, nnz * 0, union, nnz * 0])


def quantize_rows(x):
    expect(x, torch.bfloat16, *x.shape)
    return tuple(float8_gate.quantize_rows(x))


def row_forward(x, w_gate, w_up, w_down_t, counting):
    rows = x if counting else x.flatten(0, -2)
    assert x.is_contiguous()
    expect_layer(rows, w_gate, w_up, w_down_t)
    y, *statistics, _ = computed(rows, w_gate, w_up, w_down_t)
    return [y.view(x.shape), *(statistics if counting else [])]


def tile_forward(x, w_gate, w_up, w_down_t, capacity, long_capacity, ordered, saving):
    expect_layer(x, w_gate, w_up, w_down_t)
    assert long_capacity is None
    ASKED.append((capacity, ordered, saving))
    *outputs, planes = computed(x, w_gate, w_up, w_down_t)
    return *outputs, saved_planes(planes, w_gate is not None, capacity, ordered, saving)


def saved_planes(planes, gated, capacity, ordered, saving):
    if not saving:
        return planes[0].new_empty(0, dtype=torch.uint8)
    kept = torch.stack(planes).view(torch.uint8).flatten()
    rest = tile_saved_bytes(*planes[0].shape, gated, capacity, ordered) - len(kept)
    return torch.cat([kept, kept.new_empty(rest)])


def tile_forward_float8(
    x, w_gate, w_up, w_down_t, x_values, x_scales, w_thresholded, w_scales, capacity, ordered, saving
):
    expect_layer(x, w_gate, w_up, w_down_t)
    expect_float8(x_values, x_scales)
    expect_float8(w_thresholded, w_scales)
    g = float8_gate.gate(Float8Rows(x_values, x_scales), Float8Rows(w_thresholded, w_scales))
    planes = [g] if w_gate is None else [g, x @ w_up.T]
    h = g if w_gate is None else g * planes[1]
    l1, nnz, fired = reference.statistics(h, g != 0)
    counts = torch.stack([nnz, nnz * 0, nnz * 0, reference.union(g != 0), nnz * 0])
    ASKED.append((capacity, ordered, "float8"))
    saved = saved_planes(planes, w_gate is not None, capacity, ordered, saving)
    return h @ w_down_t, l1, fired, counts, saved


def tile_saved_bytes(m, n, gated, capacity, ordered):
    return (2 if gated else 1) * m * n * 2 + 16 * capacity + 4 * ordered + Engine.tile


def tile_backward(x, w_gate, w_up, w_down_t, dy, dl1, saved, dw_gate, dw_up, dw_down, add):
    expect_layer(x, w_gate, w_up, w_down_t)
    expect(dy, torch.bfloat16, *x.shape)
    expect(dl1, torch.float32, 1)
    shape = 1 if w_gate is None else 2, len(x), len(w_up)
    planes = saved[: 2 * shape[0] * shape[1] * shape[2]].view(torch.bfloat16).view(shape).unbind()
    dx, *dws = reference.backward(x, w_gate, w_up, w_down_t.T, planes, dy, dl1[0])
    into = [dw for dw in (dw_gate, dw_up, dw_down) if dw is not None]
    assert dw_up.dtype == torch.float32 or not add
    for to, dw in zip(into, dws, strict=True):
        expect(to, dw_up.dtype, *dw.shape)
        to.copy_(to + dw if add else dw)
    return dx


def tile_saved_field(saved, m, n, gated, name):
    raise NotImplementedError


def limit(name):
    return LIMITS[name]


def dense_forward(x, w_gate, w_up, w_down, fused, counting, saving):
    expect_layer(x, w_gate, w_up)
    expect(w_down, torch.bfloat16, x.shape[1], len(w_up))
    assert fused == (len(x) >= borders.MIN_FUSED_TOKENS)
    *outputs, planes = computed(x, w_gate, w_up, w_down.t().contiguous())
    if not fused:
        planes[0] = x @ (w_up if w_gate is None else w_gate).T  # z in place of g
        if not counting:
            outputs[1:] = [t.flatten()[:0] for t in outputs[1:]]
    return *outputs, torch.stack(planes).view(torch.uint8).flatten() if saving else x.new_empty(0, dtype=torch.uint8)


def dense_backward(x, w_gate, w_up, w_down, dy, dl1, saved, fused):
    expect_layer(x, w_gate, w_up)
    expect(dy, torch.bfloat16, *x.shape)
    expect(dl1, torch.float32, 1)
    assert fused == (len(x) >= borders.MIN_FUSED_TOKENS)
    g, *u = saved.view(torch.bfloat16).view(1 if w_gate is None else 2, len(x), len(w_up)).unbind()
    return gradients(w_gate, reference.backward(x, w_gate, w_up, w_down, [torch.relu(g), *u], dy, dl1[0]))


def gradients(w_gate, found):
    """As the kernels return them: without rows if there is no w_gate."""
    dx, *dws = found
    return [dx, *([] if w_gate is not None else [dx.new_empty(0, dx.shape[1])]), *dws]


def transpose(matrix, transposed):
    assert transposed.dtype in (matrix.dtype, torch.bfloat16)
    expect(matrix, matrix.dtype, *matrix.shape)
    expect(transposed, transposed.dtype, *reversed(matrix.shape))
    transposed.copy_(matrix.t())


@contextmanager
def registered() -> Iterator[None]:
    functions = (
        gate_pack, gate_pack_float8, quantize_rows, row_forward, row_forward_float8, tile_forward, tile_forward_float8,
        tile_backward,
        tile_saved_bytes, tile_saved_field, limit, dense_forward, dense_backward, transpose,
    )  # fmt: skip
    found = schemas()
    assert [s.split("(")[0] for s in found] == [f.__name__ for f in functions]
    ASKED.clear()
    with torch.library._scoped_library("sparsellm_cuda", "DEF") as library:
        for schema, function in zip(found, functions, strict=True):
            library.define(schema)
            device = "CompositeExplicitAutograd" if function in (tile_saved_bytes, limit) else "CPU"
            library.impl(function.__name__, function, device)
        yield
