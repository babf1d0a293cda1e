"""Triton kernels for text generation: attention of one token, prompts, and pointwise operations."""

from sparsellm.inference.kernels.decoding import attend_to_the_past, multiply, multiply_few
from sparsellm.inference.kernels.pointwise import activate, sum_norm
from sparsellm.inference.kernels.prompts import place

__all__ = ["activate", "attend_to_the_past", "multiply", "multiply_few", "place", "sum_norm"]
