// Launchers: plain C++ functions over device pointers, free of torch. Each enqueues on `stream`, waits for nothing,
// allocates nothing and returns cudaSuccess or the first error. A kernel may start while the one before it ends, but
// touches no memory of the caller's before that one is done; the first of a chain (gate_pack, pointwise) starts as any
// kernel does. Callers have checked shapes and layouts (sparsellm/ops/cuda.py); what a kernel assumes beyond them is
// asserted where it is used.
//
// Letters: M tokens, K model width, N neurons, all rows contiguous, K and N multiples of 8 up to 65,536.
//   MT = ceil(M / 128) token tiles, NT = ceil(N / 256) column tiles, W = 256 / C words of a packed tile row
//   (C, the compression factor: 2, 4, 8 or 16). bf16 pointers are void*.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

namespace sparsellm {

constexpr int kTokenTile = 128;   // tokens of a token tile
constexpr int kColumnTile = 256;  // columns of a TwELL tile, the gate product's own N tile

constexpr int kRowCapacity = 512;  // nonzeros of a row that have a place of their own; a row with more is a long row

// counters: int64 [kCounters], zeroed by the caller
enum Counter { kNonzeros = 0, kOverflow = 1, kUnion = 2, kCounters = 4 };

// The packed gate of M tokens, TwELL: see kernels/README.md.
struct Packed {
  uint32_t* words;      // [M, NT, W] word 0 the count, then bf16 value << 16 | uint16 column, columns ascending
  void* wide;           // bf16 [M, N]: row segments of tiles with more than W - 1 nonzeros; undefined elsewhere
  uint32_t* mask;       // [MT, NT * 8] bit n: neuron n fires for some token of the tile
  int32_t* row_counts;  // [M] zeroed by the caller
  uint8_t* fired;       // [N] zeroed by the caller: 1 where the neuron fires for some token
  int64_t* counters;    // [kCounters] zeroed by the caller; kUnion: sum over token tiles of neurons in the mask
};

// totals of the tile plan, int32 [8]: zero at first, and again after use but for the first two
enum Total { kItems = 0, kRest = 1, kListWords = 2, kLongWords = 3, kPlanTickets = 4, kUpTickets = 5 };

// The work list of the tile engine: kernels/tile/plan.cuh says what slots, blocks, items and places are. int4 as there.
struct TilePlan {
  uint32_t* rows;         // [M, kRowCapacity] the nonzeros of each row; then [long_capacity] those of long rows
  int64_t long_capacity;
  const int32_t* tokens;  // [M] the token at each tile position, or null: natural order
  uint16_t* slots;        // [MT, NT * 256] the neurons of each tile
  uint32_t* starts;       // [MT, 2, NT * 4 + 1] where each block's nonzeros of each half start in `lists`, and the end
  uint32_t* lists;        // [capacity] the nonzeros, bf16 << 16 | place: g, and after tile_up h
  int64_t capacity;       // if they are more, or too many in long rows, no tile has any: all is left to row_rest
  int4* tiles;            // [MT] neurons, blocks, and the two halves' blocks
  int4* order;            // [MT] tiles that have blocks, fullest first, then those that have none
  int4* items;            // [MT * NT] units of the up product
  int32_t* totals;        // [8] items; whether there is a rest
};

// The nonzeros of each row side by side, from the packed form: to plan.rows, words as there, columns ascending.
cudaError_t pack_rows(const Packed& packed, int64_t m, int64_t n, int words_per_tile, const TilePlan& plan,
                      cudaStream_t stream);

// An order of the tokens that brings together those that fire the same neurons: tokens [M], a permutation.
// workspace: order_workspace(m, n) bytes, contents undefined.
int64_t order_workspace(int64_t m, int64_t n);
cudaError_t token_order(const uint32_t* rows, const int32_t* row_counts, int64_t m, int64_t n, void* workspace,
                        int32_t* tokens, cudaStream_t stream);

// relu(x w^T), packed: x [M, K], w [N, K].
cudaError_t gate_pack(const void* x, const void* w, int64_t m, int64_t k, int64_t n, int words_per_tile,
                      const Packed& out, cudaStream_t stream);

// The neurons of each token tile, its nonzeros, and the units of work. Sets counters[kUnion] to the union of these
// tiles; where the lists have no room, adds M to counters[kOverflow].
cudaError_t tile_plan(const Packed& packed, int64_t m, int64_t n, int words_per_tile, const TilePlan& plan,
                      cudaStream_t stream);

// h = g * (x w_up^T) for the nonzeros, in the lists' place of g. w_up == null: h = g (non-gated), and x is not read.
// l1: float32 [1]; l1_partials: float32 [MT * NT * 8].
cudaError_t tile_up(const void* x, const void* w_up, int64_t m, int64_t k, int64_t n, const TilePlan& plan,
                    float* l1_partials, float* l1, cudaStream_t stream);

// y[token] = h w_down_t[slots]: w_down_t [N, K], y [M, K].
cudaError_t tile_down(const void* w_down_t, int64_t m, int64_t k, int64_t n, const TilePlan& plan, void* y,
                      cudaStream_t stream);

// The row engine: y [M, K] and l1 (float32 [1]) from the packed gate, row by row. w_up == null: non-gated, and x is
// not read. workspace: row_workspace(m, k, n) bytes, 16-byte aligned, contents undefined. tickets: int32 [kRowTickets],
// zero on entry and on exit.
constexpr int kRowTickets = 128;
int64_t row_workspace(int64_t m, int64_t k, int64_t n);
cudaError_t row_ffn(const void* x, const void* w_up, const void* w_down_t, int64_t m, int64_t k, int64_t n,
                    int words_per_tile, const Packed& packed, void* workspace, int32_t* tickets, float* l1, void* y,
                    cudaStream_t stream);

// The same if totals of the plan tell that there is a rest, which is all, else nothing. workspace:
// row_rest_workspace(m, k) bytes.
int64_t row_rest_workspace(int64_t m, int64_t k);
cudaError_t row_rest(const void* x, const void* w_up, const void* w_down_t, int64_t m, int64_t k, int64_t n,
                     int words_per_tile, const Packed& packed, const int32_t* totals, void* workspace,
                     int32_t* tickets, float* l1, void* y, cudaStream_t stream);

// The dense engine's elementwise half in one pass: h = relu(z) * u (u == null: h = relu(z)), and the statistics:
// l1, and, zeroed by the caller, fired, counters[kNonzeros] and counters[kUnion]. h may be z or u.
cudaError_t pointwise(const void* z, const void* u, int64_t m, int64_t n, void* h, float* l1_partials /* [MT * NT] */,
                      float* l1, uint8_t* fired, int64_t* counters, int32_t* tickets /* [1] zero on entry, on exit */,
                      cudaStream_t stream);

}  // namespace sparsellm
