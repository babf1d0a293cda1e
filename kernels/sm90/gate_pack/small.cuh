// gate_pack for few tokens: the product is a stream of w, so it is cut by columns over many SMs.
//
// Four CTAs of a cluster share a column tile, 64 neurons each, and take turns to fetch the tokens for one another.
// Operands are swapped: neurons are the rows of the matrix instruction, tokens (up to 64) its columns. A CTA says of its
// own neurons which fire, and packs a quarter of the tokens: the CTAs copy to one another's shared memory what each
// needs. Same numerics as the kernel for many tokens.
#pragma once

#include "common/host.h"
#include "common/tile.cuh"
#include "gate_pack/pack.cuh"

namespace sparsellm {

constexpr int kSmallTokens = kCountedTokens;  // there is room for their tiles' counts

namespace small {

constexpr int kCluster = 4;
constexpr int kNeurons = kColumnTile / kCluster;
constexpr int kTokens = kSmallTokens / kCluster;  // that a CTA packs
constexpr uint32_t kPitch = kNeurons * 2 + 16;    // bytes of a token and one CTA's neurons: eight chunks lie in all banks
constexpr uint32_t kPart = kTokens * kPitch;
constexpr int kWarps = 4;                         // that multiply and pack; one more feeds
constexpr int kThreads = 32 * (kWarps + 1);
constexpr uint32_t kNeuronBytes = kNeurons * kTileK * 2;
constexpr uint32_t kStage = kNeuronBytes + kSmallTokens * kTileK * 2;
constexpr int kDepth = 11;  // stages in flight
constexpr int kAhead = 2;   // of those, whose w is asked for before the first x: what comes behind more of it comes late

struct Shared {
  uint64_t full[kDepth];
  uint64_t empty[kDepth];
  uint64_t finished;  // what this CTA packs
  Sums sums;
};

constexpr uint32_t kBytes = 1024 + kDepth * kStage + 2 * kCluster * kPart + sizeof(Shared);
static_assert(kTokens == 4 * kWarps && kTokens == 16, "a warp packs four tokens, and stores sixteen for each CTA at once");
static_assert(kNeurons == 16 * kWarps, "a warp has 16 neurons");
static_assert(kBytes <= kMaxSharedBytes, "the stages, what it computed and what it packs share one CTA's memory");

__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                                                  uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0),
               "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

__global__ void __launch_bounds__(small::kThreads, 1)
    gate_pack_small_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, int m,
                           int64_t n, int k_blocks, int words_per_tile, const Packed out, int zeroed) {
  extern __shared__ uint8_t raw[];
  const uint32_t stages = (ptx::smem_address(raw) + 1023) & ~1023u;
  const uint32_t own = stages + kDepth * kStage;  // [CTAs, their tokens] of this CTA's neurons, for the others to pack
  const uint32_t tile = own + kCluster * kPart;   // [CTAs, this one's tokens] of their neurons
  auto& shared = *reinterpret_cast<Shared*>(raw + (tile + kCluster * kPart - ptx::smem_address(raw)));
  const uint32_t full = ptx::smem_address(shared.full);
  const uint32_t empty = ptx::smem_address(shared.empty);
  const uint32_t finished = ptx::smem_address(&shared.finished);
  const int warp = ptx::warp_index();
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t rank = ptx::cluster_rank();
  const int column_tile = blockIdx.x / kCluster;
  const int column_tiles = gridDim.x / kCluster;
  const bool counts = zeroed == 0;
  const auto tokens_of = [&](int cta) { return max(min(m - cta * kTokens, kTokens), 0); };
  const uint32_t column = column_tile * kColumnTile;

  const auto fetch_w = [&](int kb, uint32_t stage) {
    ptx::mbarrier_arrive_expect_tx(full + 8 * stage, kStage);
    ptx::tma_load_2d(stages + stage * kStage, &w_map, kb * kTileK, column + rank * kNeurons, full + 8 * stage);
  };
  const auto fetch_x = [&](int kb, uint32_t stage) {
    if (kb % kCluster != static_cast<int>(rank)) return;
    ptx::tma_load_2d_multicast(stages + stage * kStage + kNeuronBytes, &x_map, kb * kTileK, 0, full + 8 * stage,
                               (1 << kCluster) - 1);
  };
  const int ahead = min(kAhead, k_blocks);
  if (warp == kWarps) {
    if (lane < kDepth) {
      ptx::mbarrier_init(full + 8 * lane, 1);
      ptx::mbarrier_init(empty + 8 * lane, kCluster * kWarps);
    } else if (lane == kDepth) {
      ptx::mbarrier_init(finished, 1);
      ptx::mbarrier_arrive_expect_tx(finished, (kCluster - 1) * tokens_of(rank) * kPitch);
    }
    ptx::fence_mbarrier_init();
    if (lane == 0) {
      ptx::tma_prefetch_descriptor(&w_map);
      ptx::tma_prefetch_descriptor(&x_map);
    }
    __syncwarp();
  } else if (warp == 0) {
    shared.sums.clear(lane);
  }
  ptx::cluster_arrive_relaxed();
  ptx::griddepcontrol_wait();  // for all before
  ptx::griddepcontrol_launch_dependents();  // not before: the next kernel finds done whatever is before gate_pack
  if (warp == kWarps) {
    for (int kb = 0; lane == 0 && kb < ahead; ++kb) fetch_w(kb, kb);
    __syncwarp();
  } else if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < zeroed; i += 32 * kWarps) out.counters[i] = 0;
  }
  ptx::cluster_wait();  // all barriers are there: CTAs fetch for one another, and give back what they have read

  RingOf<kDepth> ring;
  float d[kSmallTokens / 2];
  if (warp == kWarps) {
    if (lane == 0) {
      for (int kb = 0; kb < k_blocks; ++kb, ring.advance()) {
        if (kb >= ahead) {
          ptx::mbarrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
          fetch_w(kb, ring.stage);
        }
        fetch_x(kb, ring.stage);
      }
    }
  } else if (warp < kWarps) {
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
  __syncthreads();  // the sums are zero
  if (warp < kWarps) {
    uint32_t fires[2] = {0, 0};  // of this warp's 16 neurons lane / 4, and 8 on
#pragma unroll
    for (int j = 0; j < kSmallTokens / 8; ++j) {
      const int first = 8 * j + lane % 4 * 2;
      // Behind the last token stand zeros of x, but zero times infinity is no zero.
      const uint32_t there = (first < m ? 0x00007fff : 0) | (first + 1 < m ? 0x7fff0000 : 0);
      fires[0] |= ptx::cvt_relu_bf16x2(d[4 * j], d[4 * j + 1]) & there;
      fires[1] |= ptx::cvt_relu_bf16x2(d[4 * j + 2], d[4 * j + 3]) & there;
    }
#pragma unroll
    for (int j = 0; j < kCluster; ++j) {
      const uint32_t part = (j == static_cast<int>(rank) ? tile : own) + j * kPart + warp * 32;
      const uint32_t token = 8 * (lane / 16) + lane % 8;
      stmatrix_x4_trans(part + token * kPitch + (lane / 8 & 1) * 16, ptx::cvt_relu_bf16x2(d[8 * j], d[8 * j + 1]),
                        ptx::cvt_relu_bf16x2(d[8 * j + 2], d[8 * j + 3]),
                        ptx::cvt_relu_bf16x2(d[8 * j + 4], d[8 * j + 5]),
                        ptx::cvt_relu_bf16x2(d[8 * j + 6], d[8 * j + 7]));
    }
    ptx::fence_proxy_async();
    ptx::bar_sync(1, 32 * kWarps);
    if (threadIdx.x < kCluster) {
      const int to = threadIdx.x;
      const uint32_t bytes = to == static_cast<int>(rank) ? 0 : tokens_of(to) * kPitch;
      if (bytes != 0) ptx::bulk_copy_cluster(tile + rank * kPart, to, own + to * kPart, bytes, finished);
    }
    __syncwarp();

    const uint32_t low = __ballot_sync(~0u, fires[0] != 0), high = __ballot_sync(~0u, fires[1] != 0);
    const int neuron = column + rank * kNeurons + warp * 16 + static_cast<int>(lane);
    const bool known = lane < 16 && neuron < n;
    const bool fired = known && ((lane < 8 ? low : high) >> lane % 8 * 4 & 0xf) != 0;
    const uint32_t of_sixteen = __ballot_sync(~0u, fired);
    if (known) out.fired[neuron] = fired;
    if (lane == 0) {
      reinterpret_cast<uint16_t*>(out.mask)[blockIdx.x * kWarps + warp] = static_cast<uint16_t>(of_sixteen);
      if (counts) atomicAdd(shared.sums.counts + kUnion, __popc(of_sixteen));
    }

    ptx::mbarrier_wait(finished, 0);
    __syncwarp();
    ptx::cluster_arrive_relaxed();  // this CTA has what it wants of the others
    const int token = 4 * warp + lane / 8;
    pack_tokens<kPart>(tile + token * kPitch + lane % 8 * 16, rank * kTokens + token, token < tokens_of(rank), lane, n,
                       column_tile, column_tiles, words_per_tile, out, shared.sums, counts);
    if (counts) {
      ptx::bar_sync(1, 32 * kWarps);
      if (warp == 0) add_counts(out, shared.sums, lane);
    }
  } else {
    ptx::cluster_arrive_relaxed();
  }
  ptx::cluster_wait();  // the others have what they copy from here
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
