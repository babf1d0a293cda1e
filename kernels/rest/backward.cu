// rest_backward: the gradients of a feedforward layer for a batch whose nonzeros had no room in the tile engine's lists:
// dense, from the inputs alone, and slow: plain float32 multiply-adds, no matrix instructions, in one launch that ends
// at once where there is no rest. It keeps no matrix of M x N: neurons are done 128 at a time for the weights, and then
// tokens 256 at a time for x, with everything computed anew.
//
// Numerics: as sparsellm/ops/reference.py: products in float32 rounded to bf16 once (gradients of weights that are
// float32: not rounded), elementwise in float32 rounded to bf16 once. Deterministic.
#include "common/host.h"
#include "common/ptx.cuh"
#include "launch.h"

namespace sparsellm {
namespace {

constexpr int kRestThreads = 256;
constexpr int kSide = 64;        // of a tile of outputs: 16 x 16 threads, 4 x 4 outputs each
constexpr int kDepth = 16;       // of the inner dimension at a time
constexpr int kNeurons = 128;    // whose hidden values are kept at a time, for all tokens,
constexpr int kTokens = 256;     // and of so many tokens, for all neurons

struct Tiles {
  float a[kDepth][kSide + 4];
  float b[kDepth][kSide + 4];
};

__device__ __forceinline__ float rounded(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

// sum[i][j] += sum over k < depth of a(row, k) b(column, k) for this thread's rows and columns of the tile: rows
// 4 (thread / 16) + i, columns 4 (thread % 16) + j. a and b are asked for any row, column or k of a tile, and give 0
// outside of their matrices. kRowsAreFast: neighbouring rows lie side by side in memory, not neighbouring k.
template <bool kRowsAreFast, class A, class B>
__device__ __forceinline__ void multiply(Tiles& tiles, float (&sum)[4][4], int depth, A a, B b) {
  const int thread = threadIdx.x, row0 = thread / 16 * 4, column0 = thread % 16 * 4;
  for (int k0 = 0; k0 < depth; k0 += kDepth) {
    for (int i = thread; i < kSide * kDepth; i += kRestThreads) {
      const int side = kRowsAreFast ? i % kSide : i / kDepth, k = kRowsAreFast ? i / kSide : i % kDepth;
      tiles.a[k][side] = k0 + k < depth ? a(side, k0 + k) : 0.0f;
      tiles.b[k][side] = k0 + k < depth ? b(side, k0 + k) : 0.0f;
    }
    __syncthreads();
    for (int k = 0; k < kDepth; ++k) {
      for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 4; ++j) sum[i][j] = fmaf(tiles.a[k][row0 + i], tiles.b[k][column0 + j], sum[i][j]);
      }
    }
    __syncthreads();
  }
}

// All CTAs: none goes on before all are here. `arrivals` grows by their number.
__device__ __forceinline__ void grid_barrier(int32_t* arrivals, int& passed) {
  __syncthreads();
  passed += gridDim.x;
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(arrivals, 1);
    while (*static_cast<volatile int32_t*>(arrivals) < passed) {
    }
    __threadfence();
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kRestThreads) rest_backward_kernel(const RestBackward p) {
  __shared__ Tiles tiles;
  ptx::griddepcontrol_wait();
  if (*p.rest == 0) return;
  using Bf16 = __nv_bfloat16;
  const bool gated = p.w_up != nullptr;
  const int m = p.m, k = p.k, n = p.n;
  const float dl1 = *p.dl1;
  const auto x = static_cast<const Bf16*>(p.x), dy = static_cast<const Bf16*>(p.dy);
  const auto w_gate = static_cast<const Bf16*>(p.w_gate), w_up = static_cast<const Bf16*>(p.w_up);
  const auto w_down_t = static_cast<const Bf16*>(p.w_down_t);
  const auto planes = static_cast<Bf16*>(p.planes);
  const int row0 = threadIdx.x / 16 * 4, column0 = threadIdx.x % 16 * 4;
  int passed = 0;

  // dz, du and h of tokens [token0, token0 + tokens) and neurons [neuron0, neuron0 + neurons): to three planes of
  // [tokens, neurons].
  const auto hidden = [&](int token0, int tokens, int neuron0, int neurons) {
    const int across = (neurons + kSide - 1) / kSide, all = (tokens + kSide - 1) / kSide * across;
    const int64_t plane = static_cast<int64_t>(tokens) * neurons;
    for (int tile = blockIdx.x; tile < all; tile += gridDim.x) {
      const int top = tile / across * kSide, left = tile % across * kSide;
      const auto rows_of = [&](const Bf16* matrix) {
        return [=](int row, int at) {
          const int token = token0 + top + row;
          return token < m ? __bfloat162float(matrix[static_cast<int64_t>(token) * k + at]) : 0.0f;
        };
      };
      const auto neurons_of = [&](const Bf16* matrix) {
        return [=](int column, int at) {
          const int neuron = neuron0 + left + column;
          return neuron < n ? __bfloat162float(matrix[static_cast<int64_t>(neuron) * k + at]) : 0.0f;
        };
      };
      float z[4][4] = {}, u[4][4] = {}, dh[4][4] = {};
      multiply<false>(tiles, z, k, rows_of(x), neurons_of(w_gate));
      if (gated) multiply<false>(tiles, u, k, rows_of(x), neurons_of(w_up));
      multiply<false>(tiles, dh, k, rows_of(dy), neurons_of(w_down_t));
      for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 4; ++j) {
          const int row = top + row0 + i, column = left + column0 + j;
          if (row >= tokens || column >= neurons) continue;
          const float rounded_z = rounded(z[i][j]);
          const float g = rounded_z > 0.0f || rounded_z != rounded_z ? rounded_z : 0.0f;  // NaN stays
          const float its_u = gated ? rounded(u[i][j]) : 1.0f;
          const float h = rounded(g * its_u);
          const float sign = !gated || h > 0.0f ? 1.0f : h < 0.0f ? -1.0f : h;
          const float total = rounded(dh[i][j]) + dl1 * sign;
          const int64_t at = static_cast<int64_t>(row) * neurons + column;
          planes[at] = __float2bfloat16_rn(g != 0.0f ? total * its_u : 0.0f);
          planes[plane + at] = __float2bfloat16_rn(total * g);
          planes[2 * plane + at] = __float2bfloat16_rn(h);
        }
      }
    }
  };

  // The weights: each gradient's rows of these neurons are sums over all tokens.
  for (int neuron0 = 0; neuron0 < n; neuron0 += kNeurons) {
    const int neurons = min(kNeurons, n - neuron0);
    hidden(0, m, neuron0, neurons);
    grid_barrier(p.arrivals, passed);
    const int across = (k + kSide - 1) / kSide, each = (neurons + kSide - 1) / kSide * across;
    for (int tile = blockIdx.x; tile < 3 * each; tile += gridDim.x) {
      const int which = tile / each, top = tile % each / across * kSide, left = tile % across * kSide;
      void* out = which == 0 ? p.dw_gate : which == 1 ? p.dw_up : p.dw_down_t;
      if (out == nullptr) continue;
      const Bf16* plane = planes + static_cast<int64_t>(which) * m * neurons;
      const Bf16* right = which == 2 ? dy : x;
      float sum[4][4] = {};
      multiply<true>(
          tiles, sum, m,
          [&](int row, int token) {
            const int64_t at = static_cast<int64_t>(token) * neurons + top + row;
            return top + row < neurons ? __bfloat162float(plane[at]) : 0.0f;
          },
          [&](int column, int token) {
            const int64_t at = static_cast<int64_t>(token) * k + left + column;
            return left + column < k ? __bfloat162float(right[at]) : 0.0f;
          });
      for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 4; ++j) {
          const int row = top + row0 + i, column = left + column0 + j;
          if (row >= neurons || column >= k) continue;
          const int64_t at = static_cast<int64_t>(neuron0 + row) * k + column;
          if (p.float_gradients) {
            static_cast<float*>(out)[at] = sum[i][j];
          } else {
            static_cast<Bf16*>(out)[at] = __float2bfloat16_rn(sum[i][j]);
          }
        }
      }
    }
    grid_barrier(p.arrivals, passed);
  }

  // x: each token's row is a sum over all neurons.
  for (int token0 = 0; token0 < m; token0 += kTokens) {
    const int tokens = min(kTokens, m - token0);
    hidden(token0, tokens, 0, n);
    grid_barrier(p.arrivals, passed);
    const int across = (k + kSide - 1) / kSide, all = (tokens + kSide - 1) / kSide * across;
    const int64_t plane = static_cast<int64_t>(tokens) * n;
    for (int tile = blockIdx.x; tile < all; tile += gridDim.x) {
      const int top = tile / across * kSide, left = tile % across * kSide;
      float sum[4][4] = {};
      for (int which = 0; which < (gated ? 2 : 1); ++which) {
        const Bf16* weights = which == 0 ? w_gate : w_up;
        const auto value = [&](int row, int neuron) {
          const int64_t at = which * plane + static_cast<int64_t>(top + row) * n + neuron;
          return top + row < tokens ? __bfloat162float(planes[at]) : 0.0f;
        };
        const auto weight = [&](int column, int neuron) {
          const int64_t at = static_cast<int64_t>(neuron) * k + left + column;
          return left + column < k ? __bfloat162float(weights[at]) : 0.0f;
        };
        multiply<true>(tiles, sum, n, value, weight);
      }
      for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 4; ++j) {
          const int row = top + row0 + i, column = left + column0 + j;
          if (row >= tokens || column >= k) continue;
          static_cast<Bf16*>(p.dx)[static_cast<int64_t>(token0 + row) * k + column] = __float2bfloat16_rn(sum[i][j]);
        }
      }
    }
    grid_barrier(p.arrivals, passed);
  }
  if (threadIdx.x == 0 && atomicAdd(p.arrivals + 1, 1) == static_cast<int>(gridDim.x) - 1) {
    p.arrivals[0] = p.arrivals[1] = 0;  // none waits any more
  }
}

}  // namespace

int64_t rest_backward_workspace(int64_t m, int64_t n) {
  const int64_t by_neurons = m * kNeurons, by_tokens = kTokens * n;
  return 3 * 2 * (by_neurons > by_tokens ? by_neurons : by_tokens);
}

cudaError_t rest_backward(const RestBackward& p, cudaStream_t stream) {
  int count = 0;
  const cudaError_t error = multiprocessors(&count);
  if (error != cudaSuccess) return error;
  return launch_early(rest_backward_kernel, count, kRestThreads, 0, 1, stream, p);
}

}  // namespace sparsellm
