"""Quality of a checkpoint: held-out cross entropy, and accuracy on seven downstream tasks.

`evaluate_checkpoint(config)` returns the contents of results.json. Training imports this package too, so lm-eval is
imported only when tasks are evaluated.
"""

from typing import Any

__all__ = ["evaluate_checkpoint"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'sparsellm.evaluation' has no attribute {name!r}")
    from sparsellm.evaluation.checkpoint import evaluate_checkpoint

    return evaluate_checkpoint
