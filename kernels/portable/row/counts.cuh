// How row_cluster reads the packed gate: it lists a row's nonzeros and, for few tokens, computes the counts that
// gate_pack leaves to row_cluster.
#pragma once

#include "row/common.cuh"

namespace sparsellm::row {

// Lists nonzeros first .. last - 1 of the row at list[0..], columns ascending, as list_nonzeros does. This function is
// faster if only one warp of a CTA lists: each lane has a column tile of its own, and one scan serves 32 column tiles.
__device__ __forceinline__ void list_at_once(const Packed& packed, int64_t row, int64_t n, uint32_t first,
                                             uint32_t last, uint32_t lane, uint32_t* list) {
  const int tiles = static_cast<int>((n + kColumnTile - 1) / kColumnTile);
  const uint32_t size = last - first;
  uint32_t seen = 0;  // nonzeros in earlier column tiles
  for (int start = 0; start < tiles && seen < last; start += 32) {
    const uint32_t* words = segment_of(packed, row, start + lane, tiles);
    uint4 v[4];  // the first 16 words of a segment
    v[0].x = 0;
    if (start + static_cast<int>(lane) < tiles) {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = *reinterpret_cast<const uint4*>(words + word_offset(4 * i, tiles));
    }
    const uint32_t count = v[0].x;
    const uint32_t base = seen + exclusive_scan(count, lane);  // number of the row's nonzeros before this column tile
    seen = __shfl_sync(~0u, base + count, 31);
    const bool wanted = count != 0 && base < last && base + count > first;
    const bool fits = count < kTileWords;
    if (wanted && fits) {
      const auto put = [&](uint32_t index, const uint4& four) {  // word 0 is the count: its `at` wraps around
        const uint32_t of_four[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t at = index + i - 1;
          if (at < count && base + at - first < size) list[base + at - first] = of_four[i];
        }
      };
      put(0, v[0]), put(4, v[1]);
      if (count >= 8) put(8, v[2]), put(12, v[3]);
#pragma unroll 1  // segments with 16 or more nonzeros are rare
      for (uint32_t index = 16; index <= count; index += 4) {
        put(index, *reinterpret_cast<const uint4*>(words + word_offset(index, tiles)));
      }
    }
    for (uint32_t rest = __ballot_sync(~0u, wanted && !fits); rest != 0; rest &= rest - 1) {
      const int source = __ffs(rest) - 1;
      list_wide(packed, row, tiles, start + source, __shfl_sync(~0u, base, source), first, size, lane, list);
    }
  }
}

// Sets count[0] and count[1] to the number of nonzeros of rows 2 lane and 2 lane + 1, from the column tiles' counts;
// rows from m on have none.
__device__ __forceinline__ void count_rows(const Packed& packed, int m, int64_t n, uint32_t lane,
                                           uint32_t (&count)[2]) {
  const int tiles = static_cast<int>((n + kColumnTile - 1) / kColumnTile);
  // Lane 8 t + s sums rows 8 s .. 8 s + 7 over column tiles t, t + 4, ..., with two rows' sums in each word. No sum
  // carries into the other row's: of the at most 256 column tiles, a lane has 64, with up to 16,384 nonzeros, and the
  // first addition of another lane's sum gives up to 32,768. The sum over all 65,536 columns would not fit in 16 bits,
  // so the two rows are separated before the last addition.
  uint32_t pairs[4] = {};
  const uint4* eight = reinterpret_cast<const uint4*>(tile_counts(packed)) + lane;
  for (int first = 0; first < tiles; first += 32) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint4 v = first + 4 * i + static_cast<int>(lane / 8) < tiles ? eight[32 * (first / 4 + i)] : uint4{};
      pairs[0] += v.x, pairs[1] += v.y, pairs[2] += v.z, pairs[3] += v.w;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] += __shfl_xor_sync(~0u, pairs[i], 8);
    const uint32_t p = __shfl_sync(~0u, pairs[i], lane / 4), q = __shfl_sync(~0u, pairs[i], lane / 4 + 16);
    if (static_cast<int>(lane % 4) == i) {
      count[0] = (p & 0xffff) + (q & 0xffff);
      count[1] = (p >> 16) + (q >> 16);
    }
  }
  const int rows = m - 2 * static_cast<int>(lane);
  if (rows < 1) count[0] = 0;
  if (rows < 2) count[1] = 0;
}

// Computes the counters from the column tiles' counts and masks. Called by all lanes of a warp.
__device__ __forceinline__ void count_all(const Packed& packed, int m, int64_t n, uint32_t lane) {
  const int tiles = static_cast<int>((n + kColumnTile - 1) / kColumnTile);
  uint32_t nonzeros = 0, wide_segments = 0, in_union = 0;
  const uint32_t* pairs = reinterpret_cast<const uint32_t*>(tile_counts(packed)) + lane;  // rows 2 lane and 2 lane + 1
  const int rows = m - 2 * static_cast<int>(lane);
#pragma unroll 8
  for (int tile = 0; tile < tiles; ++tile) {
    const uint32_t pair = rows > 0 ? pairs[tile * (kCountedTokens / 2)] : 0;
    const uint32_t even = pair & 0xffff, odd = rows > 1 ? pair >> 16 : 0;
    nonzeros += even + odd;
    wide_segments += (even >= kTileWords) + (odd >= kTileWords);
  }
  for (int i = lane; i < 2 * tiles; i += 32) {
    const uint4 mask = reinterpret_cast<const uint4*>(packed.mask)[i];
    in_union += __popc(mask.x) + __popc(mask.y) + __popc(mask.z) + __popc(mask.w);
  }
  nonzeros = __reduce_add_sync(~0u, nonzeros);
  wide_segments = __reduce_add_sync(~0u, wide_segments);
  in_union = __reduce_add_sync(~0u, in_union);
  if (lane == 0) {
    packed.counters[kNonzeros] = nonzeros;
    packed.counters[kWideSegments] = wide_segments;
    packed.counters[kUnion] = in_union;
  }
}

}  // namespace sparsellm::row
