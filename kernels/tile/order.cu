// token_order: clusters of tokens that fire the same neurons, put one after the other; binary profiles, no state.
//
// Chunks of at most 8,192 tokens, cut between token tiles, are ordered alone, one after the other. In each:
//   leaders   C = 16..128 tokens evenly spaced are the first profiles (a profile: a set of neurons, one bit in each row
//             of a table [N + 1][128 bits] whose last row is empty); f[n] = how many leaders fire n
//   assign    4,096 tokens evenly spaced, then all: token t goes to the cluster with the largest
//             C |t & profile| - sum of f over the profile: the overlap less what a mean token would have
//   profile   after the first: the neurons that at least 1/16 of the cluster's tokens fire
//   order     a greedy chain of the clusters by |c & d| / (|c| + |d|), from the one least like the others; within a
//             cluster tokens by count, fewest first, every other cluster reversed
// Ties go to the lowest index. All is integer sums and fixed orders: the same answer always, on any machine.
// Overlaps are bytes: of a row of more than 255 nonzeros every other sixteen count, twice, and of no row more than the
// first 495.
#include <algorithm>
#include <type_traits>

#include "common/host.h"
#include "common/twell.cuh"

namespace sparsellm {
namespace {

constexpr int kThreads = 1024;
constexpr int kChunk = 8192;
constexpr int kClusters = 128;
constexpr int kGroup = 8;  // clusters of one CTA of `profile`: a byte of each table row
constexpr int kGroups = kClusters / kGroup;
constexpr int kMaxRange = 6144;  // neurons of one CTA of `leaders` or `profile`
constexpr int kMinParts = 8;  // all chunks' ranges together, at least: with the groups, a CTA of `profile` for each SM
constexpr int kSamples = 4096;  // tokens that the profiles are made of
constexpr int kShare = 16;  // a profile's neurons are fired by at least 1 / kShare of its tokens
constexpr uint32_t kMaxOverlap = 255;
constexpr uint32_t kMaxCount = 495;  // nonzeros of a row that are looked at: at most 255 in every other sixteen
constexpr int kSharedTokens = 96;  // from so many tokens per CTA on, a copy of the table in shared memory pays
constexpr int kMaxTable = 208 * 1024;  // bytes of it

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

// Sets the leaders' bits in `rows`, which has rows [first, first + range) of the table, all zero; returns, to each
// leader's eight lanes, its price there. A CTA of kThreads together.
__device__ __forceinline__ int mark_leaders(const Order& order, const Chunk& chunk, uint32_t first, uint32_t range,
                                            uint4* rows) {
  static_assert(kThreads == 8 * kClusters, "eight lanes to a leader");
  const int leader = threadIdx.x / 8;
  const uint32_t piece = threadIdx.x % 8;
  const bool valid = leader < chunk.clusters;
  const int64_t token =
      chunk.first + (valid ? (2 * leader + 1) * static_cast<int64_t>(chunk.tokens) / (2 * chunk.clusters) : 0);
  const uint32_t count = valid ? known_count(order, token) : 0;
  for_each_neuron(order, token, count, piece, [&](uint32_t neuron) {
    if (neuron - first < range) {
      atomicOr(reinterpret_cast<uint32_t*>(rows + (neuron - first)) + leader / 32, 1u << leader % 32);
    }
  });
  __syncthreads();
  int price = 0;
  for_each_neuron(order, token, count, piece, [&](uint32_t neuron) {
    if (neuron - first < range) price += bits_of(rows[neuron - first]);
  });
  __syncwarp();
#pragma unroll
  for (int offset = 4; offset > 0; offset /= 2) price += __shfl_xor_sync(~0u, price, offset);
  return price;
}

// The table of the leaders and its prices, where it does not fit the shared memory of `assign`: CTA (chunk, range).
__global__ void __launch_bounds__(kThreads) leaders_kernel(const Order order) {
  extern __shared__ uint4 shared[];  // this range of the table
  ptx::griddepcontrol_launch_dependents();
  const int range = blockIdx.x % order.ranges, index = blockIdx.x / order.ranges;
  const Chunk chunk = chunk_of(order, index);
  const uint32_t first = range * order.range;
  for (int i = threadIdx.x; i < order.range; i += kThreads) shared[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  ptx::griddepcontrol_wait();
  const int price = mark_leaders(order, chunk, first, order.range, shared);
  if (threadIdx.x % 8 == 0) order.prices[blockIdx.x * kClusters + threadIdx.x / 8] = price;
  uint4* table = order.leaders + static_cast<int64_t>(index) * (order.n + 1);
  for (int i = threadIdx.x; i < order.range && first + i < order.n; i += kThreads) table[first + i] = shared[i];
  if (range == 0 && threadIdx.x == 0) table[order.n] = make_uint4(0, 0, 0, 0);
}

// New profiles from the clusters of the sample: CTA (chunk, range, group of 8 clusters) counts, in shared memory, how
// many tokens of each cluster fire each neuron.
__global__ void __launch_bounds__(kThreads, 1) profile_kernel(const Order order, int samples) {
  extern __shared__ uint4 shared[];  // [range] 8 16-bit counts of each neuron
  __shared__ uint16_t list[kSamples];  // the group's tokens: sample << 3 | cluster in the group
  __shared__ int listed, members[kGroup], price_sums[kGroup], size_sums[kGroup];
  ptx::griddepcontrol_launch_dependents();
  const int group = blockIdx.x % kGroups, part = blockIdx.x / kGroups;  // part: chunk, range
  const int range = part % order.ranges, index = part / order.ranges;
  const Chunk chunk = chunk_of(order, index);
  const uint32_t first = range * order.range, lane = threadIdx.x % 32;
  samples = min(samples, chunk.tokens);
  for (int i = threadIdx.x; i < order.range; i += kThreads) shared[i] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x < kGroup) members[threadIdx.x] = price_sums[threadIdx.x] = size_sums[threadIdx.x] = 0;
  if (threadIdx.x == 0) listed = 0;
  __syncthreads();
  ptx::griddepcontrol_wait();

  static_assert(kSamples <= 4 * kThreads, "four tokens to a thread");
  if (4 * threadIdx.x < samples) {
    const uint32_t four =
        __ldcg(reinterpret_cast<const uint32_t*>(order.clusters + static_cast<int64_t>(index) * kChunk) + threadIdx.x);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = 4 * threadIdx.x + j, cluster = four >> 8 * j & 0xff;
      if (i < samples && cluster / kGroup == group) {
        list[atomicAdd(&listed, 1)] = i * kGroup + cluster % kGroup;  // in any order: it is only summed over
        atomicAdd(&members[cluster % kGroup], 1);
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x / 8; i < listed; i += kThreads / 8) {
    const int64_t token = sample(chunk, list[i] / kGroup, samples);
    const uint32_t cluster = list[i] % kGroup;
    for_each_neuron(order, token, known_count(order, token), threadIdx.x % 8, [&](uint32_t neuron) {
      if (neuron - first < order.range) {
        atomicAdd(reinterpret_cast<uint32_t*>(shared + (neuron - first)) + cluster / 2, 1u << 16 * (cluster % 2));
      }
    });
  }
  __syncthreads();

  uint32_t enough[kGroup];
  int price[kGroup], size = 0;
#pragma unroll
  for (int c = 0; c < kGroup; ++c) {
    enough[c] = max((members[c] + kShare - 1) / kShare, 1);
    price[c] = 0;
  }
  const int64_t table = static_cast<int64_t>(index) * (order.n + 1);
  for (int i = threadIdx.x; i < order.range; i += kThreads) {  // whole warps
    const int neuron = first + i;
    const uint4 counts = shared[i];
    const int weight = neuron < order.n ? bits_of(__ldcg(order.leaders + table + neuron)) : 0;
    const uint32_t pairs[4] = {counts.x, counts.y, counts.z, counts.w};
    uint32_t byte = 0;
#pragma unroll
    for (int c = 0; c < kGroup; ++c) {
      if ((pairs[c / 2] >> 16 * (c % 2) & 0xffff) >= enough[c]) {
        byte |= 1u << c;
        price[c] += weight;
      }
    }
    if (neuron < order.n) reinterpret_cast<uint8_t*>(order.profiles + table + neuron)[group] = byte;
    uint32_t mask = 0;
#pragma unroll
    for (int c = 0; c < kGroup; ++c) {
      const uint32_t ballot = __ballot_sync(~0u, byte >> c & 1);
      if (lane == c) mask = ballot;
    }
    if (lane < kGroup && neuron / 32 < order.words) {
      order.masks[(static_cast<int64_t>(index) * kClusters + group * kGroup + lane) * order.words + neuron / 32] =
          mask;
      size += __popc(mask);
    }
  }
  int sum = 0;
#pragma unroll
  for (int c = 0; c < kGroup; ++c) {
    const int all = __reduce_add_sync(~0u, price[c]);
    if (lane == c) sum = all;
  }
  if (lane < kGroup) {
    atomicAdd(&price_sums[lane], sum);
    atomicAdd(&size_sums[lane], size);
  }
  __syncthreads();
  if (threadIdx.x < kGroup) {
    const int at = part * kClusters + group * kGroup + threadIdx.x;
    order.prices[at] = price_sums[threadIdx.x];
    order.sizes[at] = size_sums[threadIdx.x];
  }
}

// Adds three bits in each place: `sum`, and the carry, which it returns.
__device__ __forceinline__ uint32_t carry_save(uint32_t& sum, uint32_t a, uint32_t b) {
  const uint32_t s = sum;
  sum = s ^ a ^ b;
  return (s & a) | (s & b) | (a & b);
}

// Adds eight words of bits to counters kept as bit planes: plane k holds bit k of the 32 counts.
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

// From planes to counts: afterwards byte b of word j is the count of place 8 b + j (the 8 x 8 bits of each byte column,
// transposed).
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

// Each pair of clusters is compared by one CTA of `parts`: clusters u and 127 - u with all after them, 127 pairs for
// any u, eight lanes to a pair.
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

// The cluster of each sampled token, by the leaders or by the profiles: CTA (chunk, part of the sample). Eight lanes to
// a token: lane 4 s + w counts, in bit planes, the overlaps with clusters 32 w .. 32 w + 31 over every other eight
// neurons. With the profiles, a part of the clusters' similarity first, for the chain to begin with.
template <bool kLeaders, bool kShared>
__global__ void __launch_bounds__(kThreads) assign_kernel(const Order order, int samples, int parts) {
  extern __shared__ uint4 shared[];  // kShared: the table
  __shared__ int4 bias[kClusters / 4];  // [4][8]: at j, then lane 4 s + w: clusters 32 w + 8 b + 4 s + j, b = 0..3
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
  if (!kLeaders) ptx::griddepcontrol_launch_dependents();  // not before: sort_kernel counts on it

  // The first loads of a token's row do not wait for its count: every row has room for them; nor for the token before.
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

  // A score is 128 (C overlap - price) + 127 - cluster: its maximum names the cluster, the lowest of equals.
  const auto set_bias = [&](int cluster, int price) {
    const int at = cluster % 4 * 8 + cluster / 4 % 2 * 4 + cluster / 32;
    reinterpret_cast<int*>(bias + at)[cluster / 8 % 4] =
        cluster < chunk.clusters ? kClusters - 1 - cluster - kClusters * price : -(1 << 30);
  };
  if (kLeaders && kShared) {
    const int price = mark_leaders(order, chunk, 0, order.n, shared);
    if (threadIdx.x % 8 == 0) set_bias(threadIdx.x / 8, price);
    const int last = order.n * (part + 1) / parts;
    for (int r = order.n * part / parts + threadIdx.x; r < last; r += kThreads) {
      order.leaders[static_cast<int64_t>(index) * (order.n + 1) + r] = shared[r];
    }
  } else {
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
      set_bias(threadIdx.x, price);
      sizes[threadIdx.x] = size;
    }
  }
  if (kLeaders && part == 0 && threadIdx.x == 0) {
    order.profiles[static_cast<int64_t>(index) * (order.n + 1) + order.n] = make_uint4(0, 0, 0, 0);
    order.arrivals[index] = 0;  // the next `assign` counts
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
    token = sample(chunk, min(i + kThreads / 8, end - 1), samples);  // the next
    next_count = order.row_counts[token];
    const uint32_t sparing = count > kMaxOverlap;
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
    const int weight = scale << sparing;
    int best = INT32_MIN;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // The other slice's counts of the places this lane scores.
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
    if (lane % 8 == 0 && i < end) {
      order.clusters[static_cast<int64_t>(index) * kChunk + i] = kClusters - 1 - (best & (kClusters - 1));
    }
  }
}

constexpr int kSorters = 512;  // threads that rank the tokens
constexpr int kChainers = 128;  // threads that read the similarities; one warp makes the chain
constexpr int kSortWarps = kSorters / 32;
constexpr int kSortItems = kChunk / kSorters;

// Ranks among equal keys. A warp has the positions 512 warp + 32 k + lane below `tokens`, key(k) is the key of one:
// rank[k] counts the equal keys before it in its warp, before[warp][key] those of the warps before and, kSpread, all
// smaller keys; totals[key] all equal ones.
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
  ptx::bar_sync(1, kSorters);
  if (warp * 32 + lane < kKeys) {
    const uint32_t mine = warp * 32 + lane;
    uint32_t total = 0;
    for (int w = 0; w < kSortWarps; ++w) total += before[w][mine];
    static_assert(!kSpread || kKeys == 32, "one warp scans");
    uint32_t sum = kSpread ? exclusive_scan(total, lane) : 0;
    for (int w = 0; w < kSortWarps; ++w) {
      const uint32_t here = before[w][mine];
      before[w][mine] = sum;
      sum += here;
    }
    totals[mine] = total;
  }
  ptx::bar_sync(1, kSorters);
}

// The order of one chunk. The chain is one warp's work, a step at a time; meanwhile the others rank the tokens, within
// their clusters once there are any. The chain begins before `assign` ends: this kernel starts once all CTAs of that
// one are past their own wait, so what was before them is done (the rows' counts, `arrivals` at zero) and none of them
// waits for room; and `arrivals` tell when the similarities are there.
__global__ void __launch_bounds__(kSorters + kChainers) sort_kernel(const Order order, int parts, int32_t* tokens) {
  extern __shared__ uint4 shared[];  // the similarities
  __shared__ uint8_t clusters[kChunk];
  __shared__ uint16_t sorted[kChunk];
  __shared__ uint16_t before[kSortWarps][kClusters];
  __shared__ uint32_t likeness[kClusters];
  __shared__ int totals[kClusters], start[kClusters], chain[kClusters], place[kClusters], nonzeros;
  ptx::griddepcontrol_launch_dependents();
  const Chunk chunk = chunk_of(order, blockIdx.x);
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) nonzeros = 0;
  __syncthreads();

  uint16_t item[kSortItems], rank[kSortItems];
  if (warp >= kSortWarps) {
    const int thread = threadIdx.x - kSorters;
    if (thread == 0) {
      while (ptx::ld_acquire(order.arrivals + blockIdx.x) != parts) __nanosleep(100);
    }
    ptx::bar_sync(2, kChainers);
    const uint4* similarity =
        reinterpret_cast<const uint4*>(order.similarity + static_cast<int64_t>(blockIdx.x) * kClusters * kClusters);
#pragma unroll 8
    for (int i = thread; i < chunk.clusters * 32; i += kChainers) shared[i] = __ldcg(similarity + i);
    ptx::bar_sync(2, kChainers);
#pragma unroll 4
    for (int c = thread / 32; c < chunk.clusters; c += kChainers / 32) {
      const uint4 four = shared[c * 32 + lane];
      const uint32_t alike[4] = {four.x, four.y, four.z, four.w};
      uint32_t sum = 0;
      for (int e = 0; e < 4; ++e) sum += 4 * lane + e == c ? 0 : alike[e] >> 7;
      sum = __reduce_add_sync(~0u, sum);
      if (lane == 0) likeness[c] = sum;
    }
    ptx::bar_sync(2, kChainers);
    if (warp == kSortWarps) {
      uint32_t taken[4];  // the sign bit: in the chain, or no cluster
      uint32_t least = ~0u;
      for (int e = 0; e < 4; ++e) {
        const int c = 4 * lane + e;
        taken[e] = c < chunk.clusters ? 0 : 1u << 31;
        if (c < chunk.clusters) least = min(least, likeness[c] << 7 | c);
      }
      int c = __reduce_min_sync(~0u, least) & (kClusters - 1);
      for (int k = 0; k < chunk.clusters; ++k) {
        const uint4 four = shared[c * 32 + lane];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (c == 4 * lane + e) taken[e] = 1u << 31;
        }
        if (lane == 0) {
          chain[k] = c;
          place[c] = k;
        }
        const int best = max(max(static_cast<int>(four.x | taken[0]), static_cast<int>(four.y | taken[1])),
                             max(static_cast<int>(four.z | taken[2]), static_cast<int>(four.w | taken[3])));
        c = kClusters - 1 - (__reduce_max_sync(~0u, best) & (kClusters - 1));
      }
    }
    ptx::griddepcontrol_wait();
  } else {
    int count[kSortItems], sum = 0;
    const int base = warp * 32 * kSortItems + lane;
#pragma unroll
    for (int k = 0; k < kSortItems; ++k) {
      const int i = base + 32 * k;
      count[k] = i < chunk.tokens ? __ldcg(order.row_counts + chunk.first + i) : 0;
      sum += count[k];
    }
    sum = __reduce_add_sync(~0u, sum);
    if (lane == 0) atomicAdd(&nonzeros, sum);
    ptx::bar_sync(1, kSorters);
    const int mean = max((nonzeros + chunk.tokens - 1) / chunk.tokens, 1);
    const auto fullness = [&](int k) { return static_cast<uint32_t>(min(8 * count[k] / mean, 31)); };
    rank_keys<32, true>(chunk.tokens, warp, lane, before, totals, rank, fullness);
#pragma unroll
    for (int k = 0; k < kSortItems; ++k) {
      if (base + 32 * k < chunk.tokens) sorted[before[warp][fullness(k)] + rank[k]] = base + 32 * k;
    }
    ptx::griddepcontrol_wait();
#pragma unroll
    for (int k = 0; k < kSortItems; ++k) {
      const int i = base + 32 * k;
      if (i < chunk.tokens) clusters[i] = __ldcg(order.clusters + static_cast<int64_t>(blockIdx.x) * kChunk + i);
    }
    ptx::bar_sync(1, kSorters);
#pragma unroll
    for (int k = 0; k < kSortItems; ++k) item[k] = base + 32 * k < chunk.tokens ? sorted[base + 32 * k] : 0;
    rank_keys<kClusters, false>(chunk.tokens, warp, lane, before, totals, rank,
                                [&](int k) { return static_cast<uint32_t>(clusters[item[k]]); });
  }
  __syncthreads();

  if (warp == 0) {
    int size[4], sum = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int k = 4 * lane + e;
      size[e] = k < chunk.clusters ? totals[chain[k]] : 0;
      sum += size[e];
    }
    sum = exclusive_scan(sum, lane);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int k = 4 * lane + e;
      if (k < chunk.clusters) start[chain[k]] = sum;
      sum += size[e];
    }
  }
  __syncthreads();
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

// Sizes and places of the workspace; returns its bytes.
int64_t lay_out(Order& order, int64_t m, int64_t n, void* workspace) {
  order.m = m;
  order.n = static_cast<int>(n);
  order.chunks = static_cast<int>(ceil_div(m, kChunk));
  order.ranges = static_cast<int>(std::max<int64_t>(ceil_div(n, kMaxRange), kMinParts / order.chunks));
  order.range = static_cast<int>(ceil_div(ceil_div(n, order.ranges), 128) * 128);
  order.words = static_cast<int>(ceil_div(n, 128) * 4);
  int64_t bytes = 0;
  const auto take = [&](auto*& pointer, int64_t elements) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(static_cast<char*>(workspace) + bytes);
    bytes += ceil_div(elements * static_cast<int64_t>(sizeof(*pointer)), 256) * 256;
  };
  take(order.leaders, order.chunks * (n + 1));
  take(order.profiles, order.chunks * (n + 1));
  take(order.masks, static_cast<int64_t>(order.chunks) * kClusters * order.words);
  take(order.prices, static_cast<int64_t>(order.chunks) * order.ranges * kClusters);
  take(order.sizes, static_cast<int64_t>(order.chunks) * order.ranges * kClusters);
  take(order.similarity, static_cast<int64_t>(order.chunks) * kClusters * kClusters);
  take(order.clusters, static_cast<int64_t>(order.chunks) * kChunk);
  take(order.arrivals, order.chunks);
  return bytes;
}

}  // namespace

int64_t order_workspace(int64_t m, int64_t n) {
  Order order;
  return lay_out(order, m, n, nullptr);
}

cudaError_t token_order(const uint32_t* rows, const int32_t* row_counts, int64_t m, int64_t n, void* workspace,
                        int32_t* tokens, cudaStream_t stream) {
  Order order;
  lay_out(order, m, n, workspace);
  order.rows = rows;
  order.row_counts = row_counts;
  int processors = 0;
  cudaError_t error = multiprocessors(&processors);
  if (error != cudaSuccess) return error;
  const int parts = std::min(std::max(processors / order.chunks, 8), 64);
  const int64_t per_chunk = ceil_div(m, order.chunks);
  const uint32_t table_bytes = static_cast<uint32_t>(n + 1) * sizeof(uint4);
  const uint32_t range_bytes = order.range * sizeof(uint4);
  const bool fits = table_bytes <= kMaxTable;
  const bool copied = fits && ceil_div(per_chunk, parts) >= kSharedTokens;
  if (fits) {
    error = launch_early(assign_kernel<true, true>, order.chunks * parts, kThreads, table_bytes, 1, stream, order,
                         kSamples, parts);
  } else {
    error = launch_early(leaders_kernel, order.chunks * order.ranges, kThreads, range_bytes, 1, stream, order);
    if (error == cudaSuccess) {
      error = launch_early(assign_kernel<true, false>, order.chunks * parts, kThreads, 0, 1, stream, order, kSamples,
                           parts);
    }
  }
  if (error == cudaSuccess) {
    error = launch_early(profile_kernel, static_cast<int64_t>(order.chunks) * order.ranges * kGroups, kThreads,
                         range_bytes, 1, stream, order, kSamples);
  }
  if (error == cudaSuccess) {
    error = copied ? launch_early(assign_kernel<false, true>, order.chunks * parts, kThreads, table_bytes, 1, stream,
                                  order, kChunk, parts)
                   : launch_early(assign_kernel<false, false>, order.chunks * parts, kThreads, 0, 1, stream, order,
                                  kChunk, parts);
  }
  if (error == cudaSuccess) {
    error = launch_early(sort_kernel, order.chunks, kSorters + kChainers, kClusters * kClusters * sizeof(uint32_t), 1,
                         stream, order, parts, tokens);
  }
  return error;
}

}  // namespace sparsellm
