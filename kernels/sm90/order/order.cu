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
#include "order/assign.cuh"
#include "order/profiles.cuh"
#include "order/sort.cuh"

namespace sparsellm {
namespace {

using namespace order;

constexpr int kMaxRange = 6144;  // neurons of one CTA of `leaders` or `profile`
constexpr int kMinParts = 8;  // all chunks' ranges together, at least: with the groups, a CTA of `profile` for each SM
constexpr int kSharedTokens = 96;      // from so many tokens per CTA on, a copy of the table in shared memory pays
constexpr int kMaxTable = 208 * 1024;  // bytes of it

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
