// pack_rows: the nonzeros of each row side by side, out of its packed tiles. One warp to a row, one lane to a tile.
//
// A long row (more than kRowCapacity nonzeros) goes behind all others; its own place has what fits there, and at the
// end where the row is. If long rows have no room, plan.totals tells. Wide segments are left until a CTA's rows are done
// but for these, and dealt to all its warps.
#include "common/host.h"
#include "common/twell.cuh"

namespace sparsellm {
namespace {

constexpr int kRowsThreads = 256;
constexpr int kRowsWarps = kRowsThreads / 32;
constexpr int kRowsCtas = 6;  // per SM, at least: each warp waits for one load after the other

// Eight words of a segment: what memory is read in.
struct Sector {
  uint4 low, high;
};

// Sector `index` of the row's segment in tile `tile`; all zeros, and so a count of none, behind the last tile.
__device__ __forceinline__ Sector load_sector(const Packed& packed, int64_t token, int column_tiles, int tile,
                                              int words_per_tile, uint32_t index) {
  Sector sector = {};
  if (tile < column_tiles) {
    const uint32_t* words = segment_of(packed, token, tile, column_tiles, words_per_tile) +
                            word_offset(index * kSectorWords, column_tiles);
    sector.low = reinterpret_cast<const uint4*>(words)[0];
    sector.high = reinterpret_cast<const uint4*>(words)[1];
  }
  return sector;
}

// Calls put(i, word) with the row's i-th nonzero, columns ascending, for all i that are not in wide segments; a warp
// together. sector: the first of tile `lane`. Returns whether this lane has seen a wide segment.
template <class Put>
__device__ __forceinline__ bool put_words(const Packed& packed, int64_t token, int column_tiles, int words_per_tile,
                                          uint32_t lane, Sector sector, Put put) {
  bool wide = false;
  uint32_t done = 0;  // nonzeros in the tiles before
  for (int first = 0;;) {
    const int tile = first + lane;
    const uint32_t count = sector.low.x;
    const uint32_t before = exclusive_scan(count, lane);
    const uint32_t at = done + before;
    if (count < static_cast<uint32_t>(words_per_tile)) {
      for (uint32_t from = 0;;) {
        const uint32_t words[8] = {sector.low.x,  sector.low.y,  sector.low.z,  sector.low.w,
                                   sector.high.x, sector.high.y, sector.high.z, sector.high.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const uint32_t nth = from + i;  // word 0 is the count
          if (nth != 0 && nth <= count) put(at + nth - 1, words[i]);
        }
        from += 8;
        if (from > count) break;
        sector = load_sector(packed, token, column_tiles, tile, words_per_tile, from / 8);
      }
    } else {
      wide = true;
    }
    first += 32;
    if (first >= column_tiles) return wide;
    done += __shfl_sync(~0u, before + count, 31);
    sector = load_sector(packed, token, column_tiles, first + lane, words_per_tile, 0);
  }
}

// The same with the nonzeros in wide segments, of which each warp of the CTA takes its share, a lane eight columns.
template <class Put>
__device__ __forceinline__ void put_wide(const Packed& packed, int64_t token, int64_t n, int column_tiles,
                                         int words_per_tile, uint32_t warp, uint32_t lane, Put put) {
  uint32_t done = 0, nth = 0;
  for (int first = 0; first < column_tiles; first += 32) {
    const int mine = first + lane;
    const uint32_t count =
        mine < column_tiles ? *segment_of(packed, token, mine, column_tiles, words_per_tile) : 0;
    const uint32_t before = exclusive_scan(count, lane);
    uint32_t wide = __ballot_sync(~0u, count >= static_cast<uint32_t>(words_per_tile));
    for (; wide != 0; wide &= wide - 1) {
      if (nth++ % kRowsWarps != warp) continue;
      const int tile = __ffs(wide) - 1;
      const uint32_t column = (first + tile) * kColumnTile + 8 * lane;
      uint4 eight = make_uint4(0, 0, 0, 0);
      if (column < n) {
        eight = *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(packed.wide) + token * n + column);
      }
      const uint32_t bits = nonzero_bits(eight);
      const uint32_t at = done + __shfl_sync(~0u, before, tile) + exclusive_scan(__popc(bits), lane);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (bits >> i & 1) put(at + __popc(bits & ((1u << i) - 1)), pack_word(half_of(eight, i), column + i));
      }
    }
    done += __shfl_sync(~0u, before + count, 31);
  }
}

// A row of a CTA, as all its warps see it.
struct Row {
  uint32_t count;
  bool has_wide, fits;  // fits: a long row has room
  uint32_t start;       // of a long row, behind all others
};

__global__ void __launch_bounds__(kRowsThreads, kRowsCtas)
    pack_rows_kernel(const Packed packed, int64_t m, int64_t n, int words_per_tile, const TilePlan plan) {
  __shared__ alignas(16) uint32_t staged[kRowsWarps][kRowCapacity];  // those of rows that are not long
  __shared__ Row rows[kRowsWarps];
  ptx::griddepcontrol_launch_dependents();
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column_tiles = static_cast<int>((n + kColumnTile - 1) / kColumnTile);
  const int64_t first_token = static_cast<int64_t>(blockIdx.x) * kRowsWarps, token = first_token + warp;
  const auto own = [&](int64_t token) { return plan.rows + token * kRowCapacity; };
  const auto put_long = [&](uint32_t* own, const Row& row, uint32_t i, uint32_t word) {
    if (i < kRowCapacity - 1) own[i] = word;
    if (row.fits) plan.rows[row.start + i] = word;
  };
  ptx::griddepcontrol_wait();
  Row row = {};
  if (token < m) {
    row.count = packed.row_counts[token];
    const Sector sector = load_sector(packed, token, column_tiles, lane, words_per_tile, 0);  // before count is known
    if (row.count <= kRowCapacity) {
      row.has_wide = put_words(packed, token, column_tiles, words_per_tile, lane, sector,
                               [&](uint32_t i, uint32_t word) { staged[warp][i] = word; });
    } else {
      uint32_t before = 0;
      if (lane == 0) before = atomicAdd(reinterpret_cast<uint32_t*>(plan.totals) + kLongWords, row.count);
      before = __shfl_sync(~0u, before, 0);
      row.start = static_cast<uint32_t>(m * kRowCapacity) + before;
      row.fits = static_cast<int64_t>(before) + row.count <= plan.long_capacity;
      if (lane == 0) own(token)[kRowCapacity - 1] = row.start;
      row.has_wide = put_words(packed, token, column_tiles, words_per_tile, lane, sector,
                               [&](uint32_t i, uint32_t word) { put_long(own(token), row, i, word); });
    }
  }
  row.has_wide = __any_sync(~0u, row.has_wide);
  if (lane == 0) rows[warp] = row;
  if (__syncthreads_or(row.has_wide)) {  // one warp would take long for a row with many
    for (int r = 0; r < kRowsWarps; ++r) {
      const Row& of = rows[r];
      if (!of.has_wide) continue;
      put_wide(packed, first_token + r, n, column_tiles, words_per_tile, warp, lane, [&](uint32_t i, uint32_t word) {
        if (of.count <= kRowCapacity) {
          staged[r][i] = word;
        } else {
          put_long(own(first_token + r), of, i, word);
        }
      });
    }
    __syncthreads();
  }
  const uint32_t count = rows[warp].count;
  if (count > kRowCapacity) return;
  // Whole sectors: what is behind the last nonzero is undefined.
  const uint4* quads = reinterpret_cast<const uint4*>(staged[warp]);
  for (uint32_t i = lane; i / 2 * 8 < count; i += 32) reinterpret_cast<uint4*>(own(token))[i] = quads[i];
}

}  // namespace

cudaError_t pack_rows(const Packed& packed, int64_t m, int64_t n, int words_per_tile, const TilePlan& plan,
                      cudaStream_t stream) {
  if (m * kRowCapacity + plan.long_capacity > UINT32_MAX) return cudaErrorInvalidValue;  // words are counted in uint32
  return launch_early(pack_rows_kernel, ceil_div(m, kRowsWarps), kRowsThreads, 0, 1, stream, packed, m, n,
                      words_per_tile, plan);
}

}  // namespace sparsellm
