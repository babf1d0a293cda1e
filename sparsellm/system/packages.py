"""Names the package to install when an import fails."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from sparsellm.system.errors import SparsellmError

# Packages to install, for modules whose package has another name.
PACKAGES = {
    "hydra": "hydra-core", "lm_eval": "'lm-eval[hf]'", "omegaconf": "hydra-core", "pynvml": "nvidia-ml-py",
    "yaml": "pyyaml",
}  # fmt: skip


class PackageMissing(SparsellmError, ModuleNotFoundError):
    """A package needed for the current operation is not installed."""


@contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Raise PackageMissing if an import in the block fails because a package is not installed.

    `what`: what needs the package, for the message.
    """
    try:
        yield
    except PackageMissing:
        raise
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module in ("", "sparsellm") or module in sys.stdlib_module_names:
            raise
        package = PACKAGES.get(module, module)
        raise PackageMissing(
            f"{what} needs the package {module}, which is not installed: install it with `pip install {package}`"
        ) from error
