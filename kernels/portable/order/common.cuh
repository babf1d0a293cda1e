// Definitions that the kernels of token_order share: sizes, the workspace, chunks of tokens, a token's neurons.
// order.cu has the algorithm.
#pragma once

#include "common/host.h"
#include "common/twell.cuh"

namespace sparsellm::order {

constexpr int kThreads = 1024;
constexpr int kChunk = 8192;           // maximum number of tokens in a chunk
constexpr int kClusters = 128;         // maximum number of clusters in a chunk
constexpr uint32_t kMaxOverlap = 255;  // overlaps are counted in bytes
// Maximum number of nonzeros that are read of a row. In a row with more than 255 nonzeros, only every other group of
// sixteen counts, so that overlaps fit in a byte: in a row of 495 nonzeros, 15 full groups and one of 15, which are 255
// nonzeros.
constexpr uint32_t kMaxCount = 495;

struct Order {
  const uint32_t* rows;
  const int32_t* row_counts;
  int64_t m;
  int n, chunks;
  int ranges, range;     // the neurons are divided into `ranges` ranges of `range` neurons, a multiple of 128
  int words;             // words of a profile's mask, a multiple of 4
  uint4* leaders;        // [chunks][n + 1] bit c of row r: the leader of cluster c fires neuron r; row n is empty
  uint4* profiles;       // [chunks][n + 1] bit c of row r: neuron r is in the profile of cluster c; row n is empty
  uint32_t* masks;       // [chunks][kClusters][words] the same profiles, cluster by cluster
  int32_t* prices;       // [chunks][ranges][kClusters] sum of f over the range's neurons in the profile (order.cu)
  int32_t* sizes;        // [chunks][ranges][kClusters] number of the range's neurons in the profile
  uint32_t* similarity;  // [chunks][kClusters][kClusters] similarity << 7 | 127 - column; undefined on the diagonal
  uint8_t* clusters;     // [chunks][kChunk] the cluster of each token that `assign` has processed
  uint32_t* arrivals;    // [chunks] CTAs of the last `assign` that have written their share of `similarity`
};

// Tokens [first, first + tokens), and the number of clusters that they form.
struct Chunk {
  int64_t first;
  int tokens, clusters;
};

// Chunks end where token tiles end, and are as equal as possible. A chunk has 16, 32, 64 or 128 clusters, chosen so
// that a cluster has at most 64 tokens on average: 1,000 tokens form 16 clusters, 8,192 tokens form 128.
__device__ __forceinline__ Chunk chunk_of(const Order& order, int index) {
  const int64_t tiles = (order.m + kTokenTile - 1) / kTokenTile;
  Chunk chunk;
  chunk.first = kTokenTile * (tiles * index / order.chunks);
  const int64_t end = index + 1 == order.chunks ? order.m : kTokenTile * (tiles * (index + 1) / order.chunks);
  chunk.tokens = static_cast<int>(end - chunk.first);
  chunk.clusters = 16;
  while (chunk.clusters < kClusters && chunk.clusters * 64 < chunk.tokens) chunk.clusters *= 2;
  return chunk;
}

// Token `index` of `samples` tokens that are evenly spaced in the chunk.
__device__ __forceinline__ int64_t sample(const Chunk& chunk, int index, int samples) {
  return chunk.first + static_cast<uint32_t>(index) * static_cast<uint32_t>(chunk.tokens) / samples;
}

// The number of nonzeros of a token's row that are read.
__device__ __forceinline__ uint32_t known_count(const Order& order, int64_t token) {
  return min(static_cast<uint32_t>(order.row_counts[token]), kMaxCount);
}

// Calls use(neuron) for the neurons of one token. Eight lanes share the token's row; `piece` is this lane's index among
// them. A lane has four loads in flight. The first load does not wait for `count`: every row has at least this much
// memory.
template <class Use>
__device__ __forceinline__ void for_each_neuron(const Order& order, int64_t token, uint32_t count, uint32_t piece,
                                                Use use) {
  constexpr int kLoads = 4;
  const uint4* quads = reinterpret_cast<const uint4*>(order.rows + token * kRowCapacity) + piece;
  uint4 quad[kLoads];
  quad[0] = quads[0];
  for (uint32_t at = 4 * piece; at < count;) {
#pragma unroll
    for (int j = 1; j < kLoads; ++j) {
      if (at + 32 * j < count) quad[j] = quads[8 * j];
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      if (at + 32 * j < count) use(quad[j].x & 0xffff);
      if (at + 32 * j + 1 < count) use(quad[j].y & 0xffff);
      if (at + 32 * j + 2 < count) use(quad[j].z & 0xffff);
      if (at + 32 * j + 3 < count) use(quad[j].w & 0xffff);
    }
    at += 32 * kLoads;
    quads += 8 * kLoads;
    if (at < count) quad[0] = quads[0];
  }
}

// The number of bits that are set.
__device__ __forceinline__ int bits_of(const uint4& v) { return __popc(v.x) + __popc(v.y) + __popc(v.z) + __popc(v.w); }

}  // namespace sparsellm::order
