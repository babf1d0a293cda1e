// The launchers: one function for each stage of an engine, plain C++ over device pointers, free of torch. A launcher
// enqueues its kernels on `stream`, waits for nothing, allocates nothing, and returns cudaSuccess or the first error.
// Callers have checked shapes and layouts (sparsellm/ops/cuda.py); a kernel asserts any further assumption where it
// uses it.
//
// When kernels start. To save the microseconds between one kernel and the next, most kernels are launched early
// (programmatic dependent launch): their CTAs may start before the previous kernel in the stream has ended. Such a
// kernel accesses none of the caller's memory until the previous kernel is done. The exceptions are within gate_pack,
// pack_product, token_order and the dense engine's launchers: there, a kernel knows what the previous kernel writes,
// and waits only before it accesses that memory (common/clear.cuh, order/order.cu). The first kernel of these launchers
// is not launched early: gate_pack for more than 64 tokens, pack_product, row_ffn for many tokens, dense_hidden,
// dense_gradient, pointwise, pointwise_gradient, transpose.
//
// Another library's kernel that is launched early after one of these (sparsellm/ops/triton has such kernels) must
// follow the same rule: before griddepcontrol.wait it writes nothing, and reads only memory that no kernel writes, or
// that was written before the last kernel that was not launched early.
//
// Letters: M tokens, K model width, N neurons, all rows contiguous, K and N multiples of 8 up to 65,536.
//   MT = ceil(M / 128) token tiles, NT = ceil(N / 256) column tiles, W = 256 / C words of a segment (C, the
//   compression: 8 columns for each word, so W = 32). bf16 pointers are void*.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "engines.h"

namespace sparsellm {

constexpr int kCountedTokens = kFewTokens;  // up to this many tokens, row_ffn may count nonzeros instead of gate_pack

constexpr int kRowCapacity = 512;  // nonzeros per row that fit in the row's own place; a row with more is a long row

// Counters of a pass, int64 [kCounters]:
//   kNonzeros      nonzeros of the gate
//   kWideSegments  segments of the packed gate whose nonzeros did not fit in their words
//   kRestCalls     1 if the nonzeros exceeded the lists' capacity, so that the overflow path computed the call
//   kUnion         neurons that fire in each token tile, summed over the tiles
//   kDrawn         units of work that a kernel has handed out; only for that kernel
enum Counter { kNonzeros = 0, kWideSegments = 1, kRestCalls = 2, kUnion = 3, kDrawn = 4, kCounters = 6 };

// The packed gate of M tokens, TwELL: kernels/README.md has the format and an example.
struct Packed {
  uint32_t* words;      // [M, W / 8, NT, 8] each segment's W words, eight of them contiguous: word 0 is the count, the
                        // next are bf16 value << 16 | uint16 column, columns ascending
  void* wide;           // bf16 [M, N]: all values of segments with more than W - 1 nonzeros; undefined elsewhere
  uint32_t* mask;       // [MT, NT * 8] bit n of a row: neuron n fires for some token of the tile
  int32_t* row_counts;  // [M] nonzeros of each token. For up to kCountedTokens tokens, the counts of the segments
                        // follow (twell.cuh: tile_counts), so the array has (1 + NT / 2) kCountedTokens entries
  uint8_t* fired;       // [N], 8-byte aligned: 1 if the neuron fires for some token, else 0
  int64_t* counters;    // [kCounters] gate_pack's kUnion: the set bits of `mask`
};

// The totals of a tile plan, int32 [8], the counters of the forward pass's kernels. All are zero before the pass. After
// it, kItems is the number of items, kRest is 1 if the lists overflowed, and the others are zero again.
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

// The work list of the tile engine. tile/plan.cuh defines slots, blocks, items and places, and the fields of each int4.
struct TilePlan {
  uint32_t* rows;  // [M, kRowCapacity] the nonzeros of each row; then [long_capacity] those of long rows, and three
                   // more words, because rows are read four words at a time
  int64_t long_capacity;
  const int32_t* tokens;  // [M] the token at each position of the tiles; null if tokens are not reordered
  uint16_t* slots;        // [MT, NT * 256] the neurons of each tile
  uint32_t* starts;       // [MT, 2, NT * 4 + 1] where each block's nonzeros of each half start in `lists`, and the end
  uint32_t* lists;        // [capacity] the nonzeros, bf16 << 16 | place. The values are g, or h if tile_up wrote h
                          // there
  int64_t capacity;       // length of `lists`. If a batch has more nonzeros, or too many in long rows, all tiles are
                          // empty, and row_rest computes the whole batch
  int4* tiles;            // [MT] slots, blocks, the first half's end, the second half's begin
  int4* order;            // [MT] the tiles that have blocks, fullest first, then those that have none
  int4* items;            // [MT * NT] the units of the up product, those of the fullest tiles first
  int32_t* totals;        // [8] Total
};

// Writes each token's nonzeros contiguously to plan.rows: the words of the packed gate, columns ascending.
cudaError_t pack_rows(const Packed& packed, int64_t m, int64_t n, const TilePlan& plan, cudaStream_t stream);

// Writes an order of the tokens in which neighbours fire the same neurons: tokens [M], a permutation. rows and
// row_counts come from pack_rows and gate_pack. workspace: order_workspace(m, n) bytes, contents undefined.
int64_t order_workspace(int64_t m, int64_t n);
cudaError_t token_order(const uint32_t* rows, const int32_t* row_counts, int64_t m, int64_t n, void* workspace,
                        int32_t* tokens, cudaStream_t stream);

// Packs relu(x w^T): x [M, K], w [N, K]; the contents of `out` may be undefined. Zeroes `zeroed` int64 from
// out.counters on: the counters, and behind them the scratch of the engine's later stages, so that those need no kernel
// to zero it.
// for_row: row_ffn comes next, with the same M and K. Then, where row_ffn_counts(M, K), gate_pack counts nothing:
// row_counts is undefined, and row_ffn writes the counters.
constexpr bool row_ffn_counts(int64_t m, int64_t k) { return m <= kCountedTokens && k <= 4096; }
cudaError_t gate_pack(const void* x, const void* w, int64_t m, int64_t k, int64_t n, const Packed& out, int64_t zeroed,
                      bool for_row, cudaStream_t stream);

// Packs a gate whose product x w^T is in out.wide, bf16 [M, N]. For so few tokens, the caller's library computes the
// product faster. `zeroed`: as in gate_pack.
constexpr bool packs_product(int64_t m) { return m > kFewTokens && m < kManyTokens; }
cudaError_t pack_product(const Packed& out, int64_t m, int64_t n, int64_t zeroed, cudaStream_t stream);

// Fills the plan from packed gate, rows and tokens: each token tile's neurons, its nonzeros, the units of work. Sets
// counters[kUnion] to the union of the plan's tiles, which differ from gate_pack's if tokens are ordered. If the lists
// overflow, it adds 1 to counters[kRestCalls] instead.
cudaError_t tile_plan(const Packed& packed, int64_t m, int64_t n, const TilePlan& plan, cudaStream_t stream);

// Computes u = x w_up^T and h = g u at the nonzeros of the plan's lists, which hold g. Writes h to `hidden`, in words
// like those of the lists (`hidden` may be the lists themselves), and u to `ups`, bf16, if that is not null. Without
// w_up (non-gated), h is g, and only l1 is written. l1: float32 [1]; l1_partials: float32 [MT * NT * kUpPartials].
constexpr int kUpPartials = 8;  // partial sums per item, one for each consumer warp; a token tile has at most NT items
cudaError_t tile_up(const void* x, const void* w_up, int64_t m, int64_t k, int64_t n, const TilePlan& plan,
                    uint32_t* hidden, void* ups, float* l1_partials, float* l1, cudaStream_t stream);

// The gradients of the nonzeros: dh = dy w_down_t^T + dl1 sign(h), du = dh g, dz = dh u. Non-gated (ups is null, the
// lists hold h): dz = dh. Each gradient is written twice: to the position of its nonzero in the plan's lists, for dx,
// and to its position in the lists by neuron, for the weights' gradients. Those need h by neuron too.
struct Gradient {
  const void* ups;         // bf16 [capacity] u, or null
  const float* dl1;        // float32 [1]
  uint32_t *dz, *du;       // [capacity] bf16 << 16 | place; du is null if ups is
  const uint32_t* at;      // [capacity] the index of each nonzero of the plan's lists in the lists by neuron,
  const uint16_t* places;  // and the nonzero's place there
  uint32_t *dz_by_neuron, *du_by_neuron, *h_by_neuron;
  int32_t* tickets;  // [2] how many CTAs are done, how many items are drawn; zero before and after
};
cudaError_t tile_gradient(const void* dy, const void* w_down_t, int64_t m, int64_t k, int64_t n, const TilePlan& plan,
                          const Gradient& gradient, cudaStream_t stream);

// y[token] = sum over the slots of the token's tile of h[token, slot] weights[slots[slot]]. With a second list and
// second weights, y is the sum of both products: dx = dz W_g + du W_u. Tiles are 128 tokens, in halves of 64
// (tile/plan.cuh).
struct Spmm {
  const uint32_t* lists[2];  // h, bf16 << 16 | place; [1]: for the second product, or null
  const void* weights[2];    // bf16 [N, K]; [1]: null if there is one list
  const uint16_t* slots;     // [MT, slots_per_tile]; slots, starts, order and tokens are those of TilePlan
  int64_t slots_per_tile;
  const uint32_t* starts;  // [MT, 2, starts_per_half]
  int64_t starts_per_half;
  const int4* order;      // [MT]
  const int32_t* tokens;  // [m], or null
  int64_t m, k;
  void* y;  // bf16 [m, K]
};
cudaError_t tile_spmm(const Spmm& a, cudaStream_t stream);

// The nonzeros of a tile plan by neuron, for the gradients of the weights, which are sums over tokens: tiles of 128
// neurons, most frequent first, whose slots are tokens. JT = ceil(N / 128). A tile with more blocks than a CTA's share
// of all blocks is cut into pieces, so that no CTA works long after the others are done. The sums of the pieces are
// added up in order.
constexpr int kSplitUnits = 384;  // bounds the units of the tiles that are cut: their pieces, each times 256 columns
enum NeuronTotal { kPieces = 0, kNeuronTotals = 4 };
struct NeuronPlan {
  int32_t* frequencies;  // [N] how many tokens fire each neuron; zeroed by the caller
  int32_t* ranks;        // [N] the position of each neuron; 128 neighbouring positions are a neuron tile
  int32_t* neurons;      // [N] the neuron at each position
  uint32_t* masks;   // [JT * 2, MT * 4] bit p of a half's row: the token at position p fires some neuron of the half
  uint32_t* before;  // [JT, 3, MT * 4] the first slot for the tokens of a mask's word, in each of the three groups:
                     // first half only, both halves, second half only
  int32_t* slots;    // [JT, MT * 128] the token of each slot
  uint32_t* counts;  // [JT * 2, MT * 2] nonzeros of each block of each half; zeroed by the caller
  uint32_t* bases;   // [MT, JT * 2 * 6] where a token tile's nonzeros begin within a block's, for each of the at most
                     // six blocks of a half that the token tile can contribute to
  uint32_t* starts;  // [JT, 2, MT * 2 + 1] where each block's nonzeros start in the lists by neuron
  int4* tiles;       // [JT] as in TilePlan
  int4* order;       // [JT + kSplitUnits] the pieces, fullest first (tile/plan.cuh: Piece)
  uint32_t* at;      // [capacity] for each word of the tile plan's lists: its index in the lists by neuron,
  uint16_t* places;  // and its place there
  int32_t* totals;   // [4] NeuronTotal
};
// k: the columns of the products to come, which decide how tiles are cut. Returns cudaErrorInvalidValue if M is more
// than kMaxSplitTokens: a piece's code has 16 bits for a block of 64 tokens.
constexpr int64_t kMaxSplitTokens = 65535 * 64;
cudaError_t neuron_plan(const TilePlan& plan, int64_t m, int64_t k, int64_t n, const NeuronPlan& out,
                        cudaStream_t stream);

// Writes lists by neuron as operands: bf16 [JT][MT * 2 blocks][2 halves] operand tiles of [64 neurons, 64 slots], 8 KB
// each, with zeros where there is no nonzero. An operand can hold N x M values, rounded up to whole tiles; only the
// blocks that a half needs are written.
struct Operands {
  const uint32_t* lists[2];  // [1]: a second list, or null
  void* operands[2];         // [i]: for lists[i]
  NeuronPlan plan;
  int64_t m, n;
};
cudaError_t tile_operands(const Operands& a, cudaStream_t stream);

// dw[neuron] = sum over the slots of the neuron's tile of operand[neuron, slot] rows[slots[slot]]. Two operands share
// the rows, and each gives a dw.
struct WeightGradient {
  const void* operands[2];  // from tile_operands; [1]: the second, or null
  const void* rows;         // bf16 [m, K]: x or dy
  NeuronPlan plan;
  int64_t m, k, n;
  void* dw[2];  // [i]: from operands[i], [n, K], bf16, or float32 if float_dw
  bool float_dw;
  float* partials;   // [kSplitUnits, 2, 128, 256] the sums of the pieces
  int32_t* tickets;  // [kSplitUnits, 4] how many pieces are done, then [1] how many units are drawn; zero before and
                     // after
};
cudaError_t tile_weights(const WeightGradient& a, cudaStream_t stream);

// The row engine: y [M, K] and l1 (float32 [1]) from the packed gate, row by row. Without w_up the layer is non-gated,
// and x is not read. workspace: row_workspace(m, k, n) bytes, 16-byte aligned, contents undefined. tickets: int32
// [kRowTickets], zero before and after. If row_ffn_counts(M, K) is true, row_ffn does not read row_counts, and writes
// packed.counters itself.
constexpr int kRowTickets = 640;
int64_t row_workspace(int64_t m, int64_t k, int64_t n);
cudaError_t row_ffn(const void* x, const void* w_up, const void* w_down_t, int64_t m, int64_t k, int64_t n,
                    const Packed& packed, void* workspace, int32_t* tickets, float* l1, void* y, cudaStream_t stream);

// The overflow path: computes the whole call as row_ffn does if totals[kRest] of the tile plan says that the lists
// overflowed; otherwise does nothing. workspace: row_rest_workspace(m, k) bytes.
int64_t row_rest_workspace(int64_t m, int64_t k);
cudaError_t row_rest(const void* x, const void* w_up, const void* w_down_t, int64_t m, int64_t k, int64_t n,
                     const Packed& packed, const int32_t* totals, void* workspace, int32_t* tickets, float* l1, void* y,
                     cudaStream_t stream);

// The overflow path of backward: computes all gradients of a call, densely, if `rest` points to a nonzero value;
// otherwise does nothing. Non-gated: w_gate is W_u, and w_up and dw_up are null.
struct RestBackward {
  const int32_t* rest;                     // totals[kRest] of the tile plan
  const void *x, *dy;                      // bf16 [M, K]
  const void *w_gate, *w_up, *w_down_t;    // bf16 [N, K]
  const float* dl1;                        // [1]
  void *dx, *dw_gate, *dw_up, *dw_down_t;  // bf16, of the shapes of x and the weights
  bool float_gradients;                    // if true, the weights' gradients are float32
  void* planes;                            // rest_backward_workspace(m, n) bytes
  int32_t* arrivals;                       // [2] zero before and after
  int m, k, n;
};
int64_t rest_backward_workspace(int64_t m, int64_t n);
cudaError_t rest_backward(const RestBackward& p, cudaStream_t stream);

// The dense engine's first products, and the statistics: h = relu(x w_gate^T) * (x w_up^T), without w_up relu(x
// w_gate^T). Writes the two factors to g and u, bf16 [M, N], if these are not null. fired: [N], 8-byte aligned.
// counters: int64 [kDenseCounters], of which the last is the kernel's own. l1_partials: float32 [MT * 2 NT], 16-byte
// aligned.
constexpr int kDenseCounters = kCounters + 1;
cudaError_t dense_hidden(const void* x, const void* w_gate, const void* w_up, int64_t m, int64_t k, int64_t n, void* g,
                         void* u, void* h, float* l1_partials, float* l1, uint8_t* fired, int64_t* counters,
                         cudaStream_t stream);

// The elementwise half of dense_hidden, for few tokens, whose products cuBLAS computes: h = relu(z) * u, or relu(z)
// without u. h may be z or u. l1_partials: float32 [MT * ceil(N / kPointwiseColumns)]; the other arguments are those of
// dense_hidden.
constexpr int kPointwiseColumns = 64;
cudaError_t pointwise(const void* z, const void* u, int64_t m, int64_t n, void* h, float* l1_partials, float* l1,
                      uint8_t* fired, int64_t* counters, cudaStream_t stream);
// h alone, for `count` (a multiple of 8) entries, without the statistics.
cudaError_t pointwise_hidden(const void* z, const void* u, int64_t count, void* h, cudaStream_t stream);

// dz, du and h, bf16 [M, N], from dh = dy w_down, g and u (DESIGN.md §2); w_down [K, N]. Non-gated: u and du are null.
// counters: int64 [kCounters], scratch.
cudaError_t dense_gradient(const void* dy, const void* w_down, int64_t m, int64_t k, int64_t n, const void* g,
                           const void* u, const float* dl1, void* dz, void* du, void* h, int64_t* counters,
                           cudaStream_t stream);

// The elementwise half of dense_gradient, for `count` (a multiple of 8) entries: h, du and dz from z, u and dh
// (DESIGN.md §2). Non-gated: u and du are null. dz may be dh.
cudaError_t pointwise_gradient(const void* z, const void* u, const void* dh, const float* dl1, int64_t count, void* dz,
                               void* du, void* h, cudaStream_t stream);

}  // namespace sparsellm
