// row_ffn: the row engine. For each token y = sum over its nonzeros of h_n w_down_t[n], with h_n = g_n (x . w_up[n]),
// from the packed gate; h is never in global memory. One kernel for few tokens (row/few.cuh), a small plan and one
// kernel for many (row/many.cuh).
//
// Numerics: u is accumulated in float32 and rounded to bf16 once, h = g u rounded to bf16 once (not gated: h = g), y
// accumulated in float32 and rounded once. A row's nonzeros, columns ascending, are cut into chunks whose size depends
// on M and on how many there are; a chunk is summed in order from zero, and chunks are added in order, whether one
// worker does them or many. l1, the float32 sum of |h|, likewise: over a chunk, a row, then over rows in a fixed order.
// Same bits in every run. Rows without nonzeros give zeros.
#include "common/host.h"
#include "row/few.cuh"
#include "row/many.cuh"

namespace sparsellm {
namespace {

using namespace row;

constexpr int64_t kSlotBytes = 64 << 20;   // bound on the partials of split rows,
constexpr int64_t kMaxSlots = 8192;        // of which there are no more than this,
constexpr int64_t kMinSlots = 64;          // nor less
constexpr int64_t kTotalBytes = 64 << 20;  // bound on the warps' sums over chunks, unless one warp per SM takes more

bool is_few(int64_t m, int64_t k) { return m <= kFewTokens && k <= kFewMaxWidth; }

// The kernel for few tokens: CTAs of a cluster, clusters of a row at most, 16-byte vectors in flight of each matrix.
// Up to 32 tokens a CTA has an SM and all its registers; beyond, two share one. (With heavy rows, at M 16 and 64,
// narrower clusters, or more of them for every row, are slower.)
int few_ranks(int64_t m) { return m <= 16 ? 8 : 4; }
int few_in_flight(int64_t m) { return m <= 32 ? 8 : 4; }
int64_t few_clusters(int64_t m) { return ceil_div(16, m); }

int many_warps(int64_t k) {
  const int64_t warps = kTotalBytes / (kMaxGrid * k * 4);
  return static_cast<int>(warps < 1 ? 1 : warps > kManyWarps ? kManyWarps : warps);
}

// Where things are in the workspace: byte offsets.
struct Layout {
  int64_t partials = 0, l1 = 0, units = 0, arrivals = 0, slots = 0, totals = 0, bytes = 0, slot_capacity = 0;

  // planned: by the plan and the kernel for many tokens, or the one for few; else by the one for many alone.
  Layout(int64_t m, int64_t k, int64_t n, bool planned) {
    if (planned && is_few(m, k)) {
      l1 = take(m * few_clusters(m) * few_ranks(m) * 4);
      partials = take(few_clusters(m) > 1 ? m * few_clusters(m) * k * 4 : 0);
      return;
    }
    slot_capacity = kSlotBytes / ((k + 8) * 4);
    if (slot_capacity > kMaxSlots) slot_capacity = kMaxSlots;
    if (slot_capacity < kMinSlots) slot_capacity = kMinSlots;
    const int64_t chunks = ceil_div(n, kListed) > kEqualChunks ? ceil_div(n, kListed) : kEqualChunks;
    if (slot_capacity > m * chunks) slot_capacity = m * chunks;
    if (!planned) slot_capacity = 0;
    l1 = take(m * 4);
    units = take(planned ? (m + slot_capacity) * static_cast<int64_t>(sizeof(int4)) : 0);
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

template <int kVectors, int kRanks, int kInFlight>
cudaError_t launch_few(const FewArguments& a, cudaStream_t stream) {
  const auto kernel = a.w_up == nullptr ? row_few_kernel<kVectors, kRanks, kInFlight, false>
                                        : row_few_kernel<kVectors, kRanks, kInFlight, true>;
  const int workers = static_cast<int>(ceil_div(a.k, 8 * kVectors * 32)) * 32;
  const int64_t grid = static_cast<int64_t>(a.m) * a.clusters_per_row * kRanks;
  return launch_early(kernel, grid, workers + 32, a.k * 4, kRanks, stream, a);
}

template <int kVectors>
cudaError_t launch_few(const FewArguments& a, cudaStream_t stream) {
  if (few_ranks(a.m) == 8) return launch_few<kVectors, 8, 8>(a, stream);
  return few_in_flight(a.m) == 8 ? launch_few<kVectors, 4, 8>(a, stream) : launch_few<kVectors, 4, 4>(a, stream);
}

template <int kVectors, bool kFull>
cudaError_t launch_many(const ManyArguments& a, int grid, cudaStream_t stream) {
  return launch_early(a.w_up == nullptr ? row_many_kernel<kVectors, kFull, false>
                                        : row_many_kernel<kVectors, kFull, true>,
                      grid, 32 * many_warps(a.k), 0, 1, stream, a);
}

RowArguments arguments(const void* x, const void* w_up, const void* w_down_t, int64_t m, int64_t k, int64_t n,
                       int words_per_tile, const Packed& packed, int32_t* tickets, float* l1, void* y) {
  const auto bf16 = [](const void* pointer) { return static_cast<const __nv_bfloat16*>(pointer); };
  return {bf16(x), bf16(w_up), bf16(w_down_t), packed, n, static_cast<int>(m), static_cast<int>(k),
          words_per_tile, tickets, l1, static_cast<__nv_bfloat16*>(y)};
}

// Many tokens. only_if: null, or nothing is done where it points to zero, and no row is planned.
cudaError_t run_many(const RowArguments& common, const int32_t* only_if, void* workspace, cudaStream_t stream) {
  const bool planned = only_if == nullptr;
  const int64_t m = common.m, k = common.k;
  const Layout layout(m, k, common.n, planned);
  char* base = static_cast<char*>(workspace);
  int processors = 0;
  cudaError_t error = multiprocessors(&processors);
  if (error != cudaSuccess) return error;
  const int grid = processors < kMaxGrid ? processors : kMaxGrid;
  ManyArguments a = {common};
  a.only_if = only_if;
  // With few rows, short chunks are what fills the device; with many, only a row that would make a tail is cut.
  a.smallest_chunk = m <= 512 ? 8 : m <= 1024 ? 16 : m <= 2048 ? 32 : kListed;
  a.heavy_above = !planned ? 1 << 30 : m <= 8192 ? a.smallest_chunk : m <= 32768 ? 2 * kListed : 4 * kListed;
  const int64_t range = m / (grid * kManyWarps);
  a.range = static_cast<int>(range < 1 ? 1 : range > 32 ? 32 : range);
  a.slot_capacity = static_cast<int>(layout.slot_capacity);
  a.units = reinterpret_cast<int4*>(base + layout.units);
  a.arrivals = reinterpret_cast<int32_t*>(base + layout.arrivals);
  a.slots = reinterpret_cast<float*>(base + layout.slots);
  a.totals = reinterpret_cast<float*>(base + layout.totals);
  a.row_l1 = reinterpret_cast<float*>(base + layout.l1);
  if (planned && (error = launch(row_plan_kernel, ceil_div(m, 256), 256, 0, 1, stream, a)) != cudaSuccess) return error;
  if (k % 2048 == 0) return launch_many<8, true>(a, grid, stream);
  if (k % 1024 == 0) return launch_many<4, true>(a, grid, stream);
  if (k > 512) return launch_many<4, false>(a, grid, stream);
  return launch_many<2, false>(a, grid, stream);
}

}  // namespace

int64_t row_workspace(int64_t m, int64_t k, int64_t n) { return Layout(m, k, n, true).bytes; }
int64_t row_rest_workspace(int64_t m, int64_t k) { return Layout(m, k, 8, false).bytes; }

cudaError_t row_ffn(const void* x, const void* w_up, const void* w_down_t, int64_t m, int64_t k, int64_t n,
                    int words_per_tile, const Packed& packed, void* workspace, int32_t* tickets, float* l1, void* y,
                    cudaStream_t stream) {
  const auto common = arguments(x, w_up, w_down_t, m, k, n, words_per_tile, packed, tickets, l1, y);
  if (!is_few(m, k)) return run_many(common, nullptr, workspace, stream);
  const Layout layout(m, k, n, true);
  char* base = static_cast<char*>(workspace);
  FewArguments a = {common};
  a.clusters_per_row = static_cast<int>(few_clusters(m));
  a.partials = reinterpret_cast<float*>(base + layout.partials);
  a.l1_parts = reinterpret_cast<float*>(base + layout.l1);
  return k <= 8 * kFewWorkers ? launch_few<1>(a, stream) : launch_few<2>(a, stream);
}

cudaError_t row_rest(const void* x, const void* w_up, const void* w_down_t, int64_t m, int64_t k, int64_t n,
                     int words_per_tile, const Packed& packed, const int32_t* totals, void* workspace,
                     int32_t* tickets, float* l1, void* y, cudaStream_t stream) {
  return run_many(arguments(x, w_up, w_down_t, m, k, n, words_per_tile, packed, tickets, l1, y), totals + kRest,
                  workspace, stream);
}

}  // namespace sparsellm
