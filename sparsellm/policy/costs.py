"""Cost model of a layer call for each engine, and the rule that picks an engine.

Estimates come from tables measured on this GPU (`Costs`, by sparsellm.policy.measure) or from formulas that were fitted
to one GPU and ship with the package (sparsellm.policy.packaged). Letters: M tokens, K model width, N neurons.
"""

import bisect
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sparsellm.ops.borders import ALONE, FEW_TOKENS, MANY_TOKENS, MIN_FUSED_TOKENS, MIN_ORDERED_TOKENS
from sparsellm.ops.plan import ROOM, Engine

MARGIN = 0.03  # a sparse engine replaces dense only if it saves at least this share of dense's time
TILE_MAX_NONZEROS = 320  # per token; the tile engine was measured up to 300
# A plan's room is ROOM_MARGIN times the counted nonzeros, because batches differ severalfold, and a call that exceeds
# its room takes slower kernels (LOG.md, "Room for four times the fullest micro-batch").
ROOM_MARGIN = 4
ROOM_MULTIPLE = 32  # nonzeros per token
MOST_CACHED = 1000  # maximum number of token counts for which a layer caches its estimates
ROWS = 64  # tokens; the tile height of dense GEMMs is a multiple of ROWS; a partial tile costs as much as a full one
# Token counts at which an engine changes its algorithm; the last one applies to the Triton kernels without backward.
BORDERS = MIN_FUSED_TOKENS, MANY_TOKENS, MIN_ORDERED_TOKENS, ALONE * MIN_ORDERED_TOKENS


def room_for(per_token: float) -> int:
    """A plan's room, in nonzeros per token, after a batch with `per_token`: ROOM_MARGIN times as many, rounded up to a
    multiple of ROOM_MULTIPLE, and at least ROOM. For 100 nonzeros per token, the room is 416."""
    room = ROOM_MULTIPLE * math.ceil(ROOM_MARGIN * min(per_token, TILE_MAX_NONZEROS) / ROOM_MULTIPLE)
    return max(room, ROOM)


class Cost(NamedTuple):
    """Seconds of a call: fixed + per_nonzero * nnz + per_union * union, with the call's counts (FeedForwardOutput)."""

    fixed: float
    per_nonzero: float = 0.0
    per_union: float = 0.0

    def seconds(self, nnz: float, union: float) -> float:
        return self.fixed + self.per_nonzero * nnz + self.per_union * union


class Estimate(NamedTuple):
    """The cost of a call on one engine. most: maximum nonzeros of a call for which the engine may be chosen. margin:
    the share of dense's time that the engine must save to replace another engine."""

    cost: Cost
    most: float = math.inf
    margin: float = MARGIN


@dataclass(frozen=True)
class LayerCosts:
    """Chooses engines for a layer with `width` K and `neurons` N from the `estimates` of a call."""

    kernels: str  # "cuda" or "triton"
    width: int
    neurons: int
    # Eager decoding is host-bound, so the estimates for a token count are computed once and cached.
    _cache: dict[tuple[int, bool], dict[Engine, Estimate]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def estimates(self, tokens: int, training: bool) -> dict[Engine, Estimate]:
        """Estimates by engine for all work after the gate GEMM; dense is always included."""
        raise NotImplementedError

    def _cached_estimates(self, tokens: int, training: bool) -> dict[Engine, Estimate]:
        if (found := self._cache.get((tokens, training))) is None:
            if len(self._cache) == MOST_CACHED:
                self._cache.clear()
            found = self._cache[tokens, training] = self.estimates(tokens, training)
        return found

    def row_density(self, tokens: int) -> float:
        """Maximum nonzeros per token at which the row engine is chosen over dense; negative if it never is."""
        estimates = self._cached_estimates(tokens, False)
        if Engine.row not in estimates:
            return -1.0
        row, dense = estimates[Engine.row], estimates[Engine.dense]
        left = (1 - row.margin) * dense.cost.fixed - row.cost.fixed
        if row.cost.per_nonzero == 0:
            return math.inf if left >= 0 else -1.0
        return left / (row.cost.per_nonzero * tokens)

    def choose_engine(
        self, tokens: int, nnz: float, union: float, current: Engine | None = None, training: bool = False
    ) -> Engine:
        """The engine for a forward pass, or, if `training`, for the forward and backward pass of a micro-batch. The
        other arguments are those of Policy.choose_engine."""
        if not training and FEW_TOKENS < tokens < MANY_TOKENS:
            return Engine.row if nnz <= tokens * self.row_density(tokens) else Engine.dense
        estimates = self._cached_estimates(tokens, training)
        dense = estimates[Engine.dense].cost.seconds(nnz, union)
        best, least = Engine.dense, dense
        for engine, (cost, most, margin) in estimates.items():
            if engine == Engine.dense or nnz > most or (engine == Engine.tile and union < 0):  # -1: not measured
                continue
            seconds = cost.seconds(nnz, union)
            # The current engine needs no margin to stay, so the choice does not flip between engines of similar speed.
            if seconds <= dense * (1 if current == engine else 1 - margin) and seconds < least:
                best, least = engine, seconds
        return best


BySize = dict[int, dict[Engine, Cost]]  # tokens of a call -> cost of each measured engine


@dataclass(frozen=True)
class Costs(LayerCosts):
    """Costs of a layer measured on this GPU.

    The token count of a call is first rounded up to whole tiles (`whole_tiles`). Between two measured token counts, the
    time of calls with equal sparsity per token is interpolated linearly. Beyond the largest count, `fixed` is
    extrapolated from that count and one at most half as large, and `per_nonzero` and `per_union` stay constant. A
    sparse engine is not available below its smallest measured token count.
    """

    forward: BySize
    training: BySize  # forward and backward
    # Largest token count that was expected to fit into free memory during the measurement; None: all counts were
    # measured. If more fits later, first_use.policy_for measures the layer again.
    tried: int | None = field(default=None, compare=False)

    def estimates(self, tokens: int, training: bool) -> dict[Engine, Estimate]:
        most = {Engine.tile: TILE_MAX_NONZEROS * tokens}
        costs = costs_at(self.training if training else self.forward, tokens)
        return {engine: Estimate(cost, most.get(engine, math.inf)) for engine, cost in costs.items()}

    def as_json(self) -> dict[str, Any]:
        sizes = {
            name: {str(tokens): {engine.name: list(cost) for engine, cost in by.items()} for tokens, by in of.items()}
            for name, of in (("forward", self.forward), ("training", self.training))
        }
        return {"kernels": self.kernels, "width": self.width, "neurons": self.neurons, "tried": self.tried, **sizes}

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> "Costs":
        """The inverse of `as_json`. Raises KeyError, TypeError or ValueError for other values."""
        forward, training = (
            {int(tokens): {Engine[name]: Cost(*cost) for name, cost in by.items()} for tokens, by in of.items()}
            for of in (values["forward"], values["training"])
        )
        for sizes in (forward, training):
            if not sizes or any(Engine.dense not in by for by in sizes.values()):
                raise ValueError("the dense engine has no cost at some token count")
        layer = int(values["width"]), int(values["neurons"])
        return cls(values["kernels"], *layer, forward, training, values.get("tried"))


def whole_tiles(tokens: int) -> int:
    """`tokens` rounded up to the whole tiles that dense GEMMs compute, but not across a border: 270 becomes 320."""
    if tokens <= FEW_TOKENS:
        return tokens
    return min([-(-tokens // ROWS) * ROWS, *(border - 1 for border in BORDERS if tokens < border)])


def costs_at(sizes: BySize, tokens: int) -> dict[Engine, Cost]:
    """The costs of a call of `tokens` tokens, for each engine measured at token counts around `tokens`."""
    smallest, largest = min(sizes), max(sizes)
    if tokens < smallest:
        return {Engine.dense: sizes[smallest][Engine.dense]}
    found, whole = {}, whole_tiles(tokens)
    for engine in Engine:
        measured = sorted(size for size, by in sizes.items() if engine in by)
        if measured and measured[0] <= tokens and (whole <= measured[-1] or measured[-1] == largest):
            high = measured[min(bisect.bisect_left(measured, whole), len(measured) - 1)]
            # Extrapolation needs two counts that are far apart, and those next to a border are only one token apart.
            limit = high if high == whole else high - 1 if high > whole else high // 2
            low = measured[max(bisect.bisect_right(measured, limit) - 1, 0)]
            found[engine] = _between(whole, low, sizes[low][engine], high, sizes[high][engine])
    return found


def _between(tokens: int, low: int, before: Cost, high: int, after: Cost) -> Cost:
    """The cost at `tokens`, interpolated or extrapolated from the costs at `low` and `high`."""
    if low == high:
        return after
    share = (tokens - low) / (high - low)  # above 1 when extrapolating
    # At equal sparsity the counts grow in proportion to the tokens. Interpolating the time of all nonzeros therefore
    # needs these factors on the cost of one nonzero.
    first, last = ((1 - share) * low / tokens, share * high / tokens) if share < 1 else (0.0, 1.0)
    return Cost(
        before.fixed + share * (after.fixed - before.fixed),
        first * before.per_nonzero + last * after.per_nonzero,
        first * before.per_union + last * after.per_union,
    )
