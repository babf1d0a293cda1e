"""What the Triton kernels need of a machine."""

TRITON = (3, 6)  # the oldest version that the kernels were compiled by; torch 2.11 brings 3.6
CAPABILITY = (8, 0)  # bfloat16 products
SHARED_BYTES = 64 << 10  # for a block
DRIVER = 12_000  # CUDA 12.0: the programs that Triton's assembler writes run on any later driver
