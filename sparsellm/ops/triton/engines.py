"""The driver of the Triton kernels: which kernels run, in which order, on which memory.

Letters: M tokens, K model width, N neurons, T tiles. `forward` and `backward` have the contracts of those in
sparsellm.ops.cuda; callers (sparsellm.ops.feedforward) must have checked the inputs. Nothing here waits for the device.
K and N are compiled into the kernels, but M is not, so a new number of tokens compiles nothing.

The stages of the sparse engines, which differ only in the tokens per tile (tile: 128, row: 16):

    forward     z = x W_g^T by torch; mark: a bit for each nonzero; for many tokens, an order (clusters.py); plan: each
                tile's union; sampled: u; keep: h, and the values saved for backward; gathered: y
    backward    sampled: dh; gradient: dz, du and h; gathered: dx; turn and plan: the transposed bits, and tiles of
                neurons that fire about equally often; regroup: dz, du and h by these tiles; gathered: dW

z and the tile matrices can hold any pattern, so the forward pass never overflows. The saved buffer holds `room`
nonzeros per token; after a call with more, backward recomputes z and u where neurons fire.
"""

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from sparsellm.ops import borders, cuda
from sparsellm.ops.accumulation import shared
from sparsellm.ops.borders import ALONE
from sparsellm.ops.cuda import COUNTS, Forward, cast_weight, readable
from sparsellm.ops.plan import Engine, Plan
from sparsellm.ops.triton import clusters, dense, nonzeros, plan, products, tuning
from sparsellm.ops.triton.transpose import transposed
from sparsellm.ops.triton.tuning import FEW, FEWEST_SLOTS, PITCH_MULTIPLE, TOKENS, Shape
from sparsellm.ops.twell import tiles

ARRAY_ALIGNMENT = 256  # bytes; alignment of the arrays of a saved buffer
ROWS = 1  # tokens per program of `keep` and `gradient`; divides the tokens of a tile
REGROUP = {"ROWS": 16, "WORDS": 8, "num_warps": 1}
REGROUP_PROGRAMS = 16  # per program of a matmul, which needs more registers and shared memory
MARK = {"ROWS": 8, "WORDS": 32}
PLAN = {"ROWS": 16, "WORDS": 128}
TURN = {"GROUPS": 4, "WORDS": 4}
PARTS = 32  # the tokens are cut into this many parts; neurons that fire mostly in the same part count as similar
CLASSIFY = {"COLUMNS": 64}
HIDDEN = {"ROWS": 4, "COLUMNS": 256}
FLAT = {"BLOCK": 2048}
RANK = {"ROWS": 8, "COLUMNS": 2048}


def orders(m: int, saving: bool) -> bool:
    """Whether the tile engine orders m tokens, in a forward pass that saves for backward (`saving`) or one that does
    not."""
    return borders.orders(m if saving else m // ALONE)


class Unions(NamedTuple):
    """The unions of tiles of rows, as the kernel `plan` writes them and the matmuls read them."""

    tile: int  # rows per tile
    block: int  # slots per item
    pitch: int  # columns, rounded up
    order: Tensor | None  # int32 [rows]: the row at each position; None: not reordered
    slots: Tensor  # int32 [T, pitch]
    places: Tensor  # int32 [T, pitch]
    sizes: Tensor  # int32 [T]
    longest: Tensor  # int32 [T]
    items: Tensor  # int32 [T pitch / block]
    totals: Tensor  # int64 [TOTALS]


class Kept(NamedTuple):
    """The arrays of a saved buffer, in its order."""

    totals: Tensor  # int64 [TOTALS]
    bits: Tensor  # int32 [M, ceil(N / 32)]
    slots: Tensor  # slots to items: as in Unions
    places: Tensor
    sizes: Tensor
    longest: Tensor
    items: Tensor
    order: Tensor  # int32 [M]: the token at each position; [0] if tokens are not ordered
    positions: Tensor  # int32 [M]: the position of each token; [0] if tokens are not ordered
    starts: Tensor  # int64 [ceil(M / ROWS)]: where the nonzeros of each ROWS positions start in gates and ups
    gates: Tensor  # [capacity]: g of each nonzero
    ups: Tensor  # [capacity]: u of each nonzero; [0] in a non-gated layer


def _where_x_is(run: Callable[..., Any]) -> Callable[..., Any]:
    """Make the device of the first argument current during `run`: Triton launches kernels on the current device."""

    @wraps(run)
    def there(x: Tensor, *arguments: Any) -> Any:
        with torch.cuda.device_of(x):
            return run(x, *arguments)

    return there


@_where_x_is
def forward(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    of: Plan,
    w_down_t: Tensor | None,
    saving: bool,
    counting: bool = True,
) -> Forward:
    """Has the contract of sparsellm.ops.cuda.forward."""
    if of.engine == Engine.row and saving:
        raise ValueError("the plan's engine is row, which has no backward: for gradients it should be dense or"
                         " tile")  # fmt: skip
    m, n = x.shape[0], w_down.shape[1]
    if not m:
        return cuda.nothing(x, n)
    x, w_up = readable(x), cast_weight(w_up, x.dtype)
    w_gate = None if w_gate is None else cast_weight(w_gate, x.dtype)
    if of.engine == Engine.dense:
        return _dense_forward(x, w_gate, w_up, cast_weight(w_down, x.dtype), saving)
    w_down_t = _by_neuron(w_down, w_down_t, x.dtype)
    sizes, programs = tuning.of(x.device)
    few = of.engine == Engine.row
    z = x @ (w_up if w_gate is None else w_gate).T
    tile, shape = (FEW, sizes.few_sampled) if few else (TOKENS, sizes.sampled)
    capacity = _capacity(m, n, of.room) if saving else 0
    layout = _layout(m, n, w_gate is not None, capacity, tile, not few and orders(m, saving), x.dtype)
    saved = x.new_empty(_length(layout), dtype=torch.uint8)
    kept = _arrays(saved, layout)
    totals, fired = kept.totals.zero_(), x.new_zeros(n, dtype=torch.uint8)
    plan.mark[tiles(m, MARK["ROWS"]), tiles(n, 32 * MARK["WORDS"])](z, kept.bits, m, N=n, **MARK)
    unions = _unions_of_tokens(kept, tile, shape)
    if unions.order is not None:
        clusters.order_tokens(kept.bits, kept.order, kept.positions)
    _plan(kept.bits, unions, m, n, None if few else fired)  # after ordering: totals count the ordered tiles' unions
    if few:  # tiles of the row engine have 16 tokens, but the counted union is always that of 128-token tiles
        _plan(kept.bits, unions._replace(tile=TOKENS), m, n, fired, listing=False)
    hidden, *u = (x.new_empty((len(kept.sizes) * unions.tile, unions.pitch)) for _ in range(1 if w_gate is None else 2))
    if u:
        _sampled(unions, shape, programs, x, w_up, u[0], m)
    sums = x.new_empty(len(kept.starts), dtype=torch.float32)
    nonzeros.keep[len(kept.starts),](
        z, u[0] if u else hidden, hidden, kept.bits, unions.order, kept.places, kept.sizes, totals, sums, kept.gates,
        kept.ups, kept.starts, m, tiles(n, 32), capacity, GATED=bool(u), SAVING=saving, **_by_token(unions, n),
    )  # fmt: skip
    y = torch.empty_like(x)
    _gathered(unions, sizes.few_gathered if few else sizes.gathered, hidden, w_down_t, y, m)
    saved = saved if saving else saved.new_empty(0)
    return y, sums.sum(), fired.view(torch.bool), totals[:COUNTS].clone(), saved


@_where_x_is
def backward(
    x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, dy: Tensor, dl1: Tensor, saved: Tensor
) -> list[Tensor]:
    """Has the contract of sparsellm.ops.cuda.backward."""
    m, n = x.shape[0], w_down.shape[1]
    if not m:
        return [torch.zeros_like(t) for t in (x, w_gate, w_up, w_down) if t is not None]
    engine, float_weights = cuda.engine_of(saved), w_down.dtype == torch.float32
    x, dy, dl1, w_up = readable(x), readable(dy), readable(dl1.float().reshape(1)), cast_weight(w_up, x.dtype)
    w_gate = None if w_gate is None else cast_weight(w_gate, x.dtype)
    if engine == Engine.dense:
        return _dense_backward(x, w_gate, w_up, cast_weight(w_down, x.dtype), dy, dl1, saved)
    k, gated, (sizes, programs) = x.shape[1], w_gate is not None, tuning.of(x.device)
    w_down_t, first = _by_neuron(w_down, None, x.dtype), w_up if w_gate is None else w_gate
    kept = _found(saved, x, n, gated)
    unions = _unions_of_tokens(kept, TOKENS, sizes.sampled)
    hidden, dz, *du = (x.new_empty((len(kept.sizes) * TOKENS, unions.pitch)) for _ in range(3 if gated else 2))
    by_neuron, bits = _by_neurons(kept, m, n, sizes.neurons)
    of_neurons = _rounded(n, PITCH_MULTIPLE), by_neuron.pitch  # the shape of the tile matrices by neuron
    stacked, turned = x.new_empty((2 if gated else 1, *of_neurons)), x.new_empty(of_neurons)
    z, u = stacked[0], stacked[-1]  # z and u occupy the memory of `stacked` until `regroup` overwrites them
    capacity = len(kept.gates)
    _sampled(unions, sizes.sampled, programs, dy, w_down_t, hidden, m)
    _sampled(unions, sizes.sampled, programs, x, first, z, m, unless=capacity)
    if gated:
        _sampled(unions, sizes.sampled, programs, x, w_up, u, m, unless=capacity)
    nonzeros.gradient[len(kept.starts),](
        hidden, dz, du[0] if gated else dz, z, u, dl1, kept.bits, unions.order, kept.places, kept.sizes, kept.totals,
        kept.gates, kept.ups, kept.starts, m, tiles(n, 32), capacity, GATED=gated, **_by_token(unions, n),
    )  # fmt: skip
    dx = torch.empty_like(x)
    _gathered(unions, sizes.gathered, dz, first, dx, m, (du[0], w_up) if gated else None)

    nonzeros.regroup[REGROUP_PROGRAMS * programs,](
        dz, du[0] if gated else dz, hidden, bits, kept.places, None if unions.order is None else kept.positions,
        by_neuron.order, by_neuron.slots, by_neuron.places, by_neuron.sizes, by_neuron.items, by_neuron.totals, stacked,
        turned, m, by_neuron.pitch, N=n, PITCH=unions.pitch, TOKENS=TOKENS, TILE=by_neuron.tile,
        BLOCK=by_neuron.block, GATED=gated, **REGROUP,
    )  # fmt: skip
    weights = torch.float32 if float_weights else x.dtype
    *firsts, dw_down_t = (x.new_empty((n, k), dtype=weights) for _ in range(3 if gated else 2))
    _gathered(by_neuron, sizes.weights, stacked, x, firsts[0], n, more_out=firsts[1] if gated else None)
    _gathered(by_neuron, sizes.down_weights, turned, dy, dw_down_t, n)
    return [dx, *firsts, transposed(dw_down_t, weights)]


def tile_saved_bytes(m: int, n: int, room: int, gated: bool) -> int:
    """The number of bytes that the tile engine saves for backward, in bfloat16."""
    if not m:
        return 0
    return _length(_layout(m, n, gated, _capacity(m, n, room), TOKENS, orders(m, True), torch.bfloat16))


# Stages.


def _launch(shape: Shape) -> dict[str, int]:
    return {"DEPTH": shape.depth, "num_warps": shape.warps, "num_stages": shape.stages}


def _by_token(unions: Unions, n: int) -> dict[str, Any]:
    """The parameters shared by `keep` and `gradient`. num_warps gives each thread four words of bits."""
    rows, words = min(ROWS, unions.tile), triton.next_power_of_2(tiles(n, 32))
    return {
        "N": n, "PITCH": unions.pitch, "TILE": unions.tile, "ROWS": rows, "WORDS": words, "BLOCK": PITCH_MULTIPLE,
        "num_warps": min(32, max(1, rows * words // 128)),
    }  # fmt: skip


def _unions_of_tokens(kept: Kept, tile: int, shape: Shape) -> Unions:
    ordered = kept.order if len(kept.order) else None
    return Unions(tile, shape.columns, kept.slots.shape[1], ordered, *kept[2:7], kept.totals)


def _plan(
    bits: Tensor, unions: Unions, rows: int, columns: int, fired: Tensor | None, listing: bool = True,
    names: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill the arrays of `unions`. fired: if not None, set to 1 for each column that fires, and totals are counted too.
    names: if not None, what the slots contain instead of column numbers."""
    plan.plan[tiles(rows, unions.tile),](
        bits, unions.order, names, unions.slots, unions.places, unions.sizes, unions.items, unions.totals, fired, rows,
        columns, unions.pitch, TILE=unions.tile, BLOCK=unions.block, LISTING=listing, num_warps=8, **PLAN,
    )  # fmt: skip
    if listing:
        _descending(unions.sizes, unions.longest)


def _descending(keys: Tensor, order: Tensor) -> None:
    plan.descending[tiles(len(keys), RANK["ROWS"]),](keys, order, len(keys), **RANK)


def _by_neurons(kept: Kept, m: int, n: int, tile: int) -> tuple[Unions, Tensor]:
    """(the unions of tiles of `tile` similar neurons, whose slots are tokens; the bits by neuron and position)"""

    def integers(*shape: int) -> Tensor:
        return kept.bits.new_empty(shape)

    turned, counts, keys, order = integers(n, tiles(m, 32)), kept.bits.new_zeros((PARTS, n)), integers(n), integers(n)
    grid = tiles(m, 32 * TURN["GROUPS"]), tiles(n, 32 * TURN["WORDS"])
    named = kept.order if len(kept.order) else None
    plan.turn[grid](kept.bits, named, turned, counts, m, n, PARTS=PARTS, num_warps=8, **TURN)
    plan.classify[tiles(n, CLASSIFY["COLUMNS"]),](counts, keys, n, PARTS=PARTS, **CLASSIFY)
    _descending(keys, order)
    count, pitch, block = tiles(n, tile), _rounded(m, PITCH_MULTIPLE), PITCH_MULTIPLE
    unions = Unions(
        tile, block, pitch, order, integers(count, pitch), integers(count, pitch), integers(count), integers(count),
        integers(count * pitch // block), kept.bits.new_zeros(plan.TOTALS, dtype=torch.int64),
    )  # fmt: skip
    _plan(turned, unions, n, m, None, names=named)
    return unions, turned


def _sampled(
    unions: Unions, shape: Shape, programs: int, x: Tensor, w: Tensor, out: Tensor, m: int, unless: int = -1
) -> None:
    """Launch `sampled`. unless: a call with at most this many nonzeros is skipped."""
    products.sampled[programs,](
        x, w, unions.order, unions.slots, unions.sizes, unions.items, unions.totals, out, m, unless, K=x.shape[1],
        PITCH=unions.pitch, TILE=unions.tile, BLOCK=shape.columns, **_launch(shape),
    )  # fmt: skip


def _gathered(
    unions: Unions, shape: Shape, a: Tensor, b: Tensor, out: Tensor, rows: int,
    more: tuple[Tensor, Tensor] | None = None, more_out: Tensor | None = None,
) -> None:  # fmt: skip
    """out = a b (and more_out, if `a` has two matrices stacked), plus the product of the pair `more`, if not None."""
    k = b.shape[1]
    products.gathered[len(unions.sizes) * tiles(k, shape.columns),](
        a, b, *(more or (None, None)), unions.slots, unions.sizes, unions.longest, unions.order, out, more_out, rows,
        unions.pitch, K=k, TILE=unions.tile, COLUMNS=shape.columns, **_launch(shape),
    )  # fmt: skip


def _by_neuron(w_down: Tensor, w_down_t: Tensor | None, dtype: torch.dtype) -> Tensor:
    """w_down_t, or w_down transposed, in `dtype`."""
    if w_down_t is not None:
        return readable(w_down_t, dtype)
    return shared(w_down, "by neuron", lambda: transposed(readable(w_down), dtype))


# The saved buffer.


def _rounded(length: int, multiple: int) -> int:
    return tiles(length, multiple) * multiple


def _capacity(m: int, n: int, room: int) -> int:
    """The number of nonzeros that a saved buffer holds: a multiple of ARRAY_ALIGNMENT, so that backward can compute the
    capacity from the buffer's length."""
    return _rounded(borders.capacity(m, n, room), ARRAY_ALIGNMENT)


Layout = list[tuple[tuple[int, ...], torch.dtype, int]]  # (shape, dtype, bytes) of each array of Kept


def _layout(m: int, n: int, gated: bool, capacity: int, tile: int, ordered: bool, dtype: torch.dtype) -> Layout:
    pitch, count = _rounded(n, PITCH_MULTIPLE), tiles(m, tile)
    positions = m if ordered else 0
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((plan.TOTALS,), torch.int64), ((m, tiles(n, 32)), torch.int32),
        ((count, pitch), torch.int32), ((count, pitch), torch.int32), ((count,), torch.int32), ((count,), torch.int32),
        ((count * pitch // FEWEST_SLOTS,), torch.int32), ((positions,), torch.int32), ((positions,), torch.int32),
        ((tiles(m, min(ROWS, tile)),), torch.int64),
        ((capacity,), dtype), ((capacity if gated else 0,), dtype),
    ]  # fmt: skip
    return [(shape, of, _rounded(math.prod(shape) * of.itemsize, ARRAY_ALIGNMENT)) for shape, of in shapes]


def _length(layout: Layout) -> int:
    """The bytes of a saved buffer. The remainder modulo ARRAY_ALIGNMENT identifies the engine (cuda.engine_of)."""
    return sum(size for *_, size in layout) + int(Engine.tile)


def _arrays(saved: Tensor, layout: Layout) -> Kept:
    found, at = [], 0
    for shape, dtype, size in layout:
        found.append(saved[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape))
        at += size
    return Kept(*found)


def _found(saved: Tensor, x: Tensor, n: int, gated: bool) -> Kept:
    """The arrays of a buffer that `forward` filled. Raises ValueError if `saved` has any other length."""
    ordered = orders(len(x), True)
    fixed = _length(_layout(len(x), n, gated, 0, TOKENS, ordered, x.dtype))
    capacity, left = divmod(saved.numel() - fixed, x.dtype.itemsize * (2 if gated else 1))
    if capacity < 0 or left or capacity % ARRAY_ALIGNMENT:
        raise ValueError(
            f"saved has {saved.numel():,} bytes: it should have {fixed:,} bytes plus {x.dtype.itemsize} per nonzero"
            f" (twice that if gated), for {len(x):,} tokens and {n:,} neurons"
        )
    return _arrays(saved, _layout(len(x), n, gated, capacity, TOKENS, ordered, x.dtype))


# The dense engine.


def _dense_forward(x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, saving: bool) -> Forward:
    m, n, gated = len(x), len(w_up), w_gate is not None
    planes = x.new_empty((2 if gated else 1, m, n))
    z = torch.mm(x, (w_up if w_gate is None else w_gate).T, out=planes[0])
    u = torch.mm(x, w_up.T, out=planes[1]) if gated else z
    h = torch.empty_like(z) if saving else z
    grid = tiles(m, TOKENS), tiles(n, HIDDEN["COLUMNS"])
    totals, fired = x.new_zeros(plan.TOTALS, dtype=torch.int64), x.new_zeros(n, dtype=torch.uint8)
    sums = x.new_empty(grid, dtype=torch.float32)
    dense.hidden[grid](z, u, h, fired, sums, totals, m, N=n, TOKENS=TOKENS, GATED=gated, **HIDDEN)
    saved = planes.view(torch.uint8).flatten() if saving else x.new_empty(0, dtype=torch.uint8)
    return h @ w_down.T, sums.sum(), fired.view(torch.bool), totals[:COUNTS].clone(), saved


def _dense_backward(
    x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, dy: Tensor, dl1: Tensor, saved: Tensor
) -> list[Tensor]:
    z, *u = cuda.planes_of(saved, 1 if w_gate is None else 2, len(x), len(w_up), x.dtype)
    dz = dy @ w_down
    h, du = torch.empty_like(z), torch.empty_like(z) if u else z
    grid = (tiles(z.numel(), FLAT["BLOCK"]),)
    dense.hidden_gradient[grid](z, u[0] if u else z, dz, dl1, dz, du, h, z.numel() // 8, GATED=bool(u), **FLAT)
    if w_gate is None:
        return [dz @ w_up, dz.T @ x, dy.T @ h]
    return [(dz @ w_gate).addmm_(du, w_up), dz.T @ x, du.T @ x, dy.T @ h]
