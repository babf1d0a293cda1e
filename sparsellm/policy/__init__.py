"""Which engine computes a feedforward layer, and what that is decided by.

choice.py        Policy, the object that is passed to who needs it
costs.py         what a call costs by each engine, and the rule of choice
packaged.py      the costs that come with the package: h200_cuda.json, h200_triton.json

A calibration measures the costs on this GPU, once, and keeps them in the cache:
first_use.py     policy_for: a policy of some layers, measured first where nobody has
layer.py         a layer that fires as layers do
measure.py       times of every engine at many numbers of tokens, and the costs that are fitted to them
block_sizes.py   the block sizes of the Triton kernels
report.py        measured, predicted and chosen, as a table
store.py         where it is kept
"""

from sparsellm.policy.choice import Policy

__all__ = ["Policy"]
