"""Triton kernels of text generation: attention of one token, prompts, and pointwise operations."""
