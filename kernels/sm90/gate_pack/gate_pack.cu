// gate_pack: computes relu(x w^T) and writes it in the packed format; the dense matrix is never in global memory.
//
// For more than 64 tokens, gate_pack computes its product in pairs of tiles (common/pairs.cuh): three warps pack a
// finished tile, four rows at a time, while the next tile is multiplied. For fewer tokens there are other kernels
// (small.cuh, fewest.cuh).
//
// gate_pack_float8 does the same for e4m3 operands with a scale per row (float8.cuh), for any number of tokens. To TMA,
// two e4m3 values along K are one bf16 value.
//
// Numerics: z is accumulated in float32 over K and rounded to bf16 once, after the ReLU; a neuron is active if the
// rounded value is not zero (NaN is active). Words, counts and masks are the same in every run.
#include "common/clear.cuh"
#include "common/pairs.cuh"
#include "gate_pack/fewest.cuh"
#include "gate_pack/float8.cuh"
#include "gate_pack/product.cuh"
#include "gate_pack/small.cuh"

namespace sparsellm {
namespace {

static_assert(!row_ffn_counts(kSmallTokens + 1, 1), "only kernels for few tokens leave counting to row_ffn");

template <class Scales>
__global__ void __launch_bounds__(kThreads, 1)
    gate_pack_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                     const PairProduct product, int64_t n, const Packed out, const Scales scales) {
  extern __shared__ uint8_t raw[];
  const PairMemory memory(raw);
  const uint32_t lane = threadIdx.x % 32;
  const int column_tiles = product.column_tiles;
  auto counters = reinterpret_cast<unsigned long long*>(out.counters);
  unsigned long long nonzeros = 0, wide_segments = 0;
  const auto fetch = [&](int column_tile, uint32_t rank, int kb, uint32_t b, uint32_t full) {
    ptx::tma_load_2d_multicast(b + rank * (kBBytes / 2), &w_map, kb * kTileK,
                               column_tile * kTileN + static_cast<int>(rank) * (kTileN / 2), full, 3);
  };
  const auto take = [&](const FinishedTile& of, int warp, uint32_t* fired) {
    const int64_t row0 = of.row0();
    const uint32_t column = of.column_tile * kColumnTile;
    uint32_t seen = 0;
    uint32_t* words = segment_of(out, row0, of.column_tile, column_tiles);
    const auto reserve = [&](uint32_t count) { return reserve_values(out, count, lane); };
    const int row_words = column_tiles * kTileWords;
#pragma unroll 1
    for (int step = 4 * warp; step < of.rows; step += 4 * kFinishWarps) {
      const int row = step + lane / 8;
      const uint32_t count =
          pack_four_rows(memory.tile + tile_offset(row, lane % 8), row < of.rows, lane, column, n, column_tiles,
                         words + static_cast<int64_t>(row) * row_words, out.wide, reserve, seen);
      if (lane % 8 == 0 && row < of.rows) {
        words[static_cast<int64_t>(row) * row_words] = count;
        if (count != 0) atomicAdd(out.row_counts + row0 + row, static_cast<int>(count));
        nonzeros += count;
        wide_segments += count >= kTileWords;
      }
    }
    add_fired(fired, seen, lane);
  };
  const auto tell = [&](const FinishedTile& of, uint32_t lane, uint32_t word) {
    out.mask[(of.token_tile * column_tiles + of.column_tile) * 8 + lane / 4] = word;
  };
  const auto end = [&](int) {
    if (nonzeros != 0) atomicAdd(counters + kNonzeros, nonzeros);
    if (wide_segments != 0) atomicAdd(counters + kWideSegments, wide_segments);
  };
  const auto bf16 = [](int, float low, float high) { return ptx::cvt_relu_bf16x2(low, high); };
  multiply_pairs<8, 0>(memory, product, x_map, w_map, counters, out.fired, fetch, bf16, take, tell, end,
                       scales);
}

// Packs relu(x w^T) by tiles; x [m, k] and w [n, k] are described as bf16. The previous kernel is `clear`.
template <class Scales>
cudaError_t pack_tiles(const void* x, const void* w, int64_t m, int64_t k, int64_t n, const Packed& out,
                       const Scales& scales, cudaStream_t stream) {
  if (out.wide_values / 8 > kNowhere) return cudaErrorInvalidValue;  // units of eight values are counted in uint32
  CUtensorMap x_map, w_map;
  cudaError_t error = tensor_map(&x_map, x, m, k, kTileM);
  if (error == cudaSuccess) error = tensor_map(&w_map, w, n, k, kTileN / 2);
  if (error != cudaSuccess) return error;
  const PairProduct product = pair_product_of(m, k, ceil_div(n, kTileN));
  return launch_pairs(gate_pack_kernel<Scales>, product, kTileN, stream, x_map, w_map, product, n, out, scales);
}

}  // namespace

cudaError_t gate_pack(const void* x, const void* w, const Float8Scales* float8, int64_t m, int64_t k, int64_t n,
                      const Packed& out, int64_t zeroed, bool for_row, cudaStream_t stream) {
  const bool are_few = m <= kSmallTokens, counts = !(for_row && row_ffn_counts(m, k));
  if (counts) {
    const int64_t fired_octets = are_few ? 0 : n / 8;  // the kernels for few tokens write all of `fired`
    const cudaError_t error = clear(out.row_counts, m, out.fired, fired_octets, out.counters, zeroed, are_few, stream);
    if (error != cudaSuccess) return error;
  }
  if (are_few) {
    const auto product = m <= kFewestTokens ? gate_pack_fewest : gate_pack_small;
    return product(x, w, float8 == nullptr ? nullptr : float8->thresholded, m, k, n, out, counts ? 0 : zeroed, stream);
  }
  if (float8 != nullptr) return cudaErrorInvalidValue;
  return pack_tiles(x, w, m, k, n, out, Unscaled{}, stream);
}

cudaError_t gate_pack_float8(const Float8Gate& gate, int64_t m, int64_t k, int64_t n, const Packed& out, int64_t zeroed,
                             cudaStream_t stream) {
  const cudaError_t error = clear(out.row_counts, m, out.fired, n / 8, out.counters, zeroed, false, stream);
  if (error != cudaSuccess) return error;
  const RowAndColumnScales scales = {gate.x_scales, gate.w_scales, m, n};
  return pack_tiles(gate.x, gate.w, m, k / 2, n, out, scales, stream);
}

cudaError_t pack_product(const Packed& out, int64_t m, int64_t n, int64_t zeroed, cudaStream_t stream) {
  const cudaError_t error = clear(out.row_counts, m, out.fired, n / 8, out.counters, zeroed, false, stream);
  if (error != cudaSuccess) return error;
  const int64_t column_tiles = ceil_div(n, kColumnTile);
  return launch_early(of_product::pack_product_kernel, ceil_div(m, kTokenTile) * column_tiles, of_product::kThreads, 0,
                      1, stream, m, n, static_cast<int>(column_tiles), out);
}

}  // namespace sparsellm
