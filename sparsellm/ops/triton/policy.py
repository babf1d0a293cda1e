"""The choice of engines where the Triton kernels compute: as sparsellm.ops.dispatch, with constants of their own.

The constants are for an H200. Those of the tile engine are fitted to layer 1 and layer 4 at 16,384 tokens (LOG.md,
"Triton fills in nonzeros bit by bit"); all others are estimates, from counts of bytes and of multiplications. On
another GPU both sides of a comparison scale about alike; where they do not, the fixed times weigh too much, so dense is
chosen too often rather than too seldom.
"""

from typing import NamedTuple

from sparsellm.ops.dispatch import TILE_MARGIN, TILE_MAX_NONZEROS
from sparsellm.ops.plan import Engine
from sparsellm.ops.twell import TOKEN_TILE


class Constants(NamedTuple):
    """Times are in seconds, for everything after the gate product."""

    few_tokens: int = 0  # up to which the row engine may compute; 0: never, for its decoding was not measured
    few_share: float = 1.0  # nonzeros of all tokens over N, up to which the row engine is faster on few tokens
    many_tokens: int = 4096  # from which the tile engine may compute
    many_training_tokens: int = 4096
    dense_seconds: float = 30e-6
    dense_flops: float = 800e12
    tile_seconds: float = 80e-6  # for bits and plans, and for the last tiles of each product
    tile_flops: float = 585e12  # in the products over the union
    seconds_per_entry: float = 1.3e-12  # of z, M N of them: reading z for its bits, and what is made of the bits
    training_seconds: float = 250e-6
    training_flops: float = 560e12
    training_seconds_per_token: float = 30e-9
    training_seconds_per_nonzero: float = 0.95e-9  # the weights' gradients, at K 2,048 and in proportion to K
    training_seconds_per_entry: float = 1.0e-12


CONSTANTS = Constants()
WIDTH = 2048
ALONE = 4  # times as many tokens are needed for an order to pay in a forward pass without a backward
PRODUCTS, TRAINING_PRODUCTS, DENSE_TRAINING_PRODUCTS = 2, 5, 8  # over the union: u, y; and dh, dx twice


def choose_engine(
    tokens: int, width: int, neurons: int, nnz: float, union: float, current: Engine | None = None
) -> Engine:
    """Arguments as of sparsellm.ops.dispatch.choose_engine."""
    of = CONSTANTS
    if tokens <= of.few_tokens:
        return Engine.row if nnz <= of.few_share * neurons else Engine.dense
    if tokens < of.many_tokens:
        return Engine.dense
    dense = of.dense_seconds + 4 * tokens * width * neurons / of.dense_flops
    tile = of.tile_seconds + PRODUCTS * 2 * union * TOKEN_TILE * width / of.tile_flops
    return _tile_or_dense(tile + of.seconds_per_entry * tokens * neurons, dense, tokens, nnz, union, current)


def row_density(tokens: int, width: int, neurons: int) -> float:
    """Arguments as of sparsellm.ops.dispatch.row_density. Below 0: the row engine is not for so many tokens."""
    return -1.0


def choose_training_engine(
    tokens: int, width: int, neurons: int, nnz: float, union: float, current: Engine | None = None
) -> Engine:
    """Arguments as of sparsellm.ops.dispatch.choose_training_engine."""
    of = CONSTANTS
    if tokens < of.many_training_tokens:
        return Engine.dense
    dense = of.dense_seconds + DENSE_TRAINING_PRODUCTS * 2 * tokens * width * neurons / of.dense_flops
    tile = of.training_seconds + of.training_seconds_per_token * tokens
    tile += of.training_seconds_per_nonzero * nnz * width / WIDTH + of.training_seconds_per_entry * tokens * neurons
    tile += TRAINING_PRODUCTS * 2 * union * TOKEN_TILE * width / of.training_flops
    return _tile_or_dense(tile, dense, tokens, nnz, union, current)


def _tile_or_dense(tile: float, dense: float, tokens: int, nnz: float, union: float, current: Engine | None) -> Engine:
    if union < 0 or nnz > TILE_MAX_NONZEROS * tokens:
        return Engine.dense
    needed = dense * (1 if current == Engine.tile else 1 - TILE_MARGIN)
    return Engine.tile if tile <= needed else Engine.dense
