// token_order, the `assign` kernel: finds each token's cluster, and how similar the clusters are to one another
// (order.cu has the algorithm).
//
// A token's score for each of 128 clusters needs the token's overlap with the cluster's profile: the number of the
// token's neurons that are in the profile. The profiles are a table with one row per neuron and one bit per cluster. So
// a token's 128 overlaps are the sums, over the rows of its neurons, of each column of bits. The sums are kept as bit
// planes and computed 32 at a time, with logical operations only.
#pragma once

#include "order/profiles.cuh"

namespace sparsellm::order {

// For each of 32 bit positions, adds the bits of sum, a and b: writes the low bits to `sum`, and returns the carries.
__device__ __forceinline__ uint32_t carry_save(uint32_t& sum, uint32_t a, uint32_t b) {
  const uint32_t s = sum;
  sum = s ^ a ^ b;
  return (s & a) | (s & b) | (a & b);
}

// Adds eight words of bits to 32 counts, one per bit position. The counts are stored as bit planes: bit i of plane k is
// bit k of count i. For example, if count 3 is 5, bit 3 is set in planes 0 and 2.
__device__ __forceinline__ void add_planes(uint32_t (&plane)[8], const uint32_t (&v)[8]) {
  const uint32_t a = carry_save(plane[0], v[0], v[1]), b = carry_save(plane[0], v[2], v[3]);
  const uint32_t c = carry_save(plane[0], v[4], v[5]), d = carry_save(plane[0], v[6], v[7]);
  const uint32_t e = carry_save(plane[1], a, b), f = carry_save(plane[1], c, d);
  uint32_t carry = carry_save(plane[2], e, f);
#pragma unroll
  for (int k = 3; k < 8; ++k) {
    const uint32_t next = plane[k] & carry;
    plane[k] ^= carry;
    carry = next;
  }
}

// Converts bit planes to counts: afterwards, byte b of word j is count 8 b + j. To do so, transposes the 8 x 8 bits
// that byte b has in the eight planes.
__device__ __forceinline__ void planes_to_bytes(uint32_t (&plane)[8]) {
  constexpr uint32_t kLow[3] = {0x55555555, 0x33333333, 0x0f0f0f0f};
#pragma unroll
  for (int level = 2; level >= 0; --level) {
    const int step = 1 << level;
    const uint32_t low = kLow[level];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (k & step) continue;
      const uint32_t a = plane[k], b = plane[k + step];
      plane[k] = (a & low) | (b << step & ~low);
      plane[k + step] = (a >> step & low) | (b & ~low);
    }
  }
}

// Compares the profiles of all pairs of clusters. CTA `part` of `parts` does its share, which is every `parts`-th u
// below 64. For each u, it compares cluster u with all 127 - u clusters of higher number, and cluster 127 - u with all
// u clusters of higher number. These are 127 pairs for every u, so the work is divided evenly. Eight lanes compare a
// pair.
__device__ __forceinline__ void compare_profiles(const Order& order, int index, int part, int parts,
                                                 const int (&sizes)[kClusters]) {
  const int pair = min(static_cast<int>(threadIdx.x) / 8, kClusters - 2), piece = threadIdx.x % 8;
  const uint32_t* masks = order.masks + static_cast<int64_t>(index) * kClusters * order.words;
  uint32_t* similarity = order.similarity + static_cast<int64_t>(index) * kClusters * kClusters;
  for (int u = part; u < kClusters / 2; u += parts) {
    const bool lower = pair < kClusters - 1 - u;
    const int c = lower ? u : kClusters - 1 - u, d = lower ? u + 1 + pair : pair + 1;
    const uint4* a = reinterpret_cast<const uint4*>(masks + c * order.words);
    const uint4* b = reinterpret_cast<const uint4*>(masks + d * order.words);
    int both = 0;
#pragma unroll 3
    for (int q = piece; q < order.words / 4; q += 8) {
      const uint4 x = a[q], y = b[q];
      both += bits_of(make_uint4(x.x & y.x, x.y & y.y, x.z & y.z, x.w & y.w));
    }
    __syncwarp();
#pragma unroll
    for (int offset = 1; offset < 8; offset *= 2) both += __shfl_xor_sync(~0u, both, offset);
    const uint32_t alike = (static_cast<uint32_t>(both) << 15) / max(sizes[c] + sizes[d], 1);
    if (piece == 0) similarity[c * kClusters + d] = alike << 7 | (kClusters - 1 - d);
    if (piece == 1) similarity[d * kClusters + c] = alike << 7 | (kClusters - 1 - c);
  }
}

// Sets a cluster's bias, which is the part of its score that does not depend on the token: score = 128 * weighted
// overlap + bias, where bias = 127 - cluster - 128 * price. So the low seven bits of the largest score identify the
// cluster, and among equally good clusters the lowest wins. A cluster that does not exist gets a bias with which it
// never wins. `bias` is [4][8], in the order in which best_score reads it: row j, entry 4 s + w has the biases of
// clusters 32 w + 8 b + 4 s + j for b = 0..3.
__device__ __forceinline__ void set_bias(int4 (&bias)[kClusters / 4], const Chunk& chunk, int cluster, int price) {
  const int at = cluster % 4 * 8 + cluster / 4 % 2 * 4 + cluster / 32;
  reinterpret_cast<int*>(bias + at)[cluster / 8 % 4] =
      cluster < chunk.clusters ? kClusters - 1 - cluster - kClusters * price : -(1 << 30);
}

// Prepares what a CTA needs to score tokens: the biases and, if kShared, a copy of the table in shared memory. If not
// kLeaders, it also computes the sizes of the profiles. If kLeaders and kShared, it makes the leaders' table: each CTA
// makes all of it in shared memory, and writes one part of it to global memory, where `profile` reads it.
template <bool kLeaders, bool kShared>
__device__ __forceinline__ void prepare(const Order& order, const Chunk& chunk, int index, int part, int parts,
                                        const uint4* table, uint4* shared, int4 (&bias)[kClusters / 4],
                                        int (&sizes)[kClusters]) {
  if (kLeaders && kShared) {
    const int price = mark_leaders(order, chunk, 0, order.n, shared);
    if (threadIdx.x % 8 == 0) set_bias(bias, chunk, threadIdx.x / 8, price);
    const int last = order.n * (part + 1) / parts;
    for (int r = order.n * part / parts + threadIdx.x; r < last; r += kThreads) {
      order.leaders[static_cast<int64_t>(index) * (order.n + 1) + r] = shared[r];
    }
    return;
  }
  if (kShared) {
    for (int r = threadIdx.x; r <= order.n; r += kThreads) shared[r] = __ldcg(table + r);
  }
  if (threadIdx.x < kClusters) {
    int price = 0, size = 0;
    for (int r = 0; r < order.ranges; ++r) {
      const int at = (index * order.ranges + r) * kClusters + threadIdx.x;
      price += __ldcg(order.prices + at);
      if (!kLeaders) size += __ldcg(order.sizes + at);
    }
    set_bias(bias, chunk, threadIdx.x, price);
    sizes[threadIdx.x] = size;
  }
}

// Returns the best score of a token's clusters, to all eight lanes of the token. plane: overlaps in the layout of
// planes_to_bytes, counted over one half of the token's neurons (this lane's slice). The lane of the other slice (lane
// 4) has the overlaps with the same clusters, counted over the other half.
__device__ __forceinline__ int best_score(const uint32_t (&plane)[8], const int4 (&bias)[kClusters / 4], int weight,
                                          uint32_t lane, uint32_t slice) {
  int best = INT32_MIN;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    // Each of the two lanes scores half of their clusters: a lane sends its overlaps with the other lane's clusters,
    // and receives the other lane's overlaps with its own clusters.
    const uint32_t other = __shfl_xor_sync(~0u, slice ? plane[j] : plane[j + 4], 4);
    const uint32_t overlaps = (slice ? plane[j + 4] : plane[j]) + other;
    const int4 four = bias[8 * j + lane % 8];
    best = max(best, static_cast<int>(overlaps & 0xff) * weight + four.x);
    best = max(best, static_cast<int>(overlaps >> 8 & 0xff) * weight + four.y);
    best = max(best, static_cast<int>(overlaps >> 16 & 0xff) * weight + four.z);
    best = max(best, static_cast<int>(overlaps >> 24) * weight + four.w);
  }
#pragma unroll
  for (int offset = 1; offset < 8; offset *= 2) best = max(best, __shfl_xor_sync(~0u, best, offset));
  return best;
}

// Finds the cluster of each sampled token, by the leaders or by the profiles. A CTA handles one part of one chunk's
// samples. Eight lanes share a token: lane 4 s + w counts, in bit planes, the overlaps with clusters 32 w .. 32 w + 31
// over slice s of the token's neurons; a slice is every other group of eight neurons. If the profiles are used, a CTA
// first computes its share of the clusters' similarities, so that sort_kernel can start its chain while tokens are
// still being assigned.
template <bool kLeaders, bool kShared>
__global__ void __launch_bounds__(kThreads) assign_kernel(const Order order, int samples, int parts) {
  extern __shared__ uint4 shared[];  // kShared: the table
  __shared__ int4 bias[kClusters / 4];
  __shared__ int sizes[kClusters];
  const int part = blockIdx.x % parts, index = blockIdx.x / parts;
  const Chunk chunk = chunk_of(order, index);
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t word = lane % 4, slice = lane / 4 % 2;
  samples = min(samples, chunk.tokens);
  const uint4* table = (kLeaders ? order.leaders : order.profiles) + static_cast<int64_t>(index) * (order.n + 1);
  if (kLeaders) ptx::griddepcontrol_launch_dependents();
  if (kLeaders && kShared) {
    for (int i = threadIdx.x; i <= order.n; i += kThreads) shared[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
  }
  ptx::griddepcontrol_wait();
  if (!kLeaders) ptx::griddepcontrol_launch_dependents();  // after the wait: sort_kernel relies on this order

  // The first loads of a token's row wait neither for the row's count (every row has at least the memory that they
  // read) nor for the previous token.
  const int share = (samples + parts - 1) / parts;
  const int begin = part * share, end = min(begin + share, samples);
  int i = begin + threadIdx.x / 8;
  int64_t token = sample(chunk, min(i, end - 1), samples);
  const auto quads_of = [&](int64_t token) {
    return reinterpret_cast<const uint4*>(order.rows + token * kRowCapacity) + 2 * slice;
  };
  const uint4* quads = quads_of(token);
  uint4 x = quads[0], y = quads[1];
  int next_count = order.row_counts[token];

  prepare<kLeaders, kShared>(order, chunk, index, part, parts, table, shared, bias, sizes);
  if (kLeaders && part == 0 && threadIdx.x == 0) {
    order.profiles[static_cast<int64_t>(index) * (order.n + 1) + order.n] = make_uint4(0, 0, 0, 0);
    order.arrivals[index] = 0;  // for the next `assign`, which counts its CTAs there
  }
  __syncthreads();
  if (!kLeaders) {
    compare_profiles(order, index, part, parts, sizes);
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(order.arrivals + index, 1);
    }
  }

  const int scale = kClusters * chunk.clusters;
  for (int at = begin; at < end; at += kThreads / 8, i += kThreads / 8) {
    const uint32_t count = i < end ? min(static_cast<uint32_t>(next_count), kMaxCount) : 0;
    token = sample(chunk, min(i + kThreads / 8, end - 1), samples);  // the token of the next step
    next_count = order.row_counts[token];
    const uint32_t sparing = count > kMaxOverlap;  // count every other group of sixteen neurons, twice
    uint32_t plane[8] = {};
    const uint32_t step = 16 << sparing;
    uint32_t from = 8 * slice;
    do {
      uint32_t rows[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w}, v[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) rows[k] = from + k < count ? rows[k] & 0xffff : order.n;  // row n is empty
      from += step;
      quads = from < count ? quads + step / 4 : quads_of(token);
      x = quads[0];
      y = quads[1];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        v[k] = kShared ? reinterpret_cast<const uint32_t*>(shared + rows[k])[word]
                       : __ldcg(reinterpret_cast<const uint32_t*>(table + rows[k]) + word);
      }
      add_planes(plane, v);
    } while (from < count);
    __syncwarp();
    planes_to_bytes(plane);
    const int best = best_score(plane, bias, scale << sparing, lane, slice);
    if (lane % 8 == 0 && i < end) {
      order.clusters[static_cast<int64_t>(index) * kChunk + i] = kClusters - 1 - (best & (kClusters - 1));
    }
  }
}

}  // namespace sparsellm::order
