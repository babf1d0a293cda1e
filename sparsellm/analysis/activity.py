"""Counts exactly which neurons fire, with hooks on the activations of a Hugging Face model.

Letters: S sequences, T their length, L layers, N neurons. A neuron fires on a token if its activation, relu(z) in the
model's dtype, is not zero. Activations are freed layer by layer; L counts of 4 bytes per token are kept.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sparsellm.inference.matching import feedforward_blocks
from sparsellm.ops.reference import union
from sparsellm.ops.twell import TOKEN_TILE, tiles

if TYPE_CHECKING:  # deferred: importing transformers' models takes two seconds
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Activity:
    """Counts of firing neurons on blocks of tokens."""

    blocks: np.ndarray  # int64 [S, T]: the tokens
    nonzeros: np.ndarray  # int32 [S, T, L]: neurons that fired
    fired: np.ndarray  # int64 [L, N]: tokens on which each neuron fired
    union: np.ndarray  # int64 [L]: neurons that fired in each tile of 128 tokens, summed over tiles
    tiles: int  # over all forward passes; the last tile of each may be shorter

    @property
    def tokens(self) -> int:
        return self.blocks.size

    @property
    def neurons(self) -> int:
        return self.fired.shape[1]


def passes(
    model: "PreTrainedModel", blocks: Tensor, batch_size: int, hooks: Sequence[RemovableHandle]
) -> Iterator[Tensor]:
    """Run `model` on `blocks` [S, T] without computing logits, and yield each batch. Removes `hooks` at the end."""
    try:
        for batch in blocks.split(batch_size):
            model.base_model(input_ids=batch.to(model.device), use_cache=False)
            yield batch
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def count(
    model: "PreTrainedModel", blocks: Tensor, batch_size: int, advance: Callable[[int], object] = lambda _: None
) -> Activity:
    """Count what fires while `model` reads `blocks` (int64 [S, T]), `batch_size` sequences per forward pass.

    Waits for the device once per forward pass and then calls advance(number of sequences). Raises ValueError for a
    model without the blocks that sparsellm.inference.matching describes.
    """
    layers: list[Any] = [*feedforward_blocks(model)]
    device, neurons = model.device, layers[0].up_proj.out_features
    fired = torch.zeros(len(layers), neurons, dtype=torch.int64, device=device)
    unions = torch.zeros(len(layers), dtype=torch.int64, device=device)
    per_token: list[Tensor] = []  # one entry per layer so far, in this forward pass

    def see(_activation: nn.Module, _inputs: tuple, output: Tensor) -> None:
        layer, active = len(per_token), output.flatten(0, -2) != 0
        unions[layer] += union(active)
        ones = active.float()  # sums stay far below 2^24, so they are exact, and much faster than sums of bool
        fired[layer] += ones.sum(0).long()
        per_token.append(ones.sum(-1).int())

    counts, seen_tiles = [], 0
    for batch in passes(model, blocks, batch_size, [layer.act_fn.register_forward_hook(see) for layer in layers]):
        counts.append(torch.stack(per_token, -1).view(*batch.shape, len(layers)).cpu())
        per_token.clear()
        seen_tiles += tiles(batch.numel(), TOKEN_TILE)
        advance(len(batch))
    return Activity(
        blocks.numpy(), torch.cat(counts).numpy(), fired.cpu().numpy(), unions.cpu().numpy(), seen_tiles
    )  # fmt: skip
