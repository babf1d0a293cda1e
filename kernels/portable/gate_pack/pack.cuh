// Packs finished tiles for gate_pack's kernels for few tokens (small.cuh, fewest.cuh).
#pragma once

#include "common/host.h"
#include "common/twell.cuh"

namespace sparsellm {

// A CTA's contribution to the counters, in shared memory.
struct Sums {
  uint32_t counts[kCounters];

  __device__ __forceinline__ void clear(uint32_t lane) {
    if (lane < kCounters) counts[lane] = 0;
  }
};

// Packs the segments of four tokens in one column tile. Called by all lanes of a warp. Lanes 8 r .. 8 r + 7 pass the
// same `token`, which is the r-th of the four; `some` is false if that token does not exist. chunks, kApart, the result
// and `seen` are those of pack_four_rows. counts: whether to add to row_counts and to the CTA's sums.
template <uint32_t kApart>
__device__ __forceinline__ uint32_t pack_tokens(uint32_t chunks, int token, bool some, uint32_t lane, int64_t n,
                                                int column_tile, int column_tiles, const Packed& out, Sums& sums,
                                                bool counts) {
  uint32_t seen = 0;
  const uint32_t column = column_tile * kColumnTile;
  uint32_t* words = segment_of(out, token, column_tile, column_tiles);
  const uint32_t count = pack_four_rows<kApart>(
      chunks, some, lane, column, n, column_tiles, words, out.wide,
      [&](uint32_t) { return own_values(token, n, column); }, seen);
  const bool tells = some && lane % 8 == 0;
  if (tells) {
    words[0] = count;
    tile_counts(out)[column_tile * kCountedTokens + token] = count;
    if (counts && count != 0) atomicAdd(out.row_counts + token, static_cast<int>(count));
  }
  if (counts) {
    const uint32_t nonzeros = __reduce_add_sync(~0u, tells ? count : 0);
    const uint32_t wide_segments = __popc(__ballot_sync(~0u, tells && count >= kTileWords));
    if (lane == 0) {
      atomicAdd(sums.counts + kNonzeros, nonzeros);
      atomicAdd(sums.counts + kWideSegments, wide_segments);
    }
  }
  return seen;
}

// Adds a CTA's sums to the counters. Called by all lanes of a warp.
__device__ __forceinline__ void add_counts(const Packed& out, const Sums& sums, uint32_t lane) {
  const uint32_t more = lane < kCounters ? sums.counts[lane] : 0;
  if (more != 0) atomicAdd(reinterpret_cast<unsigned long long*>(out.counters) + lane, more);
}

}  // namespace sparsellm
