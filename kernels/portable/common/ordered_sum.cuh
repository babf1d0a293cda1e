// Float32 sums in a fixed order.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

namespace sparsellm {

// Returns the sum over the warp to every lane.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}

// The partial sum of thread `thread` of `threads` over values[0, count), which are 16-byte aligned and which other CTAs
// have written. The thread adds groups of four values, number thread, thread + threads, ...; each of the first three
// threads also adds one of the up to three values that follow the last full group, if there is one for it.
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

// The sum of values[0, count), valid in thread 0. Called by all threads of a CTA. The order of the additions depends
// only on `count` and the number of threads. scratch: shared memory, one float per warp.
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
