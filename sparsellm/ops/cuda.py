"""The driver of the CUDA kernels (kernels/engines.h): calls the C++ operators of a plan's engine.

Letters: M tokens, K model width, N neurons. All inputs are on one Hopper GPU. x and dy are bfloat16; weights have any
dtype that casts to bfloat16; w_gate is None in non-gated layers. Callers (sparsellm.ops.feedforward) must have checked
the inputs and loaded the kernels. Nothing here waits for the device. Non-contiguous or misaligned inputs are copied.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sparsellm.ops import borders
from sparsellm.ops.accumulation import shared
from sparsellm.ops.float8_gate import Float8Rows
from sparsellm.ops.float8_weights import Float8Layer
from sparsellm.ops.plan import Engine, Plan
from sparsellm.ops.twell import PackedGate

# Bytes. TMA and 16-byte loads need this alignment, and a saved buffer's length is a multiple of ALIGNMENT plus a number
# that identifies the engine (engine_of).
ALIGNMENT = 16
SAVED_BY = {0: Engine.dense, 2: Engine.tile, 6: Engine.tile}  # by a saved buffer's length modulo ALIGNMENT
NO_MEMORY = "torch could not allocate memory"  # part of an operator's error message (kernels/bindings.cpp)

Forward = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
COUNTS = 5  # entries of a call's counts (kernels/engines.h: kCounts)


def forward(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    plan: Plan,
    w_down_t: Tensor | None,
    saving: bool,
    counting: bool = True,
    rounded: Float8Rows | None = None,
) -> Forward:
    """(y, l1, fired, counts, saved) of `sparsellm.ops.feedforward`, computed by the engine of `plan`.

    y [M, K]; l1 0-d float32; fired bool [N]; counts int64 [COUNTS]; saved uint8: one buffer for `backward`, empty
    unless `saving`, whose length identifies the engine (`engine_of`). w_down_t [N, K]: w_down transposed, or None.
    Weights are cast to the dtype of x. Without `counting`, the dense engine may skip the statistics: l1, fired and
    counts are then empty. rounded: x in FP8, with which the tile engine computes the gate product in FP8
    (`float8_forward`). Raises ValueError if `saving` is true for the row engine, which has no backward, and for more
    tokens than the tile engine supports.
    """
    m, n = x.shape[0], w_down.shape[1]
    if plan.engine == Engine.row and saving:
        raise ValueError("the plan's engine is row, which has no backward: for gradients it should be dense or"
                         " tile")  # fmt: skip
    if plan.engine == Engine.tile and m > (most := limit("tile tokens with gradients" if saving else "tile tokens")):
        with_gradients = " with gradients" if saving else ""
        raise ValueError(f"x has {m:,} tokens: for the tile engine{with_gradients} it should have at most {most:,}")
    if not m:
        return nothing(x, n)
    x, w_up = readable(x), cast_weight(w_up, x.dtype)
    w_gate = None if w_gate is None else cast_weight(w_gate, x.dtype)
    if plan.engine == Engine.dense:
        w_down = cast_weight(w_down, x.dtype)
        return _called("dense_forward", x, w_gate, w_up, w_down, borders.fuses(m), counting, saving)
    w_down_t = _by_neuron(w_down, w_down_t, x.dtype)
    if plan.engine == Engine.row:
        return *_called("row_forward", x, w_gate, w_up, w_down_t, True), x.new_empty(0, dtype=torch.uint8)
    if rounded is not None:
        thresholded = quantize_rows(w_up if w_gate is None else w_gate)
        return float8_forward(x, w_gate, w_up, w_down_t, thresholded, plan.room, rounded, saving)
    capacity, ordered = capacity_of(m, n, plan.room), borders.orders(m)
    return _called("tile_forward", x, w_gate, w_up, w_down_t, capacity, None, ordered, saving)


def row_output(x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down_t: Tensor) -> Tensor:
    """y [..., K] for x [..., K] by the row engine, without statistics, for callers that are host-bound.

    Nothing is checked or copied: M must be positive, and all tensors must be bfloat16, contiguous and aligned (see
    `readable`), with matching shapes.
    """
    return _called("row_forward", x, w_gate, w_up, w_down_t, False)[0]


def row_output_float8(x: Tensor, layer: Float8Layer) -> Tensor:
    """y [M, K] for x [M, K] by the row engine, whose gate and rows are e4m3: the products of `row_output`, with the
    rounded weights. x must be bfloat16, contiguous and aligned, with 1 to borders.FEW_TOKENS tokens; K is at most 4,096
    and a multiple of 16."""
    w_gate, w_up, w_down_t = layer
    weights = (None if w_gate is None else w_gate.values), w_up.values, w_down_t
    scales = (w_up.scales, None) if w_gate is None else (w_gate.scales, w_up.scales)
    return _called("row_forward_float8", x, *weights, *scales, False)[0]


def float8_forward(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down_t: Tensor,
    thresholded: Float8Rows,
    room: int,
    rounded: Float8Rows | None = None,
    saving: bool = False,
) -> Forward:
    """(y, l1, fired, counts, saved) of the tile engine with the gate product in FP8; other products are bfloat16.

    thresholded: w_gate, or w_up of a non-gated layer, in FP8. rounded: x in FP8, if the caller has it. M > 0, and K is
    a multiple of 16. All other tensors must be bfloat16, contiguous and aligned (see `readable`).

    `backward` multiplies by w_gate and x in bfloat16, where g of this call is not zero: the rounding to FP8 has the
    gradient 1. For token tiles that take the overflow path, the gate product of l1 and y is computed in bfloat16, as it
    is in backward; fired and counts are of the FP8 product.
    """
    m, n = x.shape[0], len(w_up)
    weights, gate = (w_gate, w_up, w_down_t), (*(rounded or quantize_rows(x)), *thresholded)
    capacity, ordered = capacity_of(m, n, room), borders.orders(m)
    return _called("tile_forward_float8", x, *weights, *gate, capacity, ordered, saving)


def quantize_rows(matrix: Tensor) -> Float8Rows:
    """A bfloat16 matrix [R, K], contiguous and aligned, rounded to e4m3 with a scale per row; K is a multiple of 16."""
    return Float8Rows(*_called("quantize_rows", matrix))


def backward(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    dy: Tensor,
    dl1: Tensor,
    saved: Tensor,
    sums: Sequence[Tensor | None] = (),
) -> list[Tensor]:
    """Computes [dx, dw_gate if gated, dw_up, dw_down] with the engine that filled `saved`. dy [M, K]; dl1: 0-d.

    The tile engine returns float32 gradients for float32 weights; all other gradients have the dtype of x.

    sums: gradients of earlier calls, one for each weight, contiguous. If all are there and in float32, the tile engine
    adds to them in place, rounding each sum once (dw_gate and dw_up where tiles overflow: twice), and returns them as
    the gradients of the weights. Otherwise, and in the dense engine, they are ignored.
    """
    if not x.shape[0]:
        return [torch.zeros_like(t) for t in (x, w_gate, w_up, w_down) if t is not None]
    weights = [w for w in (w_gate, w_up, w_down) if w is not None]
    float_weights, engine = w_down.dtype == torch.float32, engine_of(saved)
    x, dy, dl1, w_up = readable(x), readable(dy), readable(dl1.float().reshape(1)), cast_weight(w_up, x.dtype)
    w_gate = None if w_gate is None else cast_weight(w_gate, x.dtype)
    if engine == Engine.dense:
        w_down, fused = cast_weight(w_down, x.dtype), borders.fuses(x.shape[0])
        made = _called("dense_backward", x, w_gate, w_up, w_down, dy, dl1, saved, fused)
        return made if w_gate is not None else [made[0], *made[2:]]
    w_down_t, dtype = _by_neuron(w_down, None, x.dtype), torch.float32 if float_weights else x.dtype
    found = [total for total in sums if total is not None and total.dtype == dtype == torch.float32]
    adding = len(found) == len(weights)
    dws = found if adding else [x.new_empty(w.shape, dtype=dtype) for w in weights]
    targets = dws if w_gate is not None else [None, *dws]
    dx = _called("tile_backward", x, w_gate, w_up, w_down_t, dy, dl1, saved, *targets, adding)
    return [dx, *dws]


def _called(name: str, *arguments: Any) -> Any:
    """The results of one of the kernels' operators. Torch's stable ABI tells C++ only that an allocation failed, so the
    operator raises RuntimeError. This function raises torch.OutOfMemoryError instead, which tells callers that smaller
    calls may fit."""
    try:
        return getattr(torch.ops.sparsellm_cuda, name)(*arguments)
    except RuntimeError as error:
        if NO_MEMORY in str(error):
            raise torch.OutOfMemoryError(str(error)) from None
        raise


def engine_of(saved: Tensor) -> Engine:
    """The engine that filled a saved buffer. The buffer's length is a multiple of ALIGNMENT plus the engine's number,
    plus 4 where the tile engine has ordered the tokens: 33,170,694 = 16 * 2,073,168 + 2 + 4 is the tile engine.

    Raises ValueError for a length that no engine's buffer has.
    """
    rest = saved.numel() % ALIGNMENT
    if rest not in SAVED_BY:
        raise ValueError(
            f"saved has {saved.numel():,} bytes, {rest} more than a multiple of {ALIGNMENT}: it should have 0 more (the"
            " dense engine), or 2 or 6 (the tile engine)"
        )
    return SAVED_BY[rest]


def planes_of(saved: Tensor, count: int, m: int, n: int, dtype: torch.dtype) -> list[Tensor]:
    """What the dense engine saved: `count` planes [M, N], which are g and, in gated layers, u. Kernels that do not fuse
    (sparsellm.ops.borders) save z, which is g before the ReLU, instead of g. Raises ValueError for any other length."""
    if saved.numel() != (length := count * m * n * dtype.itemsize):
        raise ValueError(
            f"saved has {saved.numel():,} bytes: it should have {length:,}, which the dense engine saves for {m:,}"
            f" tokens of {n:,} neurons"
        )
    return list(saved.view(dtype).view(count, m, n).unbind())


def gate_pack(x: Tensor, w: Tensor) -> PackedGate:
    """relu(x w^T) packed (sparsellm.ops.twell): x [M, K] with M > 0, w [N, K]."""
    *packed, (nnz, wide_segments, _, union, _) = torch.ops.sparsellm_cuda.gate_pack(readable(x), readable(w))
    return PackedGate(*packed, nnz, wide_segments, union)  # type: ignore[call-arg]  # mypy cannot see the length


def gate_pack_float8(x: Float8Rows, w: Float8Rows) -> PackedGate:
    """relu(x w^T) packed, the product in FP8: x [M, K] with M > 0, w [N, K], K a multiple of 16, N of 8."""
    *packed, (nnz, wide_segments, _, union, _) = torch.ops.sparsellm_cuda.gate_pack_float8(*x, *w)
    return PackedGate(*packed, nnz, wide_segments, union)  # type: ignore[call-arg]  # mypy cannot see the length


def capacity_of(m: int, n: int, room: int) -> int:
    """How many nonzeros the tile engine's lists hold: borders.capacity, but at most what the kernels can count."""
    return min(borders.capacity(m, n, room), limit("tile capacity"))


def tile_saved_bytes(m: int, n: int, room: int, gated: bool) -> int:
    """The number of bytes that the tile engine saves for backward."""
    if not m:
        return 0
    return torch.ops.sparsellm_cuda.tile_saved_bytes(m, n, gated, capacity_of(m, n, room), borders.orders(m))


@lru_cache
def limit(name: str) -> int:
    """A limit that the kernels define (kernels/bindings.cpp: limit): limit("tile tokens") is 8,388,576."""
    return torch.ops.sparsellm_cuda.limit(name)


def nothing(x: Tensor, n: int) -> Forward:
    """The results of a call without tokens: y is empty, and the statistics are zero."""
    l1, counts = x.new_zeros((), dtype=torch.float32), x.new_zeros(COUNTS, dtype=torch.int64)
    return torch.zeros_like(x), l1, x.new_zeros(n, dtype=torch.bool), counts, x.new_empty(0, dtype=torch.uint8)


def readable(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`tensor` in `dtype` (None: its own dtype), contiguous and aligned; copied only where necessary."""
    tensor = tensor.to(dtype or tensor.dtype).contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`weight` as `readable` returns it; the micro-batches of a step may share a cast (sparsellm.ops.accumulation)."""
    return readable(weight) if weight.dtype == dtype else shared(weight, "cast", lambda: readable(weight, dtype))


def _by_neuron(w_down: Tensor, w_down_t: Tensor | None, dtype: torch.dtype) -> Tensor:
    """w_down_t, or w_down transposed, in `dtype`."""

    def transposed() -> Tensor:
        matrix = readable(w_down, None if w_down.dtype == torch.float32 else dtype)
        to = matrix.new_empty((matrix.shape[1], matrix.shape[0]), dtype=dtype)
        torch.ops.sparsellm_cuda.transpose(matrix, to)
        return to

    return readable(w_down_t, dtype) if w_down_t is not None else shared(w_down, "by neuron", transposed)
