// The launchers: one function for each stage of an engine, plain C++ over device pointers, free of torch. A launcher
// enqueues its kernels on `stream`, waits for nothing, allocates nothing, and returns cudaSuccess or the first error.
// Callers must have checked shapes and layouts (sparsellm/ops/cuda.py); a kernel asserts any further assumption where
// it uses it.
//
// When kernels start. To save the microseconds between one kernel and the next, most kernels are launched early
// (programmatic dependent launch): their CTAs may start before the previous kernel in the stream has ended. Such a
// kernel accesses none of the caller's memory until the previous kernel is done. The exceptions are within gate_pack,
// gate_pack_float8, pack_product, token_order and the dense engine's launchers: there, a kernel knows what the previous
// kernel writes, and waits only before it accesses that memory (common/clear.cuh, order/order.cu). The first kernel of
// these launchers is not launched early: gate_pack for more than 64 tokens, gate_pack_float8, pack_product, row_ffn for
// many tokens or K above 4,096, dense_hidden, dense_gradient, pointwise, pointwise_gradient; and, of engines.h,
// quantize_rows, transpose and add_transpose.
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

constexpr int kRowCapacity = 512;  // words per token in TilePlan::rows; a token with more nonzeros is a long row

// Counters of a pass, int64 [kCounters]:
//   kNonzeros      nonzeros of the gate
//   kWideSegments  segments of the packed gate whose nonzeros did not fit in their words
//   kRestCalls     1 if the nonzeros exceeded the lists' capacity, so that the overflow path computed some token tiles
//   kUnion         neurons that fire in each token tile, summed over the tiles
//   kRestTiles     token tiles that the overflow path computed
//   kDrawn         units of work that the current kernel has handed out; other kernels do not read it
//   kWideUnits     units of eight values that the wide segments of more than kFewTokens tokens need in Packed::wide
enum Counter {
  kNonzeros = 0,
  kWideSegments = 1,
  kRestCalls = 2,
  kUnion = 3,
  kRestTiles = 4,
  kDrawn = 5,
  kWideUnits = 6,
  kCounters = 7
};

// The packed gate of M tokens, TwELL: kernels/README.md has the format and an example.
struct Packed {
  uint32_t* words;      // [M, W / 8, NT, 8] each segment's W words, eight of them contiguous: word 0 is the count, the
                        // next are bf16 value << 16 | uint16 column, columns ascending. Of a wide segment (more than
                        // W - 1 nonzeros), word 1 tells where its values are, and words 8 to 15 are a mask of columns
  void* wide;           // bf16 [wide_values], 16-byte aligned: the nonzeros of the wide segments
  int64_t wide_values;  // if less than M N, it may be too few (twell.cuh: wide_fits)
  uint32_t* mask;       // [MT, NT * 8] bit n of a row: neuron n fires for some token of the tile
  int32_t* row_counts;  // [M] nonzeros of each token. For up to kCountedTokens tokens, the counts of the segments
                        // follow (twell.cuh: tile_counts), so the array has (1 + NT / 2) kCountedTokens entries
  uint8_t* fired;       // [N], 8-byte aligned: 1 if the neuron fires for some token, else 0
  int64_t* counters;    // [kCounters]; gate_pack counts the set bits of `mask` in kUnion
};

// Totals of a tile plan, int32 [12]: the counters of the forward pass's kernels. All totals are zero before the pass.
// After the pass, kItems is the number of items, kRest the number of tiles that left because the lists overflowed,
// kRestTokens the number of their tokens, and all other totals are zero again.
enum Total {
  kItems = 0,
  kRest = 1,
  kListWords = 2,
  kLongWords = 3,
  kPlanTickets = 4,
  kUpTickets = 5,
  kNextItem = 6,
  kRestTokens = 7,
  kTilesToCount = 8,
  kTilesCounted = 9,
  kTotals = 12
};

// The work list of the tile engine. tile/plan.cuh defines slots, blocks, items and places, and the fields of each int4.
struct TilePlan {
  uint32_t* rows;  // [M, kRowCapacity] the nonzeros of each row; then [long_capacity] those of long rows; then three
                   // unused words, because rows are read four words at a time
  int64_t long_capacity;
  const int32_t* tokens;  // [M] the token at each position of the tiles; null if tokens are not reordered
  uint16_t* slots;        // [MT, NT * 256] the neurons of each tile
  uint32_t* starts;       // [MT, 2, NT * 4 + 1] index in `lists` where each block of each half starts, and where the
                          // half ends
  uint32_t* lists;        // [capacity] the nonzeros, bf16 << 16 | place. The values are g; tile_up may overwrite them
                          // with h
  int64_t capacity;       // length of `lists`. If a batch has more nonzeros, the fullest tiles leave, or all tiles if
                          // wide segments lack values too. If it has too many in long rows, all tiles with long rows
                          // leave. Tiles that leave have no slots
  int4* tiles;            // [MT] (number of slots, number of blocks, end of the first half, begin of the second half)
  int4* order;            // [MT] the tiles that have blocks, fullest first, then those that have none
  int4* items;            // [MT * NT] the work items of tile_up, those of the fullest tiles first
  int32_t* totals;        // [12] Total
  int32_t* rest_tokens;   // [M] the tokens of the tiles that left, tile by tile, ascending; the overflow path computes
                          // them
  uint32_t* fullness;     // [2, MT] scratch of tile_plan if the lists overflow
};

// Writes each token's nonzeros contiguously to plan.rows: the words of the packed gate, columns ascending.
cudaError_t pack_rows(const Packed& packed, int64_t m, int64_t n, const TilePlan& plan, cudaStream_t stream);

// Writes an order of the tokens in which neighbours fire the same neurons: tokens [M], a permutation. rows and
// row_counts come from pack_rows and gate_pack. workspace: order_workspace(m, n) bytes, contents undefined.
int64_t order_workspace(int64_t m, int64_t n);
cudaError_t token_order(const uint32_t* rows, const int32_t* row_counts, int64_t m, int64_t n, void* workspace,
                        int32_t* tokens, cudaStream_t stream);

// Packs relu(x w^T), where x is [M, K] and w is [N, K]; the contents of `out` may be undefined. Also sets `zeroed`
// int64 values to zero, starting at out.counters: the counters, and the scratch that follows them in memory. So the
// engine's later stages find their scratch already zeroed.
// for_row: the next stage is row_ffn, with the same M and K. If, in addition, row_ffn_counts(M, K) is true, gate_pack
// counts nothing: row_counts is undefined, and row_ffn writes the counters.
// float8: if not null, w is e4m3 with the scales float8->thresholded; for up to kFewTokens tokens, K a multiple of 16.
constexpr bool row_ffn_counts(int64_t m, int64_t k) { return m <= kCountedTokens && k <= 4096; }
cudaError_t gate_pack(const void* x, const void* w, const Float8Scales* float8, int64_t m, int64_t k, int64_t n,
                      const Packed& out, int64_t zeroed, bool for_row, cudaStream_t stream);

// The same where x is e4m3 too; K is a multiple of 16, and x and w are 16-byte aligned.
cudaError_t gate_pack_float8(const Float8Gate& gate, int64_t m, int64_t k, int64_t n, const Packed& out, int64_t zeroed,
                             cudaStream_t stream);

// Packs a gate whose product x w^T is already in out.wide, of M N values. Used from 65 to 1,535 tokens, for which the
// caller's library multiplies faster than gate_pack. `zeroed`: as in gate_pack.
constexpr bool packs_product(int64_t m) { return m > kFewTokens && m < kManyTokens; }
cudaError_t pack_product(const Packed& out, int64_t m, int64_t n, int64_t zeroed, cudaStream_t stream);

// Fills the plan from the packed gate, rows and tokens: each token tile's neurons and nonzeros, and the work items.
// Sets counters[kUnion] to the number of neurons in each tile of the plan, summed over the tiles. If tokens are
// ordered, these tiles differ from the tiles for which gate_pack counted. If the lists overflow, tile_plan adds 1 to
// counters[kRestCalls], sets counters[kRestTiles], and leaves counters[kUnion] as it is.
cudaError_t tile_plan(const Packed& packed, int64_t m, int64_t n, const TilePlan& plan, cudaStream_t stream);

// Computes u = x w_up^T and h = g u at the nonzeros of the plan's lists, which hold g. Writes h to `hidden`, in words
// of the lists' format (`hidden` may be the lists themselves), and u to `ups`, bf16, unless `ups` is null. If w_up is
// null (non-gated), h is g, and only l1 is written. l1: float32 [1]; l1_partials: float32 [MT * NT * kUpPartials].
constexpr int kUpPartials = 8;  // partial sums per item, one for each consumer warp; a token tile has at most NT items
cudaError_t tile_up(const void* x, const void* w_up, int64_t m, int64_t k, int64_t n, const TilePlan& plan,
                    uint32_t* hidden, void* ups, float* l1_partials, float* l1, cudaStream_t stream);

// Computes the gradients at the nonzeros: dh = dy w_down_t^T + dl1 sign(h), du = dh g, dz = dh u. Non-gated (ups is
// null, and the lists hold h): dz = dh. Each gradient is written twice: for dx, at its nonzero's index in the plan's
// lists; for the weights' gradients, at its nonzero's index in the lists by neuron. h is also written by neuron, for
// dW_d.
struct Gradient {
  const void* ups;         // bf16 [capacity] u, or null
  const float* dl1;        // float32 [1]
  uint32_t *dz, *du;       // [capacity] bf16 << 16 | place; du is null if ups is
  const uint32_t* at;      // [capacity] for each nonzero of the plan's lists: its index in the lists by neuron
  const uint16_t* places;  // [capacity] for each nonzero of the plan's lists: its place in the operand tiles by neuron
  uint32_t *dz_by_neuron, *du_by_neuron, *h_by_neuron;
  int32_t* tickets;  // [2] CTAs that are done, items that are claimed; zero before and after the kernel
};
cudaError_t tile_gradient(const void* dy, const void* w_down_t, int64_t m, int64_t k, int64_t n, const TilePlan& plan,
                          const Gradient& gradient, cudaStream_t stream);

// y[token] = sum of h[token, s] weights[slots[s]] over the slots s of the token's tile. If there is a second list with
// weights of its own, y is the sum of both products: dx = dz W_g + du W_u. Tiles are 128 tokens, in halves of 64
// (tile/plan.cuh).
struct Spmm {
  const uint32_t* lists[2];  // h, bf16 << 16 | place; lists[1] is for the second product, or null
  const void* weights[2];    // bf16 [N, K]; weights[1] is null if there is one list
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

// The nonzeros of a tile plan, sorted by neuron: the gradients of the weights are sums over tokens, so they are
// computed on tiles of 128 neurons, whose slots are tokens. The most frequent neurons form the first tile. JT = ceil(N
// / 128). A tile with more blocks than a CTA's share of all blocks is cut into pieces, so that no CTA is still busy
// with that tile when the others are done. The sums of a tile's pieces are added up in order.
constexpr int kSplitUnits = 384;  // at most this many units (a piece times 256 columns of dW) come from tiles that are
                                  // cut
enum NeuronTotal { kPieces = 0, kNeuronTotals = 4 };
struct NeuronPlan {
  int32_t* frequencies;  // [N] how many tokens fire each neuron; zeroed by the caller
  int32_t* ranks;        // [N] the position of each neuron; 128 neighbouring positions are a neuron tile
  int32_t* neurons;      // [N] the neuron at each position
  uint32_t* masks;   // [JT * 2, MT * 4] bit p of a half's row: the token at position p fires some neuron of the half
  uint32_t* before;  // [JT, 3, MT * 4] for each word of the masks: the slot of its first token, in each of three
                     // groups: tokens that fire neurons of the first half only, of both halves, of the second half only
  int32_t* slots;    // [JT, MT * 128] the token of each slot
  uint32_t* counts;  // [JT * 2, MT * 2] nonzeros of each block of each half; zeroed by the caller
  uint32_t* bases;   // [MT, JT * 2 * 6] the offset of a token tile's nonzeros among all nonzeros of a block. A token
                     // tile has nonzeros in at most six blocks of a half
  uint32_t* starts;  // [JT, 2, MT * 2 + 1] where each block's nonzeros start in the lists by neuron
  int4* tiles;       // [JT] as in TilePlan
  int4* order;       // [JT + kSplitUnits] the pieces, fullest first (tile/plan.cuh: Piece)
  uint32_t* at;      // [capacity] for each word of the tile plan's lists: its index in the lists by neuron
  uint16_t* places;  // [capacity] for each word of the tile plan's lists: its place in the operand tiles by neuron
  int32_t* totals;   // [4] NeuronTotal
};
// k: the number of columns of dW, which determines how tiles are cut. Returns cudaErrorInvalidValue if M is more than
// kMaxSplitTokens, because a piece's code has 16 bits for a block number, and a block has 64 tokens.
constexpr int64_t kMaxSplitTokens = 65535 * 64;
cudaError_t neuron_plan(const TilePlan& plan, int64_t m, int64_t k, int64_t n, const NeuronPlan& out,
                        cudaStream_t stream);

// Expands lists by neuron to dense operands: bf16 [JT][MT * 2 blocks][2 halves] operand tiles of [64 neurons, 64
// slots], 8 KB each, with zeros where there is no nonzero. An operand has memory for N x M values, rounded up to whole
// tiles, but only the blocks that a half needs are written.
struct Operands {
  const uint32_t* lists[2];  // [1]: a second list, or null
  void* operands[2];         // [i]: the operand made from lists[i]
  NeuronPlan plan;
  int64_t m, n;
};
cudaError_t tile_operands(const Operands& a, cudaStream_t stream);

// dw[neuron] = sum of operand[neuron, s] rows[slots[s]] over the slots s of the neuron's tile. If there are two
// operands, each is multiplied by the same rows and gives a dw of its own.
struct WeightGradient {
  const void* operands[2];  // from tile_operands; [1]: the second operand, or null
  const void* rows;         // bf16 [m, K]: x or dy
  NeuronPlan plan;
  int64_t m, k, n;
  void* dw[2];  // [i]: from operands[i], [n, K], bf16, or float32 if float_dw
  bool float_dw;
  bool add;          // adds to dw, which is float32, instead of overwriting it
  float* partials;   // [kSplitUnits, 2, 128, 256] the sums of the pieces
  int32_t* tickets;  // [kSplitUnits, 4] pieces that are done, then [1] units that are claimed; zero before and
                     // after the kernel
};
cudaError_t tile_weights(const WeightGradient& a, cudaStream_t stream);

// The row engine: y [M, K] and l1 (float32 [1]) from the packed gate, row by row. Without w_up the layer is non-gated,
// and x is not read. workspace: row_workspace(m, k, n) bytes, 16-byte aligned, contents undefined. tickets: int32
// [kRowTickets], zero before and after. If row_ffn_counts(M, K) is true, row_ffn does not read row_counts, and writes
// packed.counters itself. float8: if not null, the weights are e4m3 with these scales, and row_ffn_counts(M, K) must be
// true.
constexpr int kRowTickets = 640;
int64_t row_workspace(int64_t m, int64_t k, int64_t n);
cudaError_t row_ffn(const void* x, const void* w_up, const void* w_down_t, const Float8Scales* float8, int64_t m,
                    int64_t k, int64_t n, const Packed& packed, void* workspace, int32_t* tickets, float* l1, void* y,
                    cudaStream_t stream);

// The overflow path: y and l1 of the tokens of the tiles that left the tile engine, densely in bf16; does nothing if
// there are none. Adds to l1 what tile_up has written for all other tokens. Non-gated: w_gate is W_u, and w_up is null.
struct RestForward {
  const int32_t *totals, *tokens;        // totals and rest_tokens of the tile plan
  const void* x;                         // bf16 [M, K]
  const void *w_gate, *w_up, *w_down_t;  // bf16 [N, K]
  void* y;                               // bf16 [M, K]
  float *l1_partials, *l1;               // float32 [MT * ceil(N / 128)], 16-byte aligned; float32 [1]
  void* plane;                           // at least rest_forward_workspace(m, n) bytes
  int32_t* tickets;                      // [2] tiles drawn, tiles done; zero before and after
  int m, k, n;
  int group_tiles = 0;  // tiles of tokens whose h fits in `plane`; set by rest_forward
};
int64_t rest_forward_workspace(int64_t m, int64_t n);
cudaError_t rest_forward(RestForward p, int64_t plane_bytes, cudaStream_t stream);

// The overflow path of backward: the gradients of the same tokens, densely; does nothing if there are none. Writes
// their dx, and adds to the weights' gradients, which must hold those of all other tokens. Non-gated: w_gate is W_u,
// dw_gate is dW_u, and w_up and dw_up are null.
struct RestBackward {
  const int32_t *totals, *tokens;          // totals and rest_tokens of the tile plan
  const void *x, *dy;                      // bf16 [M, K]
  const void *w_gate, *w_up, *w_down_t;    // bf16 [N, K]
  const float* dl1;                        // [1]
  void *dx, *dw_gate, *dw_up, *dw_down_t;  // bf16, shaped like x and the weights
  bool float_gradients;                    // if true, the weights' gradients are float32
  void* planes;                            // at least two planes (non-gated: one) of M x N values, bf16
  int64_t planes_bytes;
  int32_t* tickets;                        // [2] tiles drawn, tiles done; zero before and after
  int m, k, n;
};
cudaError_t rest_backward(const RestBackward& p, cudaStream_t stream);

// The dense engine's first products, and the statistics: h = relu(x w_gate^T) * (x w_up^T), or h = relu(x w_gate^T) if
// w_up is null. Writes the two factors to g and u, bf16 [M, N], unless these are null. fired: [N], 8-byte aligned.
// counters: int64 [kDenseCounters]; only this kernel uses the last one. l1_partials: float32 [MT * 2 NT], 16-byte
// aligned.
constexpr int kDenseCounters = kCounters + 1;
cudaError_t dense_hidden(const void* x, const void* w_gate, const void* w_up, int64_t m, int64_t k, int64_t n, void* g,
                         void* u, void* h, float* l1_partials, float* l1, uint8_t* fired, int64_t* counters,
                         cudaStream_t stream);

// The elementwise half of dense_hidden. For few tokens, cuBLAS computes the products z and u, and this kernel computes
// h = relu(z) * u, or h = relu(z) if u is null. h may be the same memory as z or u. l1_partials: float32 [MT * ceil(N /
// kPointwiseColumns)]; the other arguments are those of dense_hidden.
constexpr int kPointwiseColumns = 64;
cudaError_t pointwise(const void* z, const void* u, int64_t m, int64_t n, void* h, float* l1_partials, float* l1,
                      uint8_t* fired, int64_t* counters, cudaStream_t stream);
// Computes h as pointwise does, for `count` (a multiple of 8) entries, but no statistics.
cudaError_t pointwise_hidden(const void* z, const void* u, int64_t count, void* h, cudaStream_t stream);

// Computes dz, du and h, bf16 [M, N], from dh = dy w_down, g and u (DESIGN.md §2). w_down: [K, N]. Non-gated: u and du
// are null. counters: int64 [kCounters], scratch.
cudaError_t dense_gradient(const void* dy, const void* w_down, int64_t m, int64_t k, int64_t n, const void* g,
                           const void* u, const float* dl1, void* dz, void* du, void* h, int64_t* counters,
                           cudaStream_t stream);

// The elementwise half of dense_gradient, for `count` (a multiple of 8) entries: computes h, du and dz from z, u and dh
// (DESIGN.md §2). Non-gated: u and du are null. dz may be the same memory as dh.
cudaError_t pointwise_gradient(const void* z, const void* u, const void* dh, const float* dl1, int64_t count, void* dz,
                               void* du, void* h, cudaStream_t stream);

}  // namespace sparsellm
