// The scales of a product of e4m3 matrices, x [M, K] and w [N, K]: z[m, n] = x_scales[m] w_scales[n] sum over k of x w.
//
// A consumer warp has 16 rows of a tile in its accumulators (common/wgmma.cuh), and a lane has two of these rows and 64
// of the 256 columns. Lanes with the same lane % 4 have the same 64 columns, so each of these eight lanes reads the
// scales of eight columns, and gets the others by shuffles.
#pragma once

#include "common/pairs.cuh"

namespace sparsellm {

struct RowAndColumnScales {
  static constexpr bool kFloat8 = true;
  const float *rows, *columns;  // [m], [n]
  int64_t m, n;
  float of_row, of_row_8;  // of row lane / 4 of the warp, and of the row 8 below
  float2 of_columns[4];    // [i] columns 64 i + 8 (lane / 4) + 2 (lane % 4) and the next one

  __device__ __forceinline__ void read(const FinishedTile& of, int row, uint32_t lane) {
    const int64_t first = of.row0() + row;
    of_row = first < m ? __ldg(rows + first) : 0.f;
    of_row_8 = first + 8 < m ? __ldg(rows + first + 8) : 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t column = of.column_tile * kTileN + 64 * i + 2 * lane;
      of_columns[i] = column < n ? __ldg(reinterpret_cast<const float2*>(columns + column)) : float2{0.f, 0.f};
    }
  }

  __device__ __forceinline__ void apply(float (&d)[128], uint32_t lane) const {
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const int from = j % 8 * 4 + lane % 4;
      const float low = __shfl_sync(~0u, of_columns[j / 8].x, from);
      const float high = __shfl_sync(~0u, of_columns[j / 8].y, from);
      d[4 * j] *= low * of_row;
      d[4 * j + 1] *= high * of_row;
      d[4 * j + 2] *= low * of_row_8;
      d[4 * j + 3] *= high * of_row_8;
    }
  }
};

}  // namespace sparsellm
