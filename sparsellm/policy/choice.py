"""The policy: picks the engine for a call from the activation counts of the layer's earlier calls."""

from dataclasses import dataclass, field
from functools import lru_cache

from sparsellm.ops import backend
from sparsellm.ops.plan import Engine, Plan
from sparsellm.policy.costs import TILE_MAX_NONZEROS, Costs, LayerCosts, room_for
from sparsellm.policy.packaged import Packaged, is_shipped

packaged = lru_cache(Packaged)


@dataclass(frozen=True)
class Policy:
    """Chooses engines by a layer's costs on `kernels`: those measured on this GPU model, or else the package's.

    Code that accelerates or trains a model creates a policy (first_use.policy_for) and passes it on.
    """

    kernels: str = field(default_factory=lambda: backend.loaded() or "cuda")  # "cuda" or "triton"
    measured: dict[tuple[int, int], Costs] = field(default_factory=dict)  # key: (K, N) of a layer

    def costs(self, width: int, neurons: int) -> LayerCosts:
        return self.measured.get((width, neurons)) or packaged(self.kernels, width, neurons)

    def choose_engine(
        self, tokens: int, width: int, neurons: int, nnz: float, union: float, current: Engine | None = None
    ) -> Engine:
        """The engine for a forward pass of `tokens` tokens through a layer with `width` K and `neurons` N.

        nnz: nonzero activations of an earlier call, scaled to `tokens` tokens. union: number of neurons active in each
        128-token tile of that call, summed over the tiles, and scaled too. If union is negative (not measured), the
        tile engine is not chosen. current: the engine in use, which stays while it is the fastest. A sparse engine must
        be faster than dense by a margin to replace the current engine.
        """
        return self.costs(width, neurons).choose_engine(tokens, nnz, union, current)

    def choose_training_engine(
        self, tokens: int, width: int, neurons: int, nnz: float, union: float, current: Engine | None = None
    ) -> Engine:
        """The engine, dense or tile, for a micro-batch's forward and backward pass; arguments as in `choose_engine`."""
        return self.costs(width, neurons).choose_engine(tokens, nnz, union, current, training=True)

    def training_plan(
        self, tokens: int, width: int, neurons: int, nnz: float, union: float, fullest: float, current: Plan
    ) -> Plan:
        """The plan for a micro-batch's forward and backward pass. fullest: nonzeros per token in the fullest
        micro-batch that was counted. The other arguments are those of `choose_engine`."""
        engine = self.choose_training_engine(tokens, width, neurons, nnz, union, current=current.engine)
        if fullest > TILE_MAX_NONZEROS:
            engine = Engine.dense  # an overflow in one micro-batch costs more time than all others save
        return Plan(engine, room_for(fullest))

    def row_density(self, tokens: int, width: int, neurons: int) -> float:
        """Maximum nonzeros per token at which the row engine computes a call of FEW_TOKENS to MANY_TOKENS tokens."""
        return self.costs(width, neurons).row_density(tokens)

    def first_of_few(self) -> Plan:
        """The plan for calls of few tokens before any counts exist. With the CUDA kernels, such calls are assumed to be
        sparse."""
        return Plan(Engine.dense if self.kernels == "triton" else Engine.row)

    def chosen_by(self, width: int, neurons: int) -> str:
        """Describes, for messages, which costs choose the engines of a layer of this shape."""
        if (width, neurons) in self.measured:
            return "costs measured on this GPU model"
        if is_shipped(self.kernels, width, neurons):
            return "the package's constants, measured on this GPU and layer"
        return f"an H200's constants; `sparsellm calibrate model={width}x{neurons}` measures this GPU"
