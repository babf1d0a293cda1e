"""Muon for matrices: momentum whose update is orthogonalized by Newton-Schulz iterations.

The algorithm and its coefficients are those of Keller Jordan (https://kellerjordan.github.io/posts/muon/) and of
torch.optim.Muon; updates are scaled to the size of AdamW's (arXiv:2502.16982, section 2.2), so that AdamW's learning
rate and weight decay carry over. torch.optim.Muon has no device-side flag that skips a step, and launches some 25 small
kernels per matrix; here, matrices of the same shape are orthogonalized together.

Ranks that hold copies or shards of the same matrices share the iterations: each orthogonalizes whole matrices, as many
of every shape as the other ranks. The ranks then exchange the results. With DDP this is an all-gather; with shards,
one all-to-all gathers a rank's matrices from their shards and another one returns the rows.

Numerics: momentum and weights are float32, iterations are bfloat16 with float32 accumulation. Nothing waits for the
device.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

MOMENTUM = 0.95
ITERATIONS, COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7
SCALE = 0.2  # the root mean square of AdamW's updates, relative to the learning rate
AT_ONCE = 1 << 24  # maximum number of elements that are orthogonalized together, unless one matrix has more


@torch.no_grad()
def step(
    moments: dict[nn.Parameter, Tensor],
    rate: float,
    weight_decay: float,
    gradient_divisor: Tensor,
    skip: Tensor,
    mesh: DeviceMesh | None,
) -> None:
    """Update each matrix with its gradient, in `.grad`. Collective if there is a mesh.

    moments: the momentum of each matrix [R, C], float32. gradient_divisor: 0-d float32. skip: 0-d bool; where it is
    true, weights and momentum stay as they are. mesh: the ranks that hold copies or shards of these matrices.
    """
    for batch in _batches(list(moments), 1 if mesh is None else mesh.shape[-1]):
        updates = []
        for weight in batch:
            assert weight.grad is not None
            gradient, momentum = _local(weight.grad) / gradient_divisor, _local(moments[weight])
            momentum.copy_(torch.where(skip, momentum, momentum.lerp(gradient, 1 - MOMENTUM)))
            updates.append(gradient.lerp(momentum, MOMENTUM).bfloat16())
        for weight, update in zip(batch, _orthogonalized_by_all(torch.stack(updates), batch[0], mesh), strict=True):
            local, size = _local(weight), rate * SCALE * math.sqrt(max(weight.shape))
            decayed = local * (1 - rate * weight_decay)
            # With alpha the bfloat16 update is multiplied in float32; `size * update` would be rounded to bfloat16.
            new = decayed.sub_(update, alpha=size)
            local.copy_(torch.where(skip, local, new))


def _orthogonalized_by_all(updates: Tensor, like: nn.Parameter, mesh: DeviceMesh | None) -> Tensor:
    """Orthogonalizes matrices of which this rank has the rows `updates` [B, r, C], with `like`'s shape and sharding."""
    if mesh is None:
        return orthogonalized(updates)
    matrices: Sequence[Placement] = [Shard(0)]
    rows: Sequence[Placement] = [Replicate()]
    if isinstance(like, DTensor):  # Shard(0) shards a matrix by rows, and a batch of matrices by matrices
        matrices, rows = like.placements, [Shard(1) if p.is_shard() else p for p in like.placements]
    shape = torch.Size([len(updates), *like.shape])
    stride = (like.numel(), like.shape[1], 1)
    whole = DTensor.from_local(updates, mesh, rows, shape=shape, stride=stride).redistribute(placements=matrices)
    done = orthogonalized(whole.to_local()).contiguous()
    return DTensor.from_local(done, mesh, matrices, shape=shape, stride=stride).redistribute(placements=rows).to_local()


def orthogonalized(matrices: Tensor) -> Tensor:
    """Matrices [B, R, C] in bfloat16 with the same singular vectors, and singular values that are brought near 1."""
    a, b, c = COEFFICIENTS
    x = matrices.mT if matrices.shape[1] > matrices.shape[2] else matrices
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPSILON)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if matrices.shape[1] > matrices.shape[2] else x


def _batches(matrices: list[nn.Parameter], ranks: int) -> Iterator[list[nn.Parameter]]:
    """`matrices` in batches of one shape, with at most AT_ONCE elements or one matrix for each of `ranks`."""
    for shape in dict.fromkeys(matrix.shape for matrix in matrices):
        alike = [matrix for matrix in matrices if matrix.shape == shape]
        count = ranks * max(1, AT_ONCE // shape.numel())
        yield from (alike[i : i + count] for i in range(0, len(alike), count))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
