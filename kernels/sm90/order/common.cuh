// What the kernels of token_order share: sizes, their workspace, chunks of tokens, a token's neurons.
#pragma once

#include "common/host.h"
#include "common/twell.cuh"

namespace sparsellm::order {

constexpr int kThreads = 1024;
constexpr int kChunk = 8192;
constexpr int kClusters = 128;
constexpr uint32_t kMaxOverlap = 255;
constexpr uint32_t kMaxCount = 495;  // nonzeros of a row that are looked at: at most 255 in every other sixteen

struct Order {
  const uint32_t* rows;
  const int32_t* row_counts;
  int64_t m;
  int n, chunks;
  int ranges, range;     // the neurons in `ranges` parts of `range`, a multiple of 128
  int words;             // of a profile as a mask, a multiple of 4
  uint4* leaders;        // [chunks][n + 1] table of the leaders
  uint4* profiles;       // [chunks][n + 1] table of the profiles
  uint32_t* masks;       // [chunks][kClusters][words] the last profiles, cluster by cluster
  int32_t* prices;       // [chunks][ranges][kClusters] sum of f over the neurons of the profile in this part
  int32_t* sizes;        // [chunks][ranges][kClusters] neurons of the last profile
  uint32_t* similarity;  // [chunks][kClusters][kClusters] similarity << 7 | 127 - column; undefined diagonal
  uint8_t* clusters;     // [chunks][kChunk] of the sampled tokens
  uint32_t* arrivals;    // [chunks] CTAs of the last `assign` that have written their part of `similarity`
};

struct Chunk {
  int64_t first;
  int tokens, clusters;
};

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

__device__ __forceinline__ int64_t sample(const Chunk& chunk, int index, int samples) {
  return chunk.first + static_cast<uint32_t>(index) * static_cast<uint32_t>(chunk.tokens) / samples;
}

// How many nonzeros of a token's row are looked at.
__device__ __forceinline__ uint32_t known_count(const Order& order, int64_t token) {
  return min(static_cast<uint32_t>(order.row_counts[token]), kMaxCount);
}

// use(neuron) for the neurons of one token; lane `piece` of 8 takes its share, four loads at a time. The first does not
// wait for `count`: every row has room for it.
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

__device__ __forceinline__ int bits_of(const uint4& v) { return __popc(v.x) + __popc(v.y) + __popc(v.z) + __popc(v.w); }

}  // namespace sparsellm::order
