// What the tile products share: an output tile of 128 rows x up to 256 columns, and stages of 64 along k.
//
// A CTA has three warpgroups. The first fills shared memory and does all other work; its four warps have different
// roles. The other two are the consumers: each multiplies 64 rows, with its accumulators in registers. The first
// warpgroup hands stages over by full barriers, and gets them back by empty barriers. pairs.cuh uses three stages of 48
// KB, and 64 KB more for a finished 128 x 256 tile, so that the finished tile can be read while the next tile is
// multiplied. Other kernels define their own number of stages.
#pragma once

#include "common/pipeline.cuh"
#include "common/ptx.cuh"
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

}  // namespace sparsellm
