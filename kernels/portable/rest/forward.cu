// rest_forward, the overflow path of forward: y and l1 of the tokens whose tiles left the tile engine because its lists
// could not hold them. It reads g from the packed gate, so it fires exactly what the gate counted, and computes all
// else densely by mma.sync; it ends at once if no tile left. rest/product.cuh explains how CTAs share the work.
//
// There are two exceptions, in which this kernel computes g in bf16, as rest_backward does, which has no packed gate. A
// gate product in FP8 that a backward pass follows: so both passes use the same g (RestForward::computes_gate). And a
// packed gate without the values of some wide segments, because `wide` had no memory left for them (wide_fits).
//
// The phases: h = g * u of a group of tokens, as a plane [tokens, N]; then y = h W_d of these tokens; and so on for all
// groups. The plane is in the memory of TilePlan::rows, which nothing else uses any more, and which determines the
// number of tokens in a group.
//
// Numerics: u and y are accumulated in float32 and rounded to bf16 once; h is rounded to bf16 once, and is zero where
// the neuron does not fire. l1 is summed in float32 in a fixed order, and then added to what is there. Deterministic.
#include "common/ordered_sum.cuh"
#include "common/twell.cuh"
#include "rest/product.cuh"

namespace sparsellm {
namespace {

using namespace rest;

constexpr int kGatePitch = kSide + kPad;  // values per row of the tile of g in shared memory
constexpr uint32_t kGateBytes = kSide * kGatePitch * 2;
constexpr int kRowThreads = rest::kThreads / kSide;  // threads that unpack a row of the tile of g
static_assert(kColumnTile == 2 * kSide, "a tile has half of a segment's columns");

// Unpacks g of the tile's rows and of neurons [left, left + kSide) to shared memory, with zeros where no neuron fires.
// Called by all threads. rows: shared memory, written before the last barrier.
__device__ __forceinline__ void unpack(uint32_t gate, const Packed& packed, const int* rows, int n, int left) {
  const int row = threadIdx.x / kRowThreads, part = threadIdx.x % kRowThreads, token = rows[row];
  constexpr int kShare = kSide / kRowThreads;  // columns that this thread clears, and of a wide segment also fills
  const int column_tiles = (n + kColumnTile - 1) / kColumnTile;
  const uint32_t to = gate + row * (kGatePitch * 2), own = to + part * (kShare * 2);
  const uint32_t* words = segment_of(packed, max(token, 0), left / kColumnTile, column_tiles);
  const uint32_t count = token >= 0 ? words[0] : 0;
#pragma unroll
  for (int i = 0; i < kShare; i += 8) ptx::st_shared_v4(own + 2 * i, make_uint4(0, 0, 0, 0));
  __syncwarp();  // a row's threads are in one warp
  if (count >= kTileWords) {
    const uint32_t* mask = words + word_offset(kSectorWords, column_tiles);
    const Bf16* value = bf16(packed.wide) + 8 * static_cast<int64_t>(words[1]);
    const int first = (left % kColumnTile + part * kShare) / 32;  // the mask's first word of this thread's columns
    for (int w = 0; w < first; ++w) value += __popc(mask[w]);
    for (int w = 0; w < kShare / 32; ++w) {
      for (uint32_t bits = mask[first + w]; bits != 0; bits &= bits - 1, ++value) {
        ptx::st_shared_u16(own + 2 * (32 * w + __ffs(bits) - 1), __bfloat16_as_ushort(*value));
      }
    }
    return;
  }
  for (uint32_t i = 1 + part; i <= count; i += kRowThreads) {
    const uint32_t word = words[word_offset(i, column_tiles)], column = (word & 0xffff) - left;
    if (column < kSide) ptx::st_shared_u16(to + column * 2, word >> 16);
  }
}

struct Problem {
  const RestForward& p;
  uint32_t stages, gate;  // shared addresses: the stages of a product, and the tile of g
  int* rows;              // shared memory, [kSide] tokens of a tile's rows
  float* warp_sums;       // shared memory, a sum per warp
  int count;              // tokens
  bool unpacks;           // whether g is read from the packed gate

  // Computes an output tile of h: rows from `top` on, which are rows from `top - first` on of the plane, and neurons
  // from `left` on. partial: where its sum of |h| goes.
  __device__ __forceinline__ void hidden(int first, int top, int left, float* partial) const {
    const int k = p.k, n = p.n;
    look_up_rows(rows, p.tokens, top, count);
    __syncthreads();
    if (unpacks) {
      unpack(gate, p.packed, rows, n, left);
    } else {
      Sums z = {};
      multiply<false, false>(stages, z, k, listed_rows(bf16(p.x), k, rows), rows_from(bf16(p.w_gate), k, left, n));
      for_each_pair(z, [&](int row, int column, float low, float high, int) {
        ptx::st_shared_u32(gate + (row * kGatePitch + column) * 2, ptx::cvt_relu_bf16x2(low, high));
      });
    }
    Sums u = {};
    const bool gated = p.w_up != nullptr;
    if (gated) {
      multiply<false, false>(stages, u, k, listed_rows(bf16(p.x), k, rows), rows_from(bf16(p.w_up), k, left, n));
    } else {
      __syncthreads();  // the tile of g has been written
    }
    float l1 = 0.0f;
    for_each_pair(u, [&](int row, int column, float low, float high, int) {
      const uint32_t g = ptx::ld_shared_u32(gate + (row * kGatePitch + column) * 2);
      const auto product = [&](float g, float u) { return g == 0.0f || !gated ? g : g * rounded(u); };
      const uint32_t h = ptx::cvt_bf16x2(product(low_of(g), low), product(high_of(g), high));
      l1 += fabsf(low_of(h)) + fabsf(high_of(h));
      if (top + row >= count || left + column >= n) return;
      Bf16* to = static_cast<Bf16*>(p.plane) + static_cast<int64_t>(top - first + row) * n + left + column;
      *reinterpret_cast<uint32_t*>(to) = h;
    });
    l1 = warp_sum(l1);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = l1;
    __syncthreads();
    if (threadIdx.x == 0) {
      float all = 0.0f;
      for (int w = 0; w < rest::kThreads / 32; ++w) all += warp_sums[w];
      *partial = all;
    }
  }

  // Computes an output tile of y = h W_d.
  __device__ __forceinline__ void output_tile(int first, int top, int left) const {
    look_up_rows(rows, p.tokens, top, count);
    const int k = p.k, n = p.n;
    Sums sum = {};
    multiply<false, true>(stages, sum, n, rows_from(bf16(p.plane), n, top - first, count - first),
                          columns_from(bf16(p.w_down_t), k, left, k));
    for_each_pair(sum, [&](int row, int column, float low, float high, int) {
      if (rows[row] < 0 || left + column >= k) return;
      Bf16* y = static_cast<Bf16*>(p.y) + static_cast<int64_t>(rows[row]) * k + left + column;
      *reinterpret_cast<uint32_t*>(y) = ptx::cvt_bf16x2(low, high);
    });
  }
};

__global__ void __launch_bounds__(rest::kThreads, 1) rest_forward_kernel(const RestForward p) {
  extern __shared__ __align__(128) uint8_t raw[];
  __shared__ int rows[kSide];
  __shared__ float warp_sums[rest::kThreads / 32];
  ptx::griddepcontrol_wait();
  if (p.totals[kRest] == 0) return;
  const uint32_t stages = ptx::smem_address(raw);
  const bool unpacks = !p.computes_gate && wide_fits(p.packed);
  const Problem problem = {p, stages, stages + kStagesBytes, rows, warp_sums, p.totals[kRestTokens], unpacks};
  const int all = tiles_of(problem.count), neurons = tiles_of(p.n), across = tiles_of(p.k);
  const int groups = (all + p.group_tiles - 1) / p.group_tiles;
  const auto down_in = [&](int group) { return min(p.group_tiles, all - group * p.group_tiles); };
  // Each group has two phases: h (even phases), then y (odd phases).
  const auto tiles_in = [&](int phase) { return down_in(phase / 2) * (phase % 2 == 0 ? neurons : across); };
  const bool last = run_phases(p.tickets, 2 * groups, tiles_in, [&](int phase, int tile) {
    const int first = phase / 2 * p.group_tiles;
    const Place at = place_of_tile(tile, down_in(phase / 2), phase % 2 == 0 ? neurons : across);
    const int row = first + at.row;
    if (phase % 2 == 0) {
      problem.hidden(first * kSide, row * kSide, at.column * kSide,
                     p.l1_partials + static_cast<int64_t>(row) * neurons + at.column);
    } else {
      problem.output_tile(first * kSide, row * kSide, at.column * kSide);
    }
  });
  if (!last) return;
  const float sum = ordered_sum(p.l1_partials, static_cast<int64_t>(all) * neurons, warp_sums);
  if (threadIdx.x == 0) *p.l1 += sum;
}

constexpr int64_t kMinGroupTiles = 8;  // memory for at least this many tiles of tokens, if there are as many

}  // namespace

int64_t rest_forward_workspace(int64_t m, int64_t n) {
  const int64_t tiles = tiles_of(m);
  return 2 * n * kSide * (tiles < kMinGroupTiles ? tiles : kMinGroupTiles);
}

cudaError_t rest_forward(RestForward p, int64_t plane_bytes, cudaStream_t stream) {
  const int64_t tiles = plane_bytes / (2 * kSide * static_cast<int64_t>(p.n));
  p.group_tiles = static_cast<int>(tiles < tiles_of(p.m) ? tiles : tiles_of(p.m));
  int count = 0;
  const cudaError_t error = multiprocessors(&count);
  if (error != cudaSuccess) return error;
  return launch_early(rest_forward_kernel, count, rest::kThreads, kStagesBytes + kGateBytes, 1, stream, p);
}

}  // namespace sparsellm
