"""Which engine computes a feedforward layer: a pure policy over what an earlier call of the same layer counted.

    choose_engine            a forward pass
    choose_training_engine   the forward and the backward pass of a micro-batch
    room_for                 how many nonzeros per token the tile engine is given room for
    capacity, orders, fuses  what a call of so many tokens is given: room in lists, an order of tokens, fused kernels

The estimates are seconds on one H200 for what follows the gate product, which all engines share, or nearly: packing it
costs the sparse engines a little. The constants are fitted to scripts/bench_ffn.py; docs/LOG.md, "Constants now in
force", names the measurement behind each.
Letters: M tokens, K model width, N neurons.
"""

import math

from sparsellm.ops.plan import ROOM, Engine
from sparsellm.ops.twell import TOKEN_TILE

PACKING_SECONDS = 15e-6  # of the last packed gate tiles, which no further product hides
TILE_FLOPS = 760e12  # per second, gathered products of the tile engine
TILE_SECONDS = 50e-6  # lists, order and plan of any batch of MIN_ORDERED_TOKENS tokens or more
UNORDERED_SECONDS = 28e-6  # lists and plan of fewer; this and the next were measured at 2,048 and 4,096
UNORDERED_SECONDS_PER_MEAN = 0.25e-6  # and their fullest tile's last items, by nonzeros per token
TILE_SECONDS_PER_TOKEN = 2.3e-9
TILE_SECONDS_PER_NONZERO = 0.036e-9
ROW_SECONDS = 20e-6  # of any batch
ROW_SECONDS_PER_NONZERO = 0.95e-9  # at ROW_WIDTH
ROW_WIDTH = 2048
DENSE_SECONDS = 30e-6  # of any batch: its products' last tiles, which leave multiprocessors idle
DENSE_FLOPS = 860e12  # per second, the other products
FEW_TOKENS = 64  # at most: the row engine reads one weight matrix and little of two, dense reads three
FEW_TOKENS_MAX_DENSITY = 0.15  # of one token; above, the row engine takes longer than the dense products
FEW_TOKENS_MAX_SHARE = 1.5  # nonzeros of all tokens, of N: two weight rows for each, and dense reads 2 N in order
FEWEST_TOKENS = 16  # up to which dense itself takes less time
FEWEST_TOKENS_MAX_SHARE = 0.7  # the same share for them
MANY_TOKENS = 2048  # at least: in between, cuBLAS is faster than anything that packs first
TILE_MAX_NONZEROS = 320  # per token of LARGE_BATCH tokens or more: it was measured with up to 300
LARGE_BATCH = 16_384  # tokens
# Fewer are left in their order: ordering would take longer than it saves (LOG.md, "Ordering tokens by the neurons they
# fire").
MIN_ORDERED_TOKENS = 16_384
SMALL_BATCH_MAX_NONZEROS = 256  # of fewer: measured with up to 116, and few full tiles leave multiprocessors idle
ALL_FIT = 1 << 22  # activations of a call, M N, up to which the tile engine's lists hold them all, whatever the room
# Of fewer, cuBLAS and elementwise kernels mostly take less time, of more mostly not (LOG.md, "From how many tokens on
# the fused dense kernels pay").
MIN_FUSED_TOKENS = 1344
# Real batches differ by several times, and one without room takes ten times as long or more.
ROOM_MARGIN = 4
ROOM_MULTIPLE = 32  # nonzeros per token
TILE_MARGIN = 0.03  # of dense's time, that the tile engine must win before it is chosen

# Forward and backward, gated (a non-gated layer has five eighths of the dense products and three fifths of the others).
DENSE_TRAINING_FLOPS = 800e12  # per second, all products and what is done where they end
DENSE_TRAINING_PRODUCTS = 8  # forward 2, dh, dx 2, the weights 3
TILE_TRAINING_PRODUCTS = 5  # over the union: forward 2, dh, dx 2; the weights' gradients are counted by nonzero
TILE_TRAINING_FLOPS = 490e12  # per second, these
TRAINING_SECONDS = 170e-6  # lists, order and plans of any micro-batch, and the transposes
TRAINING_SECONDS_PER_TOKEN = 19e-9
TRAINING_SECONDS_PER_NONZERO = 0.115e-9  # at ROW_WIDTH


def room_for(per_token: float) -> int:
    """A plan's room, nonzeros per token, where a batch had `per_token`: for several times as many."""
    room = ROOM_MULTIPLE * math.ceil(ROOM_MARGIN * min(per_token, TILE_MAX_NONZEROS) / ROOM_MULTIPLE)
    return max(room, ROOM)


def capacity(tokens: int, neurons: int, room: int) -> int:
    """How many nonzeros the tile engine's lists hold at least, for `room` per token."""
    return tokens * (neurons if tokens * neurons <= ALL_FIT else min(room, neurons))


def orders(tokens: int) -> bool:
    """Whether the tile engine brings together tokens that fire the same neurons."""
    return tokens >= MIN_ORDERED_TOKENS


def fuses(tokens: int) -> bool:
    """Whether the dense engine computes its elementwise half where the products end."""
    return tokens >= MIN_FUSED_TOKENS


def choose_engine(
    tokens: int, width: int, neurons: int, nnz: float, union: float, current: Engine | None = None
) -> Engine:
    """The engine for `tokens` tokens of a layer with `width` K and `neurons` N.

    nnz: nonzero activations; union: neurons active in each 128-token tile; both summed over `tokens` tokens, as
    FeedForwardOutput counts them (union < 0: not measured, so no tile engine). `current`: the engine now in use; the
    tile engine stays while it is the fastest, and is entered only if it beats dense by TILE_MARGIN.
    """
    if tokens <= FEW_TOKENS:
        share = FEWEST_TOKENS_MAX_SHARE if tokens <= FEWEST_TOKENS else FEW_TOKENS_MAX_SHARE
        return Engine.row if nnz <= min(FEW_TOKENS_MAX_DENSITY * tokens, share) * neurons else Engine.dense
    if tokens < MANY_TOKENS:
        return Engine.dense
    seconds = estimates(tokens, width, neurons, nnz, union)
    needed = seconds[Engine.dense] * (1 if current == Engine.tile else 1 - TILE_MARGIN)
    if union < 0 or not _is_near_what_was_measured(tokens, nnz) or seconds[Engine.tile] > needed:
        del seconds[Engine.tile]
    return min(seconds, key=seconds.__getitem__)


def _is_near_what_was_measured(tokens: int, nnz: float) -> bool:
    """Whether the tile engine's estimate can be relied on."""
    return nnz <= tokens * (TILE_MAX_NONZEROS if tokens >= LARGE_BATCH else SMALL_BATCH_MAX_NONZEROS)


def estimates(tokens: int, width: int, neurons: int, nnz: float, union: float) -> dict[Engine, float]:
    """Seconds of everything after the gate product, by engine; arguments as of `choose_engine`."""
    listed = TILE_SECONDS_PER_NONZERO * nnz
    gathered = 4 * union * TOKEN_TILE * width / TILE_FLOPS
    batch = TILE_SECONDS
    if tokens < MIN_ORDERED_TOKENS:
        batch = UNORDERED_SECONDS + UNORDERED_SECONDS_PER_MEAN * nnz / max(tokens, 1)
    return {
        Engine.dense: DENSE_SECONDS + 4 * tokens * width * neurons / DENSE_FLOPS,
        Engine.row: PACKING_SECONDS + ROW_SECONDS + ROW_SECONDS_PER_NONZERO * nnz * width / ROW_WIDTH,
        Engine.tile: PACKING_SECONDS + batch + TILE_SECONDS_PER_TOKEN * tokens + listed + gathered,
    }


def choose_training_engine(
    tokens: int, width: int, neurons: int, nnz: float, union: float, current: Engine | None = None
) -> Engine:
    """The engine, dense or tile, of a micro-batch of `tokens` tokens; arguments as of `choose_engine`."""
    if tokens < MANY_TOKENS or union < 0 or not _is_near_what_was_measured(tokens, nnz):
        return Engine.dense
    seconds = training_estimates(tokens, width, neurons, nnz, union)
    needed = seconds[Engine.dense] * (1 if current == Engine.tile else 1 - TILE_MARGIN)
    return Engine.tile if seconds[Engine.tile] <= needed else Engine.dense


def training_estimates(tokens: int, width: int, neurons: int, nnz: float, union: float) -> dict[Engine, float]:
    """Seconds of the forward and backward pass but for the gate product, by engine; arguments as of `choose_engine`.

    The gradients of the gate product differ by engine, and are among them.
    """
    listed = TRAINING_SECONDS_PER_NONZERO * nnz * width / ROW_WIDTH
    gathered = TILE_TRAINING_PRODUCTS * 2 * union * TOKEN_TILE * width / TILE_TRAINING_FLOPS
    return {
        Engine.dense: DENSE_SECONDS + DENSE_TRAINING_PRODUCTS * 2 * tokens * width * neurons / DENSE_TRAINING_FLOPS,
        Engine.tile: PACKING_SECONDS + TRAINING_SECONDS + TRAINING_SECONDS_PER_TOKEN * tokens + listed + gathered,
    }
