"""The package's costs, for layers that nobody has measured on this GPU: h200_cuda.json, h200_triton.json.

A file has, of each engine, entries by number of tokens, forward and with backward. An entry holds from its number of
tokens on; what a later entry of the engine does not name stays as it was. The keys of an entry are those of `Formula`,
and `sources`: the titles in docs/dev/LOG.md of the measurements behind it, or what it is if nobody has measured it. All
is in seconds, for everything after the gate product, which the engines share.

On another GPU both sides of a comparison scale about alike. Where they do not, the fixed times weigh too much, so dense
is chosen too often rather than too seldom.
"""

import itertools
import json
import math
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple

import torch

from sparsellm.ops import backend
from sparsellm.ops.plan import Engine
from sparsellm.ops.twell import TOKEN_TILE
from sparsellm.policy.costs import MARGIN, Cost, Estimate, LayerCosts


class Formula(NamedTuple):
    """What calls of M tokens cost by one engine, for layers of any K and N: a sum of these."""

    call: float = 0.0
    token: float = 0.0  # times M
    activation: float = 0.0  # times M N
    nonzero: float = 0.0  # times the nonzeros
    nonzero_by_width: float = 0.0  # times the nonzeros, at the K of the layer that was measured, in proportion to K
    mean: float = 0.0  # times the nonzeros per token: a batch that is not ordered ends when its fullest tile does
    products: int = 0  # with a matrix of the layer: 2 K operations for each activation; of tile, for each of the union
    flops: float = math.inf  # operations per second in these products
    table: dict[str, float] | None = None  # by tokens, at the N of the layer that was measured, in proportion to N
    widths: list[int] | None = None  # K for which all this holds; None: any
    # The nonzeros up to which the engine is chosen: per token; per token, of N; of the whole call, of N.
    most_per_token: float | None = None
    most_share_per_token: float | None = None
    most_share: float | None = None
    margin: float = MARGIN

    def estimate(self, engine: Engine, tokens: int, width: int, neurons: int, layer: tuple[int, int]) -> Estimate:
        """layer: (K, N) of the layer that was measured."""
        work, over_union = 2 * self.products * width, engine == Engine.tile
        fixed = self.call + self.token * tokens + self.activation * tokens * neurons
        fixed += 0 if over_union else work * tokens * neurons / self.flops
        if self.table is not None:
            fixed += _interpolated(self.table, tokens) * neurons / layer[1]
        per_nonzero = self.nonzero + self.nonzero_by_width * width / layer[0] + self.mean / max(tokens, 1)
        most = math.inf if self.most_per_token is None else self.most_per_token * tokens
        if self.most_share is not None and self.most_share_per_token is not None:
            most = min(self.most_share_per_token * tokens, self.most_share) * neurons
        return Estimate(
            Cost(fixed, per_nonzero, work * TOKEN_TILE / self.flops if over_union else 0.0), most, self.margin
        )


def _interpolated(table: dict[str, float], tokens: int) -> float:
    """cuBLAS's tiles make steps that no formula has."""
    points = [(int(size), seconds) for size, seconds in table.items()]
    (low, before), (high, after) = next(pair for pair in itertools.pairwise(points) if tokens <= pair[1][0])
    return before + (after - before) * (tokens - low) / (high - low)


class Data(NamedTuple):
    """A file. gpu: in the name of the GPU that it was measured on; None: not measured as a whole."""

    gpu: str | None
    layer: tuple[int, int]  # K and N
    forward: dict[Engine, dict[int, Formula]]  # by engine and number of tokens
    training: dict[Engine, dict[int, Formula]]  # forward and backward


def read(kernels: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(resources.files(__package__).joinpath(f"h200_{kernels}.json").read_text())
    return values


@lru_cache
def data(kernels: str) -> Data:
    values = read(kernels)
    forward, training = (
        {Engine[name]: _merged(entries) for name, entries in values[way].items()} for way in ("forward", "training")
    )
    return Data(values["gpu"], tuple(values["layer"]), forward, training)


def _merged(entries: list[dict[str, Any]]) -> dict[int, Formula]:
    found: dict[int, Formula] = {}
    values: dict[str, Any] = {}
    for entry in entries:
        values |= entry
        found[entry["from"]] = Formula(**{key: values[key] for key in values.keys() - {"from", "sources"}})
    return found


def is_shipped(kernels: str, width: int, neurons: int) -> bool:
    """Whether the package's costs were measured on such a GPU and layer, and these kernels are loaded."""
    of = data(kernels)
    if of.gpu is None or (width, neurons) != of.layer or backend.loaded() != kernels:
        return False
    return of.gpu in torch.cuda.get_device_name()


class Packaged(LayerCosts):
    """The package's costs of a layer on `kernels`."""

    def estimates(self, tokens: int, training: bool) -> dict[Engine, Estimate]:
        of, found = data(self.kernels), {}
        for engine, entries in (of.training if training else of.forward).items():
            if (start := max((size for size in entries if size <= tokens), default=None)) is not None:
                formula = entries[start]
                if formula.widths is None or self.width in formula.widths:
                    found[engine] = formula.estimate(engine, tokens, self.width, self.neurons, of.layer)
        return found
