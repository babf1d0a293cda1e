"""The feedforward operators: tensors in, tensors out; nothing here knows modules or configurations."""

from sparsellm.ops.feedforward import MAX_COLUMNS, MULTIPLE, FeedForwardOutput, dense_plan, gated_ffn, nongated_ffn

__all__ = ["MAX_COLUMNS", "MULTIPLE", "FeedForwardOutput", "dense_plan", "gated_ffn", "nongated_ffn"]
