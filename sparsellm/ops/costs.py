"""The policy as it was measured on one GPU: what a call of one layer costs by each engine, and which is the cheapest.

    Cost     seconds of a call by one engine, linear in what fires
    Costs    those of a layer by engine and number of tokens, forward, and forward with backward

sparsellm.calibration measures them. Where the layers of a process have some (sparsellm.ops.backend.measured), engines
are chosen by them, in place of the constants of an H200 that the package has (sparsellm.ops.dispatch,
sparsellm.ops.triton.policy).
"""

import bisect
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sparsellm.ops.dispatch import (
    FEW_TOKENS,
    MANY_TOKENS,
    MIN_FUSED_TOKENS,
    MIN_ORDERED_TOKENS,
    TILE_MARGIN,
    TILE_MAX_NONZEROS,
)
from sparsellm.ops.plan import Engine
from sparsellm.ops.triton.policy import ALONE

ROWS = 64  # tokens: dense products compute tiles of so many rows, or of a multiple, and a begun tile costs a whole one
# From which on engines compute in another way; the last one is of the Triton kernels' forward pass alone.
BORDERS = MIN_FUSED_TOKENS, MANY_TOKENS, MIN_ORDERED_TOKENS, ALONE * MIN_ORDERED_TOKENS


class Cost(NamedTuple):
    """Seconds of a call: fixed + per_nonzero * nnz + per_union * union, of the call's counts (FeedForwardOutput)."""

    fixed: float
    per_nonzero: float = 0.0
    per_union: float = 0.0

    def seconds(self, nnz: float, union: float) -> float:
        return self.fixed + self.per_nonzero * nnz + self.per_union * union


BySize = dict[int, dict[Engine, Cost]]  # tokens of a call -> the engines that were measured


@dataclass(frozen=True)
class Costs:
    """What a layer with `width` K and `neurons` N costs on `kernels`.

    A call costs what one of whole tiles does (`whole_tiles`). Between two numbers of tokens at which an engine was
    measured, the seconds of calls that fire alike, per token, are interpolated. Beyond the largest number, `fixed`
    grows as it did from half of it or less, and what a nonzero and a neuron of a union cost stays. Fewer tokens than an
    engine's smallest number are for dense.
    """

    kernels: str  # "cuda" or "triton"
    width: int
    neurons: int
    forward: BySize
    training: BySize  # forward and backward
    _densities: dict[int, float] = field(default_factory=dict, compare=False, repr=False)

    def choose_engine(self, tokens: int, nnz: float, union: float, current: Engine | None = None) -> Engine:
        """Arguments as of sparsellm.ops.dispatch.choose_engine."""
        return _cheapest(self.forward, tokens, nnz, union, current)

    def choose_training_engine(self, tokens: int, nnz: float, union: float, current: Engine | None = None) -> Engine:
        """Arguments as of sparsellm.ops.dispatch.choose_training_engine."""
        return _cheapest(self.training, tokens, nnz, union, current)

    def row_density(self, tokens: int) -> float:
        """Nonzeros per token up to which the row engine is chosen instead of dense; below 0 where it never is."""
        if tokens not in self._densities:
            self._densities[tokens] = _row_density(costs_at(self.forward, tokens), tokens)
        return self._densities[tokens]

    def as_json(self) -> dict[str, Any]:
        sizes = {
            name: {str(tokens): {engine.name: list(cost) for engine, cost in by.items()} for tokens, by in of.items()}
            for name, of in (("forward", self.forward), ("training", self.training))
        }
        return {"kernels": self.kernels, "width": self.width, "neurons": self.neurons, **sizes}

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> "Costs":
        """Raises KeyError, TypeError or ValueError for other values than those of `as_json`."""
        forward, training = (
            {int(tokens): {Engine[name]: Cost(*cost) for name, cost in by.items()} for tokens, by in of.items()}
            for of in (values["forward"], values["training"])
        )
        for sizes in (forward, training):
            if not sizes or any(Engine.dense not in by for by in sizes.values()):
                raise ValueError("the dense engine has no costs at some number of tokens")
        return cls(values["kernels"], int(values["width"]), int(values["neurons"]), forward, training)


def whole_tiles(tokens: int) -> int:
    """`tokens` rounded up to what dense products compute at once, but not across a border: 320 for 270."""
    if tokens <= FEW_TOKENS:
        return tokens
    return min([-(-tokens // ROWS) * ROWS, *(border - 1 for border in BORDERS if tokens < border)])


def costs_at(sizes: BySize, tokens: int) -> dict[Engine, Cost]:
    """The costs of a call of so many tokens, of the engines that were measured around there."""
    smallest, largest = min(sizes), max(sizes)
    if tokens < smallest:
        return {Engine.dense: sizes[smallest][Engine.dense]}
    found, whole = {}, whole_tiles(tokens)
    for engine in Engine:
        measured = sorted(size for size, by in sizes.items() if engine in by)
        if measured and measured[0] <= tokens and (whole <= measured[-1] or measured[-1] == largest):
            high = measured[min(bisect.bisect_left(measured, whole), len(measured) - 1)]
            # Beyond the largest: two numbers side by side, as those of a border, do not say how the seconds grow.
            limit = high if high == whole else high - 1 if high > whole else high // 2
            low = measured[max(bisect.bisect_right(measured, limit) - 1, 0)]
            found[engine] = _between(whole, low, sizes[low][engine], high, sizes[high][engine])
    return found


def _between(tokens: int, low: int, before: Cost, high: int, after: Cost) -> Cost:
    """The cost for `tokens`, of those for `low` and `high`, or for both of the largest two numbers below."""
    if low == high:
        return after
    share = (tokens - low) / (high - low)  # above 1 beyond the largest one
    # Calls that fire alike count in proportion to their tokens: so does what all their nonzeros cost, in between.
    first, last = ((1 - share) * low / tokens, share * high / tokens) if share < 1 else (0.0, 1.0)
    return Cost(
        before.fixed + share * (after.fixed - before.fixed),
        first * before.per_nonzero + last * after.per_nonzero,
        first * before.per_union + last * after.per_union,
    )


def _cheapest(sizes: BySize, tokens: int, nnz: float, union: float, current: Engine | None) -> Engine:
    seconds = {engine: cost.seconds(nnz, union) for engine, cost in costs_at(sizes, tokens).items()}
    if union < 0 or nnz > TILE_MAX_NONZEROS * tokens:  # not measured: of this call, or with so many nonzeros
        seconds.pop(Engine.tile, None)
    best = min(sorted(seconds), key=seconds.__getitem__)
    needed = seconds[Engine.dense] * (1 if current == best else 1 - TILE_MARGIN)
    return best if seconds[best] <= needed else Engine.dense


def _row_density(costs: dict[Engine, Cost], tokens: int) -> float:
    if Engine.row not in costs:
        return -1.0
    row, dense = costs[Engine.row], costs[Engine.dense]
    left = (1 - TILE_MARGIN) * dense.fixed - row.fixed
    if row.per_nonzero == 0:
        return float("inf") if left >= 0 else -1.0
    return left / (row.per_nonzero * tokens)
