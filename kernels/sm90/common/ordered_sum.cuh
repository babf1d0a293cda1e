// Float32 sums in a fixed order.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

namespace sparsellm {

// Sum over the warp, in every lane.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}

// The calling thread's part of the sum of values[0, count), which are 16-byte aligned and written by other CTAs. Thread
// `thread` of `threads` adds quads thread, thread + threads, ..., and one of the up to three values behind the last
// quad.
__device__ __forceinline__ float strided_sum(const float* values, int64_t count, uint32_t thread, uint32_t threads) {
  constexpr int kBatch = 8;  // loads in flight per thread
  const int64_t quads = count / 4;
  float sum = 0.0f;
  for (int64_t start = thread; start < quads; start += kBatch * threads) {
    float4 v[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64_t at = start + b * threads;
      v[b] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (at < quads) v[b] = __ldcg(reinterpret_cast<const float4*>(values) + at);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) sum += (v[b].x + v[b].y) + (v[b].z + v[b].w);
  }
  if (thread < count % 4) sum += __ldcg(values + 4 * quads + thread);
  return sum;
}

// Sum of values[0, count) by all threads of a CTA, valid in thread 0. The order also depends on the number of threads.
// scratch: shared, one float per warp.
__device__ __forceinline__ float ordered_sum(const float* values, int64_t count, float* scratch) {
  const float sum = warp_sum(strided_sum(values, count, threadIdx.x, blockDim.x));
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = sum;
  __syncthreads();
  float all = 0.0f;
  if (threadIdx.x == 0) {
    for (uint32_t w = 0; w < blockDim.x / 32; ++w) all += scratch[w];
  }
  return all;
}

}  // namespace sparsellm
