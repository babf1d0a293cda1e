"""Orders the tokens so that neighbours fire the same neurons, because the cost of a tile grows with its union.

The algorithm is that of kernels/portable/order/order.cu, on bits instead of lists. The tokens are cut into *chunks* of
`size` tokens (the last chunk may have fewer), which are ordered separately; no state is kept between calls. Neurons 2 i
and 2 i + 1 count as one *pair*, which halves the work and makes unions 1% larger. For each chunk:

    profile   CLUSTERS evenly spaced tokens, the leaders, give the first profiles of the clusters: sets of pairs
    assign    `samples` evenly spaced tokens each go to the cluster with the largest score. The score is CLUSTERS times
              the pairs that token and profile share, minus the profile's price: the pairs that it shares with the
              leaders, summed over leaders. Without the price, large profiles would attract every token.
    sort      sorts these tokens by cluster
    profile   a cluster's new profile: the pairs that at least 1 / SHARE of its first MEMBERS tokens fire
    alike     the similarity of each two clusters: the pairs that their profiles share, over the profiles' sizes
    assign    all tokens, by the new profiles; meanwhile `chain` makes a chain of the clusters, which starts with the
              cluster least similar to the others and continues each time with the cluster most similar to the last
    sort      sorts all tokens by their clusters' positions in the chain, tokens of a cluster in their original order

All quantities are sums of integers, and ties go to the lowest index, so the order is the same in every run. Each token
has one cluster and one rank within its cluster, so the order is always a permutation.

Arrays by chunk: masks int32 [chunks, CLUSTERS, WORDS] marks each pair of a profile by bit 2 i of word w, where WORDS is
the number of words of a token's bits, rounded up. `table` int8 [chunks, CLUSTERS, 16, WORDS] has the same bits as zeros
and ones at [i, w]. A token's words, shifted right by 2 i, are then the left operand of an int8 matmul with the rows i
of `table`. prices and sizes: int32 [chunks, CLUSTERS]. clusters int32 [chunks, size]: the cluster of each processed
token (all tokens, or the samples). counts int32 [chunks, blocks, CLUSTERS]: how many of each block of TOKENS processed
tokens went to each cluster.
"""

import triton
import triton.language as tl
from torch import Tensor, int8

from sparsellm.ops.triton.plan import ones
from sparsellm.ops.triton.tuning import TOKENS
from sparsellm.ops.twell import tiles

CHUNK = 8192  # maximum number of tokens that are ordered together
SAMPLES = 4096  # tokens of a chunk from which profiles are made
CLUSTERS, MEMBERS, SHARE = 128, 64, 16
# `assign`: TOKENS per program, and BLOCK words of each token in one step of the matmul with the profiles. For two
# chunks of 8,192 tokens, each of the two launches has 128 programs, about one per multiprocessor of a Hopper GPU.
OF_SAMPLES = {"TOKENS": 64, "BLOCK": 32, "num_warps": 4, "num_stages": 4}
OF_ALL = {"TOKENS": 128, "BLOCK": 64, "num_warps": 8, "num_stages": 3}
AT_A_TIME = 2048  # words of masks or tokens that a program processes at once

PAIRS = tl.constexpr(16)  # per word
LOW_BITS = tl.constexpr(0x01010101)  # the lowest bit of each byte


@triton.jit
def pairs(words):
    """uint32: bit 2 i is set where bit 2 i or 2 i + 1 of an int32 is."""
    words = words.to(tl.uint32, bitcast=True)
    return (words | (words >> 1)) & 0x55555555


@triton.jit
def looked_at(block, m, size, samples, TOKENS: tl.constexpr):
    """Block number `block` (TOKENS tokens) of the `samples` evenly spaced tokens in chunk program_id(1). Returns (the
    indices of the block's tokens among the samples; the numbers of these tokens; whether each of them exists)."""
    first = tl.program_id(1) * size
    tokens = tl.minimum(size, m - first)
    count = tl.minimum(samples, tokens)
    index = block * TOKENS + tl.arange(0, TOKENS)
    inside = index < count
    return index, first + tl.where(inside, index, 0) * tokens // count, inside


@triton.jit
def counted(counts, blocks, BLOCKS: tl.constexpr, CLUSTERS: tl.constexpr):
    """The counts of chunk program_id(1), which has `blocks` blocks: int32 [BLOCKS, CLUSTERS]."""
    block = tl.arange(0, BLOCKS)
    at = (tl.program_id(1) * blocks + block)[:, None] * CLUSTERS + tl.arange(0, CLUSTERS)[None, :]
    return tl.load(counts + at, mask=(block < blocks)[:, None], other=0)


@triton.jit(do_not_specialize=["m", "size", "blocks"])
def profile(
    bits, members, counts, masks, table, prices, sizes, m, size, blocks,
    OF_ROW: tl.constexpr, WORDS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    CLUSTERS: tl.constexpr, MEMBERS: tl.constexpr, SHARE: tl.constexpr, LEADERS: tl.constexpr,
):  # fmt: skip
    """Program (i, j) makes the profile of cluster i of chunk j: from the cluster's leader if LEADERS, otherwise from
    the cluster's first tokens in `members` [chunks, size], which is sorted by cluster. WIDE: a power of 2, at least
    WORDS. ROWS rows are read at a time."""
    cluster, chunk = tl.program_id(0), tl.program_id(1)
    first = chunk * size
    tokens = tl.minimum(size, m - first)
    word = tl.arange(0, WIDE)
    inside = word < OF_ROW
    line = tl.arange(0, ROWS)
    if LEADERS:
        leader = (first + (2 * cluster + 1) * tokens // (2 * CLUSTERS)).to(tl.int64)
        mask = pairs(tl.load(bits + leader * OF_ROW + word, mask=inside, other=0))
    else:
        of_cluster = tl.sum(counted(counts, blocks, BLOCKS, CLUSTERS), 0)
        other = tl.arange(0, CLUSTERS)
        begin = tl.sum(tl.where(other < cluster, of_cluster, 0), 0)
        count = tl.minimum(tl.sum(tl.where(other == cluster, of_cluster, 0), 0), MEMBERS)
        shift = tl.arange(0, 4) * 2
        sums = tl.zeros((4, WIDE), tl.uint32)  # each sum holds four counts: bits 2 i, 2 i + 8, 2 i + 16, 2 i + 24
        for start in range(0, count, ROWS):
            there = start + line < count
            token = tl.load(members + first + begin + start + line, mask=there, other=0).to(tl.int64)
            at = token[:, None] * OF_ROW + word[None, :]
            words = pairs(tl.load(bits + at, mask=there[:, None] & inside[None, :], other=0))
            sums += tl.sum((words[:, None, :] >> shift[None, :, None]) & LOW_BITS, 0)
        needed = tl.maximum(tl.cdiv(count, SHARE), 1)
        mask = tl.zeros((WIDE,), tl.uint32)
        for byte in tl.static_range(4):
            fires = ((sums >> (8 * byte)) & 0xFF) >= needed
            mask |= tl.sum(fires.to(tl.uint32) << (shift + 8 * byte)[:, None], 0)
    price = tl.zeros((ROWS, WIDE), tl.int32)
    for start in range(0, CLUSTERS, ROWS):
        leaders = (first + (2 * (start + line) + 1) * tokens // (2 * CLUSTERS)).to(tl.int64)
        at = leaders[:, None] * OF_ROW + word[None, :]
        price += ones(pairs(tl.load(bits + at, mask=inside[None, :], other=0)) & mask[None, :])
    mine = chunk * CLUSTERS + cluster
    tl.store(prices + mine, tl.sum(tl.sum(price, 1), 0))
    tl.store(sizes + mine, tl.sum(ones(mask), 0))
    tl.store(masks + mine * WORDS + word, mask.to(tl.int32, bitcast=True), mask=word < WORDS)
    pair = tl.arange(0, PAIRS)
    fires = (mask[None, :] >> (2 * pair)[:, None]) & 1
    to = table + mine.to(tl.int64) * (PAIRS * WORDS) + pair[:, None] * WORDS + word[None, :]
    tl.store(to, fires.to(tl.int8), mask=(word < WORDS)[None, :])


@triton.jit
def chain(similarity, places, ROWS: tl.constexpr, CLUSTERS: tl.constexpr):
    """places, int32 [chunks, CLUSTERS]: each cluster's position in the chain, for chunk program_id(1)."""
    chunk, cluster = tl.program_id(1), tl.arange(0, CLUSTERS)
    first = tl.full((), 0x7FFFFFFF, tl.int32)
    for start in range(0, CLUSTERS, ROWS):
        line = start + tl.arange(0, ROWS)
        rows = tl.load(similarity + (chunk * CLUSTERS + line)[:, None] * CLUSTERS + cluster[None, :])
        first = tl.minimum(first, tl.min(tl.sum(rows // CLUSTERS, 1) * CLUSTERS + line, 0))
    last = first % CLUSTERS
    place = tl.zeros((CLUSTERS,), tl.int32)
    left = tl.full((CLUSTERS,), 1, tl.int32)
    for step in range(0, CLUSTERS):
        place = tl.where(cluster == last, step, place)
        left = tl.where(cluster == last, 0, left)
        row = tl.load(similarity + (chunk * CLUSTERS + last) * CLUSTERS + cluster)
        best = tl.max(tl.where(left != 0, row, -1), 0)
        last = CLUSTERS - 1 - best % CLUSTERS
    tl.store(places + chunk * CLUSTERS + cluster, place)


@triton.jit(do_not_specialize=["m", "size", "samples"])
def assign(
    bits, table, prices, similarity, clusters, counts, places, m, size, samples,
    OF_ROW: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, CLUSTERS: tl.constexpr, TOKENS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (i, j) assigns the i-th group of TOKENS tokens in chunk j to clusters, and counts each cluster's tokens.
    It reads BLOCK words of a row at a time; BLOCK divides WORDS. If CHAINED, programs (0, j) make the chain at the same
    time, and i is program_id(0) - 1."""
    block = tl.program_id(0)
    if CHAINED:
        block -= 1
        if block < 0:
            chain(similarity, places, 16, CLUSTERS)
            return
    chunk, cluster = tl.program_id(1), tl.arange(0, CLUSTERS)
    blocks = tl.num_programs(0) - CHAINED
    index, token, inside = looked_at(block, m, size, samples, TOKENS)
    of_token = bits + token.to(tl.int64)[:, None] * OF_ROW
    of_cluster = table + (chunk * CLUSTERS + cluster).to(tl.int64)[None, :] * (PAIRS * WORDS)
    shared = tl.zeros((TOKENS, CLUSTERS), tl.int32)
    for start in range(0, WORDS, BLOCK):
        word = start + tl.arange(0, BLOCK)
        words = pairs(tl.load(of_token + word[None, :], mask=(word < OF_ROW)[None, :], other=0))
        for pair in range(0, PAIRS):
            fires = ((words >> (2 * pair)) & 1).to(tl.int8)
            shared = tl.dot(fires, tl.load(of_cluster + (pair * WORDS + word)[:, None]), shared, out_dtype=tl.int32)
    price = tl.load(prices + chunk * CLUSTERS + cluster)
    best = tl.argmax(shared * CLUSTERS - price[None, :], 1)
    tl.store(clusters + chunk * size + index, best, mask=inside)
    there = (best[:, None] == cluster[None, :]) & inside[:, None]
    to = (chunk * blocks + block) * CLUSTERS + cluster
    tl.store(counts + to, tl.sum(there.to(tl.int32), 0))


@triton.jit(do_not_specialize=["m", "size", "samples"])
def sort(
    clusters, counts, places, order, positions, m, size, samples,
    BLOCKS: tl.constexpr, CLUSTERS: tl.constexpr, TOKENS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Write the processed tokens to order, int32 [chunks, size], sorted by the clusters' positions in the chain
    (CHAINED) or by cluster number, and each token's index in `order` to positions, int32 [M]. Program (i, j) sorts the
    i-th TOKENS processed tokens of chunk j."""
    block, cluster = tl.program_id(0), tl.arange(0, CLUSTERS)
    first = tl.program_id(1) * size
    index, token, inside = looked_at(block, m, size, samples, TOKENS)
    of_blocks = counted(counts, tl.num_programs(0), BLOCKS, CLUSTERS)
    of_cluster = tl.sum(of_blocks, 0)
    place = cluster
    if CHAINED:
        place = tl.load(places + tl.program_id(1) * CLUSTERS + cluster)
    before = tl.sum(tl.where((tl.arange(0, BLOCKS) < block)[:, None], of_blocks, 0), 0)
    before += tl.sum(tl.where(place[:, None] < place[None, :], of_cluster[:, None], 0), 0)
    mine = tl.load(clusters + first + index, mask=inside, other=-1)
    rank = tl.sum(((mine[:, None] == mine[None, :]) & (index[:, None] < index[None, :])).to(tl.int32), 0)
    rank += tl.sum(tl.where(cluster[:, None] == mine[None, :], before[:, None], 0), 0)
    tl.store(order + first + rank, token, mask=inside)
    tl.store(positions + token, first + rank, mask=inside)


@triton.jit
def alike(
    masks, sizes, similarity, WORDS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, CLUSTERS: tl.constexpr
):
    """similarity, int32 [chunks, CLUSTERS, CLUSTERS]: program (i, j) compares cluster i of chunk j with all others. An
    entry is similarity * CLUSTERS + (CLUSTERS - 1 - other). So the largest entry of a row tells which cluster is most
    similar, and among equally similar clusters, the one with the lowest number has the largest entry."""
    mine, first = tl.program_id(1) * CLUSTERS + tl.program_id(0), tl.program_id(1) * CLUSTERS
    word = tl.arange(0, WIDE)
    inside = word < WORDS
    mask = tl.load(masks + mine * WORDS + word, mask=inside, other=0)
    for start in range(0, CLUSTERS, ROWS):
        other = start + tl.arange(0, ROWS)
        theirs = tl.load(masks + (first + other)[:, None] * WORDS + word[None, :], mask=inside[None, :], other=0)
        both = tl.sum(ones((theirs & mask[None, :]).to(tl.uint32, bitcast=True)), 1)
        total = tl.load(sizes + mine) + tl.load(sizes + first + other)
        value = tl.where(other == tl.program_id(0), 0, (both << 14) // tl.maximum(total, 1))
        tl.store(similarity + mine * CLUSTERS + other, value * CLUSTERS + CLUSTERS - 1 - other)


def order_tokens(bits: Tensor, order: Tensor, positions: Tensor) -> None:
    """From bits [M, ceil(N / 32)], fill `order`, int32 [M], with the token at each position, and `positions` with the
    inverse of `order`."""
    m, of_row = bits.shape
    size = tiles(tiles(m, TOKENS), tiles(m, CHUNK)) * TOKENS
    chunks, words = tiles(m, size), tiles(of_row, OF_ALL["BLOCK"]) * OF_ALL["BLOCK"]

    def integers(*shape: int) -> Tensor:
        return bits.new_empty((chunks, *shape))

    masks, similarity = integers(CLUSTERS, words), integers(CLUSTERS, CLUSTERS)
    prices, sizes, places, of_tokens = integers(CLUSTERS), integers(CLUSTERS), integers(CLUSTERS), integers(size)
    table = bits.new_empty((chunks, CLUSTERS, PAIRS.value * words), dtype=int8)
    row = {"OF_ROW": of_row, "WORDS": words}
    wide = triton.next_power_of_2(words)
    rows = {"WIDE": wide, "ROWS": min(CLUSTERS, max(1, AT_A_TIME // wide)), "CLUSTERS": CLUSTERS}
    most = max(tiles(SAMPLES, OF_SAMPLES["TOKENS"]), tiles(CHUNK, OF_ALL["TOKENS"]))
    blocks = {"BLOCKS": triton.next_power_of_2(most), "CLUSTERS": CLUSTERS}

    def make_profiles(counts: Tensor, leaders: bool) -> None:
        profile[CLUSTERS, chunks](
            bits, order, counts, masks, table, prices, sizes, m, size, counts.shape[1],
            MEMBERS=MEMBERS, SHARE=SHARE, LEADERS=leaders, num_warps=8, **row, **(rows | blocks),
        )  # fmt: skip

    def make_clusters(samples: int, shape: dict[str, int], chained: bool) -> Tensor:
        counts = integers(tiles(samples, shape["TOKENS"]), CLUSTERS)
        grid = counts.shape[1], chunks
        if chained:
            wider = {**rows, "ROWS": min(CLUSTERS, 4 * rows["ROWS"])}
            alike[CLUSTERS, chunks](masks, sizes, similarity, WORDS=words, **wider)
        assign[grid[0] + chained, chunks](
            bits, table, prices, similarity, of_tokens, counts, places, m, size, samples,
            CLUSTERS=CLUSTERS, CHAINED=chained, **row, **shape,
        )  # fmt: skip
        sort[grid](
            of_tokens, counts, places, order, positions, m, size, samples,
            TOKENS=shape["TOKENS"], CHAINED=chained, num_warps=shape["num_warps"], **blocks,
        )  # fmt: skip
        return counts

    make_profiles(places, leaders=True)  # no counts yet: `places` is a placeholder
    make_profiles(make_clusters(min(SAMPLES, size), OF_SAMPLES, chained=False), leaders=False)
    make_clusters(size, OF_ALL, chained=True)
