"""The torch dtype for each configurable precision."""

import torch

from sparsellm.config import Precision

DTYPES = {Precision.bfloat16: torch.bfloat16, Precision.float32: torch.float32}
