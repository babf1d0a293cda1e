// gate_pack for 17 to 64 tokens. Reading w takes most of the time, so the columns of the product are spread over many
// SMs.
//
// The four CTAs of a cluster share a column tile: each multiplies 64 neurons by all tokens. They take turns to fetch
// stages of x, which are multicast to all four. Operands are swapped: neurons are the rows (M) of the WGMMA, and
// tokens, up to 64, its columns (N). A CTA finds which of its own 64 neurons fire, but packs all 256 columns of a
// quarter of the tokens. So each CTA copies its neurons' values to the shared memory of the CTA that packs the token.
// Numerics: as in the kernel for many tokens.
//
// kFloat8: w is e4m3 with a scale per neuron. A stage's 128 bytes of a neuron's row are then 128 columns, so a stage
// has x in two boxes of 64 columns. The warps read w from shared memory, convert it to bf16, which is exact, and pass
// it to WGMMA in registers. The scales multiply the sums.
#pragma once

#include "common/host.h"
#include "common/wgmma.cuh"
#include "gate_pack/pack.cuh"

namespace sparsellm {

constexpr int kSmallTokens = kCountedTokens;  // the largest M, because row_counts has memory for the counts of this
                                              // many tokens' segments

namespace small {

constexpr int kCluster = 4;
constexpr int kNeurons = kColumnTile / kCluster;
constexpr int kTokens = kSmallTokens / kCluster;  // tokens that one CTA packs
constexpr uint32_t kPitch = kNeurons * 2 + 16;  // bytes between tokens, in one CTA's neurons. The padding lets eight
                                                // chunks of different tokens use all banks
constexpr uint32_t kPart = kTokens * kPitch;
constexpr int kWarps = 4;             // warps that multiply and pack
constexpr int kFeedingWarp = kWarps;  // one additional warp, which fetches w and x
constexpr int kThreads = 32 * (kWarps + 1);
constexpr uint32_t kNeuronBytes = kNeurons * kTileK * 2;
constexpr uint32_t kBox = kSmallTokens * kTileK * 2;  // bytes of 64 columns of x
template <bool kFloat8>
constexpr int kBoxes = kFloat8 ? 2 : 1;  // boxes of x per stage
template <bool kFloat8>
constexpr uint32_t kStage = kNeuronBytes + kBoxes<kFloat8> * kBox;
template <bool kFloat8>
constexpr int kDepth = kFloat8 ? 8 : 11;  // stages in flight
constexpr int kAhead = 2;        // stages whose w is requested before the first x. If more of w came first, x would
                                 // arrive late
constexpr int kPackBarrier = 1;  // the named barrier of the warps that pack; __syncthreads uses 0
template <bool kFloat8>
using SmallPipeline = Pipeline<kDepth<kFloat8>, kCluster>;

template <bool kFloat8>
struct Shared {
  typename SmallPipeline<kFloat8>::Storage pipeline;
  uint64_t finished;  // barrier: all values that this CTA packs have arrived
  Sums sums;
};

template <bool kFloat8>
constexpr uint32_t kBytes = 1024 + kDepth<kFloat8> * kStage<kFloat8> + 2 * kCluster * kPart + sizeof(Shared<kFloat8>);
static_assert(kTokens == 4 * kWarps && kTokens == 16,
              "a warp packs four tokens, and stores sixteen for each CTA at once");
static_assert(kNeurons == 16 * kWarps, "a warp has 16 neurons");
static_assert(kBytes<false> <= kMaxSharedBytes && kBytes<true> <= kMaxSharedBytes,
              "stages and values must fit in one CTA's shared memory");

__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                                                  uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0),
               "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// One CTA, which multiplies 64 neurons by all tokens. The accumulators are locals of the kernel: if they were a member,
// the members next to them would stay in local memory until loops are unrolled.
template <bool kFloat8>
struct SmallCta {
  static constexpr int kBoxes = small::kBoxes<kFloat8>, kDepth = small::kDepth<kFloat8>;
  static constexpr uint32_t kStage = small::kStage<kFloat8>;
  using SmallPipeline = small::SmallPipeline<kFloat8>;
  using Shared = small::Shared<kFloat8>;
  using Accumulators = float[kSmallTokens / 2];
  const CUtensorMap& x_map;
  const CUtensorMap& w_map;
  Shared& shared;
  uint32_t stages, own, tile;
  SmallPipeline pipeline;
  uint32_t finished;
  int m;
  int64_t n;
  int k_blocks;
  const Packed& out;
  bool counts;  // whether this kernel adds to the counters
  int warp;
  uint32_t lane, rank;
  int column_tile, column_tiles;
  uint32_t column;
  int ahead;
  typename SmallPipeline::State state;

  // Shared memory from `stages` on: [kDepth] stages; then `own`, [CTA that packs, its tokens]: the values of this CTA's
  // neurons, to be sent to the other CTAs; then `tile`, [CTA of the neurons, this CTA's tokens]: the values that this
  // CTA packs.
  __device__ __forceinline__ SmallCta(uint8_t* raw, uint32_t stages, const CUtensorMap& x_map, const CUtensorMap& w_map,
                                      int m, int64_t n, int k_blocks, const Packed& out, bool counts)
      : x_map(x_map),
        w_map(w_map),
        shared(*reinterpret_cast<Shared*>(raw +
                                          (stages + kDepth * kStage + 2 * kCluster * kPart - ptx::smem_address(raw)))),
        stages(stages),
        own(stages + kDepth * kStage),
        tile(own + kCluster * kPart),
        pipeline(shared.pipeline),
        finished(ptx::smem_address(&shared.finished)),
        m(m),
        n(n),
        k_blocks(k_blocks),
        out(out),
        counts(counts),
        warp(ptx::warp_index()),
        lane(threadIdx.x % 32),
        rank(ptx::cluster_rank()),
        column_tile(blockIdx.x / kCluster),
        column_tiles(gridDim.x / kCluster),
        column(column_tile * kColumnTile),
        ahead(min(kAhead, k_blocks)) {}

  __device__ __forceinline__ int tokens_of(int cta) const { return max(min(m - cta * kTokens, kTokens), 0); }

  // Called by the feeding warp.
  __device__ __forceinline__ void init() const {
    if (lane < kDepth) {
      pipeline.init(lane, 1, kCluster * kWarps);
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
  }

  __device__ __forceinline__ void fetch_w(int kb, uint32_t stage) const {
    const uint32_t full = pipeline.producer_barrier(stage);
    ptx::mbarrier_arrive_expect_tx(full, kStage);
    ptx::tma_load_2d(stages + stage * kStage, &w_map, kb * kTileK, column + rank * kNeurons, full);
  }

  // The CTAs of a cluster take turns to fetch a stage of x, which is multicast to all of them.
  __device__ __forceinline__ void fetch_x(int kb, uint32_t stage) const {
    if (kb % kCluster != static_cast<int>(rank)) return;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      ptx::tma_load_2d_multicast(stages + stage * kStage + kNeuronBytes + box * kBox, &x_map,
                                 (kb * kBoxes + box) * kTileK, 0, pipeline.producer_barrier(stage),
                                 (1 << kCluster) - 1);
    }
  }

  // The role of the feeding warp: fetch_ahead requests w of the first `ahead` stages, and feed requests x of these
  // stages and then both w and x of one stage after another.
  __device__ __forceinline__ void fetch_ahead() const {
    for (int kb = 0; lane == 0 && kb < ahead; ++kb) fetch_w(kb, kb);
    __syncwarp();
  }
  __device__ __forceinline__ void feed() {
    if (lane != 0) return;
    for (int kb = 0; kb < k_blocks; ++kb, state.advance()) {
      if (kb >= ahead) {
        pipeline.producer_acquire(state);
        fetch_w(kb, state.stage);
      }
      fetch_x(kb, state.stage);
    }
  }

  // The role of the other warps.
  __device__ __forceinline__ void multiply(Accumulators& d) {
    uint32_t previous = 0;
    for (int kb = 0; kb < k_blocks; ++kb) {
      pipeline.consumer_wait(state);
      const uint32_t a = stages + state.stage * kStage;
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kTileK / 16; ++step) {
        ptx::wgmma<1, 0>(d, ptx::wgmma_descriptor(a + 32 * step, 16, 1024),
                         ptx::wgmma_descriptor(a + kNeuronBytes + 32 * step, 16, 1024), kb != 0 || step != 0);
      }
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<1>();
      // The previous stage has been read. It is released only if the producer will fill it again.
      if (kb > 0 && kb - 1 + kDepth < k_blocks) pipeline.consumer_release(previous);
      previous = state.stage;
      state.advance();
    }
    ptx::wgmma_wait_group<0>();
  }

  // kFloat8: reads this lane's part of w in a stage, as WGMMA takes it in registers: of rows lane / 4 and lane / 4 + 8
  // of the warp's 16, columns 16 s + 2 (lane % 4) and the next one, and the two that are 8 further on.
  static constexpr int kSteps = 2 * kTileK / 16;
  using Registers = uint32_t[kSteps][4];
  __device__ __forceinline__ void load_w(Registers& w, uint32_t stage) const {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const uint32_t at = stage + swizzle_128(warp * 16 + lane / 4, s) + lane % 4 * 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t row = ptx::ld_shared_u16(at + 8 * half), row_8 = ptx::ld_shared_u16(at + 8 * half + 8 * 128);
        const uint2 both = ptx::bf16x4_of_e4m3x4(row | row_8 << 16);
        w[s][2 * half] = both.x;
        w[s][2 * half + 1] = both.y;
      }
    }
  }

  // `multiply`, kFloat8: while a stage is multiplied, w of the next one is read to the registers of the one before. The
  // number of stages is even, because a branch between two stages would make the compiler serialize the WGMMAs.
  __device__ __forceinline__ void multiply_e4m3(Accumulators& d) {
    uint32_t previous = 0;
    const auto multiply_stage = [&](Registers& w, int kb) {
      pipeline.consumer_wait(state);
      const uint32_t stage = stages + state.stage * kStage;
      load_w(w, stage);
      ptx::wgmma_fence();
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const uint32_t x = stage + kNeuronBytes + s / 4 * kBox + s % 4 * 32;
        ptx::wgmma_in_registers(d, w[s], ptx::wgmma_descriptor(x, 16, 1024), kb != 0 || s != 0);
      }
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<1>();
      if (kb > 0 && kb - 1 + kDepth < k_blocks) pipeline.consumer_release(previous);
      previous = state.stage;
      state.advance();
    };
    Registers even, odd;
    for (int kb = 0; kb < k_blocks; kb += 2) {
      multiply_stage(even, kb);
      multiply_stage(odd, kb + 1);
    }
    ptx::wgmma_wait_group<0>();
  }

  // kFloat8: the scales of this lane's two neurons, and the scaling of their sums.
  __device__ __forceinline__ float2 read_scales(const float* scales) const {
    const int64_t first = column + rank * kNeurons + warp * 16 + lane / 4;
    return {first < n ? __ldg(scales + first) : 0.0f, first + 8 < n ? __ldg(scales + first + 8) : 0.0f};
  }
  static __device__ __forceinline__ void scale(Accumulators& d, const float2& by) {
#pragma unroll
    for (int j = 0; j < kSmallTokens / 8; ++j) {
      d[4 * j] *= by.x, d[4 * j + 1] *= by.x;
      d[4 * j + 2] *= by.y, d[4 * j + 3] *= by.y;
    }
  }

  // Sends the products, as bf16, to the CTAs of the cluster: each CTA gets those of the tokens that it packs.
  __device__ __forceinline__ void hand_out(const Accumulators& d) const {
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
    ptx::bar_sync(kPackBarrier, 32 * kWarps);
    if (threadIdx.x < kCluster) {
      const int to = threadIdx.x;
      const uint32_t bytes = to == static_cast<int>(rank) ? 0 : tokens_of(to) * kPitch;
      if (bytes != 0) ptx::bulk_copy_cluster(tile + rank * kPart, to, own + to * kPart, bytes, finished);
    }
    __syncwarp();
  }

  // Finds whether this lane's two neurons fire for any of this lane's tokens. The neurons are rows lane / 4 and
  // lane / 4 + 8 of the warp's 16.
  __device__ __forceinline__ void find_fired(const Accumulators& d, uint32_t (&fires)[2]) const {
#pragma unroll
    for (int j = 0; j < kSmallTokens / 8; ++j) {
      const int first = 8 * j + lane % 4 * 2;
      // Tokens from m on are masked: x is zero there, but zero times an infinite weight is NaN.
      const uint32_t there = (first < m ? 0x00007fff : 0) | (first + 1 < m ? 0x7fff0000 : 0);
      fires[0] |= ptx::cvt_relu_bf16x2(d[4 * j], d[4 * j + 1]) & there;
      fires[1] |= ptx::cvt_relu_bf16x2(d[4 * j + 2], d[4 * j + 3]) & there;
    }
  }

  __device__ __forceinline__ void tell_fired(const uint32_t (&fires)[2]) const {
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
  }

  // Packs this CTA's tokens. Waits until all CTAs have sent their neurons' values.
  __device__ __forceinline__ void pack() const {
    ptx::mbarrier_wait(finished, 0);
    __syncwarp();
    ptx::cluster_arrive_relaxed();  // announces that this CTA has received all that it needs from the others
    const int token = 4 * warp + lane / 8;
    pack_tokens<kPart>(tile + token * kPitch + lane % 8 * 16, rank * kTokens + token, token < tokens_of(rank), lane, n,
                       column_tile, column_tiles, out, shared.sums, counts);
    if (counts) {
      ptx::bar_sync(kPackBarrier, 32 * kWarps);
      if (warp == 0) add_counts(out, shared.sums, lane);
    }
  }
};

template <bool kFloat8>
__global__ void __launch_bounds__(small::kThreads, 1)
    gate_pack_small_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, int m,
                           int64_t n, int k_blocks, const Packed out, int zeroed, const float* scales) {
  extern __shared__ uint8_t raw[];
  SmallCta<kFloat8> cta(raw, (ptx::smem_address(raw) + 1023) & ~1023u, x_map, w_map, m, n, k_blocks, out, zeroed == 0);
  const bool feeds = cta.warp == kFeedingWarp;
  if (feeds) {
    cta.init();
  } else if (cta.warp == 0) {
    cta.shared.sums.clear(cta.lane);
  }
  ptx::cluster_arrive_relaxed();
  ptx::griddepcontrol_wait();
  // The next kernel may start only after the wait, because it relies on all kernels before gate_pack being done.
  ptx::griddepcontrol_launch_dependents();
  if (feeds) {
    cta.fetch_ahead();
  } else if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < zeroed; i += 32 * kWarps) out.counters[i] = 0;
  }
  ptx::cluster_wait();  // wait for all barriers to exist, because each CTA copies to all CTAs and releases all CTAs'
                        // stages

  typename SmallCta<kFloat8>::Accumulators d;
  if (feeds) {
    cta.feed();
  } else if (cta.warp < kWarps) {
    if constexpr (kFloat8) {
      const float2 of_rows = cta.read_scales(scales);
      cta.multiply_e4m3(d);
      cta.scale(d, of_rows);
    } else {
      cta.multiply(d);
    }
  }
  __syncthreads();  // wait until sums.clear has run
  if (cta.warp < kWarps) {
    uint32_t fires[2] = {0, 0};
    cta.find_fired(d, fires);
    cta.hand_out(d);
    cta.tell_fired(fires);
    cta.pack();
  } else {
    ptx::cluster_arrive_relaxed();
  }
  ptx::cluster_wait();  // wait until the other CTAs have received what is copied from this CTA's memory
}

}  // namespace small

// scales: null if w is bf16. zeroed: if not 0, the kernel counts nothing, and sets this many int64 to zero, starting at
// the counters; if 0, the kernel adds to the counters, which must be zero.
inline cudaError_t gate_pack_small(const void* x, const void* w, const float* scales, int64_t m, int64_t k, int64_t n,
                                   const Packed& out, int64_t zeroed, cudaStream_t stream) {
  using namespace small;
  CUtensorMap x_map, w_map;
  cudaError_t error = tensor_map(&x_map, x, m, k, kSmallTokens);
  const bool float8 = scales != nullptr;
  const int64_t pairs = float8 ? k / 2 : k;  // to TMA, two e4m3 values are one bf16 value
  const int64_t k_blocks = float8 ? 2 * ceil_div(pairs, 2 * kTileK) : ceil_div(pairs, kTileK);
  if (error == cudaSuccess) error = tensor_map(&w_map, w, n, pairs, kNeurons);
  if (error != cudaSuccess) return error;
  return launch_early(float8 ? gate_pack_small_kernel<true> : gate_pack_small_kernel<false>,
                      ceil_div(n, kColumnTile) * kCluster, small::kThreads, float8 ? kBytes<true> : kBytes<false>,
                      kCluster, stream, x_map, w_map, static_cast<int>(m), n, static_cast<int>(k_blocks), out,
                      static_cast<int>(zeroed), scales);
}

}  // namespace sparsellm
