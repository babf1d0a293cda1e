"""Cross entropy of a linear head, computed in chunks of tokens because the full logits [M, V] are too large.

For 32,768 tokens and a vocabulary of 49,152, the logits take 6.4 GB in float32. Forward computes the logits of a chunk,
and then the chunk's loss and gradients; the next chunk reuses the memory. Backward only scales the gradients that
forward saved: dx [M, K] and dw [V, K]. The logits of a teacher (`distilled_cross_entropy`) are computed and freed chunk
by chunk too.

Numerics: logits have the compute dtype (bfloat16 under autocast) with float32 accumulation. Softmax, loss and the sum
of losses are float32, and dw accumulates over the chunks in float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 8_192  # tokens: 0.8 GB of bfloat16 logits at a vocabulary of 49,152

SoftmaxCrossEntropy = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class TeacherOutput(NamedTuple):
    """The teacher's output for M tokens, and the weight of its KL: the loss is CE + weight x temperature^2 x KL."""

    hidden: Tensor  # [M, K'], in the compute dtype
    head: Tensor  # [V, K'], same dtype; the teacher's logits are hidden head^T
    weight: float
    temperature: float


def softmax_cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """logits [M, V], targets [M] int64 -> (summed loss, 0-d float32 or wider; gradient [M, V], dtype of logits)."""
    loss, gradient = _wide_cross_entropy(logits, targets)
    return loss, gradient.to(logits.dtype)


def distilled_softmax_cross_entropy(
    logits: Tensor, targets: Tensor, teacher: Tensor, weight: float, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits, teacher [M, V], targets [M] int64 -> (loss, ce, kl, gradient [M, V] of loss, dtype of logits).

    ce, kl and loss are sums over tokens, 0-d float32 or wider: kl = KL(teacher || student) with both logits divided by
    the temperature, and loss = ce + weight temperature^2 kl. The factor temperature^2 keeps the gradient of kl equally
    large at any temperature.
    """
    ce, gradient = _wide_cross_entropy(logits, targets)
    ours, theirs = ((each.to(gradient.dtype) / temperature).log_softmax(-1) for each in (logits, teacher))
    p = theirs.exp()
    kl = (p * (theirs - ours)).sum()
    gradient = gradient + weight * temperature * (ours.exp() - p)
    return ce + weight * temperature**2 * kl, ce, kl, gradient.to(logits.dtype)


def _wide_cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_normalizer = wide.logsumexp(-1, keepdim=True)
    loss = (log_normalizer - wide.gather(-1, targets[:, None])).sum()
    gradient = (wide - log_normalizer).exp_()
    if torch.compiler.is_compiling():  # one pass; the same bits as below
        is_target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
        return loss, gradient - is_target.to(wide.dtype)
    return loss, gradient.scatter_(-1, targets[:, None], gradient.gather(-1, targets[:, None]) - 1)


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, kernel: SoftmaxCrossEntropy) -> Tensor:
    """The sum over tokens of cross_entropy(x weight^T, targets), 0-d float32 (float64 for float64), in nats.

    x [M, K], weight [V, K], targets [M] int64 in [0, V). `kernel` is `softmax_cross_entropy` or a compiled form of it.
    """
    compute = _compute_dtype(x)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _LinearLoss.apply(x, weight, compute, kernel, targets)[0]
    weight, wide = weight.to(compute), torch.promote_types(compute, torch.float32)
    chunks = zip(x.to(compute).split(CHUNK), targets.split(CHUNK), strict=True)
    return torch.stack([F.cross_entropy((c @ weight.T).to(wide), t, reduction="sum") for c, t in chunks]).sum()


def distilled_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, teacher: TeacherOutput, kernel: Callable[..., tuple[Tensor, ...]]
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, ce, kl) for the logits x weight^T; only loss has a gradient. x [M, K], weight [V, K], targets [M] int64 in
    [0, V). `kernel` is `distilled_softmax_cross_entropy` or a compiled form of it."""

    def with_teacher(logits: Tensor, targets: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        return kernel(logits, targets, hidden @ teacher.head.T, teacher.weight, teacher.temperature)

    return _LinearLoss.apply(x, weight, _compute_dtype(x), with_teacher, targets, teacher.hidden)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype


class _LinearLoss(torch.autograd.Function):
    """Adds up over the chunks what `kernel(logits, *per_token)` returns: sums, and the gradient of the first sum with
    respect to the logits. The other sums have no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, compute: torch.dtype, kernel: Callable[..., tuple[Tensor, ...]],
        *per_token: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        # Cast here, not in the caller: otherwise autograd would round dw to the compute dtype.
        x, weight = x.to(compute), weight.to(compute)
        dx = torch.empty_like(x)
        dw = torch.zeros_like(weight, dtype=torch.promote_types(compute, torch.float32))
        sums = []
        for c, dc, *of_chunk in zip(*(each.split(CHUNK) for each in (x, dx, *per_token)), strict=True):
            *of_this, dlogits = kernel(c @ weight.T, *of_chunk)
            torch.mm(dlogits, weight, out=dc)
            dw += dlogits.T @ c
            sums.append(of_this)
            del dlogits  # free this memory before the next chunk allocates logits and their gradient
        ctx.save_for_backward(dx, dw)
        loss, *others = (torch.stack(of_chunks).sum() for of_chunks in zip(*sums, strict=True))
        ctx.mark_non_differentiable(*others)
        ctx.others = len(per_token)
        return loss, *others

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, *_unused: Any) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        # Widen dx before scaling. A bfloat16 product would round the scale, a systematic error for every token.
        return dx.to(dw.dtype) * dloss, dw * dloss, None, None, *[None] * ctx.others
