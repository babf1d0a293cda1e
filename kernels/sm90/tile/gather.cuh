// How tile_spmm and tile_weights fill B of a stage: with 64 rows gathered from a matrix, 256 of its columns, MN-major
// in panels of 64 columns.
#pragma once

#include "common/tile.cuh"
#include "tile/plan.cuh"

namespace sparsellm {

constexpr uint32_t kPanelBytes = kTileK * 128;
constexpr int kThreadRows = 4;  // neighbouring rows per thread; the thread copies one 16-byte chunk per row and panel

// The chunks that one thread of the four gather warps copies. With one instruction, a warp copies 128 bytes of each of
// four rows. The instructions that compute addresses limit the speed of the copies, so a thread computes only one
// address per row: a row's panels are at constant distances in both global and shared memory.
struct Gather {
  int first_row;
  uint32_t place[kThreadRows];

  __device__ __forceinline__ Gather(int warp, uint32_t lane)
      : first_row(warp * (kTileK / kGatherWarps) + static_cast<int>(lane) / 8 * kThreadRows) {
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) place[r] = swizzle_128(first_row + r, lane % 8);
  }

  // This thread's first column among a unit's 256 columns.
  static __device__ __forceinline__ int64_t column_of(int column_tile, uint32_t lane) {
    return static_cast<int64_t>(column_tile) * kTileN + lane % 8 * 8;
  }

  // Copies rows `rows` of a bf16 matrix of k columns, from `column` on, to the stage at `to`. Columns from `end` on are
  // filled with zeros.
  __device__ __forceinline__ void copy(uint32_t to, const void* matrix, const uint32_t (&rows)[kThreadRows],
                                       int64_t column, int64_t k, int64_t end) const {
    const uint8_t* source = static_cast<const uint8_t*>(matrix) + 2 * column;
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      const uint8_t* from = source + static_cast<uint64_t>(rows[r]) * (static_cast<uint32_t>(k) * 2);
#pragma unroll
      for (int p = 0; p < kTileN / 64; ++p) {
        ptx::cp_async_16_or_zeros(to + place[r] + p * kPanelBytes, from + p * 128, column + 64 * p < end ? 16 : 0);
      }
    }
  }
};

}  // namespace sparsellm
