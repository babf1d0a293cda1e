// token_order, the clusters' profiles: first those of the leaders, then those of the tokens that were assigned to each
// cluster (order.cu has the algorithm).
#pragma once

#include "order/common.cuh"

namespace sparsellm::order {

constexpr int kSamples = 4096;  // number of tokens from which new profiles are made
constexpr int kGroup = 8;       // clusters per CTA of profile_kernel; their bits are one byte of each table row
constexpr int kGroups = kClusters / kGroup;
constexpr int kShare = 16;  // at least 1 / kShare of a cluster's tokens must fire a neuron of its profile

// Sets the leaders' bits in `rows`, which are rows [first, first + range) of the table and must be zero. Returns the
// price of a leader (the sum of f over its neurons, order.cu) for the neurons of these rows, to each of the leader's
// eight lanes. Called by all threads of a CTA.
__device__ __forceinline__ int mark_leaders(const Order& order, const Chunk& chunk, uint32_t first, uint32_t range,
                                            uint4* rows) {
  static_assert(kThreads == 8 * kClusters, "each leader has eight lanes");
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

// Makes the leaders' table and prices if the table is too large for the shared memory of `assign`. Each CTA handles one
// range of neurons in one chunk.
__global__ void __launch_bounds__(kThreads) leaders_kernel(const Order order) {
  extern __shared__ uint4 shared[];  // this range's rows of the table
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

// Lists the sampled tokens that belong to a group of 8 clusters, and counts each cluster's tokens (members). The order
// of the list may differ between runs, but only integers are summed over it, so no result depends on it.
__device__ __forceinline__ void list_members(const Order& order, int index, int group, int samples,
                                             uint16_t (&list)[kSamples], int& listed, int (&members)[kGroup]) {
  static_assert(kSamples <= 4 * kThreads, "each thread has up to four tokens");
  if (4 * threadIdx.x < samples) {
    const uint32_t four =
        __ldcg(reinterpret_cast<const uint32_t*>(order.clusters + static_cast<int64_t>(index) * kChunk) + threadIdx.x);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = 4 * threadIdx.x + j, cluster = four >> 8 * j & 0xff;
      if (i < samples && cluster / kGroup == group) {
        list[atomicAdd(&listed, 1)] = i * kGroup + cluster % kGroup;
        atomicAdd(&members[cluster % kGroup], 1);
      }
    }
  }
  __syncthreads();
}

// Counts, for each neuron of a range, how many of the listed tokens of each cluster fire it. `shared` has 8 counts of
// 16 bits for each neuron.
__device__ __forceinline__ void count_neurons(const Order& order, const Chunk& chunk, uint32_t first, int samples,
                                              const uint16_t (&list)[kSamples], const int& listed, uint4* shared) {
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
}

// Writes the group's profiles for the neurons of this range. A neuron is in a cluster's profile if at least 1 / kShare
// of the cluster's tokens fire it: with 40 tokens, at least three must. The profiles are written to the table, as one
// byte for each neuron, and to the masks. Their prices and sizes are added to price_sums and size_sums.
__device__ __forceinline__ void make_profiles(const Order& order, int index, int group, uint32_t first, uint32_t lane,
                                              const uint4* shared, const int (&members)[kGroup],
                                              int (&price_sums)[kGroup], int (&size_sums)[kGroup]) {
  uint32_t enough[kGroup];
  int price[kGroup], size = 0;
#pragma unroll
  for (int c = 0; c < kGroup; ++c) {
    enough[c] = max((members[c] + kShare - 1) / kShare, 1);
    price[c] = 0;
  }
  const int64_t table = static_cast<int64_t>(index) * (order.n + 1);
  for (int i = threadIdx.x; i < order.range; i += kThreads) {  // whole warps, because range is a multiple of 128
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
      order.masks[(static_cast<int64_t>(index) * kClusters + group * kGroup + lane) * order.words + neuron / 32] = mask;
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
}

// Makes new profiles from the sampled tokens and their clusters. Each CTA has one chunk, one range of neurons and one
// group of 8 clusters. It counts in shared memory how many tokens of each cluster fire each neuron.
__global__ void __launch_bounds__(kThreads, 1) profile_kernel(const Order order, int samples) {
  extern __shared__ uint4 shared[];    // [range] 8 counts of 16 bits for each neuron
  __shared__ uint16_t list[kSamples];  // the group's tokens: index of the sample << 3 | cluster in the group
  __shared__ int listed, members[kGroup], price_sums[kGroup], size_sums[kGroup];
  ptx::griddepcontrol_launch_dependents();
  const int group = blockIdx.x % kGroups, part = blockIdx.x / kGroups;  // part: which chunk and which range of neurons
  const int range = part % order.ranges, index = part / order.ranges;
  const Chunk chunk = chunk_of(order, index);
  const uint32_t first = range * order.range, lane = threadIdx.x % 32;
  samples = min(samples, chunk.tokens);
  for (int i = threadIdx.x; i < order.range; i += kThreads) shared[i] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x < kGroup) members[threadIdx.x] = price_sums[threadIdx.x] = size_sums[threadIdx.x] = 0;
  if (threadIdx.x == 0) listed = 0;
  __syncthreads();
  ptx::griddepcontrol_wait();

  list_members(order, index, group, samples, list, listed, members);
  count_neurons(order, chunk, first, samples, list, listed, shared);
  make_profiles(order, index, group, first, lane, shared, members, price_sums, size_sums);
  __syncthreads();
  if (threadIdx.x < kGroup) {
    const int at = part * kClusters + group * kGroup + threadIdx.x;
    order.prices[at] = price_sums[threadIdx.x];
    order.sizes[at] = size_sums[threadIdx.x];
  }
}

}  // namespace sparsellm::order
