// rest_backward, the overflow path of backward: computes the gradients of a feedforward layer for a batch whose
// nonzeros exceeded the capacity of the tile engine's lists. One kernel computes them densely, from the inputs alone;
// it ends at once if the lists did not overflow. To save memory, no matrix of M x N is kept. The kernel first computes
// the gradients of the weights, for 128 neurons at a time over all tokens, and then the gradient of x, for 512 tokens
// at a time over all neurons. Both passes compute z, u and dh, so the kernel multiplies twice as much as dense PyTorch.
// It also uses mma.sync, which is slower than WGMMA.
//
// The work is a sequence of phases, each of which reads what the previous phase wrote: the hidden values of a group of
// neurons, then these neurons' gradients, and so on for all groups; then the same for groups of tokens. CTAs draw the
// output tiles of all phases in order from one counter. A CTA that has drawn a tile waits until the tiles of all
// earlier phases are done. The CTAs that drew those tiles are already running, so the kernel cannot hang, however few
// of its CTAs are resident at once: other streams, processes or green contexts may occupy SMs.
//
// Numerics: as in sparsellm/ops/reference.py. Products are accumulated in float32 and rounded to bf16 once (gradients
// of float32 weights are not rounded). Elementwise arithmetic is in float32 and rounded to bf16 once. Deterministic.
#include "common/host.h"
#include "common/ptx.cuh"
#include "launch.h"

namespace sparsellm {
namespace {

constexpr int kRestThreads = 256;
constexpr int kRows = 128, kColumns = 64;  // size of an output tile: 4 x 2 warps, 32 x 32 values each
constexpr int kDepth = 64;                 // inner dimension of one step
constexpr int kNeurons = 128;              // neurons per step of the weights' gradients; their dz, du and h are kept
                                           // for all tokens
constexpr int kTokens = 512;               // tokens per step of the gradient of x; their dz and du are kept for all
                                           // neurons
constexpr int kPad = 8;                    // values of padding per row in shared memory, so that neighbouring rows use
                                           // different banks

using Bf16 = __nv_bfloat16;

struct Tiles {
  alignas(16) Bf16 a[kRows * (kDepth + kPad)];
  alignas(16) Bf16 b[kColumns * (kDepth + kPad)];
};
static_assert(kDepth * (kRows + kPad) <= kRows * (kDepth + kPad) && kColumns == kDepth, "either layout fits");

__device__ __forceinline__ float rounded(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

// One operand of an output tile. Its "sides" are the tile's rows (of a) or columns (of b); it has kSide of them, times
// kDepth of the inner dimension. The layout in shared memory is that in global memory: if kSideFast, neighbouring sides
// are contiguous; otherwise, neighbours in the inner dimension are.
template <int kSide, bool kSideFast>
struct Operand {
  static constexpr int kFast = kSideFast ? kSide : kDepth, kPitch = kFast + kPad;
  static constexpr int kQuads = kSide * kDepth / 8 / kRestThreads;
  uint4 quads[kQuads];

  // `at(side, k)` returns a pointer to 8 values that are contiguous in memory, or null outside the matrix.
  template <class At>
  __device__ __forceinline__ void load(int k0, int depth, At at) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const int i = q * kRestThreads + threadIdx.x, fast = i % (kFast / 8) * 8, slow = i / (kFast / 8);
      const int side = kSideFast ? fast : slow, k = k0 + (kSideFast ? slow : fast);
      const Bf16* from = k < depth ? at(side, k) : nullptr;
      quads[q] = from == nullptr ? make_uint4(0, 0, 0, 0) : *reinterpret_cast<const uint4*>(from);
    }
  }
  __device__ __forceinline__ void store(Bf16* tile) const {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const int i = q * kRestThreads + threadIdx.x;
      ptx::st_shared_v4(ptx::smem_address(tile + i / (kFast / 8) * kPitch + i % (kFast / 8) * 8), quads[q]);
    }
  }
  // Loads the four 8 x 8 matrices of sides [side, side + 16) and k [k, k + 16). If kByDepth, the two matrices of the
  // first 8 k come first; otherwise, the two of the first 8 sides.
  template <bool kByDepth>
  static __device__ __forceinline__ void fragments(uint32_t (&r)[4], const Bf16* tile, int side, int k) {
    const int lane = threadIdx.x % 32, matrix = lane / 8;
    const int of_side = kByDepth ? matrix % 2 : matrix / 2, of_k = kByDepth ? matrix / 2 : matrix % 2;
    const int row = (kSideFast ? k + of_k * 8 : side + of_side * 8) + lane % 8;
    const int column = kSideFast ? side + of_side * 8 : k + of_k * 8;
    ptx::ldmatrix_x4<kSideFast>(r, ptx::smem_address(tile + row * kPitch + column));
  }
};

// A thread's share of the sums of an output tile: sum[i][j][2 r + c] is at row row_of(i, r), column column_of(j) + c.
using Sums = float[2][4][4];
__device__ __forceinline__ int row_of(int i, int r) {
  return threadIdx.x / 64 * 32 + 16 * i + 8 * r + threadIdx.x % 32 / 4;
}
__device__ __forceinline__ int column_of(int j) { return threadIdx.x / 32 % 2 * 32 + 8 * j + threadIdx.x % 4 * 2; }

// sum += a b^T over k < depth. a(row, k) and b(column, k) point to values as `at` of Operand::load does.
template <bool kRowsFast, bool kColumnsFast, class A, class B>
__device__ __forceinline__ void multiply(Tiles& tiles, Sums& sum, int depth, A a, B b) {
  using Left = Operand<kRows, kRowsFast>;
  using Right = Operand<kColumns, kColumnsFast>;
  Left left;
  Right right;
  left.load(0, depth, a);
  right.load(0, depth, b);
  for (int k0 = 0; k0 < depth; k0 += kDepth) {
    __syncthreads();  // wait until all threads have read the operands of the previous step
    left.store(tiles.a);
    right.store(tiles.b);
    __syncthreads();
    if (k0 + kDepth < depth) {
      left.load(k0 + kDepth, depth, a);
      right.load(k0 + kDepth, depth, b);
    }
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      uint32_t rows[2][4], columns[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Left::template fragments<true>(rows[i], tiles.a, threadIdx.x / 64 * 32 + 16 * i, k);
        Right::template fragments<false>(columns[i], tiles.b, threadIdx.x / 32 % 2 * 32 + 16 * i, k);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          ptx::mma_16x8x16(sum[i][j], rows[i], columns[j / 2][j % 2 * 2], columns[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }
}

__device__ __forceinline__ const Bf16* bf16(const void* pointer) { return static_cast<const Bf16*>(pointer); }

// Computes an output tile of dW_g (which: 0), dW_u (1) or dW_d by neuron (2): rows of neurons [neuron0, neuron0 +
// neurons), and columns from `left` on. The tile is the transpose of plane `which` (dz, du or h) times x or dy.
__device__ __forceinline__ void weight_tile(const RestBackward& p, Tiles& tiles, int which, int left, int neuron0,
                                            int neurons) {
  void* out = which == 0 ? p.dw_gate : which == 1 ? p.dw_up : p.dw_down_t;
  if (out == nullptr) return;
  const int m = p.m, k = p.k;
  const Bf16* plane = static_cast<const Bf16*>(p.planes) + static_cast<int64_t>(which) * m * neurons;
  const Bf16* right = which == 2 ? bf16(p.dy) : bf16(p.x);
  Sums sum = {};
  multiply<true, true>(
      tiles, sum, m,
      [&](int row, int token) { return row < neurons ? plane + static_cast<int64_t>(token) * neurons + row : nullptr; },
      [&](int column, int token) {
        return left + column < k ? right + static_cast<int64_t>(token) * k + left + column : nullptr;
      });
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int row = row_of(i / 8, i % 2), column = left + column_of(i / 2 % 4);
    if (row >= neurons || column >= k) continue;
    const float* pair = &sum[i / 8][i / 2 % 4][i % 2 * 2];
    const int64_t at = static_cast<int64_t>(neuron0 + row) * k + column;
    if (p.float_gradients) {
      *reinterpret_cast<float2*>(static_cast<float*>(out) + at) = make_float2(pair[0], pair[1]);
    } else {
      *reinterpret_cast<uint32_t*>(static_cast<Bf16*>(out) + at) = ptx::cvt_bf16x2(pair[0], pair[1]);
    }
  }
}

// Computes an output tile of dx = dz W_g + du W_u: rows of tokens [token0, token0 + tokens) from `top` on, and columns
// from `left` on.
__device__ __forceinline__ void input_tile(const RestBackward& p, Tiles& tiles, int top, int left, int token0,
                                           int tokens) {
  const int k = p.k, n = p.n;
  const auto planes = static_cast<const Bf16*>(p.planes);
  const int64_t plane = static_cast<int64_t>(tokens) * n;
  Sums sum = {};
  for (int which = 0; which < (p.w_up != nullptr ? 2 : 1); ++which) {
    const Bf16* weights = which == 0 ? bf16(p.w_gate) : bf16(p.w_up);
    const auto value = [&](int row, int neuron) {
      return top + row < tokens ? planes + which * plane + static_cast<int64_t>(top + row) * n + neuron : nullptr;
    };
    const auto weight = [&](int column, int neuron) {
      return left + column < k ? weights + static_cast<int64_t>(neuron) * k + left + column : nullptr;
    };
    multiply<false, true>(tiles, sum, n, value, weight);
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int row = top + row_of(i / 8, i % 2), column = left + column_of(i / 2 % 4);
    if (row >= tokens || column >= k) continue;
    const float* pair = &sum[i / 8][i / 2 % 4][i % 2 * 2];
    *reinterpret_cast<uint32_t*>(static_cast<Bf16*>(p.dx) + static_cast<int64_t>(token0 + row) * k + column) =
        ptx::cvt_bf16x2(pair[0], pair[1]);
  }
}

// Computes an output tile of dz, du and h, for rows of tokens [token0, token0 + tokens) from `top` on and neurons
// [neuron0, neuron0 + neurons) from `left` on, and writes them to three planes of [tokens, neurons]. The arguments are
// passed one by one rather than as a struct, because of ptxas: otherwise the bounds checks of the other products' loads
// no longer fit in the registers, and are recomputed in the loops.
__device__ __forceinline__ void hidden(Tiles& tiles, const Bf16* x, const Bf16* dy, const Bf16* w_gate,
                                       const Bf16* w_up, const Bf16* w_down_t, Bf16* planes, bool gated, int k,
                                       float dl1, int top, int left, int token0, int tokens, int neuron0, int neurons) {
  const int64_t plane = static_cast<int64_t>(tokens) * neurons;
  const auto rows_of = [&](const Bf16* matrix) {
    return [=](int row, int at) {
      return top + row < tokens ? matrix + static_cast<int64_t>(token0 + top + row) * k + at : nullptr;
    };
  };
  const auto neurons_of = [&](const Bf16* matrix) {
    return [=](int column, int at) {
      return left + column < neurons ? matrix + static_cast<int64_t>(neuron0 + left + column) * k + at : nullptr;
    };
  };
  Sums z = {}, u = {}, dh = {};
  multiply<false, false>(tiles, z, k, rows_of(x), neurons_of(w_gate));
  if (gated) multiply<false, false>(tiles, u, k, rows_of(x), neurons_of(w_up));
  multiply<false, false>(tiles, dh, k, rows_of(dy), neurons_of(w_down_t));
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int row = top + row_of(i / 8, i % 2), column = left + column_of(i / 2 % 4);
    if (row >= tokens || column >= neurons) continue;
    float dz[2], du[2], h[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const auto of = [&](const Sums& sums) { return rounded(sums[i / 8][i / 2 % 4][i % 2 * 2 + c]); };
      const float its_z = of(z), its_u = gated ? of(u) : 1.0f;
      const float g = its_z > 0.0f || its_z != its_z ? its_z : 0.0f;  // NaN stays NaN
      h[c] = rounded(g * its_u);
      const float sign = !gated || h[c] > 0.0f ? 1.0f : h[c] < 0.0f ? -1.0f : h[c];
      const float total = of(dh) + dl1 * sign;
      dz[c] = g != 0.0f ? total * its_u : 0.0f;
      du[c] = total * g;
    }
    const int64_t at = static_cast<int64_t>(row) * neurons + column;
    *reinterpret_cast<uint32_t*>(planes + at) = ptx::cvt_bf16x2(dz[0], dz[1]);
    *reinterpret_cast<uint32_t*>(planes + plane + at) = ptx::cvt_bf16x2(du[0], du[1]);
    *reinterpret_cast<uint32_t*>(planes + 2 * plane + at) = ptx::cvt_bf16x2(h[0], h[1]);
  }
}

__device__ __forceinline__ int tiles_of(int length, int size) { return (length + size - 1) / size; }

// Called by one thread: returns once `count` tiles are done, whose results this CTA may read after a barrier.
__device__ __forceinline__ void wait_until_done(const RestBackward& p, int count) {
  while (static_cast<int>(ptx::ld_acquire(reinterpret_cast<const uint32_t*>(p.tickets + 1))) < count) __nanosleep(100);
  __threadfence();
}

__global__ void __launch_bounds__(kRestThreads, 1) rest_backward_kernel(const RestBackward p) {
  __shared__ Tiles tiles;
  __shared__ int drawn;
  ptx::griddepcontrol_wait();
  if (*p.rest == 0) return;
  const int m = p.m, n = p.n, across = tiles_of(p.k, kColumns);
  // Each group has two phases: the hidden values (even phases), then gradients from them (odd phases).
  const int weight_phases = 2 * tiles_of(n, kNeurons), phases = weight_phases + 2 * tiles_of(m, kTokens);
  int phase = 0, begin = 0;  // the phase of the drawn tile, and the number of the phase's first tile
  for (;;) {
    if (threadIdx.x == 0) drawn = atomicAdd(p.tickets, 1);
    __syncthreads();
    const int tile = drawn;
    // The phase's tokens and neurons, and how many tiles its output has in a row.
    int token0 = 0, tokens = m, neuron0 = 0, neurons = n, columns = across;
    for (; phase < phases; ++phase) {
      const bool of_weights = phase < weight_phases, of_hidden = phase % 2 == 0;
      neuron0 = of_weights ? phase / 2 * kNeurons : 0;
      neurons = of_weights ? min(kNeurons, n - neuron0) : n;
      token0 = of_weights ? 0 : (phase - weight_phases) / 2 * kTokens;
      tokens = of_weights ? m : min(kTokens, m - token0);
      columns = of_hidden ? tiles_of(neurons, kColumns) : across;
      const int count = (of_weights && !of_hidden ? 3 : tiles_of(tokens, kRows)) * columns;
      if (tile < begin + count) break;
      begin += count;
    }
    if (phase == phases) break;
    // No tile of this phase can be done before all earlier ones are. So once `begin` tiles are done, it is those.
    if (threadIdx.x == 0) wait_until_done(p, begin);
    __syncthreads();
    const int row = (tile - begin) / columns, left = (tile - begin) % columns * kColumns;
    if (phase % 2 == 0) {
      hidden(tiles, bf16(p.x), bf16(p.dy), bf16(p.w_gate), bf16(p.w_up), bf16(p.w_down_t), static_cast<Bf16*>(p.planes),
             p.w_up != nullptr, p.k, *p.dl1, row * kRows, left, token0, tokens, neuron0, neurons);
    } else if (phase < weight_phases) {
      weight_tile(p, tiles, row, left, neuron0, neurons);
    } else {
      input_tile(p, tiles, row * kRows, left, token0, tokens);
    }
    __syncthreads();  // all threads have stored their part of the tile, and have read `drawn`
    if (threadIdx.x == 0) ptx::add_release(p.tickets + 1, 1);
  }
  // The CTA that has drawn the last number of all resets the counters: every other CTA has drawn its own last number,
  // so none reads the counters again. It waits because their last additions may still be on their way.
  if (threadIdx.x == 0 && drawn == begin + static_cast<int>(gridDim.x) - 1) {
    wait_until_done(p, begin);
    p.tickets[0] = p.tickets[1] = 0;
  }
}

}  // namespace

int64_t rest_backward_workspace(int64_t m, int64_t n) {
  const int64_t by_neurons = m * kNeurons, by_tokens = (m < kTokens ? m : kTokens) * n;
  return 3 * 2 * (by_neurons > by_tokens ? by_neurons : by_tokens);
}

cudaError_t rest_backward(const RestBackward& p, cudaStream_t stream) {
  int count = 0;
  const cudaError_t error = multiprocessors(&count);
  if (error != cudaSuccess) return error;
  return launch_early(rest_backward_kernel, count, kRestThreads, 0, 1, stream, p);
}

}  // namespace sparsellm
