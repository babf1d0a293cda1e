// gate_pack for few tokens: the product is a stream of w, so it is cut by columns over many SMs.
//
// Four CTAs of a cluster share a column tile, 64 neurons each, and take turns to fetch the tokens for one another.
// Operands are swapped: neurons are the rows of the matrix instruction, tokens (up to 64) its columns. The results meet
// in the first CTA's shared memory, which packs them. Same numerics as the kernel for many tokens.
#pragma once

#include "common/host.h"
#include "common/tile.cuh"
#include "common/twell.cuh"

namespace sparsellm {

constexpr int kSmallTokens = kCountedTokens;  // there is room for their tiles' counts

namespace small {

constexpr int kCluster = 4;
constexpr int kNeurons = kColumnTile / kCluster;
constexpr uint32_t kPitch = kColumnTile * 2 + 16;  // bytes of a packed row: 16-byte chunks of eight rows lie in all banks
constexpr int kThreads = 32 * kSmallTokens / 4;  // each warp packs four tokens; before, 0..3 multiply, 4 feeds
constexpr uint32_t kNeuronBytes = kNeurons * kTileK * 2;
constexpr uint32_t kStage = kNeuronBytes + kSmallTokens * kTileK * 2;
constexpr int kDepth = 11;  // stages in flight

// What a column tile's first CTA sums up.
struct Sums {
  uint32_t fired[8];
  uint32_t counts[kCounters];

  __device__ __forceinline__ void clear(uint32_t lane) {
    if (lane < 8) fired[lane] = 0;
    if (lane < kCounters) counts[lane] = 0;
  }
};

struct Shared {
  uint64_t full[kDepth];
  uint64_t empty[kDepth];
  Sums sums;
};

constexpr uint32_t kBytes = 1024 + kDepth * kStage + kSmallTokens * kPitch + sizeof(Shared);
static_assert(kBytes <= kMaxSharedBytes, "the stages and the packed tile share one CTA's memory");

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

// Packs a finished tile of 256 columns, rows of kPitch bytes at `tile`; a CTA of kWarps together. counts: adds to
// row_counts and counters.
template <int kWarps>
__device__ __forceinline__ void pack_tile(uint32_t tile, int m, int64_t n, int column_tile, int column_tiles,
                                          int words_per_tile, const Packed& out, Sums& sums, bool counts) {
  const int warp = threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32, column = column_tile * kColumnTile;
  for (int first = 4 * warp; first < m; first += 4 * kWarps) {
    const int token = first + lane / 8;
    const bool some = token < m;
    uint32_t* words = out.words + (static_cast<int64_t>(token) * column_tiles + column_tile) * words_per_tile;
    __nv_bfloat16* wide = static_cast<__nv_bfloat16*>(out.wide) + token * n + column;
    uint32_t seen = 0;
    const uint32_t count = pack_four_rows(tile + token * kPitch + lane % 8 * 16, some, lane, column, n, words_per_tile,
                                          words, wide, seen);
    const bool tells = some && lane % 8 == 0;
    if (tells) {
      words[0] = count;
      tile_counts(out)[column_tile * kCountedTokens + token] = count;
      if (counts && count != 0) atomicAdd(out.row_counts + token, static_cast<int>(count));
    }
    if (counts) {
      const uint32_t nonzeros = __reduce_add_sync(~0u, tells ? count : 0);
      const uint32_t overflow = __popc(__ballot_sync(~0u, tells && count >= static_cast<uint32_t>(words_per_tile)));
      if (lane == 0) {
        atomicAdd(sums.counts + kNonzeros, nonzeros);
        atomicAdd(sums.counts + kOverflow, overflow);
      }
    }
    add_fired(sums.fired, seen, lane);
  }
  __syncthreads();
  if (warp == 0) {
    const uint32_t word = sums.fired[lane / 4];
    const uint32_t bits = word >> lane % 4 * 8;
    if (column + 8 * lane < n) {
      *reinterpret_cast<uint2*>(out.fired + column + 8 * lane) = make_uint2(bytes_of(bits), bytes_of(bits >> 4));
    }
    if (lane % 4 == 0) out.mask[column_tile * 8 + lane / 4] = word;
    if (!counts) return;
    const uint32_t in_union = __reduce_add_sync(~0u, lane % 4 == 0 ? __popc(word) : 0);
    const uint32_t more = lane == kUnion ? in_union : lane < kCounters ? sums.counts[lane] : 0;
    if (more != 0) atomicAdd(reinterpret_cast<unsigned long long*>(out.counters) + lane, more);
  }
}

__global__ void __launch_bounds__(small::kThreads, 1)
    gate_pack_small_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, int m,
                           int64_t n, int k_blocks, int words_per_tile, const Packed out, int zeroed) {
  extern __shared__ uint8_t raw[];
  const uint32_t stages = (ptx::smem_address(raw) + 1023) & ~1023u;
  const uint32_t tile = stages + kDepth * kStage;  // [tokens] rows of 256 columns; all four parts in rank 0's
  auto& shared = *reinterpret_cast<Shared*>(raw + (tile + kSmallTokens * kPitch - ptx::smem_address(raw)));
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
    ptx::mbarrier_init(empty + 8 * threadIdx.x, kCluster * 4);
    ptx::fence_mbarrier_init();
  }
  if (warp == 1) shared.sums.clear(lane);
  __syncthreads();
  ptx::cluster_sync();  // they fetch for one another, and give back what they have read
  ptx::griddepcontrol_wait();  // for all before
  ptx::griddepcontrol_launch_dependents();  // not before: the next kernel finds done whatever is before gate_pack
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < zeroed; i += kThreads) out.counters[i] = 0;
  }

  RingOf<kDepth> ring;
  float d[kSmallTokens / 2];
  if (warp == 4) {
    if (lane == 0) {
      for (int kb = 0; kb < k_blocks; ++kb, ring.advance()) {
        const uint32_t barrier = full + 8 * ring.stage;
        const uint32_t a = stages + ring.stage * kStage;
        ptx::mbarrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
        ptx::mbarrier_arrive_expect_tx(barrier, kStage);
        ptx::tma_load_2d(a, &w_map, kb * kTileK, column + rank * kNeurons, barrier);
        if (kb % kCluster == static_cast<int>(rank)) {
          ptx::tma_load_2d_multicast(a + kNeuronBytes, &x_map, kb * kTileK, 0, barrier, (1 << kCluster) - 1);
        }
      }
    }
  } else if (warp < 4) {
    uint32_t previous = 0;
    for (int kb = 0; kb < k_blocks; ++kb) {
      ptx::mbarrier_wait(full + 8 * ring.stage, ring.phase);
      const uint32_t a = stages + ring.stage * kStage;
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kTileK / 16; ++step) {
        ptx::wgmma<1, 0>(d, ptx::wgmma_descriptor(a + 32 * step, 16, 1024),
                         ptx::wgmma_descriptor(a + kNeuronBytes + 32 * step, 16, 1024), kb != 0 || step != 0);
      }
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<1>();
      if (kb > 0 && kb - 1 + kDepth < k_blocks) {  // the stage before has been read, and will be filled again
        if (lane < kCluster) ptx::mbarrier_arrive_cluster(empty + 8 * previous, lane);
      }
      previous = ring.stage;
      ring.advance();
    }
    ptx::wgmma_wait_group<0>();
  }
  __syncwarp();
  if (warp < 4) {
    const uint32_t part = tile + rank * (kNeurons * 2) + warp * 32;  // this warp's 16 neurons
#pragma unroll
    for (int j = 0; j < kSmallTokens / 16; ++j) {
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

  pack_tile<small::kThreads / 32>(tile, m, n, column_tile, column_tiles, words_per_tile, out, shared.sums, zeroed == 0);
}

}  // namespace small

// zeroed: int64 of the counters and behind that it zeroes, counting nothing; 0: it adds to what is zero already.
inline cudaError_t gate_pack_small(const void* x, const void* w, int64_t m, int64_t k, int64_t n, int words_per_tile,
                                   const Packed& out, int64_t zeroed, cudaStream_t stream) {
  using namespace small;
  CUtensorMap x_map, w_map;
  cudaError_t error = tensor_map(&x_map, x, m, k, kSmallTokens);
  if (error == cudaSuccess) error = tensor_map(&w_map, w, n, k, kNeurons);
  if (error != cudaSuccess) return error;
  return launch_early(gate_pack_small_kernel, ceil_div(n, kColumnTile) * kCluster, small::kThreads, kBytes, kCluster,
                      stream, x_map, w_map, static_cast<int>(m), n, static_cast<int>(ceil_div(k, kTileK)),
                      words_per_tile, out, static_cast<int>(zeroed));
}

}  // namespace sparsellm
