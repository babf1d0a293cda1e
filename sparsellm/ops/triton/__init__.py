"""The operator's kernels in Triton, for any CUDA GPU that Triton compiles for.

    engines.py     the driver: memory, and the order in which the kernels run (for the CUDA kernels: sparsellm.ops.cuda)
    plan.py        finds which neurons fire for each token and each tile
    clusters.py    orders the tokens so that the tokens of a tile fire the same neurons
    products.py    the sparse engines' matmuls
    nonzeros.py    the sparse engines' kernels on single nonzeros between the matmuls
    dense.py       the dense engine's elementwise kernels between torch's matmuls
    transpose.py   transposes W_d and its gradient
    tuning.py      block sizes by GPU
    device.py      what these kernels need, and whether they run here

sparsellm.ops.backend imports this folder, and thereby triton, only when the Triton kernels are requested. The Triton
kernels of sparsellm.Generator are in sparsellm.inference.kernels.
"""
