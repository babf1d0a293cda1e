"""The operator's kernels in Triton, for any CUDA GPU that Triton compiles for.

    plan.py        what fires: bits, tiles' unions
    clusters.py    an order of the tokens in which those of a tile fire the same neurons
    products.py    the sparse engines' products
    dense.py       what the dense engine does between torch's products
    engines.py     the driver: memory, and the order in which the kernels run; as sparsellm.ops.cuda for the CUDA ones
    nonzeros.py    what happens to single nonzeros between the products
    transpose.py   W_d by neuron, and back
    tuning.py      block sizes by GPU
    policy.py      the choice of engines, and its constants
    decoding.py, prompts.py, pointwise.py   no part of the operator: what sparsellm.Generator computes beside it, of one
                   token, of prompts, of both
    device.py      whether all this runs here; limits.py: what it needs

Only this folder imports triton. sparsellm.ops.backend imports it once its kernels are asked for, and
sparsellm.inference.layer_forward imports decoding.py, prompts.py and pointwise.py once it computes on a GPU.
"""
