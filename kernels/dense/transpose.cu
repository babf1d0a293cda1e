// transpose: a bf16 matrix by tiles of 64 x 64, 16 bytes at a time on both sides. Exact.
#include "common/host.h"
#include "common/ptx.cuh"

namespace sparsellm {
namespace {

constexpr int kSide = 64;
constexpr int kTransposeThreads = 256;
constexpr int kPitch = kSide + 2;  // so that neither side meets in a bank more often than it must

__global__ void __launch_bounds__(kTransposeThreads)
    transpose_kernel(const uint16_t* from, int64_t rows, int64_t columns, uint16_t* to) {
  __shared__ alignas(16) uint16_t tile[kSide * kPitch];  // [column][row]
  const int64_t column0 = static_cast<int64_t>(blockIdx.x) * kSide, row0 = static_cast<int64_t>(blockIdx.y) * kSide;
  const int chunk = threadIdx.x % 8 * 8;
  for (int r = threadIdx.x / 8; r < kSide; r += kTransposeThreads / 8) {
    if (row0 + r >= rows || column0 + chunk >= columns) continue;
    union {
      uint4 quad;
      uint16_t values[8];
    } v;
    v.quad = *reinterpret_cast<const uint4*>(from + (row0 + r) * columns + column0 + chunk);
#pragma unroll
    for (int i = 0; i < 8; ++i) tile[(chunk + i) * kPitch + r] = v.values[i];
  }
  __syncthreads();
  for (int c = threadIdx.x / 8; c < kSide; c += kTransposeThreads / 8) {
    if (column0 + c >= columns || row0 + chunk >= rows) continue;
    const uint32_t* pairs = reinterpret_cast<const uint32_t*>(tile + c * kPitch + chunk);
    *reinterpret_cast<uint4*>(to + (column0 + c) * rows + row0 + chunk) =
        make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

}  // namespace

cudaError_t transpose(const void* from, int64_t rows, int64_t columns, void* to, cudaStream_t stream) {
  const dim3 grid(static_cast<uint32_t>(ceil_div(columns, kSide)), static_cast<uint32_t>(ceil_div(rows, kSide)));
  transpose_kernel<<<grid, kTransposeThreads, 0, stream>>>(static_cast<const uint16_t*>(from), rows, columns,
                                                           static_cast<uint16_t*>(to));
  return cudaGetLastError();
}

}  // namespace sparsellm
