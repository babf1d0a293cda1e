"""The operators on the CUDA kernels: allocates what they write, and launches them in order (kernels/launch.h).

Letters: M tokens, K model width, N neurons; MT token tiles of 128, NT column tiles of 256, W words of a packed segment.
Inputs are on one Hopper GPU, x and dy bfloat16, weights of any dtype that casts to it, checked by the callers
(sparsellm.ops.feedforward), who have also loaded the kernels. Nothing here waits for the device. Non-contiguous or
misaligned inputs are copied.

Each engine turns a packed gate product into y [M, K] and l1 (0-d float32); for non-gated layers x and w_up are None.
What an engine saves for backward is in `Saved`; its own backward reads it.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparsellm.ops.dispatch import DENSE, LISTED_PER_TOKEN, MIN_ORDERED_TOKENS, ROW, TILE
from sparsellm.ops.twell import COLUMN_TILE, SECTOR_WORDS, TOKEN_TILE, WORD_BITS, PackedGate, tiles

ALIGNMENT = 16  # bytes: TMA and 16-byte loads
COUNTERS = 4  # int64: nonzeros, overflow, union, drawn (launch.h: Counter)
DENSE_COUNTERS = COUNTERS + 1  # the dense engine's, int64 (launch.h: kDenseCounters)
POINTWISE_COLUMNS = 64  # of each of `pointwise`'s partial sums of l1 (launch.h: kPointwiseColumns)
TOTALS = 8  # int32 (launch.h: Total)
NEURON_TOTALS = 4  # int32 (launch.h: NeuronTotal)
SPLIT_UNITS = 384  # that pieces of tiles leave sums of (launch.h: kSplitUnits)
MAX_TOKENS = 65_535 * 64  # of the tile engine with gradients (launch.h: kMaxSplitTokens)
BLOCK = 64  # slots of the tile engine's unit (common/tile.cuh: kBlockColumns)
CONSUMER_WARPS = 8  # of the up product, each with a partial sum of l1 (common/tile.cuh)
ROW_CAPACITY = 512  # nonzeros of a row that have a place of their own; a row with more is long (launch.h: kRowCapacity)
# Of the tile engine's lists and rows, 4 bytes a word.
ALL_FIT = 1 << 22  # activations up to which the lists hold them all, whatever the plan's room
MAX_WORDS = (1 << 32) - (1 << 14)  # words are counted in uint32, in strides of up to 4,096
COUNTED_TOKENS = 64  # up to which row_ffn may count the nonzeros itself (launch.h: kCountedTokens)
ROW_TICKETS = 320  # int32 (launch.h: kRowTickets)
SCRATCH = (TOTALS + ROW_TICKETS) // 2  # int64 behind the counters, zero before (by gate_pack) and after every engine
MIN_FUSED_TOKENS = 1344  # of fewer, cuBLAS and elementwise kernels mostly take less time, of more mostly not (LOG.md)


class Saved(NamedTuple):
    """What a forward engine leaves to its backward, beside the inputs: flat, and empty where there is nothing."""

    first: Tensor  # dense: g (few tokens: z), [M * N], compute dtype. tile: u of the lists' words (non-gated: empty)
    second: Tensor  # dense: u, [M * N] (non-gated: empty). tile: empty
    lists: Tensor  # tile: int32, TilePlan's, with g (non-gated: h)
    index: Tensor  # tile: int32, the rest of TilePlan

    @classmethod
    def nothing(cls, like: Tensor) -> "Saved":
        return cls(*(like.new_empty(0) for _ in range(2)), *(like.new_empty(0, dtype=torch.int32) for _ in range(2)))


class Gate(NamedTuple):
    """What gate_pack writes: PackedGate's tensors as the kernels pass them on, fired as bytes."""

    words: Tensor  # int32 [M, W / 8, NT, 8]
    wide: Tensor  # bfloat16 [M, N]
    mask: Tensor  # int32 [MT, NT * 8]
    row_counts: Tensor  # int32 [M]; behind them, of up to COUNTED_TOKENS, the tiles' counts
    fired: Tensor  # uint8 [N]
    counters: Tensor  # int64 [COUNTERS + SCRATCH]

    def scratch(self) -> tuple[Tensor, Tensor]:
        """(totals of the tile engine, tickets of the row engine), int32."""
        return self.counters[COUNTERS:].view(torch.int32).split((TOTALS, ROW_TICKETS))

    def statistics(self) -> tuple[Tensor, Tensor]:
        """(fired bool [N], counts int64 [3]: nonzeros, overflow, union)."""
        return self.fired.view(torch.bool), self.counters[:3]


def forward(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor, plan: Tensor, w_down_t: Tensor | None, saving: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Saved]:
    """(y, l1, fired, counts) of sparsellm.ops.gated_ffn by the engine of `plan`; if `saving`, what its backward needs.

    Non-gated: w_gate is W_u, and w_up None. Weights of another dtype than x are cast to it. Raises ValueError for
    saving by the row engine, which has no backward, and for more tokens than the tile engine can take.
    """
    engine, compression, per_token = plan.tolist()
    _check(engine, x.shape[0], saving)
    saved = Saved.nothing(x)
    if not x.shape[0]:
        return *_nothing(x, w_down.shape[1]), saved
    x = _readable(x)
    w_gate, w_up = _readable(w_gate, x.dtype), None if w_up is None else _readable(w_up, x.dtype)
    if engine == DENSE:
        h, g, u, *statistics = dense_hidden(x, w_gate, w_up, keep=saving)
        return h @ w_down.to(x.dtype).T, *statistics, saved._replace(first=g.view(-1), second=u.view(-1))
    gate = pack_gate(x, w_gate, compression, for_row=engine == ROW)
    up = (None, None) if w_up is None else (x, w_up)
    if engine == ROW:
        return *row_engine(gate, *up, _transposed(w_down, w_down_t, x.dtype)), *gate.statistics(), saved
    room = tile_room(*gate.wide.shape, per_token)
    y, l1, *made = tile_engine(gate, *up, _transposed(w_down, w_down_t, x.dtype), room=room, saving=saving)
    return y, l1, *gate.statistics(), made[0] if saving else saved


def backward(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor, dy: Tensor, dl1: Tensor, saved: Saved
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(dx, dw_gate, dw_up, dw_down) of `forward`, by the engine that saved. dl1: 0-d float32 or the compute dtype.

    The gradients of float32 weights may be float32, which the tile engine's are, or of the dtype of x.
    """
    m, n = x.shape[0], w_down.shape[1]
    if not m:
        dx, dw_gate, dw_up, dw_down = (None if t is None else torch.zeros_like(t) for t in (x, w_gate, w_up, w_down))
        return dx, dw_gate, dw_up, dw_down
    stored, x, dy = w_down.dtype, _readable(x), _readable(dy)
    w_gate, w_up = _readable(w_gate, x.dtype), None if w_up is None else _readable(w_up, x.dtype)
    dl1 = dl1.float().reshape(1)
    if not len(saved.index):
        g, u = saved.first.view(m, n), None if w_up is None else saved.second.view(m, n)
        dz, du, h = dense_gradient(dy, _readable(w_down, x.dtype), g, u, dl1)
        dx = dz @ w_gate
        if du is not None:
            dx.addmm_(du, w_up)
        return dx, dz.T @ x, None if du is None else du.T @ x, dy.T @ h
    dtype = torch.float32 if stored == torch.float32 else x.dtype
    return tile_backward(x, w_gate, w_up, _transposed(w_down, None, x.dtype), dy, dl1, saved, dtype)


def gate_pack(x: Tensor, w: Tensor, compression: int) -> PackedGate:
    """relu(x w^T) packed (sparsellm.ops.twell): x [M, K] with M > 0, w [N, K]."""
    gate = pack_gate(_readable(x), _readable(w), compression)
    fired, counts = gate.statistics()
    return PackedGate(gate.words, gate.wide, gate.mask, gate.row_counts, fired, *counts)


def pack_gate(x: Tensor, w: Tensor, compression: int, for_row: bool = False) -> Gate:
    """for_row: `row_engine` comes next, to which the counters may be left; row_counts may be undefined."""
    m, n = x.shape[0], w.shape[0]
    column_tiles, sectors = tiles(n, COLUMN_TILE), COLUMN_TILE // compression // SECTOR_WORDS
    room = COUNTED_TOKENS * (2 + column_tiles) // 2  # of the row counts of few tokens (launch.h)
    gate = Gate(
        words=x.new_empty((m, sectors, column_tiles, SECTOR_WORDS), dtype=torch.int32),
        wide=x.new_empty((m, n)),
        mask=x.new_empty((tiles(m, TOKEN_TILE), column_tiles * COLUMN_TILE // WORD_BITS), dtype=torch.int32),
        row_counts=x.new_empty(max(m, room), dtype=torch.int32)[:m],
        fired=x.new_empty(n, dtype=torch.uint8),
        counters=x.new_empty(COUNTERS + SCRATCH, dtype=torch.int64),
    )
    torch.ops.sparsellm_cuda.gate_pack(x, w, *gate, for_row)
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

    def saved(self, ups: Tensor | None) -> Saved:
        """What of this backward needs, and u."""
        tokens = self.slots.new_empty(0, dtype=torch.int32) if self.tokens is None else self.tokens
        # What is read 16 bytes at a time comes first, and so is aligned.
        slots = self.slots.view(torch.int32)
        parts = (self.tiles, self.order, self.items, self.totals, slots, self.starts, tokens)
        nothing = Saved.nothing(self.slots.new_empty(0, dtype=torch.bfloat16))
        index = torch.cat([part.reshape(-1) for part in parts])
        return nothing._replace(first=nothing.first if ups is None else ups, lists=self.lists, index=index)

    @classmethod
    def of_saved(cls, saved: Saved, m: int, n: int) -> "TilePlan":
        """The plan that was saved, but for its rows, which backward does not need."""
        shapes = cls.index_shapes(m, n)
        sizes = [math.prod(shape) for shape in shapes]
        *parts, tokens = saved.index.split([*sizes, len(saved.index) - sum(sizes)])
        of_tiles, order, items, totals, slots, starts = (
            part.view(shape) for part, shape in zip(parts, shapes, strict=True)
        )
        return cls(
            saved.lists.new_empty(0), tokens if len(tokens) else None, slots.view(torch.int16), starts, saved.lists,
            of_tiles, order, items, totals,
        )  # fmt: skip

    @staticmethod
    def index_shapes(m: int, n: int) -> tuple[tuple[int, ...], ...]:
        """Of the saved index, int32: tiles, order, items, totals, slots, starts; the tokens, if ordered, follow."""
        token_tiles, column_tiles = tiles(m, TOKEN_TILE), tiles(n, COLUMN_TILE)
        return (
            (token_tiles, 4),
            (token_tiles, 4),
            (token_tiles * column_tiles, 4),
            (TOTALS,),
            (token_tiles, column_tiles * COLUMN_TILE // 2),
            (token_tiles, 2, column_tiles * COLUMN_TILE // BLOCK + 1),
        )


class NeuronPlan(NamedTuple):
    """The nonzeros by neuron (launch.h: NeuronPlan): int32, `places` int16; frequencies, counts and totals zeroed."""

    frequencies: Tensor
    ranks: Tensor
    neurons: Tensor
    masks: Tensor
    before: Tensor
    slots: Tensor
    counts: Tensor
    bases: Tensor
    starts: Tensor
    tiles: Tensor
    order: Tensor
    at: Tensor
    places: Tensor
    totals: Tensor  # int32 [NEURON_TOTALS]


def tile_plan(gate: Gate, ordered: bool = True, room: int | None = None, long_room: int | None = None) -> TilePlan:
    """Room for the plan of a tile engine, of which only the totals have contents. Arguments as of `tile_engine`."""
    m, _, column_tiles, _ = gate.words.shape
    token_tiles = tiles(m, TOKEN_TILE)
    if room is None:
        room = tile_room(*gate.wide.shape)
    if long_room is None:
        long_room = long_rows_room(m, room)

    def integers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return gate.words.new_empty(shape, dtype=dtype)

    return TilePlan(
        rows=integers(m * ROW_CAPACITY + long_room + 3)[:-3],  # the kernels read whole quads
        tokens=integers(m) if ordered and m >= MIN_ORDERED_TOKENS else None,
        slots=integers(token_tiles, column_tiles * COLUMN_TILE, dtype=torch.int16),
        starts=integers(token_tiles, 2, column_tiles * COLUMN_TILE // BLOCK + 1),
        lists=integers(room),
        tiles=integers(token_tiles, 4),
        order=integers(token_tiles, 4),
        items=integers(token_tiles * column_tiles, 4),
        totals=gate.scratch()[0],
    )


def tile_room(m: int, n: int, per_token: int = LISTED_PER_TOKEN) -> int:
    """How many nonzeros the tile engine's lists hold: all there can be if ALL_FIT, else `per_token` of each token."""
    return m * n if m * n <= ALL_FIT else min(m * min(per_token, n), MAX_WORDS)


def long_rows_room(m: int, room: int) -> int:
    """How many of the nonzeros that the lists hold may be in rows of more than ROW_CAPACITY."""
    return max(0, min(room, MAX_WORDS - m * ROW_CAPACITY))


def may_leave_a_rest(m: int, n: int, room: int, long_room: int) -> bool:
    """Whether some [M, N] has more nonzeros than there is room for: then all is left to row_rest and rest_backward."""
    return min(room, long_room) < m * n


def tile_saved_bytes(m: int, n: int, per_token: int, gated: bool) -> int:
    """What `forward` by the tile engine saves (`Saved`)."""
    if not m:
        return 0
    index = sum(map(math.prod, TilePlan.index_shapes(m, n))) + (m if m >= MIN_ORDERED_TOKENS else 0)
    return 4 * index + (6 if gated else 4) * tile_room(m, n, per_token)


def tile_engine(
    gate: Gate,
    x: Tensor | None,
    w_up: Tensor | None,
    w_down_t: Tensor,
    ordered: bool = True,
    room: int | None = None,
    long_room: int | None = None,
    saving: bool = False,
) -> tuple[Tensor, ...]:
    """For each tile of 128 tokens, products over the neurons that fire in it. w_down_t [N, K].

    ordered: tokens that fire the same neurons share a tile, and gate.counters counts the union of those tiles; else
    128 tokens in a row do. room: how many nonzeros there may be in all (`tile_room` unless given); long_room: in rows
    of more than ROW_CAPACITY (`long_rows_room` unless given, which `tile_backward` takes for granted); if there are
    more, the row engine does everything, and gate.counters' overflow grows by M. saving: returns what `tile_backward`
    needs as well.
    """
    ops = torch.ops.sparsellm_cuda
    n, k = w_down_t.shape
    m, _, column_tiles, _ = gate.words.shape
    plan = tile_plan(gate, ordered, room, long_room)
    y = gate.wide.new_empty((m, k))
    l1_partials, l1 = _l1(gate.wide, tiles(m, TOKEN_TILE) * column_tiles * CONSUMER_WARPS)
    ops.pack_rows(*gate, *plan)
    if plan.tokens is not None:
        workspace = _bytes(y, ops.order_workspace(m, n))
        ops.token_order(plan.rows, gate.row_counts, n, workspace, plan.tokens)
    ops.tile_plan(*gate, *plan)
    ups = x.new_empty(len(plan.lists)) if saving and x is not None else None
    hidden = plan.lists if ups is None else torch.empty_like(plan.lists)  # g is needed again only if it is saved
    ops.tile_up(x, w_up, m, n, *plan, hidden, ups, l1_partials, l1)
    ops.tile_spmm(hidden, w_down_t, None, None, plan.slots, plan.starts, plan.order, plan.tokens, y)
    if may_leave_a_rest(m, n, len(plan.lists), len(plan.rows) - m * ROW_CAPACITY):
        workspace, tickets = _bytes(y, ops.row_rest_workspace(m, k)), gate.scratch()[1]
        ops.row_rest(x, w_up, w_down_t, *gate, plan.totals, workspace, tickets, l1, y)
    return (y, l1, plan.saved(ups)) if saving else (y, l1)


def tile_backward(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down_t: Tensor, dy: Tensor, dl1: Tensor, saved: Saved,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """The gradients by what the tile engine saved; w_down_t [N, K], dl1 float32 [1]. dtype: of those of the weights."""
    ops = torch.ops.sparsellm_cuda
    m, n = x.shape[0], w_down_t.shape[0]
    plan = TilePlan.of_saved(saved, m, n)
    token_tiles, neuron_tiles, capacity = tiles(m, TOKEN_TILE), tiles(n, TOKEN_TILE), len(plan.lists)

    def integers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return saved.lists.new_empty(shape, dtype=dtype)

    zeroed = (n, neuron_tiles * 2 * token_tiles * 2, NEURON_TOTALS, 2, SPLIT_UNITS * 4 + 1, 2)
    frequencies, counts, totals, drawn, tickets, arrivals = _zeros(
        x.device, *((length, torch.int32) for length in zeroed)
    )
    by_neuron = NeuronPlan(
        frequencies=frequencies,
        ranks=integers(n),
        neurons=integers(n),
        masks=integers(neuron_tiles * 2, token_tiles * 4),
        before=integers(neuron_tiles, 3, token_tiles * 4),
        slots=integers(neuron_tiles, token_tiles * TOKEN_TILE),
        counts=counts.view(neuron_tiles * 2, token_tiles * 2),
        bases=integers(token_tiles, neuron_tiles * 2 * 6),
        starts=integers(neuron_tiles, 2, token_tiles * 2 + 1),
        tiles=integers(neuron_tiles, 4),
        order=integers(neuron_tiles + SPLIT_UNITS, 4),
        at=integers(capacity),
        places=integers(capacity, dtype=torch.int16),
        totals=totals,
    )
    gated = w_up is not None
    ups = saved.first if gated else None
    dz, dz_by_neuron, h_by_neuron = (integers(capacity) for _ in range(3))
    du, du_by_neuron = (integers(capacity) for _ in range(2)) if gated else (None, None)
    ops.neuron_plan(m, x.shape[1], n, *plan, *by_neuron)
    ops.tile_gradient(
        dy, w_down_t, *plan, ups, dl1, dz, du, by_neuron.at, by_neuron.places, dz_by_neuron, du_by_neuron, h_by_neuron,
        drawn,
    )  # fmt: skip
    dx, dw_gate, dw_down_t = torch.empty_like(x), *(torch.empty_like(w_gate, dtype=dtype) for _ in range(2))
    dw_up = torch.empty_like(dw_gate) if gated else None
    ops.tile_spmm(dz, w_gate, du, w_up, plan.slots, plan.starts, plan.order, plan.tokens, dx)
    partials = x.new_empty(SPLIT_UNITS * 2 * TOKEN_TILE * COLUMN_TILE, dtype=torch.float32)
    places = neuron_tiles * token_tiles * TOKEN_TILE**2  # of an operand
    first, second = x.new_empty(places), x.new_empty(places) if gated else None
    ops.tile_operands(dz_by_neuron, du_by_neuron, m, n, *by_neuron, first, second)
    ops.tile_weights(first, second, x, *by_neuron, partials, tickets, dw_gate, dw_up)
    ops.tile_operands(h_by_neuron, None, m, n, *by_neuron, first, None)
    ops.tile_weights(first, None, dy, *by_neuron, partials, tickets, dw_down_t, None)
    if may_leave_a_rest(m, n, capacity, long_rows_room(m, capacity)):
        planes = _bytes(x, ops.rest_backward_workspace(m, n))
        weights, theirs = (w_gate, w_up, w_down_t), (dw_gate, dw_up, dw_down_t)
        ops.rest_backward(plan.totals, x, dy, *weights, dl1, dx, *theirs, planes, arrivals)
    return dx, dw_gate, dw_up, _transpose(dw_down_t, dtype)


def row_engine(gate: Gate, x: Tensor | None, w_up: Tensor | None, w_down_t: Tensor) -> tuple[Tensor, Tensor]:
    """For each token, the weight rows of its own neurons. gate: of pack_gate. w_down_t [N, K]."""
    ops = torch.ops.sparsellm_cuda
    n, k = w_down_t.shape
    m = gate.words.shape[0]
    workspace, tickets = _bytes(gate.words, ops.row_workspace(m, k, n)), gate.scratch()[1]
    y, l1 = gate.wide.new_empty((m, k)), gate.wide.new_empty((), dtype=torch.float32)
    ops.row_ffn(x, w_up, w_down_t, *gate, workspace, tickets, l1, y)
    return y, l1


def dense_hidden(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, keep: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(h, g, u, l1, fired, counts): h = relu(x w_gate^T) * u [M, N], u = x w_up^T; non-gated, without w_up, no u.

    g and u, empty unless they are to be kept, are for `dense_gradient`. Many tokens: all in one kernel; few: the
    products are cuBLAS's, and g is before the ReLU.
    """
    m, n = x.shape[0], w_gate.shape[0]
    if m < MIN_FUSED_TOKENS:
        g, u = x @ w_gate.T, None if w_up is None else x @ w_up.T
        h, *statistics = pointwise(g, u, torch.empty_like(g) if keep else g)
    else:
        h = x.new_empty((m, n))
        g, u = (torch.empty_like(h) if keep and some else None for some in (True, w_up is not None))
        l1_partials, l1, fired, counters = _statistics(h, 2 * tiles(n, COLUMN_TILE))
        torch.ops.sparsellm_cuda.dense_hidden(x, w_gate, w_up, g, u, h, l1_partials, l1, fired, counters)
        statistics = [l1, fired.view(torch.bool), counters[:3]]
    g, u = (x.new_empty(0) if t is None or not keep else t for t in (g, u))
    return h, g, u, *statistics


def pointwise(z: Tensor, u: Tensor | None, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(h, l1, fired, counts): h = relu(z) * u, or relu(z) without u, [M, N], to `h`, which may be z."""
    l1_partials, l1, fired, counters = _statistics(z, tiles(z.shape[1], POINTWISE_COLUMNS))
    torch.ops.sparsellm_cuda.pointwise(z, u, h, l1_partials, l1, fired, counters)
    return h, l1, fired.view(torch.bool), counters[:3]


def _statistics(h: Tensor, parts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(partial sums of l1, l1, fired, counters) for the kernels that make h [M, N], a token tile's in `parts` parts."""
    m, n = h.shape
    l1_partials, l1 = _l1(h, tiles(m, TOKEN_TILE) * parts)
    fired, counters = h.new_empty(n, dtype=torch.uint8), h.new_empty(DENSE_COUNTERS, dtype=torch.int64)
    return l1_partials, l1, fired, counters


def dense_gradient(
    dy: Tensor, w_down: Tensor, g: Tensor, u: Tensor | None, dl1: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(dz, du, h) [M, N] of dh = dy w_down, g and u of `dense_hidden`, and dl1 float32 [1]; w_down [K, N]."""
    du, h = None if u is None else torch.empty_like(u), torch.empty_like(g)
    if len(dy) < MIN_FUSED_TOKENS:
        dz = dy @ w_down
        torch.ops.sparsellm_cuda.pointwise_gradient(g, u, dz, dl1, dz, du, h)
    else:
        dz = torch.empty_like(g)
        counters = dy.new_empty(COUNTERS, dtype=torch.int64)
        torch.ops.sparsellm_cuda.dense_gradient(dy, w_down, g, u, dl1, dz, du, h, counters)
    return dz, du, h


def _check(engine: int, m: int, saving: bool) -> None:
    """Raise ValueError where the engine cannot take M tokens, or save."""
    if engine == ROW and saving:
        raise ValueError("plan[0] is 1 (row): it should be 0 (dense) or 2 (tile) where gradients are asked for")
    most = MAX_TOKENS if saving else MAX_WORDS // ROW_CAPACITY
    if engine == TILE and m > most:
        with_gradients = " with gradients" if saving else ""
        raise ValueError(f"x has {m:,} tokens: for the tile engine{with_gradients} it should have up to {most:,}")


def _nothing(x: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    l1, counts = x.new_zeros((), dtype=torch.float32), x.new_zeros(3, dtype=torch.int64)
    return torch.zeros_like(x), l1, x.new_zeros(n, dtype=torch.bool), counts


def _readable(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor, contiguous and aligned, of its own dtype or `dtype`: itself, or else a copy."""
    tensor = tensor.to(dtype or tensor.dtype).contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def _transposed(w_down: Tensor, w_down_t: Tensor | None, dtype: torch.dtype) -> Tensor:
    """w_down_t, or w_down by neuron, in `dtype`."""
    if w_down_t is not None:
        return _readable(w_down_t, dtype)
    return _transpose(_readable(w_down, None if w_down.dtype == torch.float32 else dtype), dtype)


def _transpose(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    transposed = matrix.new_empty(tuple(reversed(matrix.shape)), dtype=dtype)
    torch.ops.sparsellm_cuda.transpose(matrix, transposed)
    return transposed


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
