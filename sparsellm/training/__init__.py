"""The training loop: optimizer, sharding, micro-batch size, sparsity, warm start, distillation."""
