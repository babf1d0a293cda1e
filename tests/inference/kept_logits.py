"""The logits of a generator's draw."""

import torch
from torch import Tensor


class KeptLogits:
    """Takes the place of a Sampling: the likeliest token is drawn, and the logits are kept."""

    logits: Tensor  # [B, V] float32, of the last draw

    def draw(self, logits: Tensor, _generator: torch.Generator) -> Tensor:
        self.logits = logits
        return logits.argmax(-1)
