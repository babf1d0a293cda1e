// Launchers: plain C++ functions over device pointers, free of torch. Each enqueues on `stream`, waits for nothing,
// allocates nothing and returns cudaSuccess or the first error. What is launched may start while the kernel before it
// ends, but touches no memory of the caller's before that one is done (within gate_pack, the dense engine's and
// token_order, which know what that one writes: common/clear.cuh, order/order.cu); the first kernel of gate_pack for
// more than 64 tokens, dense_hidden, dense_gradient, pointwise, pointwise_gradient and transpose starts as any kernel
// does. Callers have checked shapes and layouts (sparsellm/ops/cuda.py); what a kernel assumes beyond them is asserted
// where it is used.
//
// Letters: M tokens, K model width, N neurons, all rows contiguous, K and N multiples of 8 up to 65,536.
//   MT = ceil(M / 128) token tiles, NT = ceil(N / 256) column tiles, W = 256 / C words of a packed tile row
//   (C, the compression: 8 columns for each word). bf16 pointers are void*.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "engines.h"

namespace sparsellm {

constexpr int kCountedTokens = 64;  // up to so many, row_ffn may count the nonzeros itself

constexpr int kRowCapacity = 512;  // nonzeros of a row that have a place of their own; a row with more is a long row

// What a pass counts, int64 [kCounters]. kWideSegments: segments of the packed gate whose nonzeros did not fit their
// words. kRestCalls: 1 where the lists had no room for the nonzeros, so that the rest's kernels computed the call.
// kUnion: the neurons that fire in each token tile, summed. kDrawn: units of work that a kernel has given out, of no
// use to others.
enum Counter { kNonzeros = 0, kWideSegments = 1, kRestCalls = 2, kUnion = 3, kDrawn = 4, kCounters = 6 };

// The packed gate of M tokens, TwELL: see kernels/README.md.
struct Packed {
  uint32_t* words;      // [M, W / 8, NT, 8] W words of each token and column tile, eight at a time: word 0 the count,
                        // then bf16 value << 16 | uint16 column, columns ascending
  void* wide;           // bf16 [M, N]: row segments of tiles with more than W - 1 nonzeros; undefined elsewhere
  uint32_t* mask;       // [MT, NT * 8] bit n: neuron n fires for some token of the tile
  int32_t* row_counts;  // [M]; up to kCountedTokens, room for (1 + NT / 2) kCountedTokens (twell.cuh: tile_counts)
  uint8_t* fired;       // [N], 8-byte aligned: 1 where the neuron fires for some token, else 0
  int64_t* counters;    // [kCounters] kUnion: sum over token tiles of neurons in the mask
};

// totals of the tile plan, int32 [8]: zero at first, and again after use but for the first two. Each kernel of the
// forward pass counts there while it runs.
enum Total {
  kItems = 0,
  kRest = 1,
  kListWords = 2,
  kLongWords = 3,
  kPlanTickets = 4,
  kUpTickets = 5,
  kNextItem = 6,
  kTotals = 8
};

// The work list of the tile engine: sm90/tile/plan.cuh says what slots, blocks, items and places are. int4 as there.
struct TilePlan {
  uint32_t* rows;  // [M, kRowCapacity] the nonzeros of each row; then [long_capacity] those of long rows
                   // and room for three more: they are read by four
  int64_t long_capacity;
  const int32_t* tokens;  // [M] the token at each tile position, or null: natural order
  uint16_t* slots;        // [MT, NT * 256] the neurons of each tile
  uint32_t* starts;       // [MT, 2, NT * 4 + 1] where each block's nonzeros of each half start in `lists`, and the end
  uint32_t* lists;        // [capacity] the nonzeros, bf16 << 16 | place: g, or h, if tile_up was given them as `hidden`
  int64_t capacity;       // if they are more, or too many in long rows, no tile has any: all is left to row_rest
  int4* tiles;            // [MT] neurons, blocks, and the two halves' blocks
  int4* order;            // [MT] tiles that have blocks, fullest first, then those that have none
  int4* items;            // [MT * NT] units of the up product
  int32_t* totals;        // [8] items; whether there is a rest
};

// The nonzeros of each row side by side, from the packed form: to plan.rows, words as there, columns ascending.
cudaError_t pack_rows(const Packed& packed, int64_t m, int64_t n, const TilePlan& plan, cudaStream_t stream);

// An order of the tokens that brings together those that fire the same neurons: tokens [M], a permutation.
// workspace: order_workspace(m, n) bytes, contents undefined.
int64_t order_workspace(int64_t m, int64_t n);
cudaError_t token_order(const uint32_t* rows, const int32_t* row_counts, int64_t m, int64_t n, void* workspace,
                        int32_t* tokens, cudaStream_t stream);

// relu(x w^T), packed: x [M, K], w [N, K]; contents of `out` undefined before. Zeroes what lies behind the counters
// too, up to `zeroed` int64 in all: the scratch of the engines to come. for_row: row_ffn comes next, with the same M
// and K; where row_ffn_counts, row_counts is undefined then, and the counters are left to it.
constexpr bool row_ffn_counts(int64_t m, int64_t k) { return m <= kCountedTokens && k <= 4096; }
cudaError_t gate_pack(const void* x, const void* w, int64_t m, int64_t k, int64_t n, const Packed& out, int64_t zeroed,
                      bool for_row, cudaStream_t stream);

// The neurons of each token tile, its nonzeros, and the units of work. Sets counters[kUnion] to the union of these
// tiles; where the lists have no room, adds 1 to counters[kRestCalls].
cudaError_t tile_plan(const Packed& packed, int64_t m, int64_t n, const TilePlan& plan, cudaStream_t stream);

// h = g * (x w_up^T) for the nonzeros of the plan's lists, which hold g: h to `hidden`, words as there (they may be the
// lists themselves), and u to `ups`, bf16, where that is not null. w_up == null: h = g (non-gated), and only l1 is
// written. l1: float32 [1]; l1_partials: float32 [MT * NT * kUpPartials].
constexpr int kUpPartials = 8;  // of each of a token tile's column tiles: one for each consumer warp
cudaError_t tile_up(const void* x, const void* w_up, int64_t m, int64_t k, int64_t n, const TilePlan& plan,
                    uint32_t* hidden, void* ups, float* l1_partials, float* l1, cudaStream_t stream);

// The gradients of the nonzeros: dh = dy w_down_t^T + dl1 sign(h), du = dh g, dz = dh u; non-gated (ups == null, the
// lists hold h): dz = dh. Each word goes where the nonzero is in the plan's lists, and where it is in those by neuron.
struct Gradient {
  const void* ups;         // bf16 [capacity] u, or null
  const float* dl1;        // float32 [1]
  uint32_t *dz, *du;       // [capacity] du: null if ups is
  const uint32_t* at;      // [capacity] each nonzero's index in the lists by neuron,
  const uint16_t* places;  // and its place there
  uint32_t *dz_by_neuron, *du_by_neuron, *h_by_neuron;
  int32_t* tickets;  // [2] CTAs that are done, items drawn; zero on entry and on exit
};
cudaError_t tile_gradient(const void* dy, const void* w_down_t, int64_t m, int64_t k, int64_t n, const TilePlan& plan,
                          const Gradient& gradient, cudaStream_t stream);

// y[token] = sum over slots of h[token, slot] weights[slots[slot]]; with a second list and weights, the sum of both.
// Tiles of 128 tokens, in halves of 64, as tile/plan.cuh has them.
struct Spmm {
  const uint32_t* lists[2];  // h, bf16 << 16 | place; [1]: of the second, or null
  const void* weights[2];    // bf16 [N, K]; [1]: null if there is one list
  const uint16_t* slots;     // [MT, slots_per_tile], and the next three, as of TilePlan
  int64_t slots_per_tile;
  const uint32_t* starts;  // [MT, 2, starts_per_half]
  int64_t starts_per_half;
  const int4* order;      // [MT]
  const int32_t* tokens;  // [m], or null
  int64_t m, k;
  void* y;  // bf16 [m, K]
};
cudaError_t tile_spmm(const Spmm& a, cudaStream_t stream);

// The nonzeros of a tile plan by neuron, for the gradients of the weights: tiles of 128 neurons, most frequent first,
// their slots being tokens. JT = ceil(N / 128). A tile with more blocks than a CTA's share of all is multiplied in
// pieces, whose sums are added up in order.
constexpr int kSplitUnits = 384;  // at most: pieces of such tiles, times the units of 256 columns
enum NeuronTotal { kPieces = 0, kNeuronTotals = 4 };
struct NeuronPlan {
  int32_t* frequencies;  // [N] zeroed by the caller: tokens that fire each
  int32_t* ranks;        // [N] the position of each neuron
  int32_t* neurons;      // [N] the neuron at each position
  uint32_t* masks;       // [JT * 2, MT * 4] tokens, by their position, that fire some neuron of a half
  uint32_t* before;      // [JT, 3, MT * 4] slots before each word: first half's own, both halves', second half's own
  int32_t* slots;        // [JT, MT * 128] the tokens of each tile
  uint32_t* counts;      // [JT * 2, MT * 2] zeroed by the caller: nonzeros of each block of each half
  uint32_t* bases;       // [MT, JT * 2 * 6] of those, how many come before a token tile's, in the blocks it has part in
  uint32_t* starts;      // [JT, 2, MT * 2 + 1] where each block's nonzeros start in the lists by neuron
  int4* tiles;           // [JT] as of TilePlan
  int4* order;           // [JT + kSplitUnits] pieces, fullest first (tile/plan.cuh: Piece)
  uint32_t* at;          // [capacity] for each word of the tile plan's lists: where it is in the lists by neuron,
  uint16_t* places;      // and its place there
  int32_t* totals;       // [4] NeuronTotal
};
// For products of K columns. M is at most kMaxSplitTokens, else cudaErrorInvalidValue.
constexpr int64_t kMaxSplitTokens = 65535 * 64;
cudaError_t neuron_plan(const TilePlan& plan, int64_t m, int64_t k, int64_t n, const NeuronPlan& out,
                        cudaStream_t stream);

// From lists by neuron to operands: bf16 [JT][MT * 2 blocks][2 halves] operand tiles of [64 neurons, 64 slots], 8 KB
// each, zeros where there is no nonzero; undefined but for the blocks that a half needs. So N x M, up to whole tiles.
struct Operands {
  const uint32_t* lists[2];  // [1]: the second, or null
  void* operands[2];
  NeuronPlan plan;
  int64_t m, n;
};
cudaError_t tile_operands(const Operands& a, cudaStream_t stream);

// dw[neuron] = sum over the slots of its tile of operand[neuron, slot] rows[slots[slot]]; of two operands, each its
// own.
struct WeightGradient {
  const void* operands[2];  // as of tile_operands; [1]: the second, or null
  const void* rows;         // bf16 [m, K]: x or dy
  NeuronPlan plan;
  int64_t m, k, n;
  void* dw[2];  // [n, K] bf16, or float32 if float_dw; [1]: the second, or null
  bool float_dw;
  float* partials;   // [kSplitUnits, 2, 128, 256]
  int32_t* tickets;  // [kSplitUnits, 4] of pieces, and [1] units drawn; zero on entry and on exit
};
cudaError_t tile_weights(const WeightGradient& a, cudaStream_t stream);

// The row engine: y [M, K] and l1 (float32 [1]) from the packed gate, row by row. w_up == null: non-gated, and x is
// not read. workspace: row_workspace(m, k, n) bytes, 16-byte aligned, contents undefined. tickets: int32 [kRowTickets],
// zero on entry and on exit. Where row_ffn_counts, it does not read row_counts, and writes the counters.
constexpr int kRowTickets = 320;
int64_t row_workspace(int64_t m, int64_t k, int64_t n);
cudaError_t row_ffn(const void* x, const void* w_up, const void* w_down_t, int64_t m, int64_t k, int64_t n,
                    const Packed& packed, void* workspace, int32_t* tickets, float* l1, void* y, cudaStream_t stream);

// The same if totals of the plan tell that there is a rest, which is all, else nothing. workspace:
// row_rest_workspace(m, k) bytes.
int64_t row_rest_workspace(int64_t m, int64_t k);
cudaError_t row_rest(const void* x, const void* w_up, const void* w_down_t, int64_t m, int64_t k, int64_t n,
                     const Packed& packed, const int32_t* totals, void* workspace, int32_t* tickets, float* l1, void* y,
                     cudaStream_t stream);

// All gradients, densely, if `rest` points to other than zero, else nothing: what the tile engine leaves undone
// backward. Non-gated: w_gate is W_u, w_up and dw_up are null.
struct RestBackward {
  const int32_t* rest;
  const void *x, *dy;                      // bf16 [M, K]
  const void *w_gate, *w_up, *w_down_t;    // bf16 [N, K]
  const float* dl1;                        // [1]
  void *dx, *dw_gate, *dw_up, *dw_down_t;  // bf16, as x and the weights; the latter float32
  bool float_gradients;                    // if so
  void* planes;                            // rest_backward_workspace(m, n) bytes
  int32_t* arrivals;                       // [2] zero before and after
  int m, k, n;
};
int64_t rest_backward_workspace(int64_t m, int64_t n);
cudaError_t rest_backward(const RestBackward& p, cudaStream_t stream);

// The dense engine's products but for the last, and the statistics: h = relu(x w_gate^T) * (x w_up^T), without w_up
// relu(x w_gate^T); the two factors to g and u, bf16 [M, N], where these are not null. l1, fired [N] (8-byte aligned)
// and counters, int64 [kDenseCounters], of which the last is not for others. l1_partials: float32 [MT * 2 NT], 16-byte
// aligned.
constexpr int kDenseCounters = kCounters + 1;
cudaError_t dense_hidden(const void* x, const void* w_gate, const void* w_up, int64_t m, int64_t k, int64_t n, void* g,
                         void* u, void* h, float* l1_partials, float* l1, uint8_t* fired, int64_t* counters,
                         cudaStream_t stream);

// The elementwise half of dense_hidden alone, for few tokens, whose products are cuBLAS's: h = relu(z) * u, without u
// relu(z); h may be z or u. l1_partials: float32 [MT * ceil(N / kPointwiseColumns)]; else as above.
constexpr int kPointwiseColumns = 64;
cudaError_t pointwise(const void* z, const void* u, int64_t m, int64_t n, void* h, float* l1_partials, float* l1,
                      uint8_t* fired, int64_t* counters, cudaStream_t stream);

// dz, du and h, bf16 [M, N], of dh = dy w_down, g and u (DESIGN.md §2), w_down [K, N]. Non-gated: u and du are null.
// counters: int64 [kCounters], for nobody else.
cudaError_t dense_gradient(const void* dy, const void* w_down, int64_t m, int64_t k, int64_t n, const void* g,
                           const void* u, const float* dl1, void* dz, void* du, void* h, int64_t* counters,
                           cudaStream_t stream);

// The elementwise half of dense_gradient alone, over `count` (a multiple of 8) entries: h, du and dz from z, u and dh
// (DESIGN.md §2). Non-gated: u and du are null. dz may be dh.
cudaError_t pointwise_gradient(const void* z, const void* u, const void* dh, const float* dl1, int64_t count, void* dz,
                               void* du, void* h, cudaStream_t stream);

}  // namespace sparsellm
