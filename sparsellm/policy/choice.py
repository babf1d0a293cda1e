"""The policy: which engine computes a call, from what earlier calls of the layer have counted."""

from dataclasses import dataclass, field
from functools import lru_cache

from sparsellm.ops import backend
from sparsellm.ops.plan import Engine, Plan
from sparsellm.policy.costs import Costs, LayerCosts
from sparsellm.policy.packaged import Packaged, is_shipped

packaged = lru_cache(Packaged)


@dataclass(frozen=True)
class Policy:
    """Chooses engines on `kernels` by what was measured of a layer on this GPU model, else by the package's costs.

    Whoever accelerates or trains a model makes one (sparsellm.policy.policy_for) and passes it on.
    """

    kernels: str = field(default_factory=lambda: backend.loaded() or "cuda")  # or "triton"
    measured: dict[tuple[int, int], Costs] = field(default_factory=dict)  # by (K, N) of a layer

    def costs(self, width: int, neurons: int) -> LayerCosts:
        return self.measured.get((width, neurons)) or packaged(self.kernels, width, neurons)

    def choose_engine(
        self, tokens: int, width: int, neurons: int, nnz: float, union: float, current: Engine | None = None
    ) -> Engine:
        """The engine of a forward pass of `tokens` tokens through a layer with `width` K and `neurons` N.

        nnz: the nonzero activations of an earlier call; union: the neurons active in each of its 128-token tiles,
        summed. Both are for `tokens` tokens, as FeedForwardOutput counts them; where union is negative (not measured),
        the tile engine is not chosen. current: the engine in use, which stays while it is the fastest. To replace it,
        a sparse engine must be faster than dense by a margin.
        """
        return self.costs(width, neurons).choose_engine(tokens, nnz, union, current)

    def choose_training_engine(
        self, tokens: int, width: int, neurons: int, nnz: float, union: float, current: Engine | None = None
    ) -> Engine:
        """The engine, dense or tile, for a micro-batch's forward and backward pass; arguments as of `choose_engine`."""
        return self.costs(width, neurons).choose_training_engine(tokens, nnz, union, current)

    def row_density(self, tokens: int, width: int, neurons: int) -> float:
        """Of a call of neither few nor many tokens: the nonzeros per token up to which the row engine computes it."""
        return self.costs(width, neurons).row_density(tokens)

    def first_of_few(self) -> Plan:
        """The plan of calls of few tokens until something has been counted: on the CUDA kernels they are assumed to be
        sparse."""
        return Plan(Engine.dense if self.kernels == "triton" else Engine.row)

    def chosen_by(self, width: int, neurons: int) -> str:
        """By what engines of such layers are chosen, for people."""
        if (width, neurons) in self.measured:
            return "what was measured on this GPU model"
        if is_shipped(self.kernels, width, neurons):
            return "the package's constants, which are of this GPU and layer"
        return f"an H200's constants; `sparsellm calibrate model={width}x{neurons}` measures this GPU"
