"""The minimum requirements of the Triton kernels."""

TRITON = (3, 6)  # the oldest version that was tested; torch 2.11 brings 3.6
CAPABILITY = (8, 0)  # bfloat16 tensor cores
SHARED_BYTES = 64 << 10  # per block
DRIVER = 12_000  # CUDA 12.0; cubins from Triton's ptxas run on this driver and later ones
