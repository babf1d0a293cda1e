// The kernel that zeroes what a product adds its statistics to. The product begins while this kernel still runs.
#pragma once

#include "common/host.h"

namespace sparsellm {

// Zeroes row_counts[0, rows), fired[0, 8 fired_octets), 8-byte aligned, and counters[0, count).
//
// early = false: this kernel starts when all before it are done. The next kernel, launched early, starts at once, and
// has to wait (griddepcontrol_wait) only before it touches what this kernel zeroes. early = true: this kernel may start
// while kernels before it still run, so the next one waits before it reads or writes anything.
cudaError_t clear(int32_t* row_counts, int64_t rows, uint8_t* fired, int64_t fired_octets, int64_t* counters,
                  int64_t count, bool early, cudaStream_t stream);

}  // namespace sparsellm
