// gate_pack for few tokens (decoding): the product is a stream of w, so it is cut by columns over many SMs.
//
// Four CTAs of a cluster share a column tile, 64 neurons each. Operands are swapped: neurons are the rows of the
// matrix instruction, tokens (up to 16 or 64) its columns. The results meet in the first CTA's shared memory, which
// packs them. Same numerics as the kernel for many tokens.
#pragma once

#include "common/host.h"
#include "common/tile.cuh"
#include "common/twell.cuh"

namespace sparsellm {

constexpr int kSmallTokens = 64;

namespace small {

constexpr int kCluster = 4;
constexpr int kNeurons = kColumnTile / kCluster;
constexpr int kPitch = kColumnTile * 2 + 16;  // bytes of a packed row: 16-byte chunks of eight rows lie in all banks

template <int kTokens>
struct Sizes {
  // CTAs that take turns to fetch the tokens for one another, and so wait for one another; 16 each fetches itself.
  static constexpr int kSharers = kTokens == 16 ? 1 : kCluster;
  static constexpr int kPackers = kTokens / 4;                     // warps that pack, each four tokens: the first ones
  static constexpr int kThreads = 32 * (kPackers > 5 ? kPackers : 5);  // warps 0..3 multiply, 4 feeds
  static constexpr uint32_t kNeuronBytes = kNeurons * kTileK * 2;
  static constexpr uint32_t kStage = kNeuronBytes + kTokens * kTileK * 2;
  static constexpr int kDepth = kTokens == 16 ? 20 : 11;  // stages in flight
  static constexpr uint32_t kPacked = kTokens * kPitch;
  struct Shared {
    uint64_t full[kDepth];
    uint64_t empty[kDepth];
    uint32_t fired[8];
    uint32_t counts[kCounters];
  };
  static constexpr uint32_t kBytes = 1024 + kDepth * kStage + kPacked + sizeof(Shared);
  static_assert(kBytes <= kMaxSharedBytes, "the stages and the packed tile share one CTA's memory");
  static_assert(kDepth <= 32, "one warp sets the barriers up");
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

// The lowest four bits, a byte each.
__device__ __forceinline__ uint32_t bytes_of(uint32_t bits) { return (bits & 0xf) * 0x00204081 & 0x01010101; }

template <int kTokens>
__global__ void __launch_bounds__(Sizes<kTokens>::kThreads, 1)
    gate_pack_small_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, int m,
                           int64_t n, int k_blocks, int words_per_tile, const Packed out) {
  using Size = Sizes<kTokens>;
  constexpr int kDepth = Size::kDepth, kSharers = Size::kSharers;
  extern __shared__ uint8_t raw[];
  const uint32_t stages = (ptx::smem_address(raw) + 1023) & ~1023u;
  const uint32_t tile = stages + kDepth * Size::kStage;  // [tokens] rows of 256 columns; all four parts in rank 0's
  auto& shared = *reinterpret_cast<typename Size::Shared*>(raw + (tile + Size::kPacked - ptx::smem_address(raw)));
  const uint32_t full = ptx::smem_address(shared.full);
  const uint32_t empty = ptx::smem_address(shared.empty);
  const int warp = threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t rank = ptx::cluster_rank();
  const int column_tile = blockIdx.x / kCluster;
  const int column_tiles = gridDim.x / kCluster;
  const uint32_t column = column_tile * kColumnTile;

  if (warp == 4 && lane == 0) {
    ptx::tma_prefetch_descriptor(&w_map);
    ptx::tma_prefetch_descriptor(&x_map);
  }
  if (threadIdx.x < kDepth) {
    ptx::mbarrier_init(full + 8 * threadIdx.x, 1);
    ptx::mbarrier_init(empty + 8 * threadIdx.x, kSharers * 4);
    ptx::fence_mbarrier_init();
  }
  if (warp == 1 && lane < 8) shared.fired[lane] = 0;
  if (warp == 1 && lane < kCounters) shared.counts[lane] = 0;
  __syncthreads();
  ptx::cluster_arrive();
  if constexpr (kSharers > 1) ptx::cluster_wait();
  ptx::griddepcontrol_launch_dependents();

  RingOf<kDepth> ring;
  float d[kTokens / 2];
  if (warp == 4) {
    if (lane == 0) {
      for (int kb = 0; kb < k_blocks; ++kb, ring.advance()) {
        const uint32_t barrier = full + 8 * ring.stage;
        const uint32_t a = stages + ring.stage * Size::kStage;
        ptx::mbarrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
        ptx::mbarrier_arrive_expect_tx(barrier, Size::kStage);
        ptx::tma_load_2d(a, &w_map, kb * kTileK, column + rank * kNeurons, barrier);
        if constexpr (kSharers == 1) {
          ptx::tma_load_2d(a + Size::kNeuronBytes, &x_map, kb * kTileK, 0, barrier);
        } else if (kb % kSharers == static_cast<int>(rank)) {
          ptx::tma_load_2d_multicast(a + Size::kNeuronBytes, &x_map, kb * kTileK, 0, barrier, (1 << kSharers) - 1);
        }
      }
    }
  } else if (warp < 4) {
    uint32_t previous = 0;
    for (int kb = 0; kb < k_blocks; ++kb) {
      ptx::mbarrier_wait(full + 8 * ring.stage, ring.phase);
      const uint32_t a = stages + ring.stage * Size::kStage;
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
      ptx::wgmma_wait_group<1>();
      if (kb > 0 && kb - 1 + kDepth < k_blocks) {  // the stage before has been read, and will be filled again
        if constexpr (kSharers == 1) {
          if (lane == 0) ptx::mbarrier_arrive(empty + 8 * previous);
        } else if (lane < kSharers) {
          ptx::mbarrier_arrive_cluster(empty + 8 * previous, lane);
        }
      }
      previous = ring.stage;
      ring.advance();
    }
    ptx::wgmma_wait_group<0>();
  }
  __syncwarp();
  if constexpr (kSharers == 1) ptx::cluster_wait();  // the first CTA has begun: its memory may be written
  if (warp < 4) {
    const uint32_t part = tile + rank * (kNeurons * 2) + warp * 32;  // this warp's 16 neurons
#pragma unroll
    for (int j = 0; j < kTokens / 16; ++j) {
      const uint32_t token = 16 * j + 8 * (lane / 16) + lane % 8;
      stmatrix_x4_trans(part + token * kPitch + (lane / 8 & 1) * 16, ptx::cvt_relu_bf16x2(d[8 * j], d[8 * j + 1]),
                        ptx::cvt_relu_bf16x2(d[8 * j + 2], d[8 * j + 3]),
                        ptx::cvt_relu_bf16x2(d[8 * j + 4], d[8 * j + 5]),
                        ptx::cvt_relu_bf16x2(d[8 * j + 6], d[8 * j + 7]));
    }
    __syncwarp();
    for (int i = lane; rank != 0 && i < 2 * m; i += 32) {
      const uint32_t chunk = part + i / 2 * kPitch + i % 2 * 16;
      st_cluster_v4(chunk, 0, ptx::ld_shared_v4(chunk));
    }
    __syncwarp();
  }
  ptx::cluster_sync();
  if (rank != 0) return;

  ptx::griddepcontrol_wait();  // for clear_kernel
  if (4 * warp < m) {
    const int token = 4 * warp + lane / 8;
    const bool some = token < m;
    uint32_t* words = out.words + (static_cast<int64_t>(token) * column_tiles + column_tile) * words_per_tile;
    __nv_bfloat16* wide = static_cast<__nv_bfloat16*>(out.wide) + token * n + column;
    uint32_t seen = 0;
    const uint32_t count = pack_four_rows(tile + token * kPitch + lane % 8 * 16, some, lane, column, n, words_per_tile,
                                          words, wide, seen);
    const bool tells = some && lane % 8 == 0;
    if (tells) {
      words[0] = count;
      if (count != 0) atomicAdd(out.row_counts + token, static_cast<int>(count));
    }
    const uint32_t nonzeros = __reduce_add_sync(~0u, tells ? count : 0);
    const uint32_t overflow = __popc(__ballot_sync(~0u, tells && count >= static_cast<uint32_t>(words_per_tile)));
    if (lane == 0) {
      atomicAdd(shared.counts + kNonzeros, nonzeros);
      atomicAdd(shared.counts + kOverflow, overflow);
    }
    add_fired(shared.fired, seen, lane);
  }
  __syncthreads();
  if (warp == 0) {
    const uint32_t word = shared.fired[lane / 4];
    const uint32_t bits = word >> lane % 4 * 8;
    if (column + 8 * lane < n) {
      *reinterpret_cast<uint2*>(out.fired + column + 8 * lane) = make_uint2(bytes_of(bits), bytes_of(bits >> 4));
    }
    if (lane % 4 == 0) out.mask[column_tile * 8 + lane / 4] = word;
    const uint32_t in_union = __reduce_add_sync(~0u, lane % 4 == 0 ? __popc(word) : 0);
    const uint32_t more = lane == kUnion ? in_union : lane < kCounters ? shared.counts[lane] : 0;
    if (more != 0) atomicAdd(reinterpret_cast<unsigned long long*>(out.counters) + lane, more);
  }
}

template <int kTokens>
cudaError_t launch_gate_pack(const void* x, const void* w, int64_t m, int64_t k, int64_t n, int words_per_tile,
                             const Packed& out, cudaStream_t stream) {
  CUtensorMap x_map, w_map;
  cudaError_t error = tensor_map(&x_map, x, m, k, kTokens);
  if (error == cudaSuccess) error = tensor_map(&w_map, w, n, k, kNeurons);
  if (error != cudaSuccess) return error;
  return launch_early(gate_pack_small_kernel<kTokens>, ceil_div(n, kColumnTile) * kCluster, Sizes<kTokens>::kThreads,
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
