"""What the engines cost on this GPU: measured once, kept in the cache, and taken by the policy.

layer.py         a layer that fires as layers do
measure.py       times of every engine at many numbers of tokens, and the costs that are fitted to them
block_sizes.py   the block sizes of the Triton kernels
report.py        measured, predicted and chosen, as a table
first_use.py     layers that nobody has measured: measured where they are first used
store.py         where it is kept, and how the policy comes to go by it
"""

from sparsellm.calibration.first_use import measure_missing
from sparsellm.calibration.store import chosen_by, is_shipped, take

__all__ = ["chosen_by", "is_shipped", "measure_missing", "take"]
