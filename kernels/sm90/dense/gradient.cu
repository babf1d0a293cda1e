// dense_gradient: computes dz, du and h as dense matrices from dh = dy w_down, g and u; dh itself is never in global
// memory. Non-gated (u is null): computes only dz and h.
//
// The kernel computes the product in pairs of tiles (common/pairs.cuh), and the finished tiles are dh. Three warps
// compute dz, du and h from dh, and from g and u, which they load from global memory, while the next tile is
// multiplied. w_down [K, N] is an MN-major operand, because its rows run along N.
//
// Numerics: dh is accumulated in float32 over K and rounded to bf16 once; elementwise.cuh has the arithmetic that
// follows. The bits are the same in every run.
#include "common/clear.cuh"
#include "common/pairs.cuh"
#include "dense/elementwise.cuh"

namespace sparsellm {
namespace {

struct Inputs {
  const __nv_bfloat16 *g, *u;  // [m, n]
  const float* dl1;
};

struct Outputs {
  __nv_bfloat16 *dz, *du, *h;  // [m, n]
  unsigned long long* counters;
};

template <bool kGated>
__global__ void __launch_bounds__(kThreads, 1)
    dense_gradient_kernel(const __grid_constant__ CUtensorMap dy_map, const __grid_constant__ CUtensorMap w_map,
                          const PairProduct pairs, int64_t n, const Inputs in, const Outputs out) {
  constexpr int kBatch = 4;  // rows whose loads are in flight together in each warp
  extern __shared__ uint8_t raw[];
  const PairMemory memory(raw);
  const uint32_t lane = threadIdx.x % 32;
  const float dl1 = *in.dl1;
  const auto fetch = [&](int column_tile, uint32_t rank, int kb, uint32_t b, uint32_t full) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t panel = 2 * rank + i;
      ptx::tma_load_2d_multicast(b + panel * (kTileK * 128), &w_map, column_tile * kTileN + panel * 64, kb * kTileK,
                                 full, 3);
    }
  };
  const auto bf16 = [](int, float low, float high) { return ptx::cvt_bf16x2(low, high); };
  const auto take = [&](const FinishedTile& of, int warp, uint32_t*) {
    const int64_t column = static_cast<int64_t>(of.column_tile) * kTileN + 8 * lane;
    const int rows = column < n ? of.rows : 0;
    struct Rows {
      uint4 g[kBatch], u[kBatch];
    };
    const auto load = [&](Rows& rows_of, int first) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int row = first + kFinishWarps * b;
        const int64_t at = (of.row0() + row) * n + column;
        if (row < rows) {
          rows_of.g[b] = __ldcs(reinterpret_cast<const uint4*>(in.g + at));
          if constexpr (kGated) rows_of.u[b] = __ldcs(reinterpret_cast<const uint4*>(in.u + at));
        }
      }
    };
    const auto finish = [&](const Rows& rows_of, int first) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int row = first + kFinishWarps * b;
        const int64_t at = (of.row0() + row) * n + column;
        if (row < rows) {
          const uint4 dh = ptx::ld_shared_v4(memory.tile + tile_offset(row, lane));
          const dense::Gradients made = dense::gradients<kGated>(rows_of.g[b], rows_of.u[b], dh, dl1);
          ptx::st_global_v4(out.dz + at, made.dz);
          ptx::st_global_v4(out.h + at, made.h);
          if constexpr (kGated) ptx::st_global_v4(out.du + at, made.du);
        }
      }
    };
    constexpr int kStep = kFinishWarps * kBatch;
    Rows even, odd;
    load(even, warp);
#pragma unroll 1
    for (int first = warp; first < rows; first += 2 * kStep) {
      load(odd, first + kStep);
      finish(even, first);
      load(even, first + 2 * kStep);
      finish(odd, first + kStep);
    }
    __syncwarp();
  };
  const auto tell = [](const FinishedTile&, uint32_t, uint32_t) {};
  const auto end = [](int) {};
  multiply_pairs<0, 1, 136>(memory, pairs, dy_map, w_map, out.counters, nullptr, fetch, bf16, take, tell, end);
}

}  // namespace

cudaError_t dense_gradient(const void* dy, const void* w_down, int64_t m, int64_t k, int64_t n, const void* g,
                           const void* u, const float* dl1, void* dz, void* du, void* h, int64_t* counters,
                           cudaStream_t stream) {
  CUtensorMap dy_map, w_map;
  cudaError_t error = tensor_map(&dy_map, dy, m, k, kTileM);
  if (error == cudaSuccess) error = tensor_map(&w_map, w_down, k, n, kTileK);
  if (error == cudaSuccess) error = clear(nullptr, 0, nullptr, 0, counters, kCounters, false, stream);
  if (error != cudaSuccess) return error;
  const auto in = [](const void* pointer) { return static_cast<const __nv_bfloat16*>(pointer); };
  const auto out = [](void* pointer) { return static_cast<__nv_bfloat16*>(pointer); };
  const PairProduct pairs = pair_product_of(m, k, ceil_div(n, kTileN));
  return launch_pairs(u != nullptr ? dense_gradient_kernel<true> : dense_gradient_kernel<false>, pairs, 0, stream,
                      dy_map, w_map, pairs, n, Inputs{in(g), in(u), dl1},
                      Outputs{out(dz), out(du), out(h), reinterpret_cast<unsigned long long*>(counters)});
}

}  // namespace sparsellm
