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

from sparsellm.ops.dispatch import TILE_MARGIN, TILE_MAX_NONZEROS
from sparsellm.ops.plan import Engine


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

    Between two numbers of tokens that were measured, costs are interpolated, and engines are those of both. Beyond the
    largest one, `fixed` grows as it did before, and what a nonzero and a neuron of a union cost stays. Fewer tokens
    than the smallest number are for dense.
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


def costs_at(sizes: BySize, tokens: int) -> dict[Engine, Cost]:
    """The costs of a call of so many tokens."""
    measured = sorted(sizes)
    if tokens in sizes:
        return sizes[tokens]
    at = bisect.bisect(measured, tokens)
    if at == 0:
        return {Engine.dense: sizes[measured[0]][Engine.dense]}
    if len(measured) == 1:
        return sizes[measured[0]]
    low, high = measured[min(at, len(measured) - 1) - 1], measured[min(at, len(measured) - 1)]
    share = (tokens - low) / (high - low)  # above 1 beyond the largest one
    found = {}
    for engine in sizes[low].keys() & sizes[high].keys():
        before, after = sizes[low][engine], sizes[high][engine]
        slopes = min(share, 1.0)
        found[engine] = Cost(
            before.fixed + share * (after.fixed - before.fixed),
            before.per_nonzero + slopes * (after.per_nonzero - before.per_nonzero),
            before.per_union + slopes * (after.per_union - before.per_union),
        )
    return found


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
