// rest_backward, the overflow path of backward: the gradients of the tokens whose tiles left the tile engine because
// its lists could not hold them. It writes their dx, and adds their share to the gradients of the weights, which the
// tile engine has already computed for all other tokens. It computes densely, from the inputs alone, by WGMMA; it
// ends at once if no tile left. rest/product.cuh explains how CTAs share the work.
//
// The phases: dz, du and h of all these tokens; then all gradients from them. The planes [tokens, N] (non-gated: dz and
// h) are in the memory of the nonzeros' gradients and of the operands by neuron, which nothing else uses any more. If
// not all planes fit, there are two passes: the first computes h and, in a gated layer, dz, and the gradients dW_d and
// dW_g; the second the other plane in place of h, and the gradients dW_u and dx.
//
// Numerics: as in sparsellm/ops/reference.py. Products are accumulated in float32 and rounded to bf16 once. A weight's
// gradient is summed in float32 over these tokens, ascending in the list, and then added to what is there. Elementwise
// arithmetic is in float32 and rounded to bf16 once. Deterministic.
#include "rest/product.cuh"

namespace sparsellm {
namespace {

using namespace rest;

constexpr int kDz = 1, kDu = 2, kH = 4;  // a set of planes is a sum of these

constexpr int kListedAhead = Stages<kWide>::kAhead * kDepth;
constexpr int kListed = 512;  // tokens of the steps of a sum over tokens, used in rotation
static_assert(kListed >= 2 * (kListedAhead + kDepth));

// What a pass computes: which planes, and where each of them is.
struct Pass {
  int planes;     // set of the planes that this pass computes
  int dz, du, h;  // which plane of the memory holds each
};

// The passes for `count` tokens: one if the memory holds all planes, else two.
__device__ __forceinline__ int passes_for(const RestBackward& p, bool gated, int64_t count) {
  return (gated ? 3 : 2) * 2 * count * p.n <= p.planes_bytes ? 1 : 2;
}
__device__ __forceinline__ Pass pass_of(bool gated, int passes, int index) {
  if (passes == 1) return gated ? Pass{kDz | kDu | kH, 0, 1, 2} : Pass{kDz | kH, 0, 0, 1};
  if (gated) return index == 0 ? Pass{kDz | kH, 0, 1, 1} : Pass{kDu, 0, 1, 1};
  return index == 0 ? Pass{kH, 0, 0, 0} : Pass{kDz, 0, 0, 0};
}

struct Problem {
  const RestBackward& p;
  uint32_t stages;
  int *rows, *listed;  // shared memory, [kSide] tokens of a tile's rows, and [kListed] of a sum's steps
  int count;  // tokens
  bool gated;

  __device__ __forceinline__ Bf16* plane(int index) const {
    return static_cast<Bf16*>(p.planes) + static_cast<int64_t>(index) * count * p.n;
  }

  // Computes an output tile of the pass's planes: rows from `top` on, neurons from `left` on.
  __device__ __forceinline__ void hidden(const Pass& pass, int top, int left) const {
    look_up_rows(rows, p.tokens, top, count);
    const int k = p.k, n = p.n;
    uint32_t gs[kSide / 4], us[kSide / 4];
    gate_and_up(stages, gs, us, p.x, p.w_gate, p.w_up, k, n, rows, left);
    Sums<> dh = {};
    if ((pass.planes & (kDz | kDu)) != 0) {
      multiply(stages, dh, k, listed_rows(bf16(p.dy), k, rows), rows_from(bf16(p.w_down_t), k, left, n));
    }
    const float dl1 = *p.dl1;
    Bf16 *to_dz = plane(pass.dz), *to_du = plane(pass.du), *to_h = plane(pass.h);
    for_each_pair([&](int row, int column, int i) {
      if (top + row >= count || left + column >= n) return;
      float dz[2], du[2], h[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float g = c == 0 ? low_of(gs[i]) : high_of(gs[i]);
        const float u = !gated ? 1.0f : c == 0 ? low_of(us[i]) : high_of(us[i]);
        h[c] = rounded(g * u);
        const float sign = !gated || h[c] > 0.0f ? 1.0f : h[c] < 0.0f ? -1.0f : h[c];
        const float total = rounded(dh[2 * i + c]) + dl1 * sign;
        dz[c] = g != 0.0f ? total * u : 0.0f;
        du[c] = total * g;
      }
      const int64_t at = static_cast<int64_t>(top + row) * n + left + column;
      const auto store = [&](int which, Bf16* plane, const float(&pair)[2]) {
        if ((pass.planes & which) != 0) *reinterpret_cast<uint32_t*>(plane + at) = ptx::cvt_bf16x2(pair[0], pair[1]);
      };
      store(kDz, to_dz, dz);
      store(kDu, to_du, du);
      store(kH, to_h, h);
    });
  }

  // Adds to an output tile of dW [N, K]: the transpose of a plane times x or dy.
  __device__ __forceinline__ void weight_tile(void* dw, const Bf16* plane, const Bf16* matrix, int top,
                                              int left) const {
    const int k = p.k, n = p.n;
    const int32_t* tokens = p.tokens;
    const auto token_of = [&](int row) { return listed[row % kListed]; };
    for (int row = threadIdx.x; row < min(kListedAhead, count); row += rest::kThreads) {
      listed[row] = tokens[row];  // multiply begins with a barrier
    }
    // May read up to three words behind the last token: memory is in units of 256 bytes.
    const auto list = [&](int step) {
      const int row = step * kDepth + kListedAhead + 4 * threadIdx.x;
      if (threadIdx.x < kDepth / 4 && row < count) {
        ptx::cp_async_16(ptx::smem_address(listed + row % kListed), tokens + row);
      }
    };
    Sums<kWide> sum = {};
    multiply(stages, sum, count, columns_from<kSide>(plane, n, top), columns_from<kWide>(matrix, k, left, token_of),
             list);
    for_each_pair<kWide>([&](int row, int column, int i) {
      if (top + row >= n || left + column >= k) return;
      const int64_t at = static_cast<int64_t>(top + row) * k + left + column;
      if (p.float_gradients) {
        float2* to = reinterpret_cast<float2*>(static_cast<float*>(dw) + at);
        const float2 there = *to;
        *to = make_float2(there.x + sum[2 * i], there.y + sum[2 * i + 1]);
      } else {
        uint32_t* to = reinterpret_cast<uint32_t*>(static_cast<Bf16*>(dw) + at);
        const uint32_t there = *to;
        *to = ptx::cvt_bf16x2(low_of(there) + sum[2 * i], high_of(there) + sum[2 * i + 1]);
      }
    });
  }

  // Computes an output tile of dx = dz W_g + du W_u.
  __device__ __forceinline__ void input_tile(const Pass& pass, int top, int left) const {
    look_up_rows(rows, p.tokens, top, count);
    const int k = p.k, n = p.n;
    Sums<kWide> sum = {};
#pragma unroll 1
    for (int which = 0; which < (gated ? 2 : 1); ++which) {
      const Bf16* weights = which == 0 ? bf16(p.w_gate) : bf16(p.w_up);
      multiply(stages, sum, n, rows_from(plane(which == 0 ? pass.dz : pass.du), n, top, count),
               columns_from<kWide>(weights, k, left));
    }
    for_each_pair<kWide>([&](int row, int column, int i) {
      if (top + row >= count || left + column >= k) return;
      Bf16* dx = static_cast<Bf16*>(p.dx) + static_cast<int64_t>(rows[row]) * k + left + column;
      *reinterpret_cast<uint32_t*>(dx) = ptx::cvt_bf16x2(sum[2 * i], sum[2 * i + 1]);
    });
  }
};

__global__ void __launch_bounds__(rest::kThreads, 1) rest_backward_kernel(const RestBackward p) {
  extern __shared__ uint8_t raw[];
  __shared__ int rows[kSide];
  __shared__ __align__(16) int listed[kListed];
  ptx::griddepcontrol_wait();
  if (p.totals[kRest] == 0) return;
  const Problem problem = {p, aligned_stages(raw), rows, listed, p.totals[kRestTokens], p.w_up != nullptr};
  const bool gated = problem.gated;
  // In shared memory, because no registers are left for values that are needed only between tiles.
  __shared__ int down, neurons, across, passes;
  if (threadIdx.x == 0) {
    down = tiles_of(problem.count), neurons = tiles_of(p.n), across = tiles_of(p.k, kWide);
    passes = passes_for(p, gated, problem.count);
  }
  __syncthreads();
  // Each pass has two phases: its planes (even phases), then the gradients from them (odd phases): dx, whose
  // tiles take longest, in the last pass; then those of the weights, from one plane after the other.
  const auto inputs_in = [&](int phase) { return phase / 2 == passes - 1 ? down * across : 0; };
  const auto tiles_in = [&](int phase) {
    if (phase % 2 == 0) return down * neurons;
    return inputs_in(phase) + __popc(pass_of(gated, passes, phase / 2).planes) * neurons * across;
  };
  run_phases(p.tickets, 2 * passes, tiles_in, [&](int phase, int tile) {
    const Pass pass = pass_of(gated, passes, phase / 2);
    if (phase % 2 == 0) {
      const Place at = place_of_tile(tile, down, neurons);
      problem.hidden(pass, at.row * kSide, at.column * kSide);
    } else if (const int inputs = inputs_in(phase); tile < inputs) {
      const Place at = place_of_tile(tile, down, across);
      problem.input_tile(pass, at.row * kSide, at.column * kWide);
    } else {
      const int each = neurons * across, index = tile - inputs;
      const Place at = place_of_tile(index % each, neurons, across);
      int which = pass.planes;  // the planes before this tile's are removed from the set
      for (int i = 0; i < index / each; ++i) which &= which - 1;
      which &= -which;
      // In a non-gated layer, dz is the gradient of the product with W_u, whose gradient is in dw_gate.
      void* dw = which == kDz ? p.dw_gate : which == kDu ? p.dw_up : p.dw_down_t;
      const Bf16* plane = problem.plane(which == kDz ? pass.dz : which == kDu ? pass.du : pass.h);
      problem.weight_tile(dw, plane, which == kH ? bf16(p.dy) : bf16(p.x), at.row * kSide, at.column * kWide);
    }
  });
}

}  // namespace

cudaError_t rest_backward(const RestBackward& p, cudaStream_t stream) {
  int count = 0;
  const cudaError_t error = multiprocessors(&count);
  if (error != cudaSuccess) return error;
  return launch_early(rest_backward_kernel, count, rest::kThreads, kAlignment + kStagesBytes, 1, stream, p);
}

}  // namespace sparsellm
