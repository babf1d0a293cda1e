"""The operators on the CUDA kernels: allocates what they write, and launches them in order (kernels/launch.h).

Letters: M tokens, K model width, N neurons; MT token tiles of 128, NT column tiles of 256, W words of a packed segment.
Everything is bfloat16 on one Hopper GPU, checked by the callers (sparsellm.ops.feedforward), who have also loaded the
kernels. Nothing here waits for the device. Non-contiguous or misaligned inputs are copied.

Each engine turns a packed gate product into y [M, K] and l1 (0-d float32); for non-gated layers x and w_up are None.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparsellm.ops.dispatch import DENSE, ROW
from sparsellm.ops.twell import COLUMN_TILE, TOKEN_TILE, WORD_BITS, PackedGate, tiles

ALIGNMENT = 16  # bytes: TMA and 16-byte loads
COUNTERS = 4  # int64: nonzeros, overflow, union, unused (launch.h: Counter)
TOTALS = 8  # int32 (launch.h: Total)
BLOCK = 64  # slots of the tile engine's unit (common/tile.cuh: kBlockColumns)
CONSUMER_WARPS = 8  # of the up product, each with a partial sum of l1 (common/tile.cuh)
ROW_CAPACITY = 512  # nonzeros of a row that have a place of their own; a row with more is long (launch.h: kRowCapacity)
# Nonzeros that the tile engine has room for, 4 bytes each.
LISTED_PER_TOKEN, LONG_PER_TOKEN = 320, 128  # in all; in long rows
MIN_ROOM, MAX_ROOM = 1 << 24, (1 << 32) - 4
ROW_TICKETS = 128  # int32 (launch.h: kRowTickets)
SCRATCH = (TOTALS + ROW_TICKETS) // 2  # int64 behind the counters, zero before and after every engine
MIN_ORDERED_TOKENS = 16_384  # fewer are left in their order: ordering them would take longer than it saves (LOG.md)


class Gate(NamedTuple):
    """What gate_pack writes: PackedGate's tensors as the kernels pass them on, fired as bytes."""

    words: Tensor  # int32 [M, NT, W]
    wide: Tensor  # bfloat16 [M, N]
    mask: Tensor  # int32 [MT, NT * 8]
    row_counts: Tensor  # int32 [M]
    fired: Tensor  # uint8 [N]
    counters: Tensor  # int64 [COUNTERS + SCRATCH]

    def scratch(self) -> tuple[Tensor, Tensor]:
        """(totals of the tile engine, tickets of the row engine), int32."""
        return self.counters[COUNTERS:].view(torch.int32).split((TOTALS, ROW_TICKETS))

    def statistics(self) -> tuple[Tensor, Tensor]:
        """(fired bool [N], counts int64 [3]: nonzeros, overflow, union)."""
        return self.fired.view(torch.bool), self.counters[:3]


def gated_forward(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, plan: Tensor, w_down_t: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, l1, fired, counts) of sparsellm.ops.gated_ffn by the engine of `plan`."""
    engine, compression = plan.tolist()
    if not x.shape[0]:
        return _nothing(x, w_down.shape[1])
    x, w_gate, w_up = _readable(x), _readable(w_gate), _readable(w_up)
    if engine == DENSE:
        return dense_engine(x @ w_gate.T, x @ w_up.T, w_down)
    gate = pack_gate(x, w_gate, compression)
    run = row_engine if engine == ROW else tile_engine
    return *run(gate, x, w_up, _transposed(w_down, w_down_t)), *gate.statistics()


def nongated_forward(
    x: Tensor, w_up: Tensor, w_down: Tensor, plan: Tensor, w_down_t: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, l1, fired, counts) of sparsellm.ops.nongated_ffn by the engine of `plan`."""
    engine, compression = plan.tolist()
    if not x.shape[0]:
        return _nothing(x, w_down.shape[1])
    x, w_up = _readable(x), _readable(w_up)
    if engine == DENSE:
        return dense_engine(x @ w_up.T, None, w_down)
    gate = pack_gate(x, w_up, compression)
    run = row_engine if engine == ROW else tile_engine
    return *run(gate, None, None, _transposed(w_down, w_down_t)), *gate.statistics()


def gate_pack(x: Tensor, w: Tensor, compression: int) -> PackedGate:
    """relu(x w^T) packed (sparsellm.ops.twell): x [M, K] with M > 0, w [N, K]."""
    gate = pack_gate(_readable(x), _readable(w), compression)
    fired, counts = gate.statistics()
    return PackedGate(gate.words, gate.wide, gate.mask, gate.row_counts, fired, *counts)


def pack_gate(x: Tensor, w: Tensor, compression: int) -> Gate:
    m, n = x.shape[0], w.shape[0]
    column_tiles = tiles(n, COLUMN_TILE)
    counters = x.new_zeros(COUNTERS + SCRATCH, dtype=torch.int64)  # apart: results must not share memory
    fired, row_counts = _zeros(x.device, (n, torch.uint8), (m, torch.int32))  # a result starts its memory
    gate = Gate(
        words=x.new_empty((m, column_tiles, COLUMN_TILE // compression), dtype=torch.int32),
        wide=x.new_empty((m, n)),
        mask=x.new_empty((tiles(m, TOKEN_TILE), column_tiles * COLUMN_TILE // WORD_BITS), dtype=torch.int32),
        row_counts=row_counts, fired=fired, counters=counters,
    )  # fmt: skip
    torch.ops.sparsellm_cuda.gate_pack(x, w, *gate)
    return gate


class TilePlan(NamedTuple):
    """What the kernels of the tile engine leave for one another (launch.h: TilePlan)."""

    rows: Tensor  # int32 [M * ROW_CAPACITY + room for long rows]
    tokens: Tensor | None  # int32 [M]
    slots: Tensor  # int16 [MT, NT * 256], uint16 to the kernels
    starts: Tensor  # int32 [MT, 2, NT * 4 + 1], uint32 to the kernels
    lists: Tensor  # int32 [room]
    tiles: Tensor  # int32 [MT, 4], and so the next
    order: Tensor
    items: Tensor  # int32 [MT * NT, 4]
    totals: Tensor  # int32 [TOTALS]


def tile_plan(gate: Gate, ordered: bool = True, room: tuple[int, int] | None = None) -> TilePlan:
    """Room for the plan of a tile engine, of which only the totals have contents. Arguments as of `tile_engine`."""
    m, column_tiles, _ = gate.words.shape
    token_tiles = tiles(m, TOKEN_TILE)
    listed, in_long_rows = tile_room(*gate.wide.shape) if room is None else room

    def integers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return gate.words.new_empty(shape, dtype=dtype)

    return TilePlan(
        rows=integers(m * ROW_CAPACITY + in_long_rows),
        tokens=integers(m) if ordered and m >= MIN_ORDERED_TOKENS else None,
        slots=integers(token_tiles, column_tiles * COLUMN_TILE, dtype=torch.int16),
        starts=integers(token_tiles, 2, column_tiles * COLUMN_TILE // BLOCK + 1),
        lists=integers(listed),
        tiles=integers(token_tiles, 4),
        order=integers(token_tiles, 4),
        items=integers(token_tiles * column_tiles, 4),
        totals=gate.scratch()[0],
    )


def tile_room(m: int, n: int) -> tuple[int, int]:
    """`room` of the tile engine: for all there can be if the tokens are few, else for so many of each token."""
    return min(max(m * LISTED_PER_TOKEN, MIN_ROOM), m * n, MAX_ROOM), min(max(m * LONG_PER_TOKEN, MIN_ROOM), m * n)


def tile_engine(
    gate: Gate,
    x: Tensor | None,
    w_up: Tensor | None,
    w_down_t: Tensor,
    ordered: bool = True,
    room: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """For each tile of 128 tokens, products over the neurons that fire in it. w_down_t [N, K].

    ordered: tokens that fire the same neurons share a tile, and gate.counters counts the union of those tiles; else
    128 tokens in a row do. room: how many nonzeros there may be in all, and in rows of more than ROW_CAPACITY
    (`tile_room` unless given); if there are more, the row engine does everything, and gate.counters' overflow grows by
    M.
    """
    ops = torch.ops.sparsellm_cuda
    n, k = w_down_t.shape
    m, column_tiles, _ = gate.words.shape
    plan = tile_plan(gate, ordered, room)
    y = gate.wide.new_empty((m, k))
    l1_partials, l1 = _l1(gate.wide, tiles(m, TOKEN_TILE) * column_tiles * CONSUMER_WARPS)
    ops.pack_rows(*gate, *plan)
    if plan.tokens is not None:
        workspace = _bytes(y, ops.order_workspace(m, n))
        ops.token_order(plan.rows, gate.row_counts, n, workspace, plan.tokens)
    ops.tile_plan(*gate, *plan)
    ops.tile_up(x, w_up, m, n, *plan, l1_partials, l1)
    ops.tile_down(w_down_t, *plan, y)
    if len(plan.lists) < m * n or len(plan.rows) < m * (ROW_CAPACITY + n):  # else there is room for anything
        workspace, tickets = _bytes(y, ops.row_rest_workspace(m, k)), gate.scratch()[1]
        ops.row_rest(x, w_up, w_down_t, *gate, plan.totals, workspace, tickets, l1, y)
    return y, l1


def row_engine(gate: Gate, x: Tensor | None, w_up: Tensor | None, w_down_t: Tensor) -> tuple[Tensor, Tensor]:
    """For each token, the weight rows of its own neurons. w_down_t [N, K]."""
    ops = torch.ops.sparsellm_cuda
    n, k = w_down_t.shape
    m = gate.words.shape[0]
    workspace, tickets = _bytes(gate.words, ops.row_workspace(m, k, n)), gate.scratch()[1]
    y, l1 = gate.wide.new_empty((m, k)), gate.wide.new_empty((), dtype=torch.float32)
    ops.row_ffn(x, w_up, w_down_t, *gate, workspace, tickets, l1, y)
    return y, l1


def dense_engine(z: Tensor, u: Tensor | None, w_down: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, l1, fired, counts) from z, u [M, N]: cuBLAS, with the elementwise half in one kernel. Overwrites z."""
    h, *statistics = dense_hidden(z, u)
    return h @ w_down.T, *statistics


def dense_hidden(z: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(h, l1, fired, counts): h = relu(z) * u, or relu(z) without u, in the memory of z."""
    m, n = z.shape
    counters = z.new_zeros(COUNTERS, dtype=torch.int64)
    fired, tickets = _zeros(z.device, (n, torch.uint8), (1, torch.int32))
    l1_partials, l1 = _l1(z, tiles(m, TOKEN_TILE) * tiles(n, COLUMN_TILE))
    torch.ops.sparsellm_cuda.pointwise(z, u, z, l1_partials, l1, fired, counters, tickets)
    return z, l1, fired.view(torch.bool), counters[:3]


def _nothing(x: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    l1, counts = x.new_zeros((), dtype=torch.float32), x.new_zeros(3, dtype=torch.int64)
    return torch.zeros_like(x), l1, x.new_zeros(n, dtype=torch.bool), counts


def _readable(tensor: Tensor) -> Tensor:
    """The tensor, contiguous and aligned: itself, or else a copy."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def _transposed(w_down: Tensor, w_down_t: Tensor | None) -> Tensor:
    return _readable(w_down.t() if w_down_t is None else w_down_t)


def _bytes(like: Tensor, count: int) -> Tensor:
    return like.new_empty(count, dtype=torch.uint8)


def _l1(like: Tensor, partials: int) -> tuple[Tensor, Tensor]:
    """Room for partial sums, and for their sum (0-d)."""
    return like.new_empty(partials, dtype=torch.float32), like.new_empty((), dtype=torch.float32)


def _zeros(device: torch.device, *wanted: tuple[int, torch.dtype]) -> list[Tensor]:
    """A zeroed vector of each length and dtype, all cut from one buffer: one memset."""
    starts = [0]
    for length, dtype in wanted:
        starts.append(starts[-1] + tiles(length * dtype.itemsize, ALIGNMENT) * ALIGNMENT)
    buffer = torch.zeros(starts[-1], dtype=torch.uint8, device=device)
    return [
        buffer[start : start + length * dtype.itemsize].view(dtype)
        for start, (length, dtype) in zip(starts, wanted, strict=False)
    ]
