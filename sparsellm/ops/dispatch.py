"""The policy: which engine computes a layer, as pure functions of what an earlier call of the layer has counted.

    choose_engine            the engine of a forward pass
    choose_training_engine   the engine of a micro-batch's forward and backward pass
    row_density              of a batch of neither few nor many tokens, how many nonzeros per token the row engine takes
    room_for                 how many nonzeros per token the tile engine is given room for
    capacity, orders, fuses  for a number of tokens: the capacity of the lists, whether tokens are ordered, whether the
                             dense kernels fuse

The estimates are seconds on one H200 for everything after the gate product. All engines share the gate product; what
packing its result costs the sparse engines is estimated as well (PACKING_SECONDS). The constants are fitted to
scripts/benchmarks/bench_ffn.py; docs/dev/LOG.md, "Constants now in force", names the measurement behind each.
Letters: M tokens, K model width, N neurons.
"""

import itertools
import math
from functools import lru_cache

from sparsellm.ops.plan import ROOM, Engine
from sparsellm.ops.twell import TOKEN_TILE

# Tiles of the gate product are packed while others are multiplied; this is for the last ones, which nothing hides.
PACKING_SECONDS = 15e-6
TILE_FLOPS = 760e12  # per second, in the gathered products of the tile engine
TILE_SECONDS = 50e-6  # for lists, order and plan of a batch of MIN_ORDERED_TOKENS tokens or more, however large
UNORDERED_SECONDS = 28e-6  # for lists and plan of a smaller batch, which is not ordered; measured at 2,048 and 4,096
# A batch that is not ordered ends when its fullest tile does. That tail grows with the mean nonzeros per token: 100 per
# token add 25 us (measured at 2,048 and 4,096 tokens).
UNORDERED_SECONDS_PER_MEAN = 0.25e-6
TILE_SECONDS_PER_TOKEN = 2.3e-9
TILE_SECONDS_PER_NONZERO = 0.036e-9
ROW_SECONDS = 20e-6  # for a batch of any size
ROW_SECONDS_PER_NONZERO = 0.95e-9  # at K = ROW_WIDTH, and in proportion to K
ROW_WIDTH, ROW_NEURONS = 2048, 5632  # of the layer that was measured
DENSE_SECONDS = 30e-6  # for a batch of any size: the last tiles of each product leave multiprocessors idle
DENSE_FLOPS = 860e12  # per second, in the up and down product
# Up to so many tokens are "few": their time is that of reading weights. The row engine reads one of the three matrices
# whole, and some rows of the two others; dense reads all three.
FEW_TOKENS = 64
FEW_TOKENS_MAX_DENSITY = 0.15  # nonzeros per token over N; above, the row engine takes longer than the dense products
# Nonzeros of all tokens over N, up to which the row engine is faster. It reads two weight rows for each nonzero, dense
# reads the 2 N rows once each, in order.
FEW_TOKENS_MAX_SHARE = 1.5
# Up to FEWEST_TOKENS dense takes less time than with more, so the row engine is faster with fewer nonzeros only.
FEWEST_TOKENS = 16
FEWEST_TOKENS_MAX_SHARE = 0.7  # in place of FEW_TOKENS_MAX_SHARE
# From so many tokens on, which are "many", the tile engine may compute. Of fewer, but more than FEW_TOKENS, cuBLAS
# multiplies the gate, and the choice is between row and dense.
MANY_TOKENS = 1536
# Of more than FEW_TOKENS and fewer than MANY_TOKENS, after the gate product: the row engine's seconds, packing
# included, for a call of any size and for each nonzero,
BETWEEN_ROW_SECONDS = 15e-6
BETWEEN_ROW_SECONDS_PER_NONZERO = 1.25e-9
# and the dense engine's, by tokens, as measured: cuBLAS's tiles make steps that no formula has.
BETWEEN_DENSE_SECONDS = {
    64: 21e-6, 128: 23.3e-6, 192: 25.1e-6, 256: 27e-6, 384: 36.7e-6, 512: 42e-6, 768: 59e-6, 1024: 69.5e-6,
    1280: 94e-6, 1536: 106e-6,
}  # fmt: skip
MANY_TRAINING_TOKENS = 2048  # at least; smaller micro-batches were not measured
TILE_MAX_NONZEROS = 320  # per token, in a batch of LARGE_BATCH tokens or more: the tile engine was measured up to 300
LARGE_BATCH = 16_384  # tokens
# Fewer tokens stay in their own order: ordering them would take longer than it saves (LOG.md, "Ordering tokens by the
# neurons they fire").
MIN_ORDERED_TOKENS = 16_384
# Per token, in a smaller batch: it was measured with up to 116 nonzeros per token, and a few full tiles would leave
# multiprocessors idle.
SMALL_BATCH_MAX_NONZEROS = 256
ALL_FIT = 1 << 22  # M N: in a call with no more activations, the lists hold all of them, whatever the plan's room is
# With fewer tokens, cuBLAS and elementwise kernels mostly take less time than fused kernels, with more tokens mostly
# more (LOG.md, "From how many tokens on the fused dense kernels pay").
MIN_FUSED_TOKENS = 1344
# Room is given for so many times the nonzeros that were counted: real batches differ by several times, and a batch
# without room takes ten times as long or more.
ROOM_MARGIN = 4
ROOM_MULTIPLE = 32  # nonzeros per token
TILE_MARGIN = 0.03  # of dense's time: a sparse engine must be faster by this before it replaces dense

# Forward and backward of a gated layer. (A non-gated layer has 5 of the 8 dense products and 3 of the 5 gathered ones,
# so the comparison is about the same.)
DENSE_TRAINING_FLOPS = 800e12  # per second, in all products, elementwise work included
DENSE_TRAINING_PRODUCTS = 8  # forward 2, dh 1, dx 2, the weights' gradients 3
TILE_TRAINING_PRODUCTS = 5  # over the union: forward 2, dh 1, dx 2; the weights' gradients are counted by nonzero
TILE_TRAINING_FLOPS = 490e12  # per second, in the products over the union
TRAINING_SECONDS = 170e-6  # for lists, order, plans and transposes, however large the micro-batch
TRAINING_SECONDS_PER_TOKEN = 19e-9
TRAINING_SECONDS_PER_NONZERO = 0.115e-9  # at K = ROW_WIDTH, and in proportion to K


def room_for(per_token: float) -> int:
    """A plan's room, nonzeros per token, after a batch with `per_token`: ROOM_MARGIN times as many, rounded up to a
    multiple of ROOM_MULTIPLE, and at least ROOM. After 100 per token it is 416."""
    room = ROOM_MULTIPLE * math.ceil(ROOM_MARGIN * min(per_token, TILE_MAX_NONZEROS) / ROOM_MULTIPLE)
    return max(room, ROOM)


def capacity(tokens: int, neurons: int, room: int) -> int:
    """How many nonzeros the lists of a call must hold: `room` per token; in a small call, all that there can be."""
    return tokens * (neurons if tokens * neurons <= ALL_FIT else min(room, neurons))


def orders(tokens: int) -> bool:
    """Whether the tile engine orders the tokens, so that those which fire the same neurons share a tile."""
    return tokens >= MIN_ORDERED_TOKENS


def fuses(tokens: int) -> bool:
    """Whether the dense engine's elementwise half is computed within the products' kernels, not in its own kernels."""
    return tokens >= MIN_FUSED_TOKENS


def choose_engine(
    tokens: int, width: int, neurons: int, nnz: float, union: float, current: Engine | None = None
) -> Engine:
    """The engine for `tokens` tokens of a layer with `width` K and `neurons` N.

    nnz: the nonzero activations of an earlier call; union: the neurons active in each of its 128-token tiles, summed.
    Both are for `tokens` tokens, as FeedForwardOutput counts them; where union is negative (not measured), the tile
    engine is not chosen. current: the engine in use. To replace another engine, the tile engine must beat dense by
    TILE_MARGIN; to stay, it need only be the fastest. So the choice does not alternate between engines about as fast.
    """
    if tokens <= FEW_TOKENS:
        share = FEWEST_TOKENS_MAX_SHARE if tokens <= FEWEST_TOKENS else FEW_TOKENS_MAX_SHARE
        return Engine.row if nnz <= min(FEW_TOKENS_MAX_DENSITY * tokens, share) * neurons else Engine.dense
    if tokens < MANY_TOKENS:
        return Engine.row if nnz <= tokens * row_density(tokens, width, neurons) else Engine.dense
    seconds = estimates(tokens, width, neurons, nnz, union)
    needed = seconds[Engine.dense] * (1 if current == Engine.tile else 1 - TILE_MARGIN)
    if union < 0 or not _is_near_what_was_measured(tokens, nnz) or seconds[Engine.tile] > needed:
        del seconds[Engine.tile]
    return min(seconds, key=seconds.__getitem__)


@lru_cache
def row_density(tokens: int, width: int, neurons: int) -> float:
    """Nonzeros per token up to which the row engine is faster than dense by TILE_MARGIN, for more than FEW_TOKENS and
    fewer than MANY_TOKENS tokens. Below 0 where it never is, and for other widths than the one that was measured."""
    if width != ROW_WIDTH:
        return -1.0
    (low, before), (high, after) = next(
        pair for pair in itertools.pairwise(BETWEEN_DENSE_SECONDS.items()) if tokens <= pair[1][0]
    )
    dense = (before + (after - before) * (tokens - low) / (high - low)) * neurons / ROW_NEURONS
    return ((1 - TILE_MARGIN) * dense - BETWEEN_ROW_SECONDS) / (BETWEEN_ROW_SECONDS_PER_NONZERO * tokens)


def _is_near_what_was_measured(tokens: int, nnz: float) -> bool:
    """Whether the batch is like those that the tile engine's constants were fitted to."""
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
    """The engine, dense or tile, for a micro-batch's forward and backward pass; arguments as of `choose_engine`."""
    if tokens < MANY_TRAINING_TOKENS or union < 0 or not _is_near_what_was_measured(tokens, nnz):
        return Engine.dense
    seconds = training_estimates(tokens, width, neurons, nnz, union)
    needed = seconds[Engine.dense] * (1 if current == Engine.tile else 1 - TILE_MARGIN)
    return Engine.tile if seconds[Engine.tile] <= needed else Engine.dense


def training_estimates(tokens: int, width: int, neurons: int, nnz: float, union: float) -> dict[Engine, float]:
    """Seconds of the forward and backward pass, by engine, without the forward gate product, which both engines share.
    The gradients of that product are included. Arguments as of `choose_engine`."""
    listed = TRAINING_SECONDS_PER_NONZERO * nnz * width / ROW_WIDTH
    gathered = TILE_TRAINING_PRODUCTS * 2 * union * TOKEN_TILE * width / TILE_TRAINING_FLOPS
    return {
        Engine.dense: DENSE_SECONDS + DENSE_TRAINING_PRODUCTS * 2 * tokens * width * neurons / DENSE_TRAINING_FLOPS,
        Engine.tile: PACKING_SECONDS + TRAINING_SECONDS + TRAINING_SECONDS_PER_TOKEN * tokens + listed + gathered,
    }
