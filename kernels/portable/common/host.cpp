// Implements host.h, as far as it is no template.
#include "host.h"

#include <map>
#include <mutex>
#include <utility>

namespace sparsellm {

cudaError_t multiprocessors(int* count) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
  return error;
}

cudaError_t tensor_map(CUtensorMap* map, const void* data, int64_t rows, int64_t columns, int box_rows) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static Encode encode = nullptr;
  if (encode == nullptr) {
    void* symbol = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess) return error;
    if (found != cudaDriverEntryPointSuccess) return cudaErrorSymbolNotFound;
    encode = reinterpret_cast<Encode>(symbol);
  }
  const cuuint64_t extents[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t pitch[1] = {static_cast<cuuint64_t>(columns) * 2};
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t strides[2] = {1, 1};
  const auto describe = [&] {
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), extents, pitch, box, strides,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = describe();
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    // The driver has no current context, because this thread has not called CUDA before. Unlike functions of the
    // runtime, functions of the driver do not make the device's context current, so call cudaSetDevice.
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaSetDevice(device);
    if (error != cudaSuccess) return error;
    result = describe();
  }
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t allow_shared_memory(const void* kernel, uint32_t bytes) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, uint32_t> allowed;  // largest size so far, by kernel and device
  int device = 0;
  const cudaError_t known = cudaGetDevice(&device);
  if (known != cudaSuccess) return known;
  const std::lock_guard<std::mutex> lock(mutex);
  uint32_t& most = allowed[{kernel, device}];
  if (bytes <= most) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error == cudaSuccess) most = bytes;
  return error;
}

}  // namespace sparsellm
