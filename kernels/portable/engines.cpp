// Implements engines.h: the layout of every buffer, and the order of the stages (launch.h).
#include "engines.h"

#include <algorithm>
#include <cstring>

#include "arena.h"
#include "launch.h"

// Returns the error of `call`, if there is one, because the later stages would have no input.
#define SPARSELLM_TRY(call)                                                   \
  do {                                                                        \
    if (const cudaError_t error = (call); error != cudaSuccess) return error; \
  } while (false)

namespace sparsellm {
namespace {

// Kernels index words with uint32 and advance an index by up to 4,096 at a time. The index must not exceed 2^32 even
// after the last step.
constexpr int64_t kMaxWords = (int64_t{1} << 32) - (1 << 14);
constexpr int64_t kCapacityUnit = 128;
// The tile engine adds these to a saved buffer's length, else a multiple of 16: 2, plus 4 if tokens are ordered.
constexpr int64_t kTileEngine = 2, kOrdered = 4;
// Scratch after the counters, in int64: totals, then tickets. The scratch must be zero when a stage starts, and every
// stage leaves it zero.
constexpr int kScratch = (kTotals + kRowTickets) / 2;
constexpr int kCountsLength = kCounters + kScratch;

int64_t tiles_of(int64_t tokens) { return (tokens + kTokenTile - 1) / kTokenTile; }
int64_t column_tiles_of(int64_t neurons) { return (neurons + kColumnTile - 1) / kColumnTile; }

// The scratch memory after the counters in Result.counts: the totals of the tile engine's plan, then the tickets of the
// row engine.
int32_t* totals_of(int64_t* counts) { return reinterpret_cast<int32_t*>(counts + kCounters); }
int32_t* tickets_of(int64_t* counts) { return totals_of(counts) + kTotals; }

// wide_values: how many values of wide segments there is memory for.
Packed lay_out_packed(Arena& arena, int64_t m, int64_t n, int64_t wide_values, const Result& result) {
  const int64_t column_tiles = column_tiles_of(n);
  Packed packed = {};
  packed.words = arena.take<uint32_t>(m * column_tiles * kTileWords);
  packed.wide = arena.take<uint16_t>(wide_values);
  packed.wide_values = wide_values;
  packed.mask = arena.take<uint32_t>(tiles_of(m) * column_tiles * kColumnTile / 32);
  packed.row_counts = arena.take<int32_t>(row_counts_length(m, n));
  packed.fired = result.fired;
  packed.counters = result.counts;
  return packed;
}

// What the tile engine's forward pass saves for its backward pass: the layout of the saved buffer. A forward pass that
// saves nothing puts the same plan into its workspace, without `ups`.
struct Kept {
  TilePlan plan;  // without `rows` and `fullness`, which backward does not read
  void* ups;      // bf16 [capacity]: u for each word of the lists; null if nothing is saved or the layer is non-gated

  Kept(Arena& arena, const TileShape& s, bool saving) : plan(), ups(nullptr) {
    const int64_t tiles = tiles_of(s.m), column_tiles = column_tiles_of(s.n);
    plan.long_capacity = s.long_capacity;
    plan.capacity = s.capacity;
    plan.tiles = arena.take<int4>(tiles);
    plan.order = arena.take<int4>(tiles);
    plan.items = arena.take<int4>(tiles * column_tiles);
    plan.totals = arena.take<int32_t>(kTotals);
    plan.slots = arena.take<uint16_t>(tiles * column_tiles * kColumnTile);
    plan.starts = arena.take<uint32_t>(tiles * 2 * (column_tiles * 4 + 1));
    plan.tokens = s.ordered ? arena.take<int32_t>(s.m) : nullptr;
    plan.rest_tokens = arena.take<int32_t>(s.m);
    plan.lists = arena.take<uint32_t>(s.capacity);
    if (saving && s.gated) ups = arena.take<uint16_t>(s.capacity);
  }
};

// Whether some batch has more nonzeros than the lists hold.
bool can_overflow(const TileShape& s) { return std::min(s.capacity, s.long_capacity) < s.m * s.n; }

// How many values of wide segments the tile engine has memory for: as many as fit in the memory of the words, M N / 4,
// or more, if the lists hold so many nonzeros that this may be too few. A wide segment has at least 32 nonzeros, and
// takes their number rounded up to a multiple of eight, at most a quarter more. So wherever all nonzeros fit in the
// lists, all wide segments fit. The kernels for few tokens reserve no memory (common/twell.cuh).
int64_t wide_values_of(const TileShape& s) {
  const int64_t all = s.m * s.n;
  return s.m <= kFewTokens ? all : std::min(all, std::max(all / 4, s.capacity + s.capacity / 4));
}

// Buffers that only the tile engine's forward pass needs.
struct TileWorkspace {
  Packed packed;
  void* rows;           // TilePlan::rows
  int64_t plane_bytes;  // of the memory from packed.words to the end of rows, later the plane of rest_forward
  uint32_t* fullness;
  float* l1_partials;
  uint32_t* hidden;   // h, indexed like g in the lists; null if backward does not need g, because then h replaces g in
                      // the lists
  void* order;  // workspace of token_order

  TileWorkspace(Arena& arena, const TileShape& s, const Result& result, bool saving) {
    const int64_t before = arena.bytes();
    packed = lay_out_packed(arena, s.m, s.n, wide_values_of(s), result);
    const int64_t plane = can_overflow(s) ? rest_forward_workspace(s.m, s.n) : 0, packed_bytes = arena.bytes() - before;
    const int64_t words = s.m * kRowCapacity + s.long_capacity + 3;  // + 3: kernels read four words at a time
    rows = arena.take_bytes(std::max<int64_t>(words * sizeof(uint32_t), plane - packed_bytes));
    plane_bytes = arena.bytes() - before;
    fullness = arena.take<uint32_t>(2 * tiles_of(s.m));
    l1_partials = arena.take<float>(tiles_of(s.m) * column_tiles_of(s.n) * kUpPartials);
    hidden = saving && s.gated ? arena.take<uint32_t>(s.capacity) : nullptr;
    order = arena.take_bytes(s.ordered ? order_workspace(s.m, s.n) : 0);
  }
};

// Buffers that the tile engine's backward pass needs in addition to the saved buffer.
struct BackwardWorkspace {
  NeuronPlan plan;
  int32_t *drawn, *tickets, *rest_tickets;  // counters of tile_gradient, tile_weights, rest_backward
  int64_t zeroed;                           // bytes at the start that must be zero before the pass
  uint32_t *dz, *du, *dz_by_neuron, *du_by_neuron, *h_by_neuron;
  float* partials;
  void *operand, *second_operand;
  int64_t planes_bytes;  // of the memory from plan.at to the end of the operands, later the planes of rest_backward
  void* dw_down_t;  // [N, K]: dW_d by neuron; the last stage transposes it to dw_down

  BackwardWorkspace(Arena& arena, const TileShape& s, bool float_weights)
      : plan(), du(nullptr), du_by_neuron(nullptr), second_operand(nullptr) {
    const int64_t tiles = tiles_of(s.m), neuron_tiles = (s.n + kTokenTile - 1) / kTokenTile;
    plan.frequencies = arena.take<int32_t>(s.n);
    plan.counts = arena.take<uint32_t>(neuron_tiles * 2 * tiles * 2);
    plan.totals = arena.take<int32_t>(kNeuronTotals);
    drawn = arena.take<int32_t>(2);
    tickets = arena.take<int32_t>(kSplitUnits * 4 + 1);
    rest_tickets = arena.take<int32_t>(2);
    zeroed = arena.bytes();
    plan.ranks = arena.take<int32_t>(s.n);
    plan.neurons = arena.take<int32_t>(s.n);
    plan.masks = arena.take<uint32_t>(neuron_tiles * 2 * tiles * 4);
    plan.before = arena.take<uint32_t>(neuron_tiles * 3 * tiles * 4);
    plan.slots = arena.take<int32_t>(neuron_tiles * tiles * kTokenTile);
    plan.bases = arena.take<uint32_t>(tiles * neuron_tiles * 2 * 6);
    plan.starts = arena.take<uint32_t>(neuron_tiles * 2 * (tiles * 2 + 1));
    plan.tiles = arena.take<int4>(neuron_tiles);
    plan.order = arena.take<int4>(neuron_tiles + kSplitUnits);
    const int64_t before_planes = arena.bytes();
    plan.at = arena.take<uint32_t>(s.capacity);
    plan.places = arena.take<uint16_t>(s.capacity);
    dz = arena.take<uint32_t>(s.capacity);
    dz_by_neuron = arena.take<uint32_t>(s.capacity);
    h_by_neuron = arena.take<uint32_t>(s.capacity);
    if (s.gated) du = arena.take<uint32_t>(s.capacity);
    if (s.gated) du_by_neuron = arena.take<uint32_t>(s.capacity);
    partials = arena.take<float>(static_cast<int64_t>(kSplitUnits) * 2 * kTokenTile * kColumnTile);
    const int64_t places = neuron_tiles * tiles * kTokenTile * kTokenTile;  // number of values of an operand
    operand = arena.take<uint16_t>(places);
    if (s.gated) second_operand = arena.take<uint16_t>(places);
    planes_bytes = arena.bytes() - before_planes;
    dw_down_t = arena.take_bytes(s.n * s.k * (float_weights ? 4 : 2));
  }
};

// Describes the product of lists and weights by neuron, y [M, K]. The lists are the plan's, or other lists with the
// same places. The second list and the second weights may be null.
struct Lists {
  const uint32_t *first, *second;
};
struct Weights {
  const void *first, *second;
};
Spmm product_over(const TilePlan& plan, const Layer& a, Lists lists, Weights weights, void* y) {
  Spmm product = {};
  product.lists[0] = lists.first;
  product.lists[1] = lists.second;
  product.weights[0] = weights.first;
  product.weights[1] = weights.second;
  product.slots = plan.slots;
  product.slots_per_tile = column_tiles_of(a.n) * kColumnTile;
  product.starts = plan.starts;
  product.starts_per_half = column_tiles_of(a.n) * 4 + 1;
  product.order = plan.order;
  product.tokens = plan.tokens;
  product.m = a.m;
  product.k = a.k;
  product.y = y;
  return product;
}

// What the dense engine saves: g (or z, if the engine does not fuse) and, in a gated layer, u. Both are null if nothing
// is saved.
struct DensePlanes {
  void *g, *u;

  DensePlanes(void* saved, const Layer& a)
      : g(saved), u(saved != nullptr && a.gated() ? static_cast<char*>(saved) + a.m * a.n * 2 : nullptr) {}
};

struct DenseWorkspace {
  void *h, *u;  // u: null if the layer is non-gated, if u is saved, or if one kernel computes and uses u
  float* l1_partials;

  DenseWorkspace(Arena& arena, const Layer& a, bool fused, bool saving) : u(nullptr) {
    h = arena.take<uint16_t>(a.m * a.n);
    // dense_hidden and pointwise write different numbers of partial sums of l1. The larger number is enough for both.
    const int64_t columns = std::max(2 * column_tiles_of(a.n), (a.n + kPointwiseColumns - 1) / kPointwiseColumns);
    l1_partials = arena.take<float>(tiles_of(a.m) * columns);
    if (a.gated() && !fused && !saving) u = arena.take<uint16_t>(a.m * a.n);
  }
};

struct DenseBackwardWorkspace {
  int64_t* counters;  // scratch of dense_gradient
  void *dz, *du, *h;

  DenseBackwardWorkspace(Arena& arena, const Layer& a) : du(nullptr) {
    counters = arena.take<int64_t>(kCounters);
    dz = arena.take<uint16_t>(a.m * a.n);
    h = arena.take<uint16_t>(a.m * a.n);
    if (a.gated()) du = arena.take<uint16_t>(a.m * a.n);
  }
};

}  // namespace

int64_t counts_length() { return kCountsLength; }

namespace {
Result lay_out_statistics(Arena& arena, int64_t n, void* y) {
  return {y, arena.take<float>(1), arena.take<uint8_t>(n), arena.take<int64_t>(kCountsLength)};
}
}  // namespace

int64_t statistics_bytes(int64_t n) {
  Arena arena(nullptr);
  lay_out_statistics(arena, n, nullptr);
  return arena.bytes();
}

Result with_statistics_in(void* memory, int64_t n, void* y) {
  Arena arena(memory);
  return lay_out_statistics(arena, n, y);
}

int64_t row_counts_length(int64_t m, int64_t n) {
  return std::max<int64_t>(m, kCountedTokens * (2 + column_tiles_of(n)) / 2);
}

cudaError_t pack(const void* x, const void* w, int64_t m, int64_t k, int64_t n, const PackedGate& out,
                 cudaStream_t stream) {
  const Packed packed = {out.words, out.wide, m * n, out.mask, out.row_counts, out.fired, out.counts};
  return gate_pack(x, w, nullptr, m, k, n, packed, kCountsLength, false, stream);
}

cudaError_t pack_float8(const Float8Gate& gate, int64_t m, int64_t k, int64_t n, const PackedGate& out,
                        cudaStream_t stream) {
  const Packed packed = {out.words, out.wide, m * n, out.mask, out.row_counts, out.fired, out.counts};
  return gate_pack_float8(gate, m, k, n, packed, kCountsLength, stream);
}

// ---- row

int64_t row_workspace_bytes(int64_t m, int64_t k, int64_t n) {
  Arena arena(nullptr);
  lay_out_packed(arena, m, n, m * n, {});
  arena.take_bytes(row_workspace(m, k, n));
  return arena.bytes();
}

cudaError_t row_forward(const Layer& a, const Multiply& multiply, void* workspace, const Result& result,
                        cudaStream_t stream) {
  Arena arena(workspace);
  const Packed packed = lay_out_packed(arena, a.m, a.n, a.m * a.n, result);
  void* own = arena.take_bytes(row_workspace(a.m, a.k, a.n));
  if (packs_product(a.m)) {
    if (a.scales != nullptr) return cudaErrorInvalidValue;
    multiply({a.x, a.m, a.k, false}, {a.thresholded(), a.k, a.n, true}, packed.wide, false);
    SPARSELLM_TRY(pack_product(packed, a.m, a.n, kCountsLength, stream));
  } else {
    SPARSELLM_TRY(gate_pack(a.x, a.thresholded(), a.scales, a.m, a.k, a.n, packed, kCountsLength, true, stream));
  }
  return row_ffn(a.x, a.multiplier(), a.w_down_t, a.scales, a.m, a.k, a.n, packed, own, tickets_of(result.counts),
                 result.l1, result.y, stream);
}

// ---- tile

int64_t tile_max_capacity() { return kMaxWords; }
int64_t tile_max_tokens(bool saving) { return saving ? kMaxSplitTokens : kMaxWords / kRowCapacity; }

TileShape tile_shape(int64_t m, int64_t k, int64_t n, bool gated, int64_t capacity, int64_t long_capacity,
                     bool ordered) {
  // `capacity` is rounded up to a multiple of 128, so that arrays of `capacity` words or halfwords fill whole 256-byte
  // units of the arena. Then the size of a saved buffer grows by exactly 4 bytes (gated: 6) per nonzero of capacity,
  // and tile_shape_of_saved can compute the capacity from the size by a division.
  capacity = (capacity + kCapacityUnit - 1) / kCapacityUnit * kCapacityUnit;
  if (long_capacity < 0) long_capacity = std::max<int64_t>(0, std::min(capacity, kMaxWords - m * kRowCapacity));
  return {m, k, n, gated, capacity, long_capacity, ordered};
}

int64_t tile_workspace_bytes(const TileShape& shape, bool saving) {
  Arena arena(nullptr);
  TileWorkspace(arena, shape, {}, saving);
  if (!saving) Kept(arena, shape, false);
  return arena.bytes();
}

int64_t tile_saved_bytes(const TileShape& shape) {
  Arena arena(nullptr);
  Kept(arena, shape, true);
  return arena.bytes() + kTileEngine + (shape.ordered ? kOrdered : 0);
}

// For example (docs/dev/SEAM.md): 33,170,694 = 1,713,408 (all arrays except lists and ups) + 6 * 5,242,880 + 2 + 4.
TileShape tile_shape_of_saved(int64_t length, int64_t m, int64_t k, int64_t n, bool gated) {
  const bool ordered = length % 16 == kTileEngine + kOrdered;
  const int64_t lists = length - tile_saved_bytes({m, k, n, gated, 0, 0, ordered});
  const TileShape shape = tile_shape(m, k, n, gated, std::max<int64_t>(0, lists) / (gated ? 6 : 4), -1, ordered);
  if (shape.capacity > 0 && tile_saved_bytes(shape) == length) return shape;
  return {m, k, n, gated, -1, 0, ordered};
}

cudaError_t tile_forward(const Layer& a, const TileShape& s, void* workspace, void* saved, const Result& result,
                         cudaStream_t stream) {
  const bool saving = saved != nullptr;
  Arena own(workspace), theirs(saved);
  const TileWorkspace w(own, s, result, saving);
  Kept kept(saving ? theirs : own, s, saving);
  TilePlan& plan = kept.plan;
  plan.rows = static_cast<uint32_t*>(w.rows);
  plan.fullness = w.fullness;
  if (saving) {
    SPARSELLM_TRY(cudaMemsetAsync(plan.totals, 0, kTotals * sizeof(int32_t), stream));
  } else {
    plan.totals = totals_of(result.counts);  // gate_pack zeroes the totals
  }
  if (a.float8 != nullptr) {
    SPARSELLM_TRY(gate_pack_float8(*a.float8, a.m, a.k, a.n, w.packed, kCountsLength, stream));
  } else {
    SPARSELLM_TRY(gate_pack(a.x, a.thresholded(), nullptr, a.m, a.k, a.n, w.packed, kCountsLength, false, stream));
  }
  SPARSELLM_TRY(pack_rows(w.packed, a.m, a.n, plan, stream));
  if (s.ordered) {
    SPARSELLM_TRY(token_order(plan.rows, w.packed.row_counts, a.m, a.n, w.order,
                              const_cast<int32_t*>(plan.tokens), stream));
  }
  SPARSELLM_TRY(tile_plan(w.packed, a.m, a.n, plan, stream));
  uint32_t* hidden = w.hidden != nullptr ? w.hidden : plan.lists;
  SPARSELLM_TRY(tile_up(a.gated() ? a.x : nullptr, a.multiplier(), a.m, a.gated() ? a.k : 0, a.n, plan, hidden,
                        kept.ups, w.l1_partials, result.l1, stream));
  const Spmm product = product_over(plan, a, {hidden, nullptr}, {a.w_down_t, nullptr}, result.y);
  SPARSELLM_TRY(tile_spmm(product, stream));
  if (!can_overflow(s)) return cudaSuccess;
  RestForward rest = {};
  rest.totals = plan.totals;
  rest.tokens = plan.rest_tokens;
  rest.x = a.x;
  rest.w_gate = a.thresholded();
  rest.w_up = a.multiplier();
  rest.w_down_t = a.w_down_t;
  rest.y = result.y;
  rest.l1_partials = w.l1_partials;
  rest.l1 = result.l1;
  rest.plane = w.packed.words;
  rest.tickets = tickets_of(result.counts);
  rest.m = static_cast<int>(a.m);
  rest.k = static_cast<int>(a.k);
  rest.n = static_cast<int>(a.n);
  return rest_forward(rest, w.plane_bytes, stream);
}

int64_t tile_backward_workspace_bytes(const TileShape& shape, bool float_weights) {
  Arena arena(nullptr);
  BackwardWorkspace(arena, shape, float_weights);
  return arena.bytes();
}

cudaError_t tile_backward(const Layer& a, const TileShape& s, const void* dy, const float* dl1, void* saved,
                          void* workspace, const Gradients& d, cudaStream_t stream) {
  Arena arena(workspace), theirs(saved);
  const BackwardWorkspace w(arena, s, d.float_weights);
  const Kept kept(theirs, s, true);
  const TilePlan& plan = kept.plan;
  SPARSELLM_TRY(cudaMemsetAsync(workspace, 0, w.zeroed, stream));
  SPARSELLM_TRY(neuron_plan(plan, a.m, a.k, a.n, w.plan, stream));
  const Gradient nonzeros = {kept.ups,       dl1,           w.dz,   w.du, w.plan.at, w.plan.places, w.dz_by_neuron,
                             w.du_by_neuron, w.h_by_neuron, w.drawn};
  SPARSELLM_TRY(tile_gradient(dy, a.w_down_t, a.m, a.k, a.n, plan, nonzeros, stream));
  const Spmm dx = product_over(plan, a, {w.dz, w.du}, {a.thresholded(), a.multiplier()}, d.dx);
  SPARSELLM_TRY(tile_spmm(dx, stream));
  void* dw_first = a.gated() ? d.dw_gate : d.dw_up;
  void* dw_second = a.gated() ? d.dw_up : nullptr;
  const auto weights = [&](const uint32_t* list, const uint32_t* second_list, const void* rows, void* dw,
                           void* second_dw, bool add) -> cudaError_t {
    void* second = second_list != nullptr ? w.second_operand : nullptr;
    SPARSELLM_TRY(tile_operands({{list, second_list}, {w.operand, second}, w.plan, a.m, a.n}, stream));
    const WeightGradient gradient = {{w.operand, second}, rows, w.plan,     a.m,       a.k, a.n, {dw, second_dw},
                                     d.float_weights,     add,  w.partials, w.tickets};
    return tile_weights(gradient, stream);
  };
  SPARSELLM_TRY(weights(w.dz_by_neuron, w.du_by_neuron, a.x, dw_first, dw_second, d.add));
  SPARSELLM_TRY(weights(w.h_by_neuron, nullptr, dy, w.dw_down_t, nullptr, false));
  RestBackward rest = {};
  rest.totals = plan.totals;
  rest.tokens = plan.rest_tokens;
  rest.x = a.x;
  rest.dy = dy;
  rest.w_gate = a.thresholded();
  rest.w_up = a.multiplier();
  rest.w_down_t = a.w_down_t;
  rest.dl1 = dl1;
  rest.dx = d.dx;
  rest.dw_gate = dw_first;
  rest.dw_up = dw_second;
  rest.dw_down_t = w.dw_down_t;
  rest.float_gradients = d.float_weights;
  rest.planes = w.plan.at;
  rest.planes_bytes = w.planes_bytes;
  rest.tickets = w.rest_tickets;
  rest.m = static_cast<int>(a.m);
  rest.k = static_cast<int>(a.k);
  rest.n = static_cast<int>(a.n);
  SPARSELLM_TRY(rest_backward(rest, stream));
  if (d.add) return add_transpose(w.dw_down_t, a.n, a.k, d.dw_down, stream);
  return transpose(w.dw_down_t, d.float_weights, a.n, a.k, d.dw_down, d.float_weights, stream);
}

Field tile_saved_field(const TileShape& s, const char* name) {
  // A null base would make the arena only count bytes. This base is not null, so the arena returns addresses, from
  // which offsets are computed. Nothing is read from the base.
  static char base[1];
  Arena arena(base);
  const Kept kept(arena, s, true);
  const TilePlan& p = kept.plan;
  const int64_t tiles = tiles_of(s.m), column_tiles = column_tiles_of(s.n);
  const struct {
    const char* name;
    const void* at;
    int64_t count;
    int element_bytes;
  } fields[] = {
      {"tokens", p.tokens, s.ordered ? s.m : 0, 4},
      {"slots", p.slots, tiles * column_tiles * kColumnTile, 2},
      {"starts", p.starts, tiles * 2 * (column_tiles * 4 + 1), 4},
      {"lists", p.lists, s.capacity, 4},
      {"tiles", p.tiles, tiles * 4, 4},
      {"order", p.order, tiles * 4, 4},
      {"items", p.items, tiles * column_tiles * 4, 4},
      {"totals", p.totals, kTotals, 4},
      {"rest_tokens", p.rest_tokens, s.m, 4},
      {"ups", kept.ups, s.gated ? s.capacity : 0, 2},
  };
  for (const auto& field : fields) {
    if (std::strcmp(field.name, name) != 0) continue;
    return {field.at == nullptr ? 0 : static_cast<const char*>(field.at) - base, field.count, field.element_bytes};
  }
  return {0, 0, 0};
}

// ---- dense

int64_t dense_saved_bytes(const Layer& a) { return (a.gated() ? 2 : 1) * a.m * a.n * 2; }

int64_t dense_workspace_bytes(const Layer& a, bool fused, bool saving) {
  Arena arena(nullptr);
  DenseWorkspace(arena, a, fused, saving);
  return arena.bytes();
}

cudaError_t dense_forward(const Layer& a, const void* w_down, bool fused, const Multiply& multiply, void* workspace,
                          void* saved, const Result& result, cudaStream_t stream) {
  Arena arena(workspace);
  const DenseWorkspace w(arena, a, fused, saved != nullptr);
  const DensePlanes planes(saved, a);
  if (fused) {
    SPARSELLM_TRY(dense_hidden(a.x, a.thresholded(), a.multiplier(), a.m, a.k, a.n, planes.g, planes.u, w.h,
                               w.l1_partials, result.l1, result.fired, result.counts, stream));
  } else {
    void* z = saved != nullptr ? planes.g : w.h;
    void* u = saved != nullptr ? planes.u : w.u;
    const Matrix x = {a.x, a.m, a.k, false};
    multiply(x, {a.thresholded(), a.k, a.n, true}, z, false);
    if (a.gated()) multiply(x, {a.multiplier(), a.k, a.n, true}, u, false);
    if (result.counts == nullptr) {
      SPARSELLM_TRY(pointwise_hidden(z, u, a.m * a.n, w.h, stream));
    } else {
      SPARSELLM_TRY(pointwise(z, u, a.m, a.n, w.h, w.l1_partials, result.l1, result.fired, result.counts, stream));
    }
  }
  multiply({w.h, a.m, a.n, false}, {w_down, a.n, a.k, true}, result.y, false);
  return cudaSuccess;
}

int64_t dense_backward_workspace_bytes(const Layer& a) {
  Arena arena(nullptr);
  DenseBackwardWorkspace(arena, a);
  return arena.bytes();
}

cudaError_t dense_backward(const Layer& a, const void* w_down, bool fused, const Multiply& multiply, const void* dy,
                           const float* dl1, const void* saved, void* workspace, const Gradients& d,
                           cudaStream_t stream) {
  Arena arena(workspace);
  const DenseBackwardWorkspace w(arena, a);
  const DensePlanes planes(const_cast<void*>(saved), a);
  if (fused) {
    SPARSELLM_TRY(
        dense_gradient(dy, w_down, a.m, a.k, a.n, planes.g, planes.u, dl1, w.dz, w.du, w.h, w.counters, stream));
  } else {
    void* dh = w.dz;
    multiply({dy, a.m, a.k, false}, {w_down, a.k, a.n, false}, dh, false);
    SPARSELLM_TRY(pointwise_gradient(planes.g, planes.u, dh, dl1, a.m * a.n, w.dz, w.du, w.h, stream));
  }
  multiply({w.dz, a.m, a.n, false}, {a.thresholded(), a.n, a.k, false}, d.dx, false);
  if (a.gated()) multiply({w.du, a.m, a.n, false}, {a.multiplier(), a.n, a.k, false}, d.dx, true);
  const Matrix x = {a.x, a.m, a.k, false};
  multiply({w.dz, a.n, a.m, true}, x, a.gated() ? d.dw_gate : d.dw_up, false);
  if (a.gated()) multiply({w.du, a.n, a.m, true}, x, d.dw_up, false);
  multiply({dy, a.k, a.m, true}, {w.h, a.m, a.n, false}, d.dw_down, false);
  return cudaSuccess;
}

}  // namespace sparsellm
