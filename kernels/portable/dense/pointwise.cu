// The elementwise kernels of the dense engine, for few tokens. pointwise computes h = relu(z) * u and the statistics
// (l1, which neurons fire, the number of nonzeros, the union) in one pass over memory. Its CTAs have 128 tokens x 64
// columns each; a lane has eight columns of several rows, and issues all its loads before it uses a value.
// pointwise_hidden computes h alone, for callers that do not read the statistics. pointwise_gradient is used in the
// backward pass.
//
// h may be z or u itself, because a thread reads each element before it writes it; h must not overlap z or u in any
// other way. Non-gated (u is null): h = relu(z). l1_partials must be 16-byte aligned.
//
// Numerics: relu(z) is exact, -0.0 gives 0.0, and NaN gives the canonical NaN; h is rounded to bf16 once. A neuron is
// active if relu(z) is not zero; NaN is active. l1 is the float32 sum of |h|, after the rounding of h. It is added up
// in a fixed order: within a thread, a warp, a CTA; then the last CTA adds the CTAs. The bits are the same in every
// run.
#include "common/clear.cuh"
#include "common/host.h"
#include "common/ordered_sum.cuh"
#include "common/twell.cuh"
#include "dense/elementwise.cuh"

namespace sparsellm {
namespace {

constexpr int kPointwiseThreads = 256;
constexpr int kPointwiseWarps = kPointwiseThreads / 32;
constexpr int kPointwiseLanes = kPointwiseColumns / 8;                  // lanes that share a row
constexpr int kPointwiseRows = 32 / kPointwiseLanes * kPointwiseWarps;  // rows that the CTA loads at once
constexpr int kPointwiseBatch = kTokenTile / kPointwiseRows;

// One CTA's statistics, in shared memory.
struct CtaStatistics {
  uint32_t (&seen_words)[kPointwiseColumns / 32];  // bits of the neurons that fire
  float (&l1_warps)[kPointwiseWarps];
  uint32_t (&nonzeros_warps)[kPointwiseWarps];
  bool& last;
};

// Adds one CTA's statistics to those of the call. Called by all threads of the CTA, when `own` is complete except for
// `last`. The last CTA to call this function adds up l1, in a fixed order.
__device__ __forceinline__ void add_statistics(const CtaStatistics& own, int64_t first_column, float* l1_partials,
                                               float* l1, uint8_t* fired, unsigned long long* counters) {
  ptx::griddepcontrol_wait();  // wait until `clear` has zeroed the statistics
  if (threadIdx.x < kPointwiseColumns && (own.seen_words[threadIdx.x / 32] >> threadIdx.x % 32 & 1) != 0) {
    fired[first_column + threadIdx.x] = 1;
  }
  if (threadIdx.x == 0) {
    float cta_sum = 0.0f;
    uint32_t cta_nonzeros = 0, in_union = 0;
    for (int w = 0; w < kPointwiseWarps; ++w) {
      cta_sum += own.l1_warps[w];
      cta_nonzeros += own.nonzeros_warps[w];
    }
    for (int w = 0; w < kPointwiseColumns / 32; ++w) in_union += __popc(own.seen_words[w]);
    l1_partials[blockIdx.x] = cta_sum;
    __threadfence();
    own.last = atomicAdd(counters + kCounters, 1) == gridDim.x - 1;  // the last counter is the number of CTAs that are
                                                                     // done
    if (cta_nonzeros != 0) {
      atomicAdd(counters + kNonzeros, static_cast<unsigned long long>(cta_nonzeros));
      atomicAdd(counters + kUnion, static_cast<unsigned long long>(in_union));
    }
  }
  __syncthreads();
  if (!own.last) return;
  __threadfence();
  const float all = ordered_sum(l1_partials, gridDim.x, own.l1_warps);
  if (threadIdx.x == 0) *l1 = all;
}

template <bool kGated>
__global__ void __launch_bounds__(kPointwiseThreads, 4)
    pointwise_kernel(const __nv_bfloat16* z, const __nv_bfloat16* u, int64_t m, int64_t n, __nv_bfloat16* h,
                     float* l1_partials, float* l1, uint8_t* fired, unsigned long long* counters) {
  __shared__ uint32_t seen_words[kPointwiseColumns / 32];
  __shared__ float l1_warps[kPointwiseWarps];
  __shared__ uint32_t nonzeros_warps[kPointwiseWarps];
  __shared__ bool last;
  const int warp = threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32, chunk = lane % kPointwiseLanes;
  const int parts = static_cast<int>((n + kPointwiseColumns - 1) / kPointwiseColumns);
  const int64_t row0 = static_cast<int64_t>(blockIdx.x / parts) * kTokenTile;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x % parts) * kPointwiseColumns;
  const int64_t column = first_column + 8 * chunk;
  if (threadIdx.x < kPointwiseColumns / 32) seen_words[threadIdx.x] = 0;

  float sum = 0.0f;
  uint32_t seen = 0, nonzeros = 0;
  const int rows = column < n ? static_cast<int>(min(static_cast<int64_t>(kTokenTile), m - row0)) : 0;
  uint4 gate[kPointwiseBatch], up[kPointwiseBatch];
#pragma unroll
  for (int b = 0; b < kPointwiseBatch; ++b) {
    const int row = threadIdx.x / kPointwiseLanes + kPointwiseRows * b;
    gate[b] = up[b] = make_uint4(0, 0, 0, 0);
    if (row < rows) {
      const int64_t at = (row0 + row) * n + column;
      gate[b] = __ldcs(reinterpret_cast<const uint4*>(z + at));
      if constexpr (kGated) up[b] = __ldcs(reinterpret_cast<const uint4*>(u + at));
    }
  }
#pragma unroll
  for (int b = 0; b < kPointwiseBatch; ++b) {
    const int row = threadIdx.x / kPointwiseLanes + kPointwiseRows * b;
    const uint4 g = dense::relu(gate[b]);
    const uint4 out = kGated ? dense::product(g, up[b]) : g;
    const uint32_t bits = nonzero_bits(g);
    seen |= bits;
    nonzeros += __popc(bits);
    sum += dense::magnitudes(out);
    if (row < rows) ptx::st_global_v4(h + (row0 + row) * n + column, out);
  }
  sum = warp_sum(sum);
  nonzeros = __reduce_add_sync(~0u, nonzeros);
#pragma unroll
  for (int offset = kPointwiseLanes; offset < 32; offset *= 2) seen |= __shfl_xor_sync(~0u, seen, offset);
  __syncthreads();  // wait until seen_words has been zeroed
  if (seen != 0 && lane < kPointwiseLanes) atomicOr(&seen_words[chunk / 4], seen << (chunk % 4 * 8));
  if (lane == 0) {
    l1_warps[warp] = sum;
    nonzeros_warps[warp] = nonzeros;
  }
  __syncthreads();
  add_statistics({seen_words, l1_warps, nonzeros_warps, last}, first_column, l1_partials, l1, fired, counters);
}

// Computes h from z and u; a thread has eight entries. h may be z or u.
template <bool kGated>
__global__ void __launch_bounds__(kPointwiseThreads)
    pointwise_hidden_kernel(const uint4* z, const uint4* u, int64_t eights, uint4* h) {
  ptx::griddepcontrol_wait();  // wait until the previous product has been written
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kPointwiseThreads + threadIdx.x;
  if (at >= eights) return;
  const uint4 g = dense::relu(z[at]);
  h[at] = kGated ? dense::product(g, u[at]) : g;
}

// Computes dz, du and h from z, u and dh; a thread has eight entries at a time. dz may be dh.
template <bool kGated>
__global__ void __launch_bounds__(kPointwiseThreads)
    pointwise_gradient_kernel(const uint4* z, const uint4* u, const uint4* dh, const float* dl1_at, int64_t eights,
                              uint4* dz, uint4* du, uint4* h) {
  const float dl1 = *dl1_at;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * kPointwiseThreads + threadIdx.x; at < eights;
       at += static_cast<int64_t>(gridDim.x) * kPointwiseThreads) {
    const uint4 z8 = __ldcs(z + at), dh8 = __ldcs(dh + at);
    uint4 u8 = make_uint4(0, 0, 0, 0);
    if constexpr (kGated) u8 = __ldcs(u + at);
    const dense::Gradients made = dense::gradients<kGated>(dense::relu(z8), u8, dh8, dl1);
    dz[at] = made.dz;
    h[at] = made.h;
    if constexpr (kGated) du[at] = made.du;
  }
}

}  // namespace

cudaError_t pointwise_gradient(const void* z, const void* u, const void* dh, const float* dl1, int64_t count, void* dz,
                               void* du, void* h, cudaStream_t stream) {
  int processors = 0;
  const cudaError_t error = multiprocessors(&processors);
  if (error != cudaSuccess) return error;
  const int64_t eights = count / 8, wanted = ceil_div(eights, kPointwiseThreads);
  const auto in = [](const void* pointer) { return static_cast<const uint4*>(pointer); };
  const auto out = [](void* pointer) { return static_cast<uint4*>(pointer); };
  return launch(u == nullptr ? pointwise_gradient_kernel<false> : pointwise_gradient_kernel<true>,
                wanted < 8 * processors ? wanted : 8 * processors, kPointwiseThreads, 0, 1, stream, in(z), in(u),
                in(dh), dl1, eights, out(dz), out(du), out(h));
}

cudaError_t pointwise_hidden(const void* z, const void* u, int64_t count, void* h, cudaStream_t stream) {
  const int64_t eights = count / 8;
  return launch_early(u == nullptr ? pointwise_hidden_kernel<false> : pointwise_hidden_kernel<true>,
                      ceil_div(eights, kPointwiseThreads), kPointwiseThreads, 0, 1, stream,
                      static_cast<const uint4*>(z), static_cast<const uint4*>(u), eights, static_cast<uint4*>(h));
}

cudaError_t pointwise(const void* z, const void* u, int64_t m, int64_t n, void* h, float* l1_partials, float* l1,
                      uint8_t* fired, int64_t* counters, cudaStream_t stream) {
  const cudaError_t error = clear(nullptr, 0, fired, n / 8, counters, kDenseCounters, false, stream);
  if (error != cudaSuccess) return error;
  const int64_t grid = ceil_div(m, kTokenTile) * ceil_div(n, kPointwiseColumns);
  return launch_early(u == nullptr ? pointwise_kernel<false> : pointwise_kernel<true>, grid, kPointwiseThreads, 0, 1,
                      stream, static_cast<const __nv_bfloat16*>(z), static_cast<const __nv_bfloat16*>(u), m, n,
                      static_cast<__nv_bfloat16*>(h), l1_partials, l1, fired,
                      reinterpret_cast<unsigned long long*>(counters));
}

}  // namespace sparsellm
