// What all WGMMA products share: an output tile of 128 rows x up to 256 columns, and stages of 64 along k.
//
// A CTA has three warpgroups. The first fills shared memory and does all other work; its four warps have different
// roles. The other two are the consumers: each multiplies 64 rows, with its accumulators in registers. The first
// warpgroup hands stages over by full barriers, and gets them back by empty barriers. pairs.cuh uses three stages of 48
// KB, and 64 KB more for a finished 128 x 256 tile, so that the finished tile can be read while the next tile is
// multiplied. Other kernels define their own number of stages.
#pragma once

#include "common/pipeline.cuh"
#include "common/ptx.cuh"
#include "common/wgmma.cuh"
#include "launch.h"

namespace sparsellm {

constexpr int kTileM = 128;
constexpr int kTileN = 256;
constexpr int kTileK = 64;  // 64 bf16 values are one 128-byte row, the width of the swizzle
static_assert(kTileM == kTokenTile && kTileN == kColumnTile, "a product's tile must be a tile of the packed format");
constexpr int kStages = 3;
constexpr int kBlockColumns = 64;  // n of a WGMMA is a multiple of 64 columns here: 64, 128, 192 or 256

constexpr uint32_t kABytes = kTileM * kTileK * 2;
constexpr uint32_t kBBytes = kTileN * kTileK * 2;
constexpr uint32_t kStageBytes = kABytes + kBBytes;
constexpr uint32_t kTileBytes = kTileM * kTileN * 2;

constexpr int kThreads = 384;
constexpr int kConsumerWarps = 8;
// Registers per thread. A kernel of kThreads threads is launched with 168 registers per thread. If the roles together
// request more than that, setmaxnreg waits forever.
constexpr int kProducerRegisters = 104;
constexpr int kConsumerRegisters = 200;
static_assert(128 * kProducerRegisters + 256 * kConsumerRegisters <= 168 * kThreads, "more registers than launched");

constexpr uint32_t kMaxSharedBytes = 232448;  // bytes of shared memory that one CTA may use on sm_90

// Byte offset of 16-byte chunk `chunk` (0..7) of 128-byte row `row` under the 128-byte swizzle.
__device__ __forceinline__ uint32_t swizzle_128(uint32_t row, uint32_t chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

// Computes d = A B over the next `count` >= 1 stages, which it releases. Called by one consumer warpgroup. ahead() runs
// while the last stage is multiplied. stages: the address of stage 0. b_offset: the distance in bytes from a stage's B
// to the part of B that this warpgroup multiplies.
// kCopied: true if cp.async wrote the stages or parts of them. Such kernels are memory-bound, so a stage is released as
// early as possible: the warpgroup waits until its product has ended and releases the stage before it issues the next
// product; the other warpgroup's product keeps the tensor cores busy meanwhile. If kCopied is false, the next product
// is issued first.
// B is K-major [64 kBlocks, 64], or MN-major [64, 64 kBlocks] in panels of 64 columns.
// kFloat8: the operands are e4m3, so a stage's 128-byte rows hold 128 values along k.
template <int kBlocks, int kBMajorMN, bool kCopied = true, bool kFloat8 = false, int kCount, int kCtas, class Ahead>
__device__ __forceinline__ void multiply(float (&d)[32 * kBlocks], const Pipeline<kCount, kCtas>& pipeline,
                                         PipelineState<kCount>& state, int count, uint32_t stages, uint32_t b_offset,
                                         int warpgroup, Ahead ahead) {
  constexpr uint32_t kStepA = 32;
  constexpr uint32_t kStepB = kBMajorMN ? 16 * 128 : 32;
  constexpr uint32_t kPanel = kTileK * 128;  // bytes of an MN-major panel: 64 rows of k, 64 columns each
  const uint64_t first_a = ptx::wgmma_descriptor(stages + warpgroup * (kABytes / 2), 16, 1024);
  const uint64_t first_b = ptx::wgmma_descriptor(stages + kABytes + b_offset, kBMajorMN ? kPanel : 16, 1024);
  const auto issue = [&](bool first) {
    pipeline.consumer_wait(state);
    if constexpr (kCopied) ptx::fence_proxy_async();
    const uint64_t a = ptx::advanced(first_a, state.stage * kStageBytes);
    const uint64_t b = ptx::advanced(first_b, state.stage * kStageBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTileK / 16; ++step) {
      const uint64_t a_step = ptx::advanced(a, step * kStepA), b_step = ptx::advanced(b, step * kStepB);
      if constexpr (kFloat8) {
        ptx::wgmma_e4m3(d, a_step, b_step, !first || step != 0);
      } else {
        ptx::wgmma<kBlocks, kBMajorMN>(d, a_step, b_step, !first || step != 0);
      }
    }
    ptx::wgmma_commit_group();
  };
  issue(true);
  uint32_t previous = state.stage;
  state.advance();
  for (int kb = 1; kb < count; ++kb) {
    if constexpr (kCopied) {
      ptx::wgmma_wait_group<0>();
      pipeline.consumer_release(previous);
    }
    issue(false);
    if constexpr (!kCopied) {
      ptx::wgmma_wait_group<1>();
      pipeline.consumer_release(previous);
    }
    previous = state.stage;
    state.advance();
  }
  ahead();
  ptx::wgmma_wait_group<0>();
  pipeline.consumer_release(previous);
}

}  // namespace sparsellm
