// What the kernels of the overflow path share: matrix products of any shape by WGMMA, and how CTAs share the work.
//
// The tokens of the tiles that left the tile engine (TilePlan) are listed in `tokens`; the kernels call an index in
// that list a row. The work is a sequence of phases, each of which reads what the phase before has written. CTAs draw
// the output tiles of all phases in order from one counter, and a CTA that has drawn a tile waits until the tiles of
// all earlier phases are done. The CTAs that drew those tiles are already running, so the kernels cannot hang, however
// few of their CTAs are resident at once: other streams, processes or green contexts may occupy SMs.
#pragma once

#include "common/host.h"
#include "common/wgmma.cuh"

namespace sparsellm::rest {

constexpr int kThreads = 256;
constexpr int kSide = 128;    // rows of an output tile, 64 for each of the two warpgroups; and its columns
constexpr int kWide = 256;    // columns of an output tile where registers suffice: it reads less per product
constexpr int kDepth = 64;    // inner dimension of one step
constexpr int kBandRows = 8;  // tiles of a phase are drawn in bands of this many rows of tiles, down, then across, so
                              // that the tiles in flight share rows of both operands in L2

using Bf16 = __nv_bfloat16;

// The stages of a product, in shared memory: those of the steps on their way, the step that is multiplied, and the step
// before, which may still be multiplied.
template <int kColumns>
struct Stages {
  static constexpr int kAhead = kColumns == kSide ? 3 : 2;  // steps whose operands are on their way
  static constexpr int kCount = kAhead + 2;
  static constexpr uint32_t kBytes = (kSide + kColumns) * kDepth * 2;
  static constexpr uint32_t kAllBytes = kCount * kBytes;
};
constexpr uint32_t kPanelBytes = 64 * kDepth * 2;  // 64 rows or columns of a stage
constexpr uint32_t kStagesBytes = Stages<kWide>::kAllBytes;
constexpr uint32_t kAlignment = 1024;  // of the stages, for the swizzle
static_assert(kStagesBytes >= Stages<kSide>::kAllBytes);

__device__ __forceinline__ uint32_t aligned_stages(const void* shared) {
  return (ptx::smem_address(shared) + kAlignment - 1) & ~(kAlignment - 1);
}

__device__ __forceinline__ const Bf16* bf16(const void* pointer) { return static_cast<const Bf16*>(pointer); }
__device__ __forceinline__ float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(uint32_t pair) { return __uint_as_float(pair & 0xffff0000); }
__device__ __forceinline__ float rounded(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }
__host__ __device__ __forceinline__ int tiles_of(int64_t length, int side = kSide) {
  return static_cast<int>((length + side - 1) / side);
}

// The operands of an output tile, a and b. A "side" is one row of the tile (in a) or one column (in b). A step holds
// kDepth values of every side. A thread copies chunks of 16 bytes, at the same places of every step, so it computes
// their addresses once per tile. Beyond the depth, zeros are copied. In place of sides beyond the matrix, the last
// ones are copied again; their sums are not used.
//
// Rows are K-major: a side's values are contiguous.
template <int kSidesOf>
struct Rows {
  static constexpr int kMajorMN = 0;
  static constexpr uint32_t kInstructionBytes = 32;  // distance of 16 in the inner dimension
  static constexpr int kSides = kSidesOf;
  static constexpr int kApart = kThreads / (kDepth / 8);  // sides between chunks of a thread: a multiple of 8, so their
                                                          // swizzle is the same
  const Bf16* from[kSides / kApart];

  // of(side): where its values begin.
  template <class Of>
  __device__ __forceinline__ explicit Rows(Of of) {
#pragma unroll
    for (int i = 0; i < kSides / kApart; ++i) from[i] = of(i * kApart + threadIdx.x / 8) + threadIdx.x % 8 * 8;
  }
  // Starts copies of a step to the shared address `to`.
  __device__ __forceinline__ void copy(uint32_t to, int step, int depth) const {
    const uint32_t place = to + swizzle_128(threadIdx.x / 8, threadIdx.x % 8);
    const uint32_t bytes = step * kDepth + threadIdx.x % 8 * 8 < depth ? 16 : 0;
#pragma unroll
    for (int i = 0; i < kSides / kApart; ++i) {
      ptx::cp_async_16_or_zeros(place + i * kApart * 128, from[i] + step * kDepth, bytes);
    }
  }
  // The matrix descriptor of the operand at `address`, or, of a, of a warpgroup's 64 sides there.
  static __device__ __forceinline__ uint64_t descriptor(uint32_t address) {
    return ptx::wgmma_descriptor(address, 16, 1024);
  }
};

// Columns are MN-major: neighbouring sides are contiguous; in shared memory, 64 of them (a panel). of(k): the matrix's
// row for k.
template <int kSidesOf, class Of>
struct Columns {
  static constexpr int kMajorMN = 1;
  static constexpr uint32_t kInstructionBytes = 16 * 128;
  static constexpr int kSides = kSidesOf;
  static constexpr int kChunks = kSides / 8;
  static constexpr int kApart = kThreads / kChunks;  // rows between chunks of a thread: a multiple of 8, as above
  const Bf16* from;      // this thread's chunk in row 0
  uint32_t pitch_bytes;  // of a row
  Of of;

  __device__ __forceinline__ void copy(uint32_t to, int step, int depth) const {
    const int chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks;
    const uint32_t place = to + chunk / 8 * kPanelBytes + swizzle_128(first, chunk % 8);
    const int k = step * kDepth + first;
    int rows[kDepth / kApart];  // all before the first copy, for which the compiler lets reads of shared memory wait
#pragma unroll
    for (int i = 0; i < kDepth / kApart; ++i) rows[i] = of(k + i * kApart);
#pragma unroll
    for (int i = 0; i < kDepth / kApart; ++i) {
      ptx::cp_async_row_16(place + i * kApart * 128, from, rows[i], pitch_bytes, k + i * kApart < depth ? 16 : 0);
    }
  }
  static __device__ __forceinline__ uint64_t descriptor(uint32_t address) {
    return ptx::wgmma_descriptor(address, kPanelBytes, 1024);
  }
};

// Rows of `matrix` [.., pitch] at the tokens `rows` [kSide], in shared memory.
__device__ __forceinline__ Rows<kSide> listed_rows(const Bf16* matrix, int64_t pitch, const int* rows) {
  return Rows<kSide>([=](int side) { return matrix + rows[side] * pitch; });
}
// Rows `first` and following of `matrix` [end, pitch].
__device__ __forceinline__ Rows<kSide> rows_from(const Bf16* matrix, int64_t pitch, int first, int end) {
  return Rows<kSide>([=](int side) { return matrix + min(first + side, end - 1) * pitch; });
}
// Rows `first` and following, kSide of each of two matrices.
__device__ __forceinline__ Rows<2 * kSide> rows_from_both(const Bf16* one, const Bf16* other, int64_t pitch, int first,
                                                          int end) {
  return Rows<2 * kSide>([=](int side) {
    return (side < kSide ? one : other) + min(first + side % kSide, end - 1) * pitch;
  });
}
// Columns `first` and following of `matrix` [.., pitch]; of(k) is the row for k.
template <int kSides, class Of>
__device__ __forceinline__ Columns<kSides, Of> columns_from(const Bf16* matrix, int pitch, int first, Of of) {
  const int chunk = threadIdx.x % (kSides / 8);
  return {matrix + min(first + 8 * chunk, pitch - 8), static_cast<uint32_t>(pitch) * 2, of};
}
template <int kSides>
__device__ __forceinline__ auto columns_from(const Bf16* matrix, int pitch, int first) {
  return columns_from<kSides>(matrix, pitch, first, [](int k) { return k; });
}

// A thread's share of an output tile's sums, as WGMMA leaves it, in pairs of neighbouring columns: for_each_pair calls
// use(row, column, i) for each, whose sums are sum[2 i] and sum[2 i + 1].
template <int kColumns = kSide>
using Sums = float[kColumns / 2];
template <int kColumns = kSide, class Use>
__device__ __forceinline__ void for_each_pair(Use use) {
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < kColumns / 4; ++i) use(row + i % 2 * 8, column + i / 2 * 8, i);
}

struct NothingAhead {
  __device__ __forceinline__ void operator()(int) const {}
};

// sum += a b^T over k < depth. Called by all threads of a CTA. stages: shared address of the stages. ahead(step) may
// copy, by cp.async, what a and b read in shared memory for step + kAhead; for earlier steps, it must be there.
template <int kCount, class A, class B, class Ahead = NothingAhead>
__device__ __forceinline__ void multiply(uint32_t stages, float (&sum)[kCount], int depth, const A& a, const B& b,
                                         Ahead ahead = {}) {
  static_assert(A::kSides == kSide && B::kSides == 2 * kCount);
  using Stages = rest::Stages<B::kSides>;
  constexpr uint32_t kLeftBytes = kSide * kDepth * 2;
  const int steps = (depth + kDepth - 1) / kDepth;
  const uint64_t left = A::descriptor(stages + threadIdx.x / 128 * kPanelBytes);  // 64 rows are half of an operand
  const uint64_t right = B::descriptor(stages + kLeftBytes);
  const auto fetch = [&](int step) {
    if (step < steps) {
      const uint32_t to = stages + step % Stages::kCount * Stages::kBytes;
      a.copy(to, step, depth);
      b.copy(to + kLeftBytes, step, depth);
      ahead(step);
    }
    ptx::cp_async_commit_group();  // also without copies: groups are counted
  };
  __syncthreads();  // wait until all threads have read the last operands of the product before
#pragma unroll
  for (int step = 0; step < Stages::kAhead; ++step) fetch(step);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    ptx::cp_async_wait_group<Stages::kAhead - 1>();
    ptx::fence_proxy_async();  // WGMMA reads through another proxy than cp.async writes
    __syncthreads();  // all threads' copies of this step have arrived, and both warpgroups have multiplied the step
                      // before the last, whose stage is the next one to be filled
    const uint32_t stage = step % Stages::kCount * Stages::kBytes;
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      ptx::wgmma<B::kSides / 64, B::kMajorMN, A::kMajorMN>(sum, ptx::advanced(left, stage + k * A::kInstructionBytes),
                                                           ptx::advanced(right, stage + k * B::kInstructionBytes), 1);
    }
    ptx::wgmma_commit_group();
    fetch(step + Stages::kAhead);
    ptx::wgmma_wait_group<1>();
  }
  ptx::wgmma_wait_group<0>();
}

// Writes the tokens of rows [top, top + kSide) of the list to shared memory, with that of row end - 1 in place of rows
// from `end` on. Called by all threads; ends with a barrier.
__device__ __forceinline__ void look_up_rows(int* rows, const int32_t* tokens, int top, int end) {
  if (threadIdx.x < kSide) rows[threadIdx.x] = tokens[min(top + static_cast<int>(threadIdx.x), end - 1)];
  __syncthreads();
}

// Computes g and u of an output tile, whose tokens are `rows` and whose neurons begin at `left`, as pairs of bf16 in
// the order of for_each_pair. Both are one product, which reads x once. Non-gated (w_up is null): g is computed twice,
// and u is not meaningful.
__device__ __forceinline__ void gate_and_up(uint32_t stages, uint32_t (&g)[kSide / 4], uint32_t (&u)[kSide / 4],
                                            const void* x, const void* w_gate, const void* w_up, int k, int n,
                                            const int* rows, int left) {
  const Bf16* second = bf16(w_up != nullptr ? w_up : w_gate);
  Sums<2 * kSide> both = {};
  multiply(stages, both, k, listed_rows(bf16(x), k, rows), rows_from_both(bf16(w_gate), second, k, left, n));
#pragma unroll
  for (int i = 0; i < kSide / 4; ++i) {
    g[i] = ptx::cvt_relu_bf16x2(both[2 * i], both[2 * i + 1]);
    u[i] = ptx::cvt_bf16x2(both[kSide / 2 + 2 * i], both[kSide / 2 + 2 * i + 1]);
  }
}

// Tile `index` of a grid of down x across tiles, in the order in which they are drawn.
struct Place {
  int row, column;
};
__device__ __forceinline__ Place place_of_tile(int index, int down, int across) {
  const int band = index / (kBandRows * across), within = index - band * kBandRows * across;
  const int height = min(kBandRows, down - band * kBandRows);
  return {band * kBandRows + within % height, within / height};
}

// Called by one thread: returns once `count` tiles are done, whose results this CTA may read after a barrier.
__device__ __forceinline__ void wait_until_done(int32_t* tickets, int count) {
  while (static_cast<int>(ptx::ld_acquire(reinterpret_cast<const uint32_t*>(tickets + 1))) < count) __nanosleep(100);
  __threadfence();
}

// Draws and computes the tiles of all phases. tiles_in(phase) is a phase's number of tiles; compute(phase, tile)
// computes one. Returns true to all threads of the one CTA that drew last of all, once all tiles are done; there, the
// tickets are zero again.
template <class TilesIn, class Compute>
__device__ __forceinline__ bool run_phases(int32_t* tickets, int phases, TilesIn tiles_in, Compute compute) {
  __shared__ int drawn;
  int phase = 0, begin = 0;  // the phase of the drawn tile, and the number of the phase's first tile
  for (;;) {
    if (threadIdx.x == 0) drawn = atomicAdd(tickets, 1);
    __syncthreads();
    const int tile = drawn;
    for (; phase < phases; ++phase) {
      const int count = tiles_in(phase);
      if (tile < begin + count) break;
      begin += count;
    }
    if (phase == phases) break;
    // No tile of this phase can be done before all earlier ones are. So once `begin` tiles are done, it is those.
    if (threadIdx.x == 0) wait_until_done(tickets, begin);
    __syncthreads();
    compute(phase, tile - begin);
    __syncthreads();  // all threads have stored their part of the tile, and have read `drawn`
    if (threadIdx.x == 0) ptx::add_release(tickets + 1, 1);
  }
  // The CTA that has drawn the last number of all resets the counters: every other CTA has drawn its own last number,
  // so none reads the counters again. It waits because their last additions may still be on their way.
  if (drawn != begin + static_cast<int>(gridDim.x) - 1) return false;
  if (threadIdx.x == 0) {
    wait_until_done(tickets, begin);
    tickets[0] = tickets[1] = 0;
  }
  __syncthreads();
  return true;
}

}  // namespace sparsellm::rest
