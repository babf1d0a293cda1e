// quantize_rows: rounds each row of a bf16 matrix to e4m3, after division by the row's largest magnitude / 448. A warp
// reads a row twice: for its largest magnitude, then (from L1 or L2) to round it.
//
// Numerics: a value is multiplied by 1 / scale in float32 and rounded once, to at most 448. A row of zeros has a small
// positive scale. A NaN stays NaN; an infinity makes its own row's products NaN.
#include "common/host.h"
#include "common/ptx.cuh"
#include "engines.h"

namespace sparsellm {
namespace {

constexpr int kQuantizeThreads = 256;
constexpr int kRowsPerCta = kQuantizeThreads / 32;
constexpr float kLargest = 448, kSmallest = 1e-12f;  // the largest e4m3 value; the smallest magnitude for a scale

__device__ __forceinline__ float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(uint32_t pair) { return __uint_as_float(pair & 0xffff0000); }

__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_rows_kernel(const uint4* from, int64_t rows, int chunks, uint2* values, float* scales) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsPerCta + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= rows) return;
  from += row * chunks;
  values += row * chunks;
  float largest = kSmallest;
#pragma unroll 4
  for (int i = lane; i < chunks; i += 32) {
    const uint4 v = from[i];
    for (const uint32_t pair : {v.x, v.y, v.z, v.w}) {
      largest = fmaxf(largest, fmaxf(fabsf(low_of(pair)), fabsf(high_of(pair))));
    }
  }
  for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  const float scale = largest * (1 / kLargest), factor = 1 / scale;
#pragma unroll 4
  for (int i = lane; i < chunks; i += 32) {
    const uint4 v = from[i];
    const auto rounded = [&](uint32_t pair) -> uint32_t {
      return ptx::cvt_e4m3x2(low_of(pair) * factor, high_of(pair) * factor);
    };
    values[i] = {rounded(v.x) | rounded(v.y) << 16, rounded(v.z) | rounded(v.w) << 16};
  }
  if (lane == 0) scales[row] = scale;
}

}  // namespace

cudaError_t quantize_rows(const void* from, int64_t rows, int64_t columns, void* values, float* scales,
                          cudaStream_t stream) {
  return launch(quantize_rows_kernel, ceil_div(rows, kRowsPerCta), kQuantizeThreads, 0, 1, stream,
                static_cast<const uint4*>(from), rows, static_cast<int>(columns / 8), static_cast<uint2*>(values),
                scales);
}

}  // namespace sparsellm
