// gate_pack for few tokens (decoding): the product is a stream of w, so it is cut by columns over many SMs.
//
// Four CTAs of a cluster share a column tile, 64 neurons each. Operands are swapped: neurons are the rows of the
// matrix instruction, tokens (up to 16 or 64) its columns. The CTAs take turns to fetch the tokens for all four; the
// results meet in the first CTA's shared memory, which packs them. Same numerics as the kernel for many tokens.
#pragma once

#include "common/host.h"
#include "common/tile.cuh"
#include "common/twell.cuh"

namespace sparsellm {

constexpr int kSmallTokens = 64;

namespace small {

constexpr int kCluster = 4;
constexpr int kNeurons = kColumnTile / kCluster;
constexpr int kSmallThreads = 160;  // four consumer warps, one producer

template <int kTokens>
struct Sizes {
  static constexpr uint32_t kNeuronBytes = kNeurons * kTileK * 2;
  static constexpr uint32_t kStage = kNeuronBytes + kTokens * kTileK * 2;
  static constexpr int kDepth = kTokens == 16 ? 20 : 11;  // stages in flight
  static constexpr uint32_t kPacked = kTokens * kColumnTile * 2;
  struct Shared {
    uint64_t full[kDepth];
    uint64_t empty[kDepth];
    uint32_t fired[8];
  };
  static constexpr uint32_t kBytes = 1024 + kDepth * kStage + kPacked + sizeof(Shared);
  static_assert(kBytes <= kMaxSharedBytes, "the stages and the packed tile share one CTA's memory");
  static_assert(kTokens * kNeurons * 2 <= kStage, "the result reuses the first stage");
};

__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                                                  uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0),
               "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// 16 bytes to the shared address `address` of CTA `rank`.
__device__ __forceinline__ void st_cluster_v4(uint32_t address, uint32_t rank, uint4 v) {
  asm volatile(
      "{\n .reg .b32 remote;\n mapa.shared::cluster.u32 remote, %0, %1;\n"
      " st.shared::cluster.v4.u32 [remote], {%2, %3, %4, %5};\n}" ::"r"(address),
      "r"(rank), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
}

template <int kTokens>
__global__ void __launch_bounds__(kSmallThreads, 1)
    gate_pack_small_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, int m,
                           int64_t n, int k_blocks, int words_per_tile, const Packed out) {
  using Size = Sizes<kTokens>;
  constexpr int kDepth = Size::kDepth;
  extern __shared__ uint8_t raw[];
  const uint32_t stages = (ptx::smem_address(raw) + 1023) & ~1023u;
  const uint32_t tile = stages + kDepth * Size::kStage;  // rank 0: [tokens][256 columns], rows of 512 bytes
  auto& shared = *reinterpret_cast<typename Size::Shared*>(raw + (tile + Size::kPacked - ptx::smem_address(raw)));
  const uint32_t full = ptx::smem_address(shared.full);
  const uint32_t empty = ptx::smem_address(shared.empty);
  const int warp = threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t rank = ptx::cluster_rank();
  const int column_tile = blockIdx.x / kCluster;
  const int column_tiles = gridDim.x / kCluster;

  if (threadIdx.x == 0) {
    for (int s = 0; s < kDepth; ++s) {
      ptx::mbarrier_init(full + 8 * s, 1);
      ptx::mbarrier_init(empty + 8 * s, kCluster * 4);
    }
    ptx::fence_mbarrier_init();
  }
  if (threadIdx.x < 8) shared.fired[threadIdx.x] = 0;
  __syncthreads();
  ptx::cluster_sync();
  ptx::griddepcontrol_launch_dependents();

  if (warp == 4) {
    if (lane == 0) {
      for (int kb = 0; kb < k_blocks; ++kb) {
        const int stage = kb % kDepth;
        const uint32_t barrier = full + 8 * stage;
        ptx::mbarrier_wait(empty + 8 * stage, (kb / kDepth & 1) ^ 1);
        const uint32_t a = stages + stage * Size::kStage;
        ptx::mbarrier_arrive_expect_tx(barrier, Size::kStage);
        ptx::tma_load_2d(a, &w_map, kb * kTileK, column_tile * kColumnTile + rank * kNeurons, barrier);
        if (kb % kCluster == static_cast<int>(rank)) {
          ptx::tma_load_2d_multicast(a + Size::kNeuronBytes, &x_map, kb * kTileK, 0, barrier, (1 << kCluster) - 1);
        }
      }
    }
  } else {
    float d[kTokens / 2];
    for (int kb = 0; kb < k_blocks; ++kb) {
      const int stage = kb % kDepth;
      ptx::mbarrier_wait(full + 8 * stage, kb / kDepth & 1);
      const uint32_t a = stages + stage * Size::kStage;
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kTileK / 16; ++step) {
        const uint64_t neurons = ptx::wgmma_descriptor(a + 32 * step, 16, 1024);
        const uint64_t tokens = ptx::wgmma_descriptor(a + Size::kNeuronBytes + 32 * step, 16, 1024);
        if constexpr (kTokens == 16) {
          ptx::wgmma_n16(d, neurons, tokens, kb != 0 || step != 0);
        } else {
          ptx::wgmma<1, 0>(d, neurons, tokens, kb != 0 || step != 0);
        }
      }
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<0>();
      if (lane < kCluster) ptx::mbarrier_arrive_cluster(empty + 8 * stage, lane);
    }
    // Every CTA has read what it multiplied before any of its shared memory is written again: the first stage may
    // still receive nothing more, because all its loads have been waited for.
    ptx::bar_sync(1, 128);
#pragma unroll
    for (int j = 0; j < kTokens / 16; ++j) {
      const uint32_t token = 16 * j + 8 * (lane / 16) + lane % 8;
      stmatrix_x4_trans(stages + swizzle_128(token, 2 * warp + (lane / 8 & 1)),
                        ptx::cvt_relu_bf16x2(d[8 * j], d[8 * j + 1]),
                        ptx::cvt_relu_bf16x2(d[8 * j + 2], d[8 * j + 3]),
                        ptx::cvt_relu_bf16x2(d[8 * j + 4], d[8 * j + 5]),
                        ptx::cvt_relu_bf16x2(d[8 * j + 6], d[8 * j + 7]));
    }
    ptx::bar_sync(1, 128);
    for (int i = threadIdx.x; i < m * 8; i += 128) {
      const uint32_t token = i / 8, chunk = i % 8;
      st_cluster_v4(tile + token * 512 + (rank * 8 + chunk) * 16, 0,
                    ptx::ld_shared_v4(stages + swizzle_128(token, chunk)));
    }
  }
  ptx::cluster_sync();
  if (rank != 0) return;

  const uint32_t column = column_tile * kColumnTile;
  uint32_t seen = 0;
  unsigned long long nonzeros = 0, overflow = 0;
  for (int first = 4 * warp; first < m; first += 4 * (kSmallThreads / 32)) {
    const int token = first + lane / 8;
    const bool some = token < m;
    uint32_t* words = out.words + (static_cast<int64_t>(token) * column_tiles + column_tile) * words_per_tile;
    const uint32_t count = pack_four_rows(tile + token * 512 + lane % 8 * 16, some, lane, column, n, words_per_tile, words,
                                          static_cast<__nv_bfloat16*>(out.wide) + token * n + column, seen);
    if (lane % 8 == 0 && some) {
      words[0] = count;
      if (count != 0) atomicAdd(out.row_counts + token, static_cast<int>(count));
      nonzeros += count;
      overflow += count >= static_cast<uint32_t>(words_per_tile);
    }
  }
  auto counters = reinterpret_cast<unsigned long long*>(out.counters);
  if (nonzeros != 0) atomicAdd(counters + kNonzeros, nonzeros);
  if (overflow != 0) atomicAdd(counters + kOverflow, overflow);
  add_fired(shared.fired, seen, lane);
  __syncthreads();
  if (warp == 0) {
    const uint32_t word = shared.fired[lane / 4];
    if (lane % 4 == 0) {
      out.mask[column_tile * 8 + lane / 4] = word;
      if (word != 0) atomicAdd(counters + kUnion, static_cast<unsigned long long>(__popc(word)));
    }
    for (uint32_t rest = word >> (lane % 4 * 8) & 0xff; rest != 0; rest &= rest - 1) {
      out.fired[column + 8 * lane + __ffs(rest) - 1] = 1;
    }
  }
}

template <int kTokens>
cudaError_t launch_gate_pack(const void* x, const void* w, int64_t m, int64_t k, int64_t n, int words_per_tile,
                             const Packed& out, cudaStream_t stream) {
  CUtensorMap x_map, w_map;
  cudaError_t error = tensor_map(&x_map, x, m, k, kTokens);
  if (error == cudaSuccess) error = tensor_map(&w_map, w, n, k, kNeurons);
  if (error != cudaSuccess) return error;
  return launch(gate_pack_small_kernel<kTokens>, ceil_div(n, kColumnTile) * kCluster, kSmallThreads,
                Sizes<kTokens>::kBytes, kCluster, stream, x_map, w_map, static_cast<int>(m), n,
                static_cast<int>(ceil_div(k, kTileK)), words_per_tile, out);
}

}  // namespace small

inline cudaError_t gate_pack_small(const void* x, const void* w, int64_t m, int64_t k, int64_t n, int words_per_tile,
                                   const Packed& out, cudaStream_t stream) {
  return m <= 16 ? small::launch_gate_pack<16>(x, w, m, k, n, words_per_tile, out, stream)
                 : small::launch_gate_pack<kSmallTokens>(x, w, m, k, n, words_per_tile, out, stream);
}

}  // namespace sparsellm
