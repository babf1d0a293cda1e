// pack_rows: copies each token's nonzeros out of the segments of the packed gate, so that they are contiguous. A warp
// copies one row. Each lane copies one segment at a time, except that all lanes together copy a wide segment.
//
// A long row (more than kRowCapacity nonzeros) is stored after all other rows. The 512 words that every row has then
// contain the long row's first 511 nonzeros and, in the last word, the index in plan.rows where the whole row starts.
// Long rows reserve their memory by adding to totals[kLongWords]. A long row for which no memory is left is not
// written; then tile_plan finds that this total exceeds long_capacity, and leaves every tile with a long row to the
// overflow path.
//
// If the packed gate lacks values of wide segments, these are zero here, and the overflow path computes all tokens.
//
// Numerics: values are only copied. The location of a long row may differ between runs; no result depends on it.
#include "common/host.h"
#include "common/twell.cuh"

namespace sparsellm {
namespace {

constexpr int kRowsThreads = 256;
constexpr int kRowsCtas = 6;  // minimum per SM: a warp waits for most of its loads, so many warps are needed

// Eight words of a segment: 32 bytes, one memory sector.
struct Sector {
  uint4 low, high;
};

// Loads sector `index` of the row's segment in column tile `tile`. Beyond the last column tile, it returns zeros, so
// that the count (word 0) is zero too.
__device__ __forceinline__ Sector load_sector(const Packed& packed, int64_t token, int column_tiles, int tile,
                                              uint32_t index) {
  Sector sector = {};
  if (tile < column_tiles) {
    const uint32_t* words =
        segment_of(packed, token, tile, column_tiles) + word_offset(index * kSectorWords, column_tiles);
    sector.low = reinterpret_cast<const uint4*>(words)[0];
    sector.high = reinterpret_cast<const uint4*>(words)[1];
  }
  return sector;
}

// A lane's share of a wide segment.
struct WideShare {
  uint32_t count;  // nonzeros of the segment
  uint32_t bits;   // bit i: column 8 lane + i of the segment is not zero
  uint4 values;    // nonzeros 8 lane .. 8 lane + 7 of the segment, as far as it has as many; zero if they are nowhere
};

__device__ __forceinline__ WideShare load_wide(const Packed& packed, const uint32_t* words, int column_tiles,
                                               uint32_t lane) {
  const uint2 head = *reinterpret_cast<const uint2*>(words);
  WideShare share = {head.x, reinterpret_cast<const uint8_t*>(words + word_offset(kSectorWords, column_tiles))[lane]};
  if (8 * lane < head.x && head.y != kNowhere) {
    share.values = static_cast<const uint4*>(packed.wide)[static_cast<uint64_t>(head.y) + lane];
  }
  return share;
}

// Writes a wide segment as packed words, each in two halves: half 2 i of the segment's list is the column of its word
// i, and half 2 i + 1 the value. So a lane's columns need not be those of its values, and it loads both at once. Calls
// put(half, bits). column: the segment's first column. Called by all lanes of a warp.
template <class Put>
__device__ __forceinline__ void put_halves(const WideShare& share, uint32_t column, uint32_t lane, Put put) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (8 * lane + i < share.count) put(2 * (8 * lane + i) + 1, half_of(share.values, i));
  }
  const uint32_t before = exclusive_scan(__popc(share.bits), lane);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (share.bits >> i & 1) put(2 * (before + __popc(share.bits & ((1u << i) - 1))), column + 8 * lane + i);
  }
}

// Calls put(i, word) for each i with the row's i-th nonzero, columns ascending; for the nonzeros of wide segments,
// put_half(2 i, column) and put_half(2 i + 1, value) instead. Called by all lanes of a warp. sector: the first sector
// of the row's segment in column tile `lane`.
template <class Put, class PutHalf>
__device__ __forceinline__ void for_each_of_row(const Packed& packed, int64_t token, int column_tiles, uint32_t lane,
                                                Sector sector, Put put, PutHalf put_half) {
  uint32_t done = 0;  // nonzeros in the column tiles before `first`
  for (int first = 0;;) {
    const int tile = first + lane;
    const uint32_t count = sector.low.x;
    const uint32_t at = done + exclusive_scan(count, lane);
    const bool fits = count < kTileWords;
    if (fits) {
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
        sector = load_sector(packed, token, column_tiles, tile, from / 8);
      }
    }
    __syncwarp();
    // All lanes together read the wide segments, one after another, with the loads of two in flight.
    for (uint32_t wide = __ballot_sync(~0u, !fits); wide != 0;) {
      constexpr int kLoads = 2;
      WideShare share[kLoads] = {};
      uint32_t ahead = wide;
#pragma unroll
      for (int i = 0; i < kLoads; ++i, ahead &= ahead - 1) {
        if (ahead == 0) break;
        const int from = __ffs(ahead) - 1;
        share[i] = load_wide(packed, segment_of(packed, token, first + from, column_tiles), column_tiles, lane);
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i, wide &= wide - 1) {
        if (wide == 0) break;
        const int from = __ffs(wide) - 1;
        const uint32_t to = __shfl_sync(~0u, at, from);
        put_halves(share[i], (first + from) * kColumnTile, lane,
                   [&](uint32_t half, uint32_t bits) { put_half(2 * to + half, bits); });
      }
    }
    first += 32;
    if (first >= column_tiles) return;
    done = __shfl_sync(~0u, at + count, 31);
    sector = load_sector(packed, token, column_tiles, first + lane, 0);
  }
}

__global__ void __launch_bounds__(kRowsThreads, kRowsCtas)
    pack_rows_kernel(const Packed packed, int64_t m, int64_t n, const TilePlan plan) {
  __shared__ uint4 staged[kRowsThreads / 32][kRowCapacity / 4];
  ptx::griddepcontrol_launch_dependents();
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column_tiles = static_cast<int>((n + kColumnTile - 1) / kColumnTile);
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (kRowsThreads / 32) + warp;
  ptx::griddepcontrol_wait();
  if (token >= m) return;
  const uint32_t count = packed.row_counts[token];
  const Sector sector = load_sector(packed, token, column_tiles, lane, 0);  // loaded without waiting for `count`
  uint32_t* own = plan.rows + token * kRowCapacity;
  if (count <= kRowCapacity) {
    uint32_t* row = reinterpret_cast<uint32_t*>(staged[warp]);
    for_each_of_row(
        packed, token, column_tiles, lane, sector, [&](uint32_t i, uint32_t word) { row[i] = word; },
        [&](uint32_t i, uint32_t bits) { reinterpret_cast<uint16_t*>(row)[i] = bits; });
    __syncwarp();
    // Whole sectors are stored; words after the last nonzero are undefined.
    for (uint32_t i = lane; i / 2 * 8 < count; i += 32) reinterpret_cast<uint4*>(own)[i] = staged[warp][i];
    return;
  }
  uint32_t before = 0;
  if (lane == 0) before = atomicAdd(reinterpret_cast<uint32_t*>(plan.totals) + kLongWords, count);
  before = __shfl_sync(~0u, before, 0);
  const int64_t start = m * kRowCapacity + before;
  if (lane == 0) own[kRowCapacity - 1] = start;
  const bool fits = static_cast<int64_t>(before) + count <= plan.long_capacity;
  uint32_t* whole = plan.rows + start;
  for_each_of_row(
      packed, token, column_tiles, lane, sector,
      [&](uint32_t i, uint32_t word) {
        if (i < kRowCapacity - 1) own[i] = word;
        if (fits) whole[i] = word;
      },
      [&](uint32_t i, uint32_t bits) {
        if (i / 2 < kRowCapacity - 1) reinterpret_cast<uint16_t*>(own)[i] = bits;
        if (fits) reinterpret_cast<uint16_t*>(whole)[i] = bits;
      });
}

}  // namespace

cudaError_t pack_rows(const Packed& packed, int64_t m, int64_t n, const TilePlan& plan, cudaStream_t stream) {
  if (m * kRowCapacity + plan.long_capacity > UINT32_MAX) return cudaErrorInvalidValue;  // words are counted in uint32
  return launch_early(pack_rows_kernel, ceil_div(m, kRowsThreads / 32), kRowsThreads, 0, 1, stream, packed, m, n, plan);
}

}  // namespace sparsellm
