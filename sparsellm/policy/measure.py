"""Times the engines of a layer on this GPU and fits costs to the times.

At each token count of SIZES and TRAINING_SIZES, every engine that may compute such a call is timed at several sparsity
levels (Firing), and a Cost is fitted to the engine's times. The costs only have to rank the engines, so the fit
minimizes errors relative to the times, and calls that are slower than dense get less weight.

Some engines change their algorithm at a token count (a kernel for few tokens, ordering of the tokens). This count and
the count just below it are measured, so no cost is interpolated across the change. CUDA and Triton kernels begin to
order the tokens of a forward pass without backward at different counts, so each kind of kernels has its own largest
sizes. Up to 8 tokens, every count is measured: the row engine splits the rows into pieces and distributes the pieces
over about 16 clusters of CTAs, so the load of the slowest cluster jumps between counts (7 rows in 3 pieces need two
rounds, 8 rows in 2 pieces need one).

The time of dense does not depend on sparsity, but on how many tiles the GEMMs have, and on how full the last wave of
tiles is. So dense is timed at many more token counts: DENSE_SIZES and DENSE_TRAINING_SIZES.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from sparsellm.ops.borders import ALONE, FEW_TOKENS, MANY_TOKENS, MIN_FUSED_TOKENS, MIN_ORDERED_TOKENS
from sparsellm.ops.gpu_timing import alternating_ms
from sparsellm.ops.plan import Engine
from sparsellm.policy.costs import BySize, Cost, Costs
from sparsellm.policy.layer import Call, Firing, Layer

FEWEST_TOKENS = 16  # up to this many, a separate kernel computes the gate GEMM
MANY_TRAINING_TOKENS = 2048  # smallest micro-batch for sparse engines; smaller ones use dense
METHOD = 3  # raised whenever the measurement changes, which invalidates cached costs
_SIZES = (
    *range(1, 9), 12, FEWEST_TOKENS, FEWEST_TOKENS + 1, 32, FEW_TOKENS, 128, 192, 256, 320, 384, 448, 512, 640, 768,
    896, 1024, 1280, MANY_TOKENS - 1, MANY_TOKENS, 2048, 4096, 8192,
)  # fmt: skip
ORDERED_ALONE = ALONE * MIN_ORDERED_TOKENS  # the Triton kernels order forward passes without backward from here on
SIZES = {
    "cuda": (*_SIZES, MIN_ORDERED_TOKENS - 1, MIN_ORDERED_TOKENS, 65_536),
    "triton": (*_SIZES, 16_384, ORDERED_ALONE - 1, ORDERED_ALONE, 2 * ORDERED_ALONE),
}
TRAINING_SIZES = (MANY_TRAINING_TOKENS, 3072, 4096, 8192, MIN_ORDERED_TOKENS - 1, MIN_ORDERED_TOKENS, 32_768)
DENSE_SIZES = tuple(
    sorted(
        {
            24, 48, *range(64, 1536, 64), MIN_FUSED_TOKENS - 1, *range(1536, 4096, 128), *range(4096, 8192, 512),
            *range(8192, 16_384, 1024),
        }
        - set(_SIZES)
    )
)  # fmt: skip
DENSE_TRAINING_SIZES = tuple(
    sorted({*range(2048, 4096, 256), *range(4096, 8192, 1024), *range(8192, 16_384, 2048)} - set(TRAINING_SIZES))
)
TOGETHER = 16  # number of neighbouring DENSE_SIZES timed in alternation
TILE = (
    Firing(0.0015), Firing(0.0065), Firing(0.011, skew=1.0), Firing(0.018), Firing(0.018, skew=0.7), Firing(0.05),
)  # fmt: skip
ROW = (Firing(0.0015), Firing(0.003), Firing(0.0065), Firing(0.018))
ROW_OF_FEW = (Firing(0.0015), Firing(0.0065), Firing(0.018), Firing(0.05), Firing(0.15))
ROW_OF_FEWEST = (*ROW_OF_FEW, Firing(0.45))  # for up to 4 tokens, where row is faster than dense up to about this share
MILLISECONDS = 16  # time spent on each call, in 3 to 15 repetitions


class Timed(NamedTuple):
    """A timed call and its counts."""

    call: Call
    nonzeros: float
    union: float
    seconds: float


def measure(
    kernels: str, layer: Layer, advance: Callable[[int], object] = lambda _: None, most: int | None = None
) -> tuple[Costs, list[Timed]]:
    """The costs of `layer` on `kernels`, which must be loaded, and the timed calls to which the costs are fitted.

    Sizes above `most` tokens are skipped. A size that does not fit into memory is skipped with all larger sizes. Raises
    OutOfMemoryError if the smallest size does not fit.
    """
    times: list[Timed] = []
    for training, sizes, dense_sizes in (
        (False, SIZES[kernels], DENSE_SIZES),
        (True, TRAINING_SIZES, DENSE_TRAINING_SIZES),
    ):
        fitting = []
        for tokens in sizes:
            calls = calls_of(tokens, training)
            found = gpu_milliseconds(layer, calls) if most is None or tokens <= most else [None]
            if None in found and tokens == sizes[0]:
                raise torch.OutOfMemoryError(f"a call of {tokens:,} tokens does not fit into the GPU's memory")
            if None in found:
                break
            fitting.append(tokens)
            for call, ms in zip(calls, found, strict=True):
                times.append(Timed(call, *layer.counts(call), (ms or 0.0) / 1e3))
            advance(1)
        for first in range(0, len(dense_sizes), TOGETHER):
            group = [tokens for tokens in dense_sizes[first : first + TOGETHER] if tokens < fitting[-1]]
            # Each call has different weights, like the layers of a model, so that weights do not stay in the L2 cache.
            calls = [Call(tokens, TILE[i % len(TILE)], Engine.dense, training) for i, tokens in enumerate(group)]
            found = gpu_milliseconds(layer, calls)
            times += [Timed(call, 0.0, 0.0, ms / 1e3) for call, ms in zip(calls, found, strict=True) if ms is not None]
            advance(1)
    forward, training_costs = (_fitted(times, training) for training in (False, True))
    return Costs(kernels, layer.width, layer.neurons, forward, training_costs), times


def steps(kernels: str) -> int:
    """The number of times that `measure` calls `advance`."""
    timed = ((SIZES[kernels], DENSE_SIZES), (TRAINING_SIZES, DENSE_TRAINING_SIZES))
    return sum(len(sizes) + -(-len(dense) // TOGETHER) for sizes, dense in timed)


def calls_of(tokens: int, training: bool) -> list[Call]:
    """The calls to time at `tokens` tokens, for each engine that the policy may choose there; dense first."""
    tile = [(Engine.tile, firing) for firing in TILE]
    if training:
        found = tile
    else:
        row = ROW_OF_FEWEST if tokens <= 4 else ROW_OF_FEW if tokens <= FEW_TOKENS else ROW
        found = [(Engine.row, firing) for firing in row] + (tile if tokens >= MANY_TOKENS else [])
    return [Call(tokens, firing, engine, training) for engine, firing in [(Engine.dense, ROW[1]), *found]]


def gpu_milliseconds(layer: Layer, calls: Sequence[Call]) -> list[float | None]:
    """The median ms of each call, alternating between calls, or None for all calls if one runs out of memory."""

    def runs(call: Call) -> Callable[[int], object]:
        return lambda _: layer.run(call)

    times = alternating_ms({str(i): runs(call) for i, call in enumerate(calls)}, MILLISECONDS, least=3, most=15)
    found: list[float | None] = []
    for ms in times.values():
        if isinstance(ms, torch.OutOfMemoryError):
            ms.__traceback__ = None  # the frames of the traceback keep the tensors of the failed call alive
            torch.cuda.empty_cache()
            return [None] * len(calls)
        if isinstance(ms, Exception):
            raise ms
        found.append(ms)
    return found


def _fitted(times: list[Timed], training: bool) -> BySize:
    found: BySize = {}
    chosen = [each for each in times if each.call.training == training]
    for (tokens, engine), of_engine in itertools.groupby(chosen, lambda each: (each.call.tokens, each.call.engine)):
        by_engine = found.setdefault(tokens, {})
        dense = by_engine[Engine.dense].fixed if engine != Engine.dense else np.inf
        by_engine[engine] = fit(list(of_engine), dense)
    return found


def fit(times: list[Timed], dense: float = np.inf) -> Cost:
    """The Cost of one engine at one token count: non-negative least squares on the relative errors.

    dense: seconds of dense. If a call takes r > 1 times as long as dense, the error of the call has weight 1 / r^2,
    because dense is chosen for such calls anyway, so an exact cost does not matter.
    """
    engine = times[0].call.engine
    seconds = np.array([each.seconds for each in times])
    count = {Engine.dense: 1, Engine.row: 2, Engine.tile: 3}[engine]
    parts = np.array([[1.0, each.nonzeros, each.union] for each in times])[:, :count]
    weights = np.minimum(1.0, dense / seconds) ** 2
    weighted = parts * (weights / seconds)[:, None]
    scale = np.maximum(weighted.max(0), np.finfo(float).tiny)
    best, least = np.zeros(parts.shape[1]), np.inf
    # With at most three parts, trying every subset is an exact way to solve non-negative least squares.
    for size in range(1, parts.shape[1] + 1):
        for subset in itertools.combinations(range(parts.shape[1]), size):
            found = np.linalg.lstsq((weighted / scale)[:, subset], weights, rcond=None)[0]
            error = float((((weighted / scale)[:, subset] @ found - weights) ** 2).sum())
            if (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = np.zeros(parts.shape[1]), error
                best[list(subset)] = found / scale[list(subset)]
    return Cost(*(float(part) for part in best))
