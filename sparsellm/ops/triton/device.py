"""The minimum requirements of the Triton kernels, and a check that this machine meets them."""

import ctypes

import torch

from sparsellm.ops.compiler import KernelsUnavailable, require_gpu
from sparsellm.ops.triton.tuning import shared_bytes

TRITON = (3, 6)  # the oldest version that was tested; torch 2.11 brings 3.6
CAPABILITY = (8, 0)  # bfloat16 tensor cores
SHARED_BYTES = 64 << 10  # per block
DRIVER = 12_000  # CUDA 12.0; cubins from Triton's ptxas run on drivers for CUDA 12.0 and later


def driver_version() -> int:
    """The newest CUDA version that the driver supports: 13000 for 13.0."""
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def check() -> None:
    """Raise KernelsUnavailable, with a one-sentence message, if the Triton kernels cannot run on the current device."""
    require_gpu()
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
            f"triton is {triton.__version__}: the kernels need {needed} or later, which comes with torch 2.11"
        )
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if capability < CAPABILITY:
        raise KernelsUnavailable(
            f"the GPU is a {name} of compute capability {'.'.join(map(str, capability))}: the Triton kernels need"
            f" {'.'.join(map(str, CAPABILITY))} or later, which has bfloat16 tensor cores"
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
