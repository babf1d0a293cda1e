// row_ffn, the row engine: for each token, y = sum of h_n w_down_t[n] over the token's nonzeros n, with h_n = g_n (x .
// w_up[n]). It reads the packed gate, and h is never in global memory. For fewer than 1,536 tokens, one kernel computes
// everything (row/cluster.cuh); for more tokens, or K above 4,096, a small planning kernel and one more kernel do
// (row/many.cuh).
//
// Numerics: u is accumulated in float32 and rounded to bf16 once; h = g u is rounded to bf16 once (non-gated: h = g); y
// is accumulated in float32 and rounded to bf16 once. A row's nonzeros, columns ascending, are cut into chunks. The
// cuts depend on M, on the rows' counts and, for few tokens, also on the number of SMs. Each chunk is summed in order
// from zero, and the chunks' sums are added in order, whether one worker computes all of them or several workers do.
// (With clusters of eight CTAs, a chunk in this sense is what one of a CTA's eight warps gets of a row or piece: eight
// nonzeros of every 64. With clusters of four, it gets four of every 32.) l1 is the float32 sum of |h|, also in a fixed
// order. So the bits are the same in every run on the same kind of device. Rows without nonzeros give zeros.
#include "common/host.h"
#include "row/cluster.cuh"
#include "row/many.cuh"

namespace sparsellm {
namespace {

using namespace row;

constexpr int64_t kSlotBytes = 64 << 20;   // maximum bytes of all chunk sums of cut rows
constexpr int64_t kMaxSlots = 8192;        // maximum number of chunk sums
constexpr int64_t kMinSlots = 64;          // minimum number of chunk sums, however wide a row is
constexpr int64_t kTotalBytes = 64 << 20;  // maximum bytes of the warps' sums over chunks, unless one warp per SM
                                           // needs more

bool for_clusters(int64_t m, int64_t k) { return m <= kClusterTokens && k <= kClusterMaxWidth; }
static_assert(row_ffn_counts(kClusterTokens, kClusterMaxWidth) && !row_ffn_counts(1, kClusterMaxWidth + 1),
              "row_ffn must count exactly where row_cluster deals rows");
bool for_runs(int64_t m, int64_t k) { return m < kRunTokens && k <= kClusterMaxWidth; }

int many_warps(int64_t k) {
  const int64_t warps = kTotalBytes / (kMaxGrid * k * 4);
  return static_cast<int>(warps < 1 ? 1 : warps > kManyWarps ? kManyWarps : warps);
}

// Byte offsets of the arrays in the workspace.
struct Layout {
  int64_t partials = 0, l1 = 0, units = 0, arrivals = 0, slots = 0, totals = 0, bytes = 0, slot_capacity = 0;

  Layout(int64_t m, int64_t k, int64_t n) {
    if (for_runs(m, k)) {
      const int64_t rows = for_clusters(m, k) ? m + max_clusters(4, kClusterWarps) : 2 * kMaxClusters;
      partials = take(rows * k * 4);
      return;
    }
    slot_capacity = kSlotBytes / ((k + 8) * 4);
    if (slot_capacity > kMaxSlots) slot_capacity = kMaxSlots;
    if (slot_capacity < kMinSlots) slot_capacity = kMinSlots;
    const int64_t chunks = ceil_div(n, kListed) > kEqualChunks ? ceil_div(n, kListed) : kEqualChunks;
    if (slot_capacity > m * chunks) slot_capacity = m * chunks;
    l1 = take(m * 4);
    units = take((m + slot_capacity) * static_cast<int64_t>(sizeof(int4)));
    arrivals = take(slot_capacity * 4);
    slots = take(slot_capacity * (k + 8) * 4);
    totals = take(kMaxGrid * many_warps(k) * k * 4);
  }

  int64_t take(int64_t size) {
    const int64_t at = bytes;
    bytes += ceil_div(size, 256) * 256;
    return at;
  }
};

cudaError_t grid_of(int* grid) {
  cudaError_t error = multiprocessors(grid);
  if (*grid > kMaxGrid) *grid = kMaxGrid;
  return error;
}

template <int kVectors, bool kFull>
cudaError_t launch_many(const ManyArguments& a, int grid, cudaStream_t stream) {
  return launch_early(
      a.w_up == nullptr ? row_many_kernel<kVectors, kFull, false> : row_many_kernel<kVectors, kFull, true>, grid,
      32 * many_warps(a.k), 0, 1, stream, a);
}

template <int kCluster, int kWarps, int kVectors, bool kFull, bool kDealt, bool kFloat8>
cudaError_t launch_cluster(const ClusterArguments& a, int clusters, cudaStream_t stream) {
  return launch_early(a.w_up == nullptr ? row_cluster_kernel<kCluster, kWarps, kVectors, kFull, false, kDealt, kFloat8>
                                        : row_cluster_kernel<kCluster, kWarps, kVectors, kFull, true, kDealt, kFloat8>,
                      clusters * kCluster, 32 * kWarps, 0, kCluster, stream, a);
}

RowArguments arguments(const void* x, const void* w_up, const void* w_down_t, int64_t m, int64_t k, int64_t n,
                       const Packed& packed, int32_t* tickets, float* l1, void* y) {
  return {static_cast<const __nv_bfloat16*>(x),
          w_up,
          w_down_t,
          packed,
          n,
          static_cast<int>(m),
          static_cast<int>(k),
          tickets,
          l1,
          static_cast<__nv_bfloat16*>(y)};
}

// How many clusters, of how many CTAs and warps, are launched for m rows on `grid` SMs.
//
// If there are more rows than clusters, all clusters should be resident at once: a cluster that starts only when
// another one has ended would make all others wait for it. The CTAs of a cluster must be in the same group of SMs, and
// groups are not multiples of a cluster: 132 SMs hold 15 clusters of eight CTAs instead of 16, and twice as many if two
// CTAs share an SM. Of clusters of four CTAs, 60 to 62 were seen resident at once, although the driver reports 64. With
// half as many warps per CTA, twice as many clusters are launched.
struct Clusters {
  bool full;  // k is 2,048; then 16 warps share an SM
  int ctas, warps, count;

  Clusters(int64_t m, int64_t k, int grid)
      : full(k == 2048),
        ctas(full && m > max_clusters(8, kClusterWarps) ? 4 : 8),
        warps(full && m >= kLongRunTokens ? kRunWarps : kClusterWarps) {
    const int most = max_clusters(ctas, warps);
    count = grid / ctas;
    if (m > count) count = (full ? 2 * kClusterWarps / warps : 1) * (count - (ctas == 4 ? 3 : 1));
    count = count < 1 ? 1 : count > most ? most : count;
  }
};

// scales: kFloat8: see ClusterArguments.
template <bool kDealt, bool kFloat8 = false>
cudaError_t run_clusters(const RowArguments& common, const Clusters& clusters, void* workspace, cudaStream_t stream,
                         const float* scales = nullptr) {
  const Layout layout(common.m, common.k, common.n);
  ClusterArguments a = {common};
  a.scales = scales;
  a.partials = reinterpret_cast<float*>(static_cast<char*>(workspace) + layout.partials);
  if constexpr (!kDealt) {
    if (clusters.warps == kRunWarps) {
      return launch_cluster<4, kRunWarps, 8, true, kDealt, kFloat8>(a, clusters.count, stream);
    }
  }
  if (clusters.ctas == 4) return launch_cluster<4, kClusterWarps, 8, true, kDealt, kFloat8>(a, clusters.count, stream);
  if constexpr (kDealt) {
    if (clusters.full) return launch_cluster<8, kClusterWarps, 8, true, kDealt, kFloat8>(a, clusters.count, stream);
  }
  if (a.k < 2048) return launch_cluster<8, kClusterWarps, 8, false, kDealt, kFloat8>(a, clusters.count, stream);
  return launch_cluster<8, kClusterWarps, 16, false, kDealt, kFloat8>(a, clusters.count, stream);
}

cudaError_t run_many(const RowArguments& common, void* workspace, cudaStream_t stream) {
  const int64_t m = common.m, k = common.k;
  const Layout layout(m, k, common.n);
  char* base = static_cast<char*>(workspace);
  int grid = 0;
  cudaError_t error = grid_of(&grid);
  if (error != cudaSuccess) return error;
  ManyArguments a = {common};
  // Few rows occupy the device only if they are cut into short chunks. If there are many rows, only the rows that would
  // still be running when all others are done need to be cut.
  a.smallest_chunk = m <= 512 ? 8 : m <= 1024 ? 16 : m <= 2048 ? 32 : kListed;
  a.heavy_above = m <= 8192 ? a.smallest_chunk : m <= 32768 ? 2 * kListed : 4 * kListed;
  const int64_t range = m / (grid * kManyWarps);
  a.range = static_cast<int>(range < 1 ? 1 : range > 32 ? 32 : range);
  a.slot_capacity = static_cast<int>(layout.slot_capacity);
  a.units = reinterpret_cast<int4*>(base + layout.units);
  a.arrivals = reinterpret_cast<int32_t*>(base + layout.arrivals);
  a.slots = reinterpret_cast<float*>(base + layout.slots);
  a.totals = reinterpret_cast<float*>(base + layout.totals);
  a.row_l1 = reinterpret_cast<float*>(base + layout.l1);
  if ((error = launch(row_plan_kernel, ceil_div(m, 256), 256, 0, 1, stream, a)) != cudaSuccess) return error;
  if (k % 2048 == 0) return launch_many<8, true>(a, grid, stream);
  if (k % 1024 == 0) return launch_many<4, true>(a, grid, stream);
  if (k > 512) return launch_many<4, false>(a, grid, stream);
  return launch_many<2, false>(a, grid, stream);
}

}  // namespace

int64_t row_workspace(int64_t m, int64_t k, int64_t n) { return Layout(m, k, n).bytes; }

cudaError_t row_ffn(const void* x, const void* w_up, const void* w_down_t, const Float8Scales* float8, int64_t m,
                    int64_t k, int64_t n, const Packed& packed, void* workspace, int32_t* tickets, float* l1, void* y,
                    cudaStream_t stream) {
  const auto common = arguments(x, w_up, w_down_t, m, k, n, packed, tickets, l1, y);
  int grid = 0;
  const cudaError_t error = grid_of(&grid);
  if (error != cudaSuccess) return error;
  const Clusters clusters(m, k, grid);
  if (float8 != nullptr) {
    if (!for_clusters(m, k)) return cudaErrorInvalidValue;
    return run_clusters<true, true>(common, clusters, workspace, stream, float8->multiplier);
  }
  if (for_clusters(m, k)) return run_clusters<true>(common, clusters, workspace, stream);
  if (for_runs(m, k)) return run_clusters<false>(common, clusters, workspace, stream);
  return run_many(common, workspace, stream);
}

}  // namespace sparsellm
