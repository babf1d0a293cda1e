"""The order of tokens that sparsellm.ops.triton.clusters specifies, in plain torch, token by token, for tests."""

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsellm.ops.triton import clusters
from sparsellm.ops.triton.tuning import TOKENS
from sparsellm.ops.twell import tiles


def of_chunk(pairs: Tensor) -> Tensor:
    """The order of one chunk, given as float64 [tokens, N / 2]: which pairs of neurons fire."""
    count, c = len(pairs), torch.arange(clusters.CLUSTERS, device=pairs.device)
    leaders = pairs[(2 * c + 1) * count // (2 * len(c))]

    def assign(tokens: Tensor, profiles: Tensor) -> Tensor:
        scores = len(c) * (tokens @ profiles.T) - (profiles @ leaders.T).sum(1)
        return (scores == scores.max(1, keepdim=True).values).int().argmax(1)  # of equal scores, the lowest

    samples = min(clusters.SAMPLES, count)
    looked_at = pairs[torch.arange(samples, device=pairs.device) * count // samples]
    of_leaders = assign(looked_at, leaders)
    profiles = []
    for cluster in c:
        members = looked_at[of_leaders == cluster][: clusters.MEMBERS]
        profiles.append(members.sum(0) >= max(tiles(len(members), clusters.SHARE), 1))
    found = torch.stack(profiles).double()
    sizes = found.sum(1).long()
    similarity = ((found @ found.T).long() << 14) // (sizes[:, None] + sizes).clamp(min=1)
    similar = similarity.fill_diagonal_(0).tolist()
    chain = [min(range(len(c)), key=lambda i: (sum(similar[i]), i))]
    while len(chain) < len(c):
        chain.append(max(set(range(len(c))) - {*chain}, key=lambda i: (similar[chain[-1]][i], -i)))
    place = torch.empty_like(c)
    place[torch.tensor(chain, device=c.device)] = c
    return place[assign(pairs, found)].argsort(stable=True)


def order_of(fires: Tensor) -> Tensor:
    """int64 [M]: the token at each position, for bool [M, N]."""
    m, n = fires.shape
    pairs = F.pad(fires, (0, -n % 2)).view(m, -1, 2).any(2).double()
    size = tiles(tiles(m, TOKENS), tiles(m, clusters.CHUNK)) * TOKENS
    return torch.cat([first + of_chunk(pairs[first : first + size]) for first in range(0, m, size)])
