"""The operator's kernels in Triton, for any CUDA GPU that Triton compiles for.

    plan.py        what fires: bits, tiles' unions, orders
    products.py    the sparse engines' products
    dense.py       what the dense engine does between torch's products
    engines.py     the driver: memory, and the order in which the kernels run; as sparsellm.ops.cuda for the CUDA ones
    tuning.py      every constant that was, or is to be, measured: block sizes, and the choice of engines
    device.py      whether all this runs here

Nothing outside of this folder imports triton, and nothing imports this folder before its kernels are asked for.
"""
