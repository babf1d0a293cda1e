// gate_pack for few tokens (decoding): the product is a stream of w, so it is cut by columns over many SMs.
//
// Four CTAs of a cluster share a column tile, 64 neurons each. Operands are swapped: neurons are the rows of the
// matrix instruction, tokens (up to 64) its columns. Each CTA fetches a quarter of the tokens for all four; the results
// meet in the first CTA's shared memory, which packs them. Same numerics as the kernel for many tokens.
#pragma once

#include "common/host.h"
#include "common/tile.cuh"
#include "common/twell.cuh"

namespace sparsellm {

constexpr int kSmallTokens = 64;

namespace small {

constexpr int kCluster = 4;
constexpr int kNeurons = kColumnTile / kCluster;
constexpr int kDepth = 11;                                    // stages in flight
constexpr uint32_t kOperandBytes = 64 * kTileK * 2;           // 64 neurons, and 64 tokens
constexpr uint32_t kResultBytes = kSmallTokens * kNeurons * 2;
constexpr uint32_t kPackedBytes = kSmallTokens * kColumnTile * 2;
constexpr int kSmallThreads = 160;  // four consumer warps, one producer

struct Shared {
  uint64_t full[kDepth];
  uint64_t empty[kDepth];
  uint32_t fired[8];
};

constexpr uint32_t kSharedBytes = 1024 + kDepth * 2 * kOperandBytes + kPackedBytes + sizeof(Shared);
static_assert(kSharedBytes <= kMaxSharedBytes, "the stages and the packed tile share one CTA's memory");
static_assert(kResultBytes <= kOperandBytes * 2, "the result reuses the first stage");

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

__global__ void __launch_bounds__(kSmallThreads, 1)
    gate_pack_small_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, int m,
                           int64_t n, int k_blocks, int words_per_tile, const Packed out) {
  extern __shared__ uint8_t raw[];
  const uint32_t stages = (ptx::smem_address(raw) + 1023) & ~1023u;
  const uint32_t tile = stages + kDepth * 2 * kOperandBytes;  // rank 0: [64 tokens][256 columns], rows of 512 bytes
  Shared& shared = *reinterpret_cast<Shared*>(raw + (tile + kPackedBytes - ptx::smem_address(raw)));
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

  if (warp == 4) {
    if (lane == 0) {
      for (int kb = 0; kb < k_blocks; ++kb) {
        const int stage = kb % kDepth;
        const uint32_t barrier = full + 8 * stage;
        ptx::mbarrier_wait(empty + 8 * stage, (kb / kDepth & 1) ^ 1);
        const uint32_t a = stages + stage * 2 * kOperandBytes;
        ptx::mbarrier_arrive_expect_tx(barrier, 2 * kOperandBytes);
        ptx::tma_load_2d(a, &w_map, kb * kTileK, column_tile * kColumnTile + rank * kNeurons, barrier);
        ptx::tma_load_2d_multicast(a + kOperandBytes + rank * (kOperandBytes / kCluster), &x_map, kb * kTileK,
                                   rank * (kSmallTokens / kCluster), barrier, (1 << kCluster) - 1);
      }
    }
  } else {
    float d[32];
    for (int kb = 0; kb < k_blocks; ++kb) {
      const int stage = kb % kDepth;
      ptx::mbarrier_wait(full + 8 * stage, kb / kDepth & 1);
      const uint32_t a = stages + stage * 2 * kOperandBytes;
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kTileK / 16; ++step) {
        ptx::wgmma<1, 0>(d, ptx::wgmma_descriptor(a + 32 * step, 16, 1024),
                         ptx::wgmma_descriptor(a + kOperandBytes + 32 * step, 16, 1024), kb != 0 || step != 0);
      }
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<0>();
      if (lane < kCluster) ptx::mbarrier_arrive_cluster(empty + 8 * stage, lane);
    }
    // Every CTA has read what it multiplied before any of its shared memory is written again: the first stage may
    // still receive nothing more, because all its loads have been waited for.
    ptx::bar_sync(1, 128);
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // 16 tokens
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
  for (int token = warp; token < m; token += kSmallThreads / 32) {
    // Behind the last column stand zeros of w, but zero times infinity is no zero.
    const uint4 v =
        column + 8 * lane < n ? ptx::ld_shared_v4(tile + token * 512 + lane * 16) : make_uint4(0, 0, 0, 0);
    uint32_t* words = out.words + (static_cast<int64_t>(token) * column_tiles + column_tile) * words_per_tile;
    const uint32_t count = pack_row(v, lane, column, n, words_per_tile, words,
                                    static_cast<__nv_bfloat16*>(out.wide) + token * n + column, seen);
    if (lane == 0) {
      words[0] = count;
      if (count != 0) atomicAdd(out.row_counts + token, static_cast<int>(count));
      nonzeros += count;
      overflow += count >= static_cast<uint32_t>(words_per_tile);
    }
  }
  auto counters = reinterpret_cast<unsigned long long*>(out.counters);
  if (nonzeros != 0) atomicAdd(counters + kNonzeros, nonzeros);
  if (overflow != 0) atomicAdd(counters + kOverflow, overflow);
  if (seen != 0) atomicOr(&shared.fired[lane / 4], seen << (lane % 4 * 8));
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

}  // namespace small

inline cudaError_t gate_pack_small(const void* x, const void* w, int64_t m, int64_t k, int64_t n, int words_per_tile,
                                   const Packed& out, cudaStream_t stream) {
  CUtensorMap x_map, w_map;
  cudaError_t error = tensor_map(&x_map, x, m, k, kSmallTokens / small::kCluster);
  if (error == cudaSuccess) error = tensor_map(&w_map, w, n, k, small::kNeurons);
  if (error != cudaSuccess) return error;
  return launch(small::gate_pack_small_kernel, ceil_div(n, kColumnTile) * small::kCluster, small::kSmallThreads,
                small::kSharedBytes, small::kCluster, stream, x_map, w_map, static_cast<int>(m), n,
                static_cast<int>(ceil_div(k, kTileK)), words_per_tile, out);
}

}  // namespace sparsellm
