// The packed format's arithmetic, shared by its writers and readers. The format itself: kernels/README.md.
#pragma once

#include "common/ptx.cuh"
#include "launch.h"

namespace sparsellm {

constexpr uint32_t kMagnitude = 0x7fff7fff;  // of a bf16 pair: all but the signs; -0.0 is zero, NaN is not

__device__ __forceinline__ uint32_t pack_word(uint32_t bf16_bits, uint32_t column) {
  return bf16_bits << 16 | column;
}

// Half i (0..7) of eight bf16 values.
__device__ __forceinline__ uint32_t half_of(const uint4& v, int i) {
  const uint32_t w = i < 2 ? v.x : i < 4 ? v.y : i < 6 ? v.z : v.w;
  return i & 1 ? w >> 16 : w & 0xffff;
}

// Bit i set where half i is not zero (NaN is not).
__device__ __forceinline__ uint32_t nonzero_bits(const uint4& v) {
  const auto pair = [](uint32_t w) {
    return __hneu2_mask(reinterpret_cast<const __nv_bfloat162&>(w), __nv_bfloat162(0.0f, 0.0f));
  };
  const uint32_t spread = (pair(v.x) & 0x00010001) | (pair(v.y) & 0x00040004) | (pair(v.z) & 0x00100010) |
                          (pair(v.w) & 0x00400040);
  return (spread | spread >> 15) & 0xff;
}

// Sum over the lanes before this one.
__device__ __forceinline__ uint32_t exclusive_scan(uint32_t value, uint32_t lane) {
  uint32_t sum = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, sum, offset);
    if (lane >= offset) sum += other;
  }
  return sum - value;
}

// Packs one row of one tile, a warp together: lane l holds columns first + 8 l .. + 7 in `v`. Writes all words but the
// count, word 0, which it returns: many rows' counts are better written together. Where the words do not fit, the
// segment goes to `wide` (its column `first`; columns >= n are dropped). `seen` collects this lane's nonzero bits.
__device__ __forceinline__ uint32_t pack_row(const uint4& v, uint32_t lane, uint32_t first, int64_t n,
                                             int words_per_tile, uint32_t* words, __nv_bfloat16* wide,
                                             uint32_t& seen) {
  if (!__any_sync(~0u, ((v.x | v.y | v.z | v.w) & kMagnitude) != 0)) return 0;
  const uint32_t bits = nonzero_bits(v);
  const uint32_t mine = __popc(bits);
  seen |= bits;
  // How many lie before, and in all: `mine` is at most 8, so four ballots hold all lanes' numbers. (A scan by shuffles
  // waits five times for what this asks for at once.)
  const uint32_t below = (1u << lane) - 1;
  uint32_t before = 0, count = 0;
#pragma unroll
  for (int bit = 0; bit < 4; ++bit) {
    const uint32_t with = __ballot_sync(~0u, mine >> bit & 1);
    before += __popc(with & below) << bit;
    count += __popc(with) << bit;
  }
  if (count < static_cast<uint32_t>(words_per_tile)) {
    uint32_t* slot = words + 1 + before;
    for (uint32_t rest = bits; rest != 0; rest &= rest - 1) {
      const int i = __ffs(rest) - 1;
      *slot++ = pack_word(half_of(v, i), first + 8 * lane + i);
    }
  } else if (first + 8 * lane < n) {
    *reinterpret_cast<uint4*>(wide + 8 * lane) = v;
  }
  return count;
}

}  // namespace sparsellm
