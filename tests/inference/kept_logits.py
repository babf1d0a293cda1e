"""The logits of a generator's draw."""

import torch
from torch import Tensor


class KeptLogits:
    """Replaces Sampling: greedy, and keeps the logits."""

    logits: Tensor  # [B, V] float32, of the last draw

    def draw(self, logits: Tensor, _generator: torch.Generator) -> Tensor:
        self.logits = logits
        return logits.argmax(-1)
