"""The package's default costs, for layers that were not measured on this GPU: h200_cuda.json, h200_triton.json.

A file lists entries for each engine, for forward passes and for training (forward and backward). An entry applies to
calls of at least its number of tokens ("from"), until the next entry; keys that the next entry omits keep their values.
The keys of an entry are the fields of `Formula`, and `sources`: titles of the measurements in docs/dev/LOG.md, or the
origin of a value that was not measured. All times are in seconds, without the gate GEMM, which all engines share.

On another GPU, the costs of dense and sparse engines change by similar factors. Where the factors differ, fixed times
have too much weight, so dense is chosen too often rather than too rarely.
"""

import json
import math
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
import torch

from sparsellm.ops import backend
from sparsellm.ops.plan import Engine
from sparsellm.ops.twell import TOKEN_TILE
from sparsellm.policy.costs import MARGIN, Cost, Estimate, LayerCosts


class Formula(NamedTuple):
    """Cost of a call of M tokens on one engine, for any K and N: the sum of these terms, in seconds."""

    call: float = 0.0
    token: float = 0.0  # times M
    activation: float = 0.0  # times M N
    nonzero: float = 0.0  # times the nonzeros
    nonzero_by_width: float = 0.0  # times the nonzeros, at the measured layer's K; proportional to K
    mean: float = 0.0  # times the nonzeros per token: if tokens are not ordered, the call waits for its fullest tile
    products: int = 0  # number of GEMMs, each with 2 K operations per activation (tile: per neuron of the union)
    flops: float = math.inf  # operations per second in these GEMMs
    table: dict[str, float] | None = None  # tokens -> seconds at the measured layer's N, proportional to N
    widths: list[int] | None = None  # the formula is valid for these K; None: any
    # The engine is chosen up to this many nonzeros: per token; per token as a share of N; per call as a share of N.
    most_per_token: float | None = None
    most_share_per_token: float | None = None
    most_share: float | None = None
    margin: float = MARGIN

    def estimate(self, engine: Engine, tokens: int, width: int, neurons: int, layer: tuple[int, int]) -> Estimate:
        """layer: (K, N) of the measured layer."""
        work, over_union = 2 * self.products * width, engine == Engine.tile
        fixed = self.call + self.token * tokens + self.activation * tokens * neurons
        fixed += 0 if over_union else work * tokens * neurons / self.flops
        if self.table is not None:
            # Interpolated, because the time of cuBLAS grows in steps that no formula models.
            seconds = np.interp(tokens, [int(size) for size in self.table], list(self.table.values()))
            fixed += float(seconds) * neurons / layer[1]
        per_nonzero = self.nonzero + self.nonzero_by_width * width / layer[0] + self.mean / max(tokens, 1)
        most = math.inf if self.most_per_token is None else self.most_per_token * tokens
        if self.most_share is not None and self.most_share_per_token is not None:
            most = min(self.most_share_per_token * tokens, self.most_share) * neurons
        return Estimate(
            Cost(fixed, per_nonzero, work * TOKEN_TILE / self.flops if over_union else 0.0), most, self.margin
        )


class Data(NamedTuple):
    """A cost file. gpu: part of the measured GPU's name; None if no single GPU was measured in full."""

    gpu: str | None
    layer: tuple[int, int]  # K and N
    forward: dict[Engine, dict[int, Formula]]  # keys: engine, smallest number of tokens
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
    """Whether the package's costs were measured on this GPU model and layer shape, and `kernels` are loaded."""
    of = data(kernels)
    if of.gpu is None or (width, neurons) != of.layer or backend.loaded() != kernels:
        return False
    return of.gpu in torch.cuda.get_device_name()


class Packaged(LayerCosts):
    """The package's default costs of a layer on `kernels`."""

    def estimates(self, tokens: int, training: bool) -> dict[Engine, Estimate]:
        of, found = data(self.kernels), {}
        for engine, entries in (of.training if training else of.forward).items():
            if (start := max((size for size in entries if size <= tokens), default=None)) is not None:
                formula = entries[start]
                if formula.widths is None or self.width in formula.widths:
                    found[engine] = formula.estimate(engine, tokens, self.width, self.neurons, of.layer)
        return found
