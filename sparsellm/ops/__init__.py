"""The feedforward operators: tensors in, tensors out; nothing here knows modules or configurations."""

from sparsellm.ops.dispatch import ENGINES, choose_engine, choose_training_engine
from sparsellm.ops.feedforward import (
    MAX_COLUMNS,
    MULTIPLE,
    FeedForwardOutput,
    gated_ffn,
    nongated_ffn,
    plan_of,
    saved_bytes,
)
from sparsellm.ops.layout import NeuronMajor, neuron_major

__all__ = [
    "ENGINES",
    "MAX_COLUMNS",
    "MULTIPLE",
    "FeedForwardOutput",
    "NeuronMajor",
    "choose_engine",
    "choose_training_engine",
    "gated_ffn",
    "neuron_major",
    "nongated_ffn",
    "plan_of",
    "saved_bytes",
]
