"""What the engines cost on this GPU: measured once, kept in the cache, and taken by the policy.

layer.py         a layer that fires as layers do
measure.py       times of every engine at many numbers of tokens, and the costs that are fitted to them
block_sizes.py   the block sizes of the Triton kernels
report.py        measured, predicted and chosen, as a table
store.py         where it is kept, and how the policy comes to go by it
"""

from sparsellm.calibration.store import is_shipped, take

__all__ = ["is_shipped", "take"]
