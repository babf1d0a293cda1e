// Host code that the launchers share: tensor maps, launches, device properties. Each .cu file includes this header, so
// it includes no large ones: nvcc parses a header several times.
#pragma once

#include <cstdint>
#include <cuda.h>
#include <cuda_runtime.h>

namespace sparsellm {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The number of SMs of the current device.
cudaError_t multiprocessors(int* count);

// Describes a bf16 matrix [rows, columns] with contiguous rows to TMA, which copies boxes of `box_rows` rows and 64
// columns (128 bytes, swizzled). Reads beyond the matrix's edges give zeros; writes beyond them are dropped.
cudaError_t tensor_map(CUtensorMap* map, const void* data, int64_t rows, int64_t columns, int box_rows);

// Allows launches of `kernel` on the current device with `bytes` of dynamic shared memory. The limit belongs to the
// kernel, not to a launch, so the limit is only ever raised: a thread that lowered it for a narrow layer could make
// another thread's launch for a wide layer fail.
cudaError_t allow_shared_memory(const void* kernel, uint32_t bytes);

// Launches `kernel`, and returns the error of this launch alone (cudaGetLastError also returns errors of earlier
// calls). cluster: the number of CTAs per cluster. early: the kernel may start before the previous kernel in the stream
// has ended. An early kernel must call griddepcontrol_wait before it accesses memory that the previous kernel, or an
// earlier kernel that may still run, reads or writes.
template <class... Parameters, class... Arguments>
cudaError_t launch_with(bool early, void (*kernel)(Parameters...), dim3 grid, int block, uint32_t shared_bytes,
                        int cluster, cudaStream_t stream, Arguments&&... arguments) {
  if (shared_bytes > 0) {  // also below 48 KB, because the kernel's static shared memory is added to shared_bytes
    const cudaError_t error = allow_shared_memory(reinterpret_cast<const void*>(kernel), shared_bytes);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  config.numAttrs = 0;
  if (cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  if (early) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, int block, uint32_t shared_bytes, int cluster,
                   cudaStream_t stream, Arguments&&... arguments) {
  return launch_with(false, kernel, grid, block, shared_bytes, cluster, stream, arguments...);
}

template <class... Parameters, class... Arguments>
cudaError_t launch_early(void (*kernel)(Parameters...), dim3 grid, int block, uint32_t shared_bytes, int cluster,
                         cudaStream_t stream, Arguments&&... arguments) {
  return launch_with(true, kernel, grid, block, shared_bytes, cluster, stream, arguments...);
}

// Launches a persistent kernel early, with one CTA per SM.
template <class... Parameters, class... Arguments>
cudaError_t launch_persistent(void (*kernel)(Parameters...), int block, uint32_t shared_bytes, cudaStream_t stream,
                              Arguments&&... arguments) {
  int count = 0;
  const cudaError_t error = multiprocessors(&count);
  if (error != cudaSuccess) return error;
  return launch_early(kernel, count, block, shared_bytes, 1, stream, arguments...);
}

}  // namespace sparsellm
