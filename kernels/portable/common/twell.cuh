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

// A wide segment has more nonzeros than words. Its word 1 is where its values start in Packed::wide, in units of eight
// values, columns ascending; bit c of its words 8 to 15 is set if column c of its 256 is not zero.
constexpr uint32_t kNowhere = ~0u;  // the start of values for which `wide` has no memory left

// Where the values start if each segment has the memory of its columns in a matrix [M, N]. This is so in gate_pack for
// up to kFewTokens tokens, and in pack_product.
__device__ __forceinline__ uint32_t own_values(int64_t token, int64_t n, uint32_t column) {
  return static_cast<uint32_t>((token * n + column) / 8);
}

// Reserves memory for values, for all other calls. Called by all lanes of a warp. Lanes 8 r .. 8 r + 7 pass row r's
// number of nonzeros in a segment, and get where its values start if the segment is wide.
__device__ __forceinline__ uint32_t reserve_values(const Packed& out, uint32_t count, uint32_t lane) {
  uint32_t start = kNowhere;
  if (lane % 8 == 0 && count >= kTileWords) {
    const uint32_t units = (count + 7) / 8;
    const auto before = atomicAdd(reinterpret_cast<unsigned long long*>(out.counters) + kWideUnits, units);
    if (8 * (before + units) <= static_cast<unsigned long long>(out.wide_values)) start = before;
  }
  return __shfl_sync(~0u, start, lane & ~7u);
}

// Whether `wide` has the values of all wide segments. If not, which of them it lacks may differ between runs, so no
// result may depend on any of them.
__device__ __forceinline__ bool wide_fits(const Packed& packed) {
  return 8 * packed.counters[kWideUnits] <= packed.wide_values;
}

// Packs the segments of four rows in one column tile. Called by all lanes of a warp. Lanes 8 r .. 8 r + 7 have row r of
// the four; lane s of these eight has columns first + 64 j + 8 s .. + 7 for j = 0..3. For example, lane 10 has columns
// 16 to 23, 80 to 87, 144 to 151 and 208 to 215 of row 1.
// chunks: the shared address of the lane's columns for j = 0; its columns for other j are kApart j bytes further. The
// function writes all words of the segment except word 0, and returns the count that belongs there. If the segment is
// wide, reserve(count) says where its values start; it is called by all lanes, as soon as one of the rows is wide. The
// function writes nothing for a row for which `some` is false, and nothing for columns >= n. It sets bit 8 j + i of
// `seen` if column i of the lane's eight columns for j is not zero.
template <uint32_t kApart = 128, class Reserve>
__device__ __forceinline__ uint32_t pack_four_rows(uint32_t chunks, bool some, uint32_t lane, uint32_t first, int64_t n,
                                                   int column_tiles, uint32_t* words, void* wide, Reserve reserve,
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
  const bool is_wide = count >= kTileWords;
  const uint32_t start = __any_sync(~0u, is_wide) ? reserve(count) : kNowhere;
  uint32_t at = sums - mine + totals * 0x01010100u;  // byte j: how many nonzeros of the row come before the lane's
                                                     // first one for j
  const auto for_each = [&](auto put) {
    for (uint32_t rest = bits; rest != 0; rest &= rest - 1) {
      const uint32_t bit = __ffs(rest) - 1, shift = bit & 24, i = bit & 7;
      put(at >> shift & 0xff, ptx::ld_shared_u16(chunks + kApart / 8 * shift + 2 * i), column + 8 * shift + i);
      at += 1u << shift;
    }
  };
  if (!is_wide) {
    for_each([&](uint32_t nth, uint32_t value, uint32_t at_column) {
      words[word_offset(1 + nth, column_tiles)] = pack_word(value, at_column);
    });
  } else {
    if (lane % 8 == 0) words[1] = start;
    uint8_t* mask = reinterpret_cast<uint8_t*>(words + word_offset(kSectorWords, column_tiles)) + lane % 8;
#pragma unroll
    for (int j = 0; j < 4; ++j) mask[8 * j] = bits >> 8 * j;
    if (start != kNowhere) {
      uint16_t* values = static_cast<uint16_t*>(wide) + 8 * static_cast<int64_t>(start);
      for_each([&](uint32_t nth, uint32_t value, uint32_t) { values[nth] = value; });
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
