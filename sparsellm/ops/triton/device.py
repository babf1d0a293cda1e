"""Checks whether the Triton kernels run on this machine, and says what is missing."""

import ctypes

import torch

from sparsellm.ops.compiler import KernelsUnavailable
from sparsellm.ops.triton.limits import CAPABILITY, DRIVER, SHARED_BYTES, TRITON
from sparsellm.ops.triton.tuning import shared_bytes


def driver_version() -> int:
    """The newest CUDA version that the driver supports: 13000 for 13.0."""
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def check() -> None:
    """Raise KernelsUnavailable, in one sentence, if the Triton kernels do not run on the current device."""
    if torch.version.cuda is None:
        raise KernelsUnavailable(f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch")
    if not torch.cuda.is_available():
        raise KernelsUnavailable("no CUDA device is visible to torch: check nvidia-smi and CUDA_VISIBLE_DEVICES")
    try:
        import triton
    except ImportError as error:
        raise KernelsUnavailable(
            f"triton is not installed ({error}): install the version that torch {torch.__version__} requires"
        ) from error
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < TRITON:
        needed = ".".join(map(str, TRITON))
        raise KernelsUnavailable(
            f"triton is {triton.__version__}: the kernels need {needed} or later, which torch 2.11 brings"
        )
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if capability < CAPABILITY:
        raise KernelsUnavailable(
            f"the GPU is a {name} of compute capability {'.'.join(map(str, capability))}: the Triton kernels need"
            f" {'.'.join(map(str, CAPABILITY))} or later, which multiplies in bfloat16"
        )
    shared = shared_bytes(torch.cuda.get_device_properties(torch.cuda.current_device()))
    if shared < SHARED_BYTES:
        raise KernelsUnavailable(
            f"the GPU is a {name} with {shared:,} bytes of shared memory per block: the Triton kernels need"
            f" {SHARED_BYTES:,}"
        )
    driver = driver_version()
    if driver < DRIVER:
        raise KernelsUnavailable(
            f"the NVIDIA driver supports CUDA {driver // 1000}.{driver % 1000 // 10}: Triton's programs need a driver"
            f" for {DRIVER // 1000}.{DRIVER % 1000 // 10} or later"
        )
