"""Selects the kernels that this process uses: the CUDA kernels (Hopper only) or the Triton kernels (any CUDA GPU).

A process uses only one kind, because the tensors saved for backward differ between the two.
"""

from pathlib import Path
from types import ModuleType

import torch

from sparsellm.ops import build, cuda
from sparsellm.ops.compiler import KernelsUnavailable
from sparsellm.system.console import warn_on_main

DRIVER = Path("/proc/driver/nvidia/version")  # exists where the driver of an NVIDIA GPU is loaded
NAMES = {"cuda": "the CUDA kernels", "triton": "the Triton kernels"}
# The Triton kernels' driver module, once loaded. It is global to the process, like the CUDA kernels' library
# (sparsellm.ops.build): a registered operator receives only tensors, so it must find its kernels when it runs.
_triton: ModuleType | None = None
_said: set[str] = set()


def of_this_machine() -> str:
    """The kernels that "auto" loads: "triton" on a CUDA GPU other than Hopper, else "cuda", whose loader reports what
    this machine lacks."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "cuda"
    return "cuda" if torch.cuda.get_device_capability() == build.CAPABILITY else "triton"


def load(kernels: str = "auto") -> None:
    """Load the "cuda" or "triton" kernels, or with "auto" the kernels for this GPU. Raises KernelsUnavailable if the
    kernels cannot run here, and ValueError if this process has already loaded the other kind."""
    global _triton
    if kernels == "auto":
        kernels = loaded() or of_this_machine()
    if loaded() not in (None, kernels):
        raise ValueError(
            f"kernels is {kernels!r}: it should be {loaded()!r}, which this process has already loaded; a process can"
            " use only one kind of kernels"
        )
    if kernels == "cuda":
        build.load()
    else:
        check("triton")
        from sparsellm.ops.triton import engines

        _triton = engines


def available() -> tuple[bool, str]:
    """(True, "") if `load("auto")` works here, else (False, why); rank 0 also prints why, once per process.

    Raises NamedKernelsUnusable if SPARSELLM_KERNELS names an unusable library, because falling back to PyTorch would
    ignore the user's choice.
    """
    try:
        load()
    except build.NamedKernelsUnusable:
        raise
    except KernelsUnavailable as error:
        why = str(error) if torch.cuda.is_available() or DRIVER.exists() else "this machine has no NVIDIA GPU"
        if why not in _said:
            missing = NAMES[of_this_machine()]
            warn_on_main(f"PyTorch computes the feedforward layers because {missing} are unavailable: {why}")
        _said.add(why)
        return False, why
    return True, ""


def loaded() -> str | None:
    """The kernels that this process has loaded, "cuda" or "triton", else None."""
    if _triton is not None:
        return "triton"
    return "cuda" if build.loaded() else None


def check(kernels: str) -> None:
    """Raise KernelsUnavailable if `load(kernels)` would, as far as can be known without loading anything."""
    if (of_this_machine() if kernels == "auto" else kernels) == "cuda":
        build.check()
    else:
        from sparsellm.ops.triton import device

        device.check()


def driver() -> ModuleType | None:
    """The module whose forward and backward run the loaded kernels; None if none are loaded."""
    return _triton or (cuda if build.loaded() else None)
