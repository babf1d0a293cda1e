"""Pretraining of language models whose feedforward activations are almost all exactly zero (arXiv 2603.23198).

`sparsellm.accelerate(model)` runs a loaded model's feedforward blocks on the sparse kernels; `sparsellm.restore(model)`
undoes it.
"""

from typing import Any

__all__ = ["accelerate", "restore"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'sparsellm' has no attribute {name!r}")
    from sparsellm.model import accelerate  # here, for `import sparsellm` itself should not load torch

    return getattr(accelerate, name)
