"""The operator's kernels in Triton, for any CUDA GPU that Triton compiles for.

    plan.py        which neurons fire: bits, tiles' unions
    clusters.py    an order of the tokens in which the tokens of a tile fire the same neurons
    products.py    the sparse engines' matmuls
    dense.py       the dense engine's elementwise kernels between torch's matmuls
    engines.py     the driver: memory, and the order in which the kernels run (for the CUDA kernels: sparsellm.ops.cuda)
    nonzeros.py    kernels on single nonzeros between the matmuls
    transpose.py   W_d by neuron, and back
    tuning.py      block sizes by GPU
    device.py      what these kernels need, and whether they run here

sparsellm.ops.backend imports this folder, and with it triton, once its kernels are requested. The Triton kernels of
sparsellm.Generator are in sparsellm.inference.kernels.
"""
