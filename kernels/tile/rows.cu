// pack_rows: the nonzeros of each row side by side, out of its packed tiles. One warp to a row, one lane to a tile.
//
// A long row (more than kRowCapacity nonzeros) goes behind all others; its own place has what fits there, and at the
// end where the row is. If long rows have no room, plan.totals tells.
#include "common/host.h"
#include "common/twell.cuh"

namespace sparsellm {
namespace {

constexpr int kRowsThreads = 256;
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
    const uint32_t* words = packed.words + (token * column_tiles + tile) * words_per_tile;
    sector.low = reinterpret_cast<const uint4*>(words)[2 * index];
    sector.high = reinterpret_cast<const uint4*>(words)[2 * index + 1];
  }
  return sector;
}

// Calls put(i, word) with the row's i-th nonzero, columns ascending, for all i; a warp together. sector: the first of
// tile `lane`.
template <class Put>
__device__ __forceinline__ void for_each_of_row(const Packed& packed, int64_t token, int64_t n, int column_tiles,
                                                int words_per_tile, uint32_t lane, Sector sector, Put put) {
  uint32_t done = 0;  // nonzeros in the tiles before
  for (int first = 0;;) {
    const int tile = first + lane;
    const uint32_t count = sector.low.x;
    const uint32_t before = exclusive_scan(count, lane);
    uint32_t at = done + before;
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
      const uint32_t column = tile * kColumnTile;
      const auto wide = static_cast<const __nv_bfloat16*>(packed.wide) + token * n + column;
      for (uint32_t c = 0; c < kColumnTile && column + c < n; c += 8) {
        const uint4 v = *reinterpret_cast<const uint4*>(wide + c);
        for (uint32_t rest = nonzero_bits(v); rest != 0; rest &= rest - 1) {
          const int i = __ffs(rest) - 1;
          put(at++, pack_word(half_of(v, i), column + c + i));
        }
      }
    }
    first += 32;
    if (first >= column_tiles) return;
    done += __shfl_sync(~0u, before + count, 31);
    sector = load_sector(packed, token, column_tiles, first + lane, words_per_tile, 0);
  }
}

__global__ void __launch_bounds__(kRowsThreads, kRowsCtas)
    pack_rows_kernel(const Packed packed, int64_t m, int64_t n, int words_per_tile, const TilePlan plan) {
  __shared__ uint4 staged[kRowsThreads / 32][kRowCapacity / 4];
  ptx::griddepcontrol_launch_dependents();
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column_tiles = static_cast<int>((n + kColumnTile - 1) / kColumnTile);
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (kRowsThreads / 32) + warp;
  ptx::griddepcontrol_wait();
  if (token >= m) return;
  const uint32_t count = packed.row_counts[token];
  const Sector sector = load_sector(packed, token, column_tiles, lane, words_per_tile, 0);  // before count is known
  uint32_t* own = plan.rows + token * kRowCapacity;
  if (count <= kRowCapacity) {
    uint32_t* row = reinterpret_cast<uint32_t*>(staged[warp]);
    for_each_of_row(packed, token, n, column_tiles, words_per_tile, lane, sector,
                    [&](uint32_t i, uint32_t word) { row[i] = word; });
    __syncwarp();
    // Whole sectors: what is behind the last nonzero is undefined.
    for (uint32_t i = lane; i / 2 * 8 < count; i += 32) reinterpret_cast<uint4*>(own)[i] = staged[warp][i];
    return;
  }
  uint32_t before = 0;
  if (lane == 0) before = atomicAdd(reinterpret_cast<uint32_t*>(plan.totals) + kLongWords, count);
  before = __shfl_sync(~0u, before, 0);
  const int64_t start = m * kRowCapacity + before;
  if (lane == 0) own[kRowCapacity - 1] = start;
  const bool fits = static_cast<int64_t>(before) + count <= plan.long_capacity;
  for_each_of_row(packed, token, n, column_tiles, words_per_tile, lane, sector, [&](uint32_t i, uint32_t word) {
    if (i < kRowCapacity - 1) own[i] = word;
    if (fits) plan.rows[start + i] = word;
  });
}

}  // namespace

cudaError_t pack_rows(const Packed& packed, int64_t m, int64_t n, int words_per_tile, const TilePlan& plan,
                      cudaStream_t stream) {
  if (m * kRowCapacity + plan.long_capacity > UINT32_MAX) return cudaErrorInvalidValue;  // words are counted in uint32
  return launch_early(pack_rows_kernel, ceil_div(m, kRowsThreads / 32), kRowsThreads, 0, 1, stream, packed, m, n,
                      words_per_tile, plan);
}

}  // namespace sparsellm
