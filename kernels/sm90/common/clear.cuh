// The kernel that zeroes what a product adds its statistics to. The product begins while this kernel still runs.
#pragma once

#include "common/host.h"

namespace sparsellm {

// Zeroes row_counts[0, rows), fired[0, 8 fired_octets), 8-byte aligned, and counters[0, count). The next kernel of the
// stream, launched early, starts at once: what precedes this one is complete then, and only what this one writes has to
// be waited for. early: this one starts before that, too, and the next one waits before it reads or writes anything.
cudaError_t clear(int32_t* row_counts, int64_t rows, uint8_t* fired, int64_t fired_octets, int64_t* counters,
                  int64_t count, bool early, cudaStream_t stream);

}  // namespace sparsellm
