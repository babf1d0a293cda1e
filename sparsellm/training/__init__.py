"""The training loop and what it keeps: optimizer, sparsity policy, metrics, checkpoints."""
