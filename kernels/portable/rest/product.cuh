// What the kernels of the overflow path share: matrix products of any shape by mma.sync, and how CTAs share the work.
//
// The tokens of the tiles that left the tile engine (TilePlan) are listed in `tokens`; the kernels call an index in
// that list a row. The work is a sequence of phases, each of which reads what the phase before has written. CTAs draw
// the output tiles of all phases in order from one counter, and a CTA that has drawn a tile waits until the tiles of
// all earlier phases are done. The CTAs that drew those tiles are already running, so the kernels cannot hang, however
// few of their CTAs are resident at once: other streams, processes or green contexts may occupy SMs.
#pragma once

#include "common/host.h"
#include "common/ptx.cuh"
#include "launch.h"

namespace sparsellm::rest {

constexpr int kThreads = 256;
constexpr int kSide = 128;    // an output tile is 128 x 128: 2 x 4 warps, 64 x 32 values each
constexpr int kDepth = 64;    // inner dimension of one step
constexpr int kStages = 4;    // steps whose operands are in shared memory or on their way
constexpr int kPad = 8;       // values of padding per row in shared memory, so that neighbouring rows use different
                              // banks
constexpr int kBandRows = 8;  // tiles of a phase are drawn in bands of this many rows of tiles, down, then across, so
                              // that the tiles in flight share rows of both operands in L2

using Bf16 = __nv_bfloat16;

constexpr uint32_t kOperandBytes = kSide * (kDepth + kPad) * 2;
static_assert(kDepth * (kSide + kPad) <= kSide * (kDepth + kPad), "either layout fits");
constexpr uint32_t kStagesBytes = kStages * 2 * kOperandBytes;

__device__ __forceinline__ const Bf16* bf16(const void* pointer) { return static_cast<const Bf16*>(pointer); }
__device__ __forceinline__ float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(uint32_t pair) { return __uint_as_float(pair & 0xffff0000); }
__device__ __forceinline__ float rounded(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }
__host__ __device__ __forceinline__ int tiles_of(int64_t length) {
  return static_cast<int>((length + kSide - 1) / kSide);
}

// Eight values of an operand, contiguous in memory. If they are outside the matrix, they count as zero, and `from` is
// not read.
struct Chunk {
  const Bf16* from;
  bool exists;
};

// One operand of an output tile. Its "sides" are the tile's rows (of a) or columns (of b); a step has kSide of them,
// times kDepth of the inner dimension. The layout in shared memory is that in global memory: if kSideFast, neighbouring
// sides are contiguous; otherwise, neighbours in the inner dimension are.
template <bool kSideFast>
struct Operand {
  static constexpr int kFast = kSideFast ? kSide : kDepth, kPitch = kFast + kPad;

  // Starts copies of a step's operand to the shared address `to`; at(side, k) is a Chunk. It may be called for k beyond
  // depth.
  template <class At>
  static __device__ __forceinline__ void copy(uint32_t to, int k0, int depth, At at) {
#pragma unroll
    for (int q = 0; q < kSide * kDepth / 8 / kThreads; ++q) {
      const int i = q * kThreads + threadIdx.x, fast = i % (kFast / 8) * 8, slow = i / (kFast / 8);
      const int side = kSideFast ? fast : slow, k = k0 + (kSideFast ? slow : fast);
      const Chunk chunk = at(side, k);
      ptx::cp_async_16_or_zeros(to + (slow * kPitch + fast) * 2, chunk.from, chunk.exists && k < depth ? 16 : 0);
    }
  }
  // Loads the four 8 x 8 matrices of sides [side, side + 16) and k [k, k + 16). If kByDepth, the two matrices of the
  // first 8 k come first; otherwise, the two of the first 8 sides.
  template <bool kByDepth>
  static __device__ __forceinline__ void fragments(uint32_t (&r)[4], uint32_t operand, int side, int k) {
    const int lane = threadIdx.x % 32, matrix = lane / 8;
    const int of_side = kByDepth ? matrix % 2 : matrix / 2, of_k = kByDepth ? matrix / 2 : matrix % 2;
    const int row = (kSideFast ? k + of_k * 8 : side + of_side * 8) + lane % 8;
    const int column = kSideFast ? side + of_side * 8 : k + of_k * 8;
    ptx::ldmatrix_x4<kSideFast>(r, operand + (row * kPitch + column) * 2);
  }
};

// A thread's share of the sums of an output tile: sum[i][j][2 r + c] is at row row_of(i, r), column column_of(j) + c.
using Sums = float[4][4][4];
__device__ __forceinline__ int row_of(int i, int r) {
  return threadIdx.x / 128 * 64 + 16 * i + 8 * r + threadIdx.x % 32 / 4;
}
__device__ __forceinline__ int column_of(int j) { return threadIdx.x / 32 % 4 * 32 + 8 * j + threadIdx.x % 4 * 2; }

// Calls use(row, column, sum, sum of the next column, index of the pair) for each pair of a thread's sums.
template <class Use>
__device__ __forceinline__ void for_each_pair(const Sums& sum, Use use) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const float* pair = &sum[i / 8][i / 2 % 4][i % 2 * 2];
    use(row_of(i / 8, i % 2), column_of(i / 2 % 4), pair[0], pair[1], i);
  }
}

struct NothingAhead {
  __device__ __forceinline__ void operator()(int) const {}
};

// sum += a b^T over k < depth. a(row, k) and b(column, k) are chunks of the operands. Called by all threads of a CTA.
// stages: shared address of kStagesBytes bytes. ahead(step) may copy, by cp.async, what a and b read in shared memory
// for step + kStages - 1; for earlier steps, it must be there.
template <bool kRowsFast, bool kColumnsFast, class A, class B, class Ahead = NothingAhead>
__device__ __forceinline__ void multiply(uint32_t stages, Sums& sum, int depth, A a, B b, Ahead ahead = {}) {
  using Left = Operand<kRowsFast>;
  using Right = Operand<kColumnsFast>;
  const int steps = (depth + kDepth - 1) / kDepth;
  const auto fetch = [&](int step) {
    if (step < steps) {
      const uint32_t to = stages + step % kStages * (2 * kOperandBytes);
      Left::copy(to, step * kDepth, depth, a);
      Right::copy(to + kOperandBytes, step * kDepth, depth, b);
      ahead(step);
    }
    ptx::cp_async_commit_group();  // also without copies: groups are counted
  };
  __syncthreads();  // wait until all threads have read the last operands of the product before
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) fetch(step);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    ptx::cp_async_wait_group<kStages - 2>();
    __syncthreads();  // all threads' copies of this step have arrived, and all have read the step before, whose stage
                      // is the next one to be filled
    fetch(step + kStages - 1);
    const uint32_t left = stages + step % kStages * (2 * kOperandBytes), right = left + kOperandBytes;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      uint32_t rows[4][4], columns[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) Left::template fragments<true>(rows[i], left, threadIdx.x / 128 * 64 + 16 * i, k);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Right::template fragments<false>(columns[i], right, threadIdx.x / 32 % 4 * 32 + 16 * i, k);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          ptx::mma_16x8x16(sum[i][j], rows[i], columns[j / 2][j % 2 * 2], columns[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }
}

// An operand whose rows are those of `matrix` [.., pitch] at the listed tokens, from `top` on; inner dimension along a
// row. rows: shared memory, the tokens of the tile's rows, -1 where there is none.
__device__ __forceinline__ auto listed_rows(const Bf16* matrix, int64_t pitch, const int* rows) {
  return [=](int row, int at) { return Chunk{matrix + rows[row] * pitch + at, rows[row] >= 0}; };
}
// Sides [first, end) of `matrix` [.., pitch], inner dimension along a row.
__device__ __forceinline__ auto rows_from(const Bf16* matrix, int64_t pitch, int first, int end) {
  return [=](int side, int at) { return Chunk{matrix + (first + side) * pitch + at, first + side < end}; };
}
// Columns [first, end) of `matrix` [.., pitch], inner dimension down a column.
__device__ __forceinline__ auto columns_from(const Bf16* matrix, int64_t pitch, int first, int end) {
  return [=](int side, int at) { return Chunk{matrix + at * pitch + first + side, first + side < end}; };
}

// Writes the tokens of rows [top, top + kSide) of the list to shared memory. Called by all threads; a barrier follows
// before they are read.
__device__ __forceinline__ void look_up_rows(int* rows, const int32_t* tokens, int top, int end) {
  if (threadIdx.x < kSide) rows[threadIdx.x] = top + threadIdx.x < end ? tokens[top + threadIdx.x] : -1;
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
