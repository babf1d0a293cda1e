// Packs a gate product that is already in memory, for 65 to 1,535 tokens. With so few tokens, there are too few of
// gate_pack's large tiles to occupy all SMs, so the caller's library multiplies faster.
//
// The product z is in Packed::wide, bf16 [M, N]. The values of wide segments belong there too, so a wide segment's
// nonzeros replace its z. A CTA has 128 tokens of one column tile; each of its warps packs four rows at a time, and has
// read all that it packs before it writes.
//
// Numerics: z is the library's result in bf16, and relu(z) is exact. Everything else is as in gate_pack.
#pragma once

#include "common/clear.cuh"
#include "common/twell.cuh"
#include "dense/elementwise.cuh"

namespace sparsellm {

namespace of_product {

constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kSteps = kTokenTile / (4 * kWarps);
constexpr int kRowBytes = kColumnTile * 2;

__global__ void __launch_bounds__(kThreads, 2) pack_product_kernel(int64_t m, int64_t n, int column_tiles, Packed out) {
  __shared__ alignas(16) uint8_t tile[kWarps][4 * kRowBytes];
  __shared__ uint32_t fired[kColumnTile / 32];
  __shared__ uint32_t nonzeros, wide_segments;
  const int warp = threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  const int token_tile = blockIdx.x / column_tiles, column_tile = blockIdx.x % column_tiles;
  const int64_t first_row = static_cast<int64_t>(token_tile) * kTokenTile + 4 * warp + lane / 8;
  const uint32_t first = column_tile * kColumnTile;
  const __nv_bfloat16* values = static_cast<const __nv_bfloat16*>(out.wide);
  if (threadIdx.x < kColumnTile / 32) fired[threadIdx.x] = 0;
  if (threadIdx.x == 0) nonzeros = wide_segments = 0;

  uint4 z[kSteps][4];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int64_t row = first_row + 4 * kWarps * step;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t column = first + 64 * j + 8 * (lane % 8);
      z[step][j] = make_uint4(0, 0, 0, 0);
      if (row < m && column < n) z[step][j] = *reinterpret_cast<const uint4*>(values + row * n + column);
    }
  }
  __syncthreads();  // wait until fired, nonzeros and wide_segments have been zeroed

  uint8_t* chunks = tile[warp] + lane / 8 * kRowBytes + lane % 8 * 16;
  uint32_t seen = 0, counts[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int64_t row = first_row + 4 * kWarps * step;
    __syncwarp();  // wait until all lanes have read the previous four rows
#pragma unroll
    for (int j = 0; j < 4; ++j) *reinterpret_cast<uint4*>(chunks + 128 * j) = dense::relu(z[step][j]);
    __syncwarp();
    uint32_t* words = segment_of(out, row, column_tile, column_tiles);
    counts[step] = pack_four_rows(
        ptx::smem_address(chunks), row < m, lane, first, n, column_tiles, words, out.wide,
        [&](uint32_t) { return own_values(row, n, first); }, seen);
    const bool tells = lane % 8 == 0 && row < m;
    if (tells) words[0] = counts[step];
    const uint32_t all = __reduce_add_sync(~0u, tells ? counts[step] : 0);
    const uint32_t wide = __popc(__ballot_sync(~0u, tells && counts[step] >= kTileWords));
    if (lane == 0 && all != 0) {
      atomicAdd(&nonzeros, all);
      atomicAdd(&wide_segments, wide);
    }
  }
  add_fired(fired, seen, lane);
  __syncthreads();

  ptx::griddepcontrol_wait();  // wait until `clear` has zeroed the statistics
  ptx::griddepcontrol_launch_dependents();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int64_t row = first_row + 4 * kWarps * step;
    if (lane % 8 == 0 && row < m && counts[step] != 0) atomicAdd(out.row_counts + row, static_cast<int>(counts[step]));
  }
  if (threadIdx.x < kColumnTile && (fired[threadIdx.x / 32] >> threadIdx.x % 32 & 1) != 0) {
    out.fired[first + threadIdx.x] = 1;
  }
  if (threadIdx.x < kColumnTile / 32) out.mask[blockIdx.x * (kColumnTile / 32) + threadIdx.x] = fired[threadIdx.x];
  if (threadIdx.x == 0 && nonzeros != 0) {
    uint32_t in_union = 0;
    for (int i = 0; i < kColumnTile / 32; ++i) in_union += __popc(fired[i]);
    const auto counters = reinterpret_cast<unsigned long long*>(out.counters);
    atomicAdd(counters + kNonzeros, static_cast<unsigned long long>(nonzeros));
    atomicAdd(counters + kWideSegments, static_cast<unsigned long long>(wide_segments));
    atomicAdd(counters + kUnion, static_cast<unsigned long long>(in_union));
  }
}

}  // namespace of_product

}  // namespace sparsellm
