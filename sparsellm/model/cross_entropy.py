"""Cross entropy of a linear head, a few thousand tokens at a time, because all logits [M, V] at once are too large.

For 32,768 tokens and 49,152 words, they would take 6.4 GB in float32. Forward computes the logits of one chunk of
tokens, and from them at once the chunk's loss and gradients; then the next chunk's logits take their place. Backward
only scales the gradients that forward has kept: dx [M, K] and dw [V, K].

Numerics: logits are the compute dtype's (bfloat16 under autocast) with float32 accumulation; softmax, loss and its sum
are float32; dw accumulates over the chunks in float32.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 8_192  # tokens: 0.8 GB of bfloat16 logits at a vocabulary of 49,152

SoftmaxCrossEntropy = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def softmax_cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """logits [M, V], targets [M] int64 -> (the sum of losses, 0-d float32 or wider; its gradient [M, V], as logits)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_normalizer = wide.logsumexp(-1, keepdim=True)
    loss = (log_normalizer - wide.gather(-1, targets[:, None])).sum()
    is_target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    return loss, ((wide - log_normalizer).exp() - is_target.to(wide.dtype)).to(logits.dtype)


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, kernel: SoftmaxCrossEntropy) -> Tensor:
    """The sum over tokens of cross_entropy(x weight^T, targets), 0-d float32 (float64 for float64), in nats.

    x [M, K], weight [V, K], targets [M] int64 in [0, V). `kernel` is `softmax_cross_entropy` or a compiled form of it.
    """
    compute = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(x, weight, targets, compute, kernel)
    weight, wide = weight.to(compute), torch.promote_types(compute, torch.float32)
    chunks = zip(x.to(compute).split(CHUNK), targets.split(CHUNK), strict=True)
    return torch.stack([F.cross_entropy((c @ weight.T).to(wide), t, reduction="sum") for c, t in chunks]).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, compute: torch.dtype, kernel: SoftmaxCrossEntropy
    ) -> Tensor:
        # x and weight are cast in here, not by the caller: else autograd would round dw to the compute dtype.
        x, weight = x.to(compute), weight.to(compute)
        dx = torch.empty_like(x)
        dw = torch.zeros_like(weight, dtype=torch.promote_types(compute, torch.float32))
        losses = []
        for c, t, dc in zip(x.split(CHUNK), targets.split(CHUNK), dx.split(CHUNK), strict=True):
            loss, dlogits = kernel(c @ weight.T, t)
            torch.mm(dlogits, weight, out=dc)
            dw += dlogits.T @ c
            losses.append(loss)
            del dlogits  # or it would still be there beside the next chunk's logits and their gradient
        ctx.save_for_backward(dx, dw)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        dx, dw = ctx.saved_tensors
        # dx is widened before it is multiplied: a product in bfloat16 would round the scale itself, alike for every
        # token.
        return dx.to(dw.dtype) * dloss, dw * dloss, None, None, None
