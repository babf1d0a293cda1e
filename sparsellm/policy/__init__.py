"""Decides which engine computes a feedforward layer.

choice.py        Policy, the object that callers pass around
costs.py         cost model of a call for each engine, and the rule that picks an engine
packaged.py      default costs that ship with the package: h200_cuda.json, h200_triton.json
training.py      when layers in training count activations and choose engines

A calibration measures the costs once on this GPU and caches them:
first_use.py     policy_for: a policy for some layers, of which it calibrates those without cached costs
layer.py         a synthetic layer with realistic activation sparsity
measure.py       times every engine at many token counts and fits costs to the times
block_sizes.py   tunes the block sizes of the Triton kernels
report.py        table of measured times, predicted times and chosen engines
store.py         the cache on disk
"""

from sparsellm.policy.choice import Policy

__all__ = ["Policy"]
