"""What the engines of a layer cost on this GPU, fitted to calls that were timed here.

At each number of tokens of SIZES and TRAINING_SIZES, every engine that may compute such a call is timed at several ways
of firing, and a Cost is fitted to its times. What matters is which engine is faster, so the errors that are made least
are relative to the times, and those of calls that take longer than dense count less. Of each pair of neighbours between
which the engines change what they do (a kernel for few tokens, an order of the tokens), both are measured, so no cost
is interpolated across such a change. The Triton kernels order the tokens of a forward pass alone from
another number on than the CUDA kernels, so the largest numbers are each kernels' own. Of the fewest tokens each number
is measured: the row engine deals their rows to some 16 clusters of CTAs, cut into pieces, so what the slowest cluster
has jumps from one number to the next (7 rows in 3 pieces are two turns, 8 rows in 2 pieces are one).

What dense takes does not depend on what fires, but on how many tiles its products have, and whether these fill the
multiprocessors a whole number of times. So it is timed at many more numbers of tokens: DENSE_SIZES and
DENSE_TRAINING_SIZES.
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

FEWEST_TOKENS = 16  # up to which the gate product has a kernel of its own
MANY_TRAINING_TOKENS = 2048  # at least; smaller micro-batches are dense
METHOD = 3  # raised when other things are measured, or otherwise: what was kept before is not taken then
_SIZES = (
    *range(1, 9), 12, FEWEST_TOKENS, FEWEST_TOKENS + 1, 32, FEW_TOKENS, 128, 192, 256, 320, 384, 448, 512, 640, 768,
    896, 1024, 1280, MANY_TOKENS - 1, MANY_TOKENS, 2048, 4096, 8192,
)  # fmt: skip
ORDERED_ALONE = ALONE * MIN_ORDERED_TOKENS  # from which on the Triton kernels order the tokens of a forward pass alone
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
TOGETHER = 16  # neighbours of DENSE_SIZES that are timed in alternation
TILE = (
    Firing(0.0015), Firing(0.0065), Firing(0.011, skew=1.0), Firing(0.018), Firing(0.018, skew=0.7), Firing(0.05),
)  # fmt: skip
ROW = (Firing(0.0015), Firing(0.003), Firing(0.0065), Firing(0.018))
ROW_OF_FEW = (Firing(0.0015), Firing(0.0065), Firing(0.018), Firing(0.05), Firing(0.15))
ROW_OF_FEWEST = (*ROW_OF_FEW, Firing(0.45))  # of up to 4 tokens, for which row is faster up to about that
MILLISECONDS = 16  # for which a call is timed, in 3 to 15 repetitions

Timer = Callable[[Sequence[Call]], list[float | None]]  # milliseconds of each call, None if memory did not do
Counter = Callable[[Call], tuple[float, float]]


class Timed(NamedTuple):
    """A call that was timed."""

    call: Call
    nonzeros: float
    union: float
    seconds: float


def measure(
    kernels: str, layer: Layer, timer: Timer | None = None, counter: Counter | None = None,
    advance: Callable[[int], object] = lambda _: None, most: int | None = None,
) -> tuple[Costs, list[Timed]]:  # fmt: skip
    """The costs of `layer` on `kernels`, which are loaded, and what they are fitted to.

    A size above `most` tokens, or one that does not fit into memory, is left out, with all larger ones. Raises
    OutOfMemoryError if the smallest one does not fit. timer, counter: by default of this GPU.
    """
    timer, counter = timer or (lambda calls: gpu_milliseconds(layer, calls)), counter or layer.counts
    times: list[Timed] = []
    for training, sizes, dense_sizes in (
        (False, SIZES[kernels], DENSE_SIZES),
        (True, TRAINING_SIZES, DENSE_TRAINING_SIZES),
    ):
        fitting = []
        for tokens in sizes:
            calls = calls_of(tokens, training)
            found = timer(calls) if most is None or tokens <= most else [None]
            if None in found and tokens == sizes[0]:
                raise torch.OutOfMemoryError(f"a call of {tokens:,} tokens does not fit into the GPU's memory")
            if None in found:
                break
            fitting.append(tokens)
            times += [Timed(call, *counter(call), (ms or 0.0) / 1e3) for call, ms in zip(calls, found, strict=True)]
            advance(1)
        for first in range(0, len(dense_sizes), TOGETHER):
            group = [tokens for tokens in dense_sizes[first : first + TOGETHER] if tokens < fitting[-1]]
            # With other weights each, as the layers of a model have: those of the call before may be in the cache.
            calls = [Call(tokens, TILE[i % len(TILE)], Engine.dense, training) for i, tokens in enumerate(group)]
            found = timer(calls)
            times += [Timed(call, 0.0, 0.0, ms / 1e3) for call, ms in zip(calls, found, strict=True) if ms is not None]
            advance(1)
    forward, training_costs = (_fitted(times, training) for training in (False, True))
    return Costs(kernels, layer.width, layer.neurons, forward, training_costs), times


def steps(kernels: str) -> int:
    """How often `measure` calls `advance`."""
    timed = ((SIZES[kernels], DENSE_SIZES), (TRAINING_SIZES, DENSE_TRAINING_SIZES))
    return sum(len(sizes) + -(-len(dense) // TOGETHER) for sizes, dense in timed)


def calls_of(tokens: int, training: bool) -> list[Call]:
    """What is timed of so many tokens, by the engines that the policy chooses from there; dense first."""
    tile = [(Engine.tile, firing) for firing in TILE]
    if training:
        found = tile
    else:
        row = ROW_OF_FEWEST if tokens <= 4 else ROW_OF_FEW if tokens <= FEW_TOKENS else ROW
        found = [(Engine.row, firing) for firing in row] + (tile if tokens >= MANY_TOKENS else [])
    return [Call(tokens, firing, engine, training) for engine, firing in [(Engine.dense, ROW[1]), *found]]


def gpu_milliseconds(layer: Layer, calls: Sequence[Call]) -> list[float | None]:
    """The median time of each call in alternation with the others, or None for all if one runs out of memory."""

    def runs(call: Call) -> Callable[[int], object]:
        return lambda _: layer.run(call)

    times = alternating_ms({str(i): runs(call) for i, call in enumerate(calls)}, MILLISECONDS, least=3, most=15)
    found: list[float | None] = []
    for ms in times.values():
        if isinstance(ms, torch.OutOfMemoryError):
            ms.__traceback__ = None  # its frames hold what the call had allocated
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
    """The Cost of one engine at one number of tokens: none of its parts below 0, least squares of relative errors.

    dense: seconds. The error of a call that takes r > 1 times as long counts 1 / r^2, for there it is dense that is
    chosen, by whatever the engine takes longer.
    """
    engine = times[0].call.engine
    seconds = np.array([each.seconds for each in times])
    count = {Engine.dense: 1, Engine.row: 2, Engine.tile: 3}[engine]
    parts = np.array([[1.0, each.nonzeros, each.union] for each in times])[:, :count]
    weights = np.minimum(1.0, dense / seconds) ** 2
    weighted = parts * (weights / seconds)[:, None]
    scale = np.maximum(weighted.max(0), np.finfo(float).tiny)
    best, least = np.zeros(parts.shape[1]), np.inf
    # With three parts at most, the best of all subsets is the solution that has no part below 0.
    for size in range(1, parts.shape[1] + 1):
        for subset in itertools.combinations(range(parts.shape[1]), size):
            found = np.linalg.lstsq((weighted / scale)[:, subset], weights, rcond=None)[0]
            error = float((((weighted / scale)[:, subset] @ found - weights) ** 2).sum())
            if (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = np.zeros(parts.shape[1]), error
                best[list(subset)] = found / scale[list(subset)]
    return Cost(*(float(part) for part in best))
