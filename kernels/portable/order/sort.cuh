// token_order, the last kernel: chains similar clusters greedily, then sorts the tokens in chain order (see order.cu).
#pragma once

#include "order/common.cuh"

namespace sparsellm::order {

constexpr int kSorters = 512;   // threads that rank the tokens
constexpr int kChainers = 128;  // threads that read the similarities; one of their warps makes the chain
constexpr int kSortWarps = kSorters / 32;
constexpr int kSortItems = kChunk / kSorters;

// Named barriers (bar.sync); barrier 0 is __syncthreads.
enum SortBarrier { kSorterBarrier = 1, kChainerBarrier = 2 };

// Ranks tokens among those with equal keys. A warp has positions 512 warp + 32 k + lane below `tokens`; key(k) is the
// key at one of them. rank[k] is the number of equal keys at earlier positions of the same warp. before[warp][key] is
// the number of equal keys in all previous warps; if kSpread, the number of smaller keys in all warps is added.
// totals[key] is the number of equal keys in all warps. An example of one warp with keys 3, 1, 3: the ranks are 0, 0,
// 1; totals[3] is 2; before[0][3] is 1 if kSpread, because one key is smaller.
template <int kKeys, bool kSpread, class Key>
__device__ __forceinline__ void rank_keys(int tokens, uint32_t warp, uint32_t lane, uint16_t (*before)[kClusters],
                                          int* totals, uint16_t (&rank)[kSortItems], Key key) {
  for (int i = lane; i < kKeys; i += 32) before[warp][i] = 0;
  __syncwarp();
#pragma unroll
  for (int k = 0; k < kSortItems; ++k) {
    const bool valid = warp * 32 * kSortItems + 32 * k + lane < tokens;
    const uint32_t active = __ballot_sync(~0u, valid);
    if (valid) {
      const uint32_t mine = key(k);
      const uint32_t same = __match_any_sync(active, mine);
      const uint32_t seen = before[warp][mine], earlier = same & ((1u << lane) - 1);
      rank[k] = seen + __popc(earlier);
      __syncwarp(active);
      if (earlier == 0) before[warp][mine] = seen + __popc(same);
    }
    __syncwarp();
  }
  ptx::bar_sync(kSorterBarrier, kSorters);
  if (warp * 32 + lane < kKeys) {
    const uint32_t mine = warp * 32 + lane;
    uint32_t total = 0;
    for (int w = 0; w < kSortWarps; ++w) total += before[w][mine];
    static_assert(!kSpread || kKeys == 32, "one warp scans 32 keys");
    uint32_t sum = kSpread ? exclusive_scan(total, lane) : 0;
    for (int w = 0; w < kSortWarps; ++w) {
      const uint32_t here = before[w][mine];
      before[w][mine] = sum;
      sum += here;
    }
    totals[mine] = total;
  }
  ptx::bar_sync(kSorterBarrier, kSorters);
}

// References to the kernel's shared variables, which are declared one by one rather than in a struct, so that the
// compiler knows that a store to one of them does not change the others.
struct SortShared {
  uint8_t (&clusters)[kChunk];  // the cluster of each token
  uint16_t (&sorted)[kChunk];   // tokens by number of nonzeros; at the end, in the chunk's final order
  uint16_t (&before)[kSortWarps][kClusters];
  uint32_t (&likeness)[kClusters];  // each cluster's similarity to all others, summed
  int (&totals)[kClusters];         // number of tokens per cluster
  int (&start)[kClusters];          // index in the order where each cluster's tokens begin
  int (&chain)[kClusters];          // the clusters in their order
  int (&place)[kClusters];          // each cluster's index in `chain`
  int& nonzeros;                    // nonzeros of all tokens
};

// The role of the chainers. The chain starts with the cluster that is least similar to all other clusters, and
// continues each time with the remaining cluster that is most similar to the last cluster of the chain. The
// similarities may be read once all CTAs of `assign` have added to `arrivals`.
__device__ __forceinline__ void chain_clusters(const Order& order, const Chunk& chunk, int parts, uint4* similarity,
                                               const SortShared& shared, uint32_t warp, uint32_t lane) {
  const int thread = threadIdx.x - kSorters;
  if (thread == 0) {
    while (ptx::ld_acquire(order.arrivals + blockIdx.x) != parts) __nanosleep(100);
  }
  ptx::bar_sync(kChainerBarrier, kChainers);
  const uint4* from =
      reinterpret_cast<const uint4*>(order.similarity + static_cast<int64_t>(blockIdx.x) * kClusters * kClusters);
#pragma unroll 8
  for (int i = thread; i < chunk.clusters * 32; i += kChainers) similarity[i] = __ldcg(from + i);
  ptx::bar_sync(kChainerBarrier, kChainers);
#pragma unroll 4
  for (int c = thread / 32; c < chunk.clusters; c += kChainers / 32) {
    const uint4 four = similarity[c * 32 + lane];
    const uint32_t alike[4] = {four.x, four.y, four.z, four.w};
    uint32_t sum = 0;
    for (int e = 0; e < 4; ++e) sum += 4 * lane + e == c ? 0 : alike[e] >> 7;
    sum = __reduce_add_sync(~0u, sum);
    if (lane == 0) shared.likeness[c] = sum;
  }
  ptx::bar_sync(kChainerBarrier, kChainers);
  if (warp != kSortWarps) return;  // one warp makes the chain
  uint32_t taken[4];               // the sign bit is set if a cluster is already in the chain, or does not exist
  uint32_t least = ~0u;
  for (int e = 0; e < 4; ++e) {
    const int c = 4 * lane + e;
    taken[e] = c < chunk.clusters ? 0 : 1u << 31;
    if (c < chunk.clusters) least = min(least, shared.likeness[c] << 7 | c);
  }
  int c = __reduce_min_sync(~0u, least) & (kClusters - 1);
  for (int k = 0; k < chunk.clusters; ++k) {
    const uint4 four = similarity[c * 32 + lane];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (c == 4 * lane + e) taken[e] = 1u << 31;
    }
    if (lane == 0) {
      shared.chain[k] = c;
      shared.place[c] = k;
    }
    const int best = max(max(static_cast<int>(four.x | taken[0]), static_cast<int>(four.y | taken[1])),
                         max(static_cast<int>(four.z | taken[2]), static_cast<int>(four.w | taken[3])));
    c = kClusters - 1 - (__reduce_max_sync(~0u, best) & (kClusters - 1));
  }
}

// The role of the sorters: sort the tokens by number of nonzeros, in 32 steps of an eighth of the mean, and then find
// the rank of each token in its cluster, in the same order. A thread returns the tokens at its positions in the order
// by nonzeros (`item`), and their ranks in their clusters (`rank`), to which `before` adds the tokens of earlier warps.
__device__ __forceinline__ void rank_tokens(const Order& order, const Chunk& chunk, const SortShared& shared,
                                            uint32_t warp, uint32_t lane, uint16_t (&item)[kSortItems],
                                            uint16_t (&rank)[kSortItems]) {
  int count[kSortItems], sum = 0;
  const int base = warp * 32 * kSortItems + lane;
#pragma unroll
  for (int k = 0; k < kSortItems; ++k) {
    const int i = base + 32 * k;
    count[k] = i < chunk.tokens ? __ldcg(order.row_counts + chunk.first + i) : 0;
    sum += count[k];
  }
  sum = __reduce_add_sync(~0u, sum);
  if (lane == 0) atomicAdd(&shared.nonzeros, sum);
  ptx::bar_sync(kSorterBarrier, kSorters);
  const int mean = max((shared.nonzeros + chunk.tokens - 1) / chunk.tokens, 1);
  const auto fullness = [&](int k) { return static_cast<uint32_t>(min(8 * count[k] / mean, 31)); };
  rank_keys<32, true>(chunk.tokens, warp, lane, shared.before, shared.totals, rank, fullness);
#pragma unroll
  for (int k = 0; k < kSortItems; ++k) {
    if (base + 32 * k < chunk.tokens) shared.sorted[shared.before[warp][fullness(k)] + rank[k]] = base + 32 * k;
  }
  ptx::griddepcontrol_wait();  // wait until the tokens' clusters are available
#pragma unroll
  for (int k = 0; k < kSortItems; ++k) {
    const int i = base + 32 * k;
    if (i < chunk.tokens) shared.clusters[i] = __ldcg(order.clusters + static_cast<int64_t>(blockIdx.x) * kChunk + i);
  }
  ptx::bar_sync(kSorterBarrier, kSorters);
#pragma unroll
  for (int k = 0; k < kSortItems; ++k) item[k] = base + 32 * k < chunk.tokens ? shared.sorted[base + 32 * k] : 0;
  rank_keys<kClusters, false>(chunk.tokens, warp, lane, shared.before, shared.totals, rank,
                              [&](int k) { return static_cast<uint32_t>(shared.clusters[item[k]]); });
}

// Called by one warp: computes where each cluster's tokens begin, in chain order.
__device__ __forceinline__ void start_clusters(const Chunk& chunk, const SortShared& shared, uint32_t lane) {
  int size[4], sum = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int k = 4 * lane + e;
    size[e] = k < chunk.clusters ? shared.totals[shared.chain[k]] : 0;
    sum += size[e];
  }
  sum = exclusive_scan(sum, lane);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int k = 4 * lane + e;
    if (k < chunk.clusters) shared.start[shared.chain[k]] = sum;
    sum += size[e];
  }
}

// Orders one chunk. One warp makes the chain, step by step; meanwhile the sorters rank the tokens, first by number of
// nonzeros, and then within their clusters, once these are known. The chain starts before `assign` has ended. This is
// safe, because sort_kernel starts only when all CTAs of `assign` have passed their griddepcontrol_wait. Therefore all
// kernels before `assign` are done (so the rows' counts are complete, and `arrivals` are zero), and all CTAs of
// `assign` are resident (so a chainer may wait for them). `arrivals` says when the similarities are available.
__global__ void __launch_bounds__(kSorters + kChainers) sort_kernel(const Order order, int parts, int32_t* tokens) {
  extern __shared__ uint4 similarity[];
  __shared__ uint8_t clusters[kChunk];
  __shared__ uint16_t sorted[kChunk];
  __shared__ uint16_t before[kSortWarps][kClusters];
  __shared__ uint32_t likeness[kClusters];
  __shared__ int totals[kClusters], start[kClusters], chain[kClusters], place[kClusters], nonzeros;
  const SortShared shared = {clusters, sorted, before, likeness, totals, start, chain, place, nonzeros};
  ptx::griddepcontrol_launch_dependents();
  const Chunk chunk = chunk_of(order, blockIdx.x);
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) nonzeros = 0;
  __syncthreads();

  uint16_t item[kSortItems], rank[kSortItems];
  if (warp >= kSortWarps) {
    chain_clusters(order, chunk, parts, similarity, shared, warp, lane);
    ptx::griddepcontrol_wait();
  } else {
    rank_tokens(order, chunk, shared, warp, lane, item, rank);
  }
  __syncthreads();
  if (warp == 0) start_clusters(chunk, shared, lane);
  __syncthreads();
  // Within a cluster, tokens go from few to many nonzeros, and in every other cluster of the chain from many to few. So
  // neighbouring tokens have similar numbers of nonzeros also where two clusters meet.
  if (warp < kSortWarps) {
#pragma unroll
    for (int k = 0; k < kSortItems; ++k) {
      if (warp * 32 * kSortItems + 32 * k + lane < chunk.tokens) {
        const int c = clusters[item[k]];
        const int within = before[warp][c] + rank[k];
        sorted[start[c] + (place[c] % 2 == 0 ? within : totals[c] - 1 - within)] = item[k];
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < chunk.tokens; i += kSorters + kChainers) {
    tokens[chunk.first + i] = chunk.first + sorted[i];
  }
}

}  // namespace sparsellm::order
