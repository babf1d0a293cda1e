"""Pretraining of language models whose feedforward activations are almost all exactly zero (arXiv 2603.23198)."""
