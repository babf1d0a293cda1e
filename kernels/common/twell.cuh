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

// The nonzeros of `tiles` column tiles, from `first_tile` on, of `rows` rows, by one warp together: calls use(row,
// words, valid) with four packed words for each lane, of which the bits of `valid` (maybe none) count. All lanes call
// together, always in the same order. token_of(row) is the row's token, or -1 for none. Two lanes read the first 32
// bytes of a packed tile row, which mostly is all of it.
template <class TokenOf, class Use>
__device__ __forceinline__ void for_each_quad(const Packed& packed, int64_t n, int words_per_tile, int column_tiles,
                                              int rows, int first_tile, int tiles, uint32_t lane, TokenOf token_of,
                                              Use use) {
  constexpr int kBatch = 4;  // loads in flight in each lane
  const int pairs = rows * tiles;
  for (int start = 0; start < pairs; start += 16 * kBatch) {
    uint4 v[kBatch];
    int64_t token[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int pair = start + 16 * b + lane / 2;
      v[b] = make_uint4(0, 0, 0, 0);
      token[b] = pair < pairs ? token_of(pair / tiles) : -1;
      if (token[b] >= 0) {
        const uint32_t* words = packed.words + (token[b] * column_tiles + first_tile + pair % tiles) * words_per_tile;
        v[b] = reinterpret_cast<const uint4*>(words)[lane % 2];
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int pair = start + 16 * b + lane / 2;
      const int row = pair / tiles;
      const uint32_t count = __shfl_sync(~0u, v[b].x, lane & ~1u);
      const bool fits = count < static_cast<uint32_t>(words_per_tile);
      const uint32_t last = fits ? count : 0;  // word 0 is the count, words 1..last the nonzeros
      uint4 four = v[b];
      for (uint32_t index = 4 * (lane % 2); __any_sync(~0u, index <= last && last != 0); index += 8) {
        uint32_t valid = 0;
        if (index <= last) {
          if (index >= 8) {
            four = *reinterpret_cast<const uint4*>(
                packed.words + (token[b] * column_tiles + first_tile + pair % tiles) * words_per_tile + index);
          }
          valid = last - index >= 3 ? 15 : (2u << (last - index)) - 1;
          if (index == 0) valid &= 14;
        }
        use(row, four, valid);
      }
      for (uint32_t wide = __ballot_sync(~0u, !fits && lane % 2 == 0); wide != 0; wide &= wide - 1) {
        const int of = start + 16 * b + (__ffs(wide) - 1) / 2;
        const uint32_t column = (first_tile + of % tiles) * kColumnTile + 8 * lane;
        uint4 eight = make_uint4(0, 0, 0, 0);
        const int64_t its_token = __shfl_sync(~0u, token[b], __ffs(wide) - 1);
        if (column < n) {
          eight = *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(packed.wide) + its_token * n +
                                                  column);
        }
        const uint32_t bits = nonzero_bits(eight);
        use(of / tiles,
            make_uint4(pack_word(eight.x & 0xffff, column), pack_word(eight.x >> 16, column + 1),
                       pack_word(eight.y & 0xffff, column + 2), pack_word(eight.y >> 16, column + 3)),
            bits & 15);
        use(of / tiles,
            make_uint4(pack_word(eight.z & 0xffff, column + 4), pack_word(eight.z >> 16, column + 5),
                       pack_word(eight.w & 0xffff, column + 6), pack_word(eight.w >> 16, column + 7)),
            bits >> 4);
      }
    }
  }
}

// Calls use(word) for each of the four that counts.
template <class Use>
__device__ __forceinline__ void for_each_word(const uint4& four, uint32_t valid, Use use) {
  if (valid & 1) use(four.x);
  if (valid & 2) use(four.y);
  if (valid & 4) use(four.z);
  if (valid & 8) use(four.w);
}

}  // namespace sparsellm
