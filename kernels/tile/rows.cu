// pack_rows: the nonzeros of each row side by side, out of its packed tiles. One warp to a row, one lane to a tile.
//
// A long row (more than kRowCapacity nonzeros) goes behind all others; its own place has what fits there, and at the
// end where the row is. If long rows have no room, plan.totals tells.
#include "common/host.h"
#include "common/twell.cuh"

namespace sparsellm {
namespace {

constexpr int kRowsThreads = 256;

// Calls put(i, word) with the row's i-th nonzero, columns ascending, for all i; a warp together.
template <class Put>
__device__ __forceinline__ void for_each_of_row(const Packed& packed, int64_t token, int64_t n, int words_per_tile,
                                                uint32_t lane, Put put) {
  const int column_tiles = static_cast<int>((n + kColumnTile - 1) / kColumnTile);
  uint32_t done = 0;  // nonzeros in the tiles before
  for (int first = 0; first < column_tiles; first += 32) {
    const int tile = first + lane;
    const uint32_t* words = packed.words + (token * column_tiles + tile) * words_per_tile;
    uint4 low = make_uint4(0, 0, 0, 0), high = low;
    if (tile < column_tiles) {
      low = reinterpret_cast<const uint4*>(words)[0];
      high = reinterpret_cast<const uint4*>(words)[1];
    }
    const uint32_t count = low.x;
    const uint32_t before = exclusive_scan(count, lane);
    uint32_t at = done + before;
    done += __shfl_sync(~0u, before + count, 31);
    if (count < static_cast<uint32_t>(words_per_tile)) {
      const uint32_t seven[7] = {low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < 7; ++i) {
        if (i < count) put(at + i, seven[i]);
      }
      for (uint32_t i = 8; i <= count; ++i) put(at + i - 1, words[i]);
    } else {
      const uint32_t column = tile * kColumnTile;
      const auto segment = static_cast<const __nv_bfloat16*>(packed.wide) + token * n + column;
      for (uint32_t c = 0; c < kColumnTile && column + c < n; c += 8) {
        const uint4 v = *reinterpret_cast<const uint4*>(segment + c);
        for (uint32_t rest = nonzero_bits(v); rest != 0; rest &= rest - 1) {
          const int i = __ffs(rest) - 1;
          put(at++, pack_word(half_of(v, i), column + c + i));
        }
      }
    }
  }
}

__global__ void __launch_bounds__(kRowsThreads)
    pack_rows_kernel(const Packed packed, int64_t m, int64_t n, int words_per_tile, const TilePlan plan) {
  __shared__ uint32_t staged[kRowsThreads / 32][kRowCapacity];
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const uint32_t lane = threadIdx.x % 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (kRowsThreads / 32) + threadIdx.x / 32;
  if (token >= m) return;
  const uint32_t count = packed.row_counts[token];
  uint32_t* own = plan.rows + token * kRowCapacity;
  if (count <= kRowCapacity) {
    uint32_t* row = staged[threadIdx.x / 32];
    for_each_of_row(packed, token, n, words_per_tile, lane, [&](uint32_t i, uint32_t word) { row[i] = word; });
    __syncwarp();
    for (uint32_t i = lane; i < count; i += 32) own[i] = row[i];
    return;
  }
  uint32_t before = 0;
  if (lane == 0) before = atomicAdd(reinterpret_cast<uint32_t*>(plan.totals) + kLongWords, count);
  before = __shfl_sync(~0u, before, 0);
  const int64_t start = m * kRowCapacity + before;
  if (lane == 0) own[kRowCapacity - 1] = start;
  const bool fits = static_cast<int64_t>(before) + count <= plan.long_capacity;
  for_each_of_row(packed, token, n, words_per_tile, lane, [&](uint32_t i, uint32_t word) {
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
