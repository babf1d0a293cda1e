// A kernel that zeroes statistics to which the next kernel, a matrix product, adds. The product may start while this
// kernel still runs; `early` determines when the product must wait.
#pragma once

#include "common/host.h"

namespace sparsellm {

// Zeroes row_counts[0, rows), fired[0, 8 fired_octets), 8-byte aligned, and counters[0, count).
//
// early = false: `clear` starts when all previous kernels are done. So the next kernel, which is launched early and
// starts at once, needs griddepcontrol_wait only before it accesses the memory that `clear` zeroes. early = true:
// `clear` may start while previous kernels still run. So the next kernel needs griddepcontrol_wait before it reads or
// writes any memory.
cudaError_t clear(int32_t* row_counts, int64_t rows, uint8_t* fired, int64_t fired_octets, int64_t* counters,
                  int64_t count, bool early, cudaStream_t stream);

}  // namespace sparsellm
