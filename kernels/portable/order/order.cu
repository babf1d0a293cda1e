// token_order: finds an order of the tokens in which neighbours fire the same neurons, because the cost of a token tile
// grows with the number of neurons that at least one of its tokens fires. Tokens are assigned to clusters, and the
// clusters are arranged in a chain. No state is kept between calls.
//
// Each chunk of at most 8,192 tokens, cut between token tiles, is ordered separately. A cluster has a profile, which is
// a set of neurons. The profiles are a table [N + 1][128]: one row per neuron, one bit per cluster; the last row is
// empty. The steps for each chunk:
//   leaders   C = 16 to 128 evenly spaced tokens, the leaders, are the clusters' first profiles; f[n] is the number of
//             leaders that fire neuron n
//   assign    4,096 evenly spaced tokens are assigned, each to the cluster with the largest score, C |token & profile|
//             - (sum of f over the profile). This is C times the token's overlap in excess of a mean leader's overlap
//   profile   a cluster's new profile is the set of neurons that at least 1/16 of the cluster's tokens fire
//   assign    all tokens are assigned, by the new profiles
//   sort      the clusters form a greedy chain by similarity |c & d| / (|c| + |d|), which starts with the cluster that
//             is least similar to all others. Within a cluster, tokens are sorted by their number of nonzeros:
//             ascending and descending in turn along the chain
// Ties go to the lowest index, and all sums are of integers, so the result is the same in every run. An overlap is
// counted in a byte. So in a row with more than 255 nonzeros, only every other group of sixteen is counted, twice, and
// only the first 495 nonzeros of a row are read.
#include <type_traits>

#include "common/host.h"
#include "order/assign.cuh"
#include "order/profiles.cuh"
#include "order/sort.cuh"

namespace sparsellm {
namespace {

using namespace order;

constexpr int kMaxRange = 6144;  // maximum neurons per CTA of `leaders` and `profile`
// Minimum number of ranges, summed over all chunks. With the 16 groups of clusters per range, `profile` then has at
// least 128 CTAs, about one per SM.
constexpr int kMinParts = 8;
constexpr int kSharedTokens = 96;      // from this many tokens per CTA on, copying the table to shared memory pays off
constexpr int kMaxTable = 208 * 1024;  // bytes of a table that fits in shared memory

// Sets the sizes, assigns the arrays to parts of the workspace, and returns the number of bytes. If workspace is null,
// the function only counts bytes.
int64_t lay_out(Order& order, int64_t m, int64_t n, void* workspace) {
  order.m = m;
  order.n = static_cast<int>(n);
  order.chunks = static_cast<int>(ceil_div(m, kChunk));
  order.ranges = static_cast<int>(max(ceil_div(n, kMaxRange), static_cast<int64_t>(kMinParts / order.chunks)));
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
  const int parts = min(max(processors / order.chunks, 8), 64);
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
