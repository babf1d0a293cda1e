// dense_hidden: h = relu(x w_gate^T) * (x w_up^T) as a dense matrix, and the statistics: l1, which neurons fire, how
// many nonzeros g has. The factors g and u are written only if the caller asks for them. Non-gated (w_up is null):
// h = relu(x w_gate^T).
//
// The kernel computes its product in pairs of tiles (common/pairs.cuh). In a gated layer, the 256 columns of a column
// tile are 128 rows of w_gate and the same 128 rows of w_up. The first CTA of a cluster fetches the rows of w_gate, the
// second CTA those of w_up, and each multicasts them to both. So a finished tile has g in columns 0 to 127 and u in
// columns 128 to 255, and three warps compute h from these while the next tile is multiplied.
//
// Numerics: products are accumulated in float32 over K and rounded to bf16 once; the ReLU is exact, and NaN stays NaN;
// h is rounded to bf16 once. A neuron is active if g is not zero; NaN is active. l1 is the float32 sum of |h|, after
// the rounding of h. It is added up in a fixed order: within a thread, a warp, a tile; then the last CTA adds the
// tiles. The bits are the same in every run.
#include "common/clear.cuh"
#include "common/ordered_sum.cuh"
#include "common/pairs.cuh"
#include "dense/elementwise.cuh"

namespace sparsellm {
namespace {

struct Hidden {
  __nv_bfloat16 *g, *u, *h;  // [m, n]; g and u are null if not wanted
  float* l1_partials;        // [MT, column tiles]
  float* l1;
  uint8_t* fired;
  unsigned long long* counters;  // [kCounters], followed by the number of CTAs that are done

  __device__ __forceinline__ unsigned long long* tickets() const { return counters + kCounters; }
};

template <bool kGated>
__global__ void __launch_bounds__(kThreads, 1)
    dense_hidden_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap gate_map,
                        const __grid_constant__ CUtensorMap up_map, const PairProduct pairs, int64_t n,
                        const Hidden out) {
  constexpr int kNeurons = kGated ? kTileN / 2 : kTileN;  // neurons per column tile
  constexpr int kLanes = kNeurons / 8;                    // lanes per row
  constexpr int kStep = 32 / kLanes;                      // rows that a warp processes at once
  extern __shared__ uint8_t raw[];
  __shared__ float l1_warps[2][kFinishWarps];  // [tile parity], because the three warps may be one tile apart
  __shared__ bool last;
  const PairMemory memory(raw);
  const uint32_t lane = threadIdx.x % 32, chunk = lane % kLanes;
  unsigned long long nonzeros = 0;
  const CUtensorMap& w_map = kGated && ptx::cluster_rank() == 1 ? up_map : gate_map;
  const auto fetch = [&](int column_tile, uint32_t rank, int kb, uint32_t b, uint32_t full) {
    const int row = column_tile * kNeurons + (kGated ? 0 : static_cast<int>(rank) * (kTileN / 2));
    ptx::tma_load_2d_multicast(b + rank * (kBBytes / 2), &w_map, kb * kTileK, row, full, 3);
  };
  const auto bf16 = [](int j, float low, float high) {
    return !kGated || j < 8 ? ptx::cvt_relu_bf16x2(low, high) : ptx::cvt_bf16x2(low, high);
  };
  const auto take = [&](const FinishedTile& of, int warp, uint32_t* fired) {
    const int64_t column = static_cast<int64_t>(of.column_tile) * kNeurons + 8 * chunk;
    const int rows = column < n ? of.rows : 0;  // columns beyond n are skipped: w is zero there, but zero times an
                                                // infinite x is NaN
    uint32_t seen = 0;
    float sum = 0.0f;
#pragma unroll 2
    for (int row = kStep * warp + lane / kLanes; row < rows; row += kStep * kFinishWarps) {
      const uint4 g = ptx::ld_shared_v4(memory.tile + tile_offset(row, chunk));
      uint4 h = g;
      const int64_t at = (of.row0() + row) * n + column;
      if constexpr (kGated) {
        const uint4 u = ptx::ld_shared_v4(memory.tile + tile_offset(row, kLanes + chunk));
        h = dense::product(g, u);
        if (out.u != nullptr) ptx::st_global_v4(out.u + at, u);
      }
      if (out.g != nullptr) ptx::st_global_v4(out.g + at, g);
      ptx::st_global_v4(out.h + at, h);
      const uint32_t bits = nonzero_bits(g);
      seen |= bits;
      nonzeros += __popc(bits);
      sum += dense::magnitudes(h);
    }
    __syncwarp();
    if constexpr (kGated) seen |= __shfl_xor_sync(~0u, seen, kLanes);
    if (seen != 0 && lane < kLanes) atomicOr(fired + lane / 4, seen << lane % 4 * 8);
    sum = warp_sum(sum);
    if (lane == 0) l1_warps[of.parity][warp] = sum;
  };
  const auto tell = [&](const FinishedTile& of, uint32_t lane, uint32_t) {
    if (lane != 0) return;
    const float* warps = l1_warps[of.parity];
    out.l1_partials[of.token_tile * pairs.column_tiles + of.column_tile] = (warps[0] + warps[1]) + warps[2];
  };
  // The CTA that finishes last adds up l1.
  const auto end = [&](int warp) {
    constexpr int kFinishThreads = 32 * kFinishWarps;
    if (nonzeros != 0) atomicAdd(out.counters + kNonzeros, nonzeros);
    if (warp == 0 && lane == 0) {  // this thread has written the CTA's partial sums
      __threadfence();
      last = atomicAdd(out.tickets(), 1) == gridDim.x - 1;
    }
    ptx::bar_sync(kFinishBarrier, kFinishThreads);
    if (!last) return;
    __threadfence();
    const int64_t tiles = (pairs.m + kTileM - 1) / kTileM * pairs.column_tiles;
    const float sum = warp_sum(strided_sum(out.l1_partials, tiles, 32 * warp + lane, kFinishThreads));
    if (lane == 0) l1_warps[0][warp] = sum;
    ptx::bar_sync(kFinishBarrier, kFinishThreads);
    if (warp == 0 && lane == 0) *out.l1 = (l1_warps[0][0] + l1_warps[0][1]) + l1_warps[0][2];
  };
  multiply_pairs<kNeurons / 32, 0>(memory, pairs, x_map, w_map, out.counters, out.fired, fetch, bf16, take, tell, end);
}

}  // namespace

cudaError_t dense_hidden(const void* x, const void* w_gate, const void* w_up, int64_t m, int64_t k, int64_t n, void* g,
                         void* u, void* h, float* l1_partials, float* l1, uint8_t* fired, int64_t* counters,
                         cudaStream_t stream) {
  CUtensorMap x_map, gate_map, up_map;
  const bool gated = w_up != nullptr;
  const int neurons = gated ? kTileN / 2 : kTileN;
  cudaError_t error = tensor_map(&x_map, x, m, k, kTileM);
  if (error == cudaSuccess) error = tensor_map(&gate_map, w_gate, n, k, kTileN / 2);
  if (error == cudaSuccess) error = tensor_map(&up_map, gated ? w_up : w_gate, n, k, kTileN / 2);
  if (error == cudaSuccess) error = clear(nullptr, 0, fired, n / 8, counters, kDenseCounters, false, stream);
  if (error != cudaSuccess) return error;
  const Hidden out = {static_cast<__nv_bfloat16*>(g),
                      static_cast<__nv_bfloat16*>(u),
                      static_cast<__nv_bfloat16*>(h),
                      l1_partials,
                      l1,
                      fired,
                      reinterpret_cast<unsigned long long*>(counters)};
  const PairProduct pairs = pair_product_of(m, k, ceil_div(n, neurons));
  return launch_pairs(gated ? dense_hidden_kernel<true> : dense_hidden_kernel<false>, pairs, neurons, stream, x_map,
                      gate_map, up_map, pairs, n, out);
}

}  // namespace sparsellm
