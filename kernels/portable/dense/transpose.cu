// transpose and add_transpose: transpose a matrix in tiles of 64 x 64 through shared memory, reading and writing 16
// bytes at a time. add_transpose (kAdd) adds the result to what is there. Numerics: float32 is rounded to bf16 to
// nearest even; all other values are copied, or added in float32.
#include "common/host.h"
#include "engines.h"
#include "common/ptx.cuh"
#include "launch.h"

namespace sparsellm {
namespace {

constexpr int kSide = 64;
constexpr int kTransposeThreads = 256;

__device__ __forceinline__ void convert(float from, float& to) { to = from; }
__device__ __forceinline__ void convert(__nv_bfloat16 from, __nv_bfloat16& to) { to = from; }
__device__ __forceinline__ void convert(float from, __nv_bfloat16& to) { to = __float2bfloat16_rn(from); }

template <class From, class To, bool kAdd>
__global__ void __launch_bounds__(kTransposeThreads)
    transpose_kernel(const From* from, int64_t rows, int64_t columns, To* to) {
  // [column][row]. Rows are padded so that reads and writes have as few bank conflicts as possible; bf16 is read in
  // pairs.
  constexpr int kPitch = kSide + (sizeof(To) == 2 ? 2 : 1);
  __shared__ alignas(16) To tile[kSide * kPitch];
  const int64_t column0 = static_cast<int64_t>(blockIdx.x) * kSide, row0 = static_cast<int64_t>(blockIdx.y) * kSide;
  const int chunk = threadIdx.x % 8 * 8;
  for (int r = threadIdx.x / 8; r < kSide; r += kTransposeThreads / 8) {
    if (row0 + r >= rows || column0 + chunk >= columns) continue;
    union {
      uint4 quads[sizeof(From) / 2];
      From values[8];
    } v;
#pragma unroll
    for (int q = 0; q < sizeof(From) / 2; ++q) {
      v.quads[q] = reinterpret_cast<const uint4*>(from + (row0 + r) * columns + column0 + chunk)[q];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) convert(v.values[i], tile[(chunk + i) * kPitch + r]);
  }
  __syncthreads();
  for (int c = threadIdx.x / 8; c < kSide; c += kTransposeThreads / 8) {
    if (column0 + c >= columns || row0 + chunk >= rows) continue;
    To* values = tile + c * kPitch + chunk;
    uint4* out = reinterpret_cast<uint4*>(to + (column0 + c) * rows + row0 + chunk);
    if constexpr (kAdd) {
      const float4* there = reinterpret_cast<const float4*>(out);
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const float4 v = there[q];
        values[4 * q] += v.x, values[4 * q + 1] += v.y, values[4 * q + 2] += v.z, values[4 * q + 3] += v.w;
      }
    }
    const uint32_t* words = reinterpret_cast<const uint32_t*>(values);
#pragma unroll
    for (int q = 0; q < sizeof(To) / 2; ++q) {
      ptx::st_global_v4(out + q, make_uint4(words[4 * q], words[4 * q + 1], words[4 * q + 2], words[4 * q + 3]));
    }
  }
}

template <class From, class To, bool kAdd = false>
cudaError_t run(const void* from, int64_t rows, int64_t columns, void* to, cudaStream_t stream) {
  const dim3 grid(static_cast<uint32_t>(ceil_div(columns, kSide)), static_cast<uint32_t>(ceil_div(rows, kSide)));
  return launch(transpose_kernel<From, To, kAdd>, grid, kTransposeThreads, 0, 1, stream,
                static_cast<const From*>(from), rows, columns, static_cast<To*>(to));
}

}  // namespace

cudaError_t transpose(const void* from, bool from_float, int64_t rows, int64_t columns, void* to, bool to_float,
                      cudaStream_t stream) {
  if (to_float && !from_float) return cudaErrorInvalidValue;  // no caller converts bf16 to float32
  return (to_float     ? run<float, float>
          : from_float ? run<float, __nv_bfloat16>
                       : run<__nv_bfloat16, __nv_bfloat16>)(from, rows, columns, to, stream);
}

cudaError_t add_transpose(const void* from, int64_t rows, int64_t columns, void* to, cudaStream_t stream) {
  return run<float, float, true>(from, rows, columns, to, stream);
}

}  // namespace sparsellm
