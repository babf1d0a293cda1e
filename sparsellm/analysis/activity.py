"""Which neurons fire: exact counts, by hooks on a Hugging Face model's own activations while it reads.

Letters: S sequences, T their length, L layers, N neurons. A neuron fires on a token where its activation, relu(z) in
the model's dtype, is not zero. No activation outlives its layer; what is kept is L counts per token, 4 bytes each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsellm.inference.matching import feedforward_blocks
from sparsellm.ops.reference import union
from sparsellm.ops.twell import TOKEN_TILE, tiles

if TYPE_CHECKING:  # transformers' modelling takes two seconds to import: a refusal need not wait for it
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Activity:
    """What fired on blocks of tokens."""

    blocks: np.ndarray  # int64 [S, T]: the tokens
    nonzeros: np.ndarray  # int32 [S, T, L]: neurons that fired
    fired: np.ndarray  # int64 [L, N]: tokens on which each neuron fired
    union: np.ndarray  # int64 [L]: neurons that fired in each tile of 128 tokens, summed over tiles
    tiles: int  # of each forward pass; its last one may be shorter

    @property
    def tokens(self) -> int:
        return self.blocks.size


@torch.inference_mode()
def count(
    model: "PreTrainedModel", blocks: Tensor, batch_size: int, advance: Callable[[int], object] = lambda _: None
) -> Activity:
    """What fires while `model` reads `blocks` (int64 [S, T]), `batch_size` sequences per forward pass.

    Waits for the device once per forward pass, after which advance(its sequences) is called. Raises ValueError for a
    model whose blocks are not as sparsellm.inference.matching describes them.
    """
    layers: list[Any] = [*feedforward_blocks(model)]
    device, neurons = model.device, layers[0].up_proj.out_features
    fired = torch.zeros(len(layers), neurons, dtype=torch.int64, device=device)
    unions = torch.zeros(len(layers), dtype=torch.int64, device=device)
    per_token: list[Tensor] = []  # of the layers so far, in this forward pass

    def see(_activation: nn.Module, _inputs: tuple, output: Tensor) -> None:
        layer, active = len(per_token), output.flatten(0, -2) != 0
        unions[layer] += union(active)
        ones = active.float()  # its sums are far below 2^24, so exact, and many times faster than those of bool
        fired[layer] += ones.sum(0).long()
        per_token.append(ones.sum(-1).int())

    hooks = [layer.act_fn.register_forward_hook(see) for layer in layers]
    counts, seen_tiles = [], 0
    try:
        for batch in blocks.split(batch_size):
            per_token.clear()
            model.base_model(input_ids=batch.to(device), use_cache=False)  # without the logits
            counts.append(torch.stack(per_token, -1).view(*batch.shape, len(layers)).cpu())
            seen_tiles += tiles(batch.numel(), TOKEN_TILE)
            advance(len(batch))
    finally:
        for hook in hooks:
            hook.remove()
    return Activity(
        blocks.numpy(), torch.cat(counts).numpy(), fired.cpu().numpy(), unions.cpu().numpy(), seen_tiles
    )  # fmt: skip
