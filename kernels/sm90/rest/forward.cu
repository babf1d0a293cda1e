// rest_forward, the overflow path of forward: y and l1 of the tokens whose tiles left the tile engine because its lists
// could not hold them. It computes densely, by WGMMA, from x and the weights alone; g has the bits of rest_backward's
// g. It ends at once if no tile left. rest/product.cuh explains how CTAs share the work.
//
// The phases: h = g * u of a group of tokens, as a plane [tokens, N]; then y = h W_d of these tokens; and so on for all
// groups. The plane is in the memory of the packed gate and of TilePlan::rows, which nothing else uses any more, and
// which determines the number of tokens in a group.
//
// Numerics: g, u and y are accumulated in float32 and rounded to bf16 once; h is rounded to bf16 once, and is zero
// where the neuron does not fire. l1 is summed in float32 in a fixed order, and then added to what is there.
// Deterministic.
#include "common/ordered_sum.cuh"
#include "rest/product.cuh"

namespace sparsellm {
namespace {

using namespace rest;

struct Problem {
  const RestForward& p;
  uint32_t stages;   // shared address of the stages of a product
  int* rows;         // shared memory, [kSide] tokens of a tile's rows
  float* warp_sums;  // shared memory, a sum per warp
  int count;         // tokens

  // Computes an output tile of h: rows from `top` on, which are rows from `top - first` on of the plane, and neurons
  // from `left` on. partial: where its sum of |h| goes.
  __device__ __forceinline__ void hidden(int first, int top, int left, float* partial) const {
    const int k = p.k, n = p.n;
    look_up_rows(rows, p.tokens, top, count);
    uint32_t gs[kSide / 4], us[kSide / 4];
    gate_and_up(stages, gs, us, p.x, p.w_gate, p.w_up, k, n, rows, left);
    const bool gated = p.w_up != nullptr;
    float l1 = 0.0f;
    for_each_pair([&](int row, int column, int i) {
      if (top + row >= count || left + column >= n) return;
      const auto product = [&](float g, float u) { return g == 0.0f || !gated ? g : g * u; };
      const uint32_t h =
          ptx::cvt_bf16x2(product(low_of(gs[i]), low_of(us[i])), product(high_of(gs[i]), high_of(us[i])));
      l1 += fabsf(low_of(h)) + fabsf(high_of(h));
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
    Sums<kWide> sum = {};
    multiply(stages, sum, n, rows_from(bf16(p.plane), n, top - first, count - first),
             columns_from<kWide>(bf16(p.w_down_t), k, left));
    for_each_pair<kWide>([&](int row, int column, int i) {
      if (top + row >= count || left + column >= k) return;
      Bf16* y = static_cast<Bf16*>(p.y) + static_cast<int64_t>(rows[row]) * k + left + column;
      *reinterpret_cast<uint32_t*>(y) = ptx::cvt_bf16x2(sum[2 * i], sum[2 * i + 1]);
    });
  }
};

__global__ void __launch_bounds__(rest::kThreads, 1) rest_forward_kernel(const RestForward p) {
  extern __shared__ uint8_t raw[];
  __shared__ int rows[kSide];
  __shared__ float warp_sums[rest::kThreads / 32];
  ptx::griddepcontrol_wait();
  if (p.totals[kRest] == 0) return;
  const Problem problem = {p, aligned_stages(raw), rows, warp_sums, p.totals[kRestTokens]};
  const int all = tiles_of(problem.count), neurons = tiles_of(p.n), across = tiles_of(p.k, kWide);
  const int groups = (all + p.group_tiles - 1) / p.group_tiles;
  const int group_tiles = (all + groups - 1) / groups;  // equal groups: a small one leaves most CTAs without a tile
  const auto down_in = [&](int group) { return min(group_tiles, all - group * group_tiles); };
  // Each group has two phases: h (even phases), then y (odd phases).
  const auto tiles_in = [&](int phase) { return down_in(phase / 2) * (phase % 2 == 0 ? neurons : across); };
  const bool last = run_phases(p.tickets, 2 * groups, tiles_in, [&](int phase, int tile) {
    const int first = phase / 2 * group_tiles;
    const Place at = place_of_tile(tile, down_in(phase / 2), phase % 2 == 0 ? neurons : across);
    const int row = first + at.row;
    if (phase % 2 == 0) {
      problem.hidden(first * kSide, row * kSide, at.column * kSide,
                     p.l1_partials + static_cast<int64_t>(row) * neurons + at.column);
    } else {
      problem.output_tile(first * kSide, row * kSide, at.column * kWide);
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
  return launch_early(rest_forward_kernel, count, rest::kThreads, kAlignment + kStagesBytes, 1, stream, p);
}

}  // namespace sparsellm
