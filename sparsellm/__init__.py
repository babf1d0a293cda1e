"""Pretraining of language models whose feedforward activations are almost all exactly zero (arXiv 2603.23198).

`sparsellm.accelerate(model)` runs a loaded model's feedforward blocks on the sparse kernels; `sparsellm.restore(model)`
undoes this. `sparsellm.SparseFeedForward` is a sparse feedforward layer for your own model, and
`sparsellm.l1_loss(model)` the L1 term for the model's loss. `sparsellm.Generator.load(folder)` generates text with a
checkpoint. `sparsellm.api` trains and evaluates. `sparsellm.SparsellmError` is the base class of this package's errors.
"""

import importlib
from importlib import metadata
from typing import Any

from sparsellm.system.errors import SparsellmError
from sparsellm.system.packages import needed_by

# The public names, and the modules from which __getattr__ imports them, so that `import sparsellm` loads no torch.
_LATER = {
    "Generator": "sparsellm.inference.generation",
    "SparseFeedForward": "sparsellm.inference.feedforward",
    "accelerate": "sparsellm.inference.accelerate",
    "l1_loss": "sparsellm.inference.accelerate",
    "restore": "sparsellm.inference.accelerate",
}
__all__ = ["Generator", "SparseFeedForward", "SparsellmError", "__version__", "accelerate", "l1_loss", "restore"]
__version__: str  # the installed package's version, read on first access


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("sparsellm")
    if name == "api":
        with needed_by("sparsellm.api"):
            return importlib.import_module("sparsellm.api")
    if name not in _LATER:
        raise AttributeError(f"module 'sparsellm' has no attribute {name!r}")
    with needed_by(f"sparsellm.{name}"):
        module = importlib.import_module(_LATER[name])
    return getattr(module, name)
