// clear: see clear.cuh.
#include "common/clear.cuh"

#include "common/ptx.cuh"

namespace sparsellm {
namespace {

constexpr int kClearThreads = 256;

__global__ void clear_kernel(int32_t* row_counts, int64_t rows, uint64_t* fired, int64_t fired_octets,
                             int64_t* counters, int64_t count) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kClearThreads + threadIdx.x;
  if (i < rows) row_counts[i] = 0;
  if (i < fired_octets) fired[i] = 0;
  if (i < count) counters[i] = 0;
}

}  // namespace

cudaError_t clear(int32_t* row_counts, int64_t rows, uint8_t* fired, int64_t fired_octets, int64_t* counters,
                  int64_t count, bool early, cudaStream_t stream) {
  return launch_with(early, clear_kernel, ceil_div(max(max(rows, fired_octets), count), kClearThreads), kClearThreads,
                     0, 1, stream, row_counts, rows, reinterpret_cast<uint64_t*>(fired), fired_octets, counters, count);
}

}  // namespace sparsellm
