"""What the engines of a layer cost on this GPU, fitted to calls that were timed here.

At each number of tokens of SIZES and TRAINING_SIZES, every engine that may compute such a call is timed at several ways
of firing, and a Cost is fitted to its times, so that their errors relative to the times are least. Of each pair of
neighbours between which the engines change what they do (a kernel for few tokens, an order of the tokens), both are
measured, so no cost is interpolated across such a change.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from sparsellm.calibration.layer import Call, Firing, Layer
from sparsellm.ops.costs import BySize, Cost, Costs
from sparsellm.ops.dispatch import FEW_TOKENS, FEWEST_TOKENS, MANY_TOKENS, MANY_TRAINING_TOKENS, MIN_ORDERED_TOKENS
from sparsellm.ops.gpu_timing import alternating_ms
from sparsellm.ops.plan import Engine

SIZES = (
    1, 4, FEWEST_TOKENS, FEWEST_TOKENS + 1, FEW_TOKENS, FEW_TOKENS + 1, 128, 192, 256, 384, 512, 768, 1024, 1280,
    MANY_TOKENS - 1, MANY_TOKENS, 2048, 4096, MIN_ORDERED_TOKENS - 1, MIN_ORDERED_TOKENS, 65_536,
)  # fmt: skip
TRAINING_SIZES = (MANY_TRAINING_TOKENS, 4096, MIN_ORDERED_TOKENS - 1, MIN_ORDERED_TOKENS, 32_768)
TILE = (Firing(0.0015), Firing(0.0065), Firing(0.018), Firing(0.018, skew=0.7), Firing(0.05))
ROW_OF_FEW = (Firing(0.0065), Firing(0.018), Firing(0.05), Firing(0.15))
ROW = (Firing(0.0015), Firing(0.0065), Firing(0.018))
MILLISECONDS = 25  # for which a call is timed, in 5 to 15 repetitions

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
    advance: Callable[[int], object] = lambda _: None,
) -> tuple[Costs, list[Timed]]:  # fmt: skip
    """The costs of `layer` on `kernels`, which are loaded, and what they are fitted to.

    A size that does not fit into memory is left out, with all larger ones. Raises OutOfMemoryError if the smallest one
    does not fit. timer, counter: by default of this GPU.
    """
    timer, counter = timer or (lambda calls: gpu_milliseconds(layer, calls)), counter or layer.counts
    times: list[Timed] = []
    for training, sizes in ((False, SIZES), (True, TRAINING_SIZES)):
        for tokens in sizes:
            calls = calls_of(tokens, training)
            found = timer(calls)
            if None in found and tokens == sizes[0]:
                raise torch.OutOfMemoryError(f"a call of {tokens:,} tokens does not fit into the GPU's memory")
            if None in found:
                break
            times += [Timed(call, *counter(call), (ms or 0.0) / 1e3) for call, ms in zip(calls, found, strict=True)]
            advance(1)
    forward, training_costs = (_fitted(times, training) for training in (False, True))
    return Costs(kernels, layer.width, layer.neurons, forward, training_costs), times


def calls_of(tokens: int, training: bool) -> list[Call]:
    """What is timed of so many tokens, by the engines that the policy chooses from there; dense first."""
    tile = [(Engine.tile, firing) for firing in TILE]
    if training:
        found = tile
    else:
        row = ROW_OF_FEW if tokens <= FEW_TOKENS else ROW
        found = [(Engine.row, firing) for firing in row] + (tile if tokens >= MANY_TOKENS else [])
    return [Call(tokens, firing, engine, training) for engine, firing in [(Engine.dense, ROW[1]), *found]]


def gpu_milliseconds(layer: Layer, calls: Sequence[Call]) -> list[float | None]:
    """The median time of each call in alternation with the others, or None for all if one runs out of memory."""

    def runs(call: Call) -> Callable[[int], object]:
        return lambda _: layer.run(call)

    times = alternating_ms({str(i): runs(call) for i, call in enumerate(calls)}, MILLISECONDS, most=15)
    found: list[float | None] = []
    for ms in times.values():
        if isinstance(ms, torch.OutOfMemoryError):
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
        found.setdefault(tokens, {})[engine] = fit(list(of_engine))
    return found


def fit(times: list[Timed]) -> Cost:
    """The Cost of one engine at one number of tokens: none of its parts below 0, least squares of relative errors."""
    engine = times[0].call.engine
    seconds = np.array([each.seconds for each in times])
    count = {Engine.dense: 1, Engine.row: 2, Engine.tile: 3}[engine]
    parts = np.array([[1.0, each.nonzeros, each.union] for each in times])[:, :count]
    weighted = parts / seconds[:, None]
    scale = np.maximum(weighted.max(0), np.finfo(float).tiny)
    best, least = np.zeros(parts.shape[1]), np.inf
    # With three parts at most, the best of all subsets is the solution that has no part below 0.
    for size in range(1, parts.shape[1] + 1):
        for subset in itertools.combinations(range(parts.shape[1]), size):
            found = np.linalg.lstsq((weighted / scale)[:, subset], np.ones(len(times)), rcond=None)[0]
            error = float((((weighted / scale)[:, subset] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = np.zeros(parts.shape[1]), error
                best[list(subset)] = found / scale[list(subset)]
    return Cost(*(float(part) for part in best))
