"""The feedforward operator, on tensors alone: nothing here knows modules or configurations."""

from sparsellm.ops.feedforward import MULTIPLE, FeedForwardOutput, feedforward, saved_bytes
from sparsellm.ops.plan import ENGINES, Engine, Plan
from sparsellm.ops.twell import MAX_COLUMNS

__all__ = [
    "ENGINES",
    "MAX_COLUMNS",
    "MULTIPLE",
    "Engine",
    "FeedForwardOutput",
    "Plan",
    "feedforward",
    "saved_bytes",
]
