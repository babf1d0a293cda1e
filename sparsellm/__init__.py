"""Pretraining of language models whose feedforward activations are almost all exactly zero (arXiv 2603.23198).

`sparsellm.accelerate(model)` runs a loaded model's feedforward blocks on the sparse kernels; `sparsellm.restore(model)`
undoes it. `sparsellm.Generator.load(folder)` writes text with a checkpoint. `sparsellm.api` trains and evaluates.
`sparsellm.SparsellmError` is the base of this package's errors.
"""

import importlib
from importlib import metadata
from typing import Any

from sparsellm.system.errors import SparsellmError
from sparsellm.system.packages import needed_by

__all__ = ["Generator", "SparsellmError", "__version__", "accelerate", "restore"]
__version__: str  # the installed package's version, read on first access


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("sparsellm")
    if name == "api":
        with needed_by("sparsellm.api"):
            return importlib.import_module("sparsellm.api")
    if name not in __all__:
        raise AttributeError(f"module 'sparsellm' has no attribute {name!r}")
    file = "generation" if name == "Generator" else "accelerate"
    with needed_by(f"sparsellm.{name}"):
        module = importlib.import_module(f"sparsellm.inference.{file}")  # so `import sparsellm` alone loads no torch
    return getattr(module, name)
