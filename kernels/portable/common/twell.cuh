// The packed format's arithmetic, shared by its writers and readers. kernels/README.md describes the format.
#pragma once

#include "common/ptx.cuh"
#include "launch.h"

namespace sparsellm {

__device__ __forceinline__ uint32_t pack_word(uint32_t bf16_bits, uint32_t column) { return bf16_bits << 16 | column; }

// The number of nonzeros of every segment, for packed gates of up to kCountedTokens tokens: [NT, kCountedTokens].
// Entries of tokens from M on are undefined.
__device__ __forceinline__ uint16_t* tile_counts(const Packed& packed) {
  return reinterpret_cast<uint16_t*>(packed.row_counts + kCountedTokens);
}

// segment_of is the address of a segment, which is one token's words of one column tile. word_offset is the distance
// from there to the segment's word `index`. Eight words of a segment are contiguous; the next eight come after the
// first eight words of all the token's segments. With 10 column tiles, word 9 is at offset 80 + 1.
__device__ __forceinline__ uint32_t* segment_of(const Packed& packed, int64_t token, int tile, int column_tiles) {
  return packed.words + token * (column_tiles * kTileWords) + tile * kSectorWords;
}
__device__ __forceinline__ uint32_t word_offset(uint32_t index, int column_tiles) {
  return index / kSectorWords * (column_tiles * kSectorWords) + index % kSectorWords;
}

// Element i (0..7) of eight bf16 values.
__device__ __forceinline__ uint32_t half_of(const uint4& v, int i) {
  const uint32_t w = i < 2 ? v.x : i < 4 ? v.y : i < 6 ? v.z : v.w;
  return i & 1 ? w >> 16 : w & 0xffff;
}

// Sets all 16 bits of each bf16 value of a pair that is not zero, and clears all bits of a zero. NaN counts as nonzero,
// -0.0 as zero.
__device__ __forceinline__ uint32_t nonzero_halves(uint32_t pair) {
  return __hneu2_mask(reinterpret_cast<const __nv_bfloat162&>(pair), __nv_bfloat162(0.0f, 0.0f));
}

// Sets bit i if bf16 value i of eight is not zero.
__device__ __forceinline__ uint32_t nonzero_bits(const uint4& v) {
  const uint32_t spread = (nonzero_halves(v.x) & 0x00010001) | (nonzero_halves(v.y) & 0x00040004) |
                          (nonzero_halves(v.z) & 0x00100010) | (nonzero_halves(v.w) & 0x00400040);
  return (spread | spread >> 15) & 0xff;
}

// Sets bit 8 j + i if bf16 value i of v[j] is not zero.
__device__ __forceinline__ uint32_t nonzero_bits(const uint4 (&v)[4]) {
  uint32_t spread[2] = {};  // [j / 2] low 16 bits: even values of v[j]; high 16 bits: odd values
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t pairs[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
#pragma unroll
    for (int q = 0; q < 4; ++q) spread[j / 2] |= nonzero_halves(pairs[q]) & 0x00020001u << (8 * (j % 2) + 2 * q);
  }
  return __byte_perm(spread[0] | spread[0] >> 16, spread[1] | spread[1] >> 16, 0x5410);
}

// Byte b of the result is the number of bits that are set in byte b of v.
__device__ __forceinline__ uint32_t popc_bytes(uint32_t v) {
  v -= v >> 1 & 0x55555555;
  v = (v & 0x33333333) + (v >> 2 & 0x33333333);
  return (v + (v >> 4)) & 0x0f0f0f0f;
}

// Returns the sum of the values in all lower lanes: values 2, 0, 3, ... give 0, 2, 2, 5, ...
__device__ __forceinline__ uint32_t exclusive_scan(uint32_t value, uint32_t lane) {
  uint32_t sum = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, sum, offset);
    if (lane >= offset) sum += other;
  }
  return sum - value;
}

// Packs the segments of four rows in one column tile. Called by all lanes of a warp. Lanes 8 r .. 8 r + 7 have row r of
// the four; lane s of these eight has columns first + 64 j + 8 s .. + 7 for j = 0..3. For example, lane 10 has columns
// 16 to 23, 80 to 87, 144 to 151 and 208 to 215 of row 1.
// chunks: the shared address of the lane's columns for j = 0; its columns for other j are kApart j bytes further. The
// function writes all words of the segment except word 0, and returns the count that belongs there. If the nonzeros do
// not fit in the segment's words, it writes the row's 256 values to `wide`, which points to the row's column `first`,
// instead. It writes nothing for a row for which `some` is false, and nothing for columns >= n. It sets bit 8 j + i of
// `seen` if column i of the lane's eight columns for j is not zero.
template <uint32_t kApart = 128>
__device__ __forceinline__ uint32_t pack_four_rows(uint32_t chunks, bool some, uint32_t lane, uint32_t first, int64_t n,
                                                   int column_tiles, uint32_t* words, __nv_bfloat16* wide,
                                                   uint32_t& seen) {
  const uint32_t column = first + 8 * (lane % 8);
  uint4 v[4];
  uint32_t there = 0;  // Columns from n on are masked: w is zero there, but zero times an infinite x is NaN.
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    v[j] = ptx::ld_shared_v4(chunks + kApart * j);
    there |= column + 64 * j < n ? 0xffu << 8 * j : 0;
  }
  const uint32_t bits = nonzero_bits(v) & (some ? there : 0);
  if (!__any_sync(~0u, bits != 0)) return 0;
  seen |= bits;
  const uint32_t mine = popc_bytes(bits);  // byte j: the lane's number of nonzeros for j
  uint32_t sums = mine;
#pragma unroll
  for (int offset = 1; offset < 8; offset *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, sums, offset, 8);
    if (lane % 8 >= offset) sums += other;
  }
  const uint32_t totals = __shfl_sync(~0u, sums, 7, 8);  // at most 64 per byte
  const uint32_t count = __dp4a(totals, 0x01010101u, 0u);
  if (count < kTileWords) {
    uint32_t at = sums - mine + totals * 0x01010100u;  // byte j: how many nonzeros of the row come before the lane's
                                                       // first one for j
    for (uint32_t rest = bits; rest != 0; rest &= rest - 1) {
      const uint32_t bit = __ffs(rest) - 1, shift = bit & 24, i = bit & 7;
      const uint32_t value = ptx::ld_shared_u16(chunks + kApart / 8 * shift + 2 * i);
      words[word_offset(1 + (at >> shift & 0xff), column_tiles)] = pack_word(value, column + 8 * shift + i);
      at += 1u << shift;
    }
  } else {
#pragma unroll 1
    for (int j = 0; j < 4; ++j) {
      if (column + 64 * j < n) {
        ptx::st_global_v4(wide + 8 * (lane % 8) + 64 * j, ptx::ld_shared_v4(chunks + kApart * j));
      }
    }
  }
  return count;
}

// Sets the bits of the columns that fire, given by `seen` from pack_four_rows, in a bit mask of 256 columns in shared
// memory. Called by all lanes of a warp.
__device__ __forceinline__ void add_fired(uint32_t* fired, uint32_t seen, uint32_t lane) {
  seen |= __shfl_xor_sync(~0u, seen, 8);
  seen |= __shfl_xor_sync(~0u, seen, 16);
  const uint32_t mine = seen >> lane / 8 * 8 & 0xff;
  if (mine != 0) atomicOr(fired + lane / 8 * 2 + lane % 8 / 4, mine << lane % 4 * 8);
}

}  // namespace sparsellm
