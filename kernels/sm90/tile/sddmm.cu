// tile_up and tile_gradient: matrix products a w^T that are needed only at the nonzeros of the tile plan's lists
// (sampled dense-dense matrix products, SDDMM), and the values that follow from each product. Forward: u = x w_up^T,
// then h = g u. Backward: dh = dy w_down_t^T, then du and dz.
//
// The unit of work is an item (tile/plan.cuh): one token tile of 128 tokens, times up to four blocks of 64 of its
// slots. An item is multiplied densely, but of its 128 x 256 products, only those at the tile's nonzeros are used.
// Roles:
//
//   produce       warps 0-3: copy the rows of `a` (tokens) and of `w` (the neurons in the slots) to the stages
//   Consumer      warps 4-11: warpgroup h multiplies the blocks that half h of the tokens needs, and writes the
//                 products to shared memory as bf16. It also looks up the rows of the next item for the producer.
//   ItemEpilogue  every consumer thread: processes every 128th nonzero of its half, whose product it reads from shared
//                 memory
//   drawing thread  the first consumer thread: from the third round on, it claims items from a counter
//
// Arrays that should stay in registers are locals of a function and are passed by reference; no role has one as a
// member. If a struct had an array next to scalars, all members would stay in local memory until the loops over the
// array are unrolled, which is too late for the compiler's earlier simplifications: the producer's loop was then
// scheduled differently.
//
// Numerics: a product is accumulated in float32 over K and rounded to bf16 once; h = g u is rounded to bf16 once; dh +
// dl1 sign(h) is computed in float32, multiplied by g or u, and rounded to bf16 once. l1 is summed in float32 in a
// fixed order. The results are deterministic: no bit depends on which CTA computes an item.
#include "common/host.h"
#include "common/wgmma.cuh"
#include "tile/plan.cuh"

namespace sparsellm {
namespace {

// The rows of an item are its 128 tokens, followed by its up to 256 neurons. A gather warp copies them in groups of 32:
// for one stage, a group takes eight instructions, each of which copies 128 bytes of each of four rows.
constexpr int kGroup = 32;
constexpr int kTokenGroups = kTileM / kGroup;
constexpr int kNeuronGroups = kTileN / kGroup / kGatherWarps;  // maximum number per warp
static_assert(kTokenGroups == kGatherWarps, "each gather warp copies 32 tokens");
constexpr int kRows = kTileM + kTileN;
constexpr int kWarpRows = kRows / kConsumerWarps;  // 48: the rows that a consumer warp looks up
constexpr int kUpStages = 4;
// Shared memory holds a half's products of two blocks. For four blocks, the products are stored and read in two steps.
constexpr int kPanels = 2;

constexpr uint16_t kOne = 0x3f80;  // 1.0 in bf16

constexpr int kDrawingThread = 32 * kGatherWarps;  // the first thread of the consumers

// Named barriers (bar.sync) among the 128 consumer threads of a half; barrier 0 is __syncthreads.
enum HalfBarrier { kFirstHalfBarrier = 1, kSecondHalfBarrier = 2 };
__device__ __forceinline__ void sync_half(int half) { ptx::bar_sync(kFirstHalfBarrier + half, 128); }

// What the kernel computes. kUp: the forward pass of a gated layer. kGradient: the backward pass. kL1: the forward pass
// of a non-gated layer, in which h is g, so nothing is multiplied, and only l1 is computed.
enum Epilogue { kL1 = 0, kUp = 1, kGradient = 2 };

struct Outputs {
  uint32_t* hidden;
  uint16_t* ups;
  float* l1_partials;
  float* l1;
  int32_t* tickets;  // [2] CTAs that are done, items that are claimed
  Gradient gradient;
};
static_assert(kNextItem == kUpTickets + 1, "tile_up's two tickets must be adjacent in the totals");

// Arrays of two are double buffers, indexed by round % 2.
struct Shared {
  // The rows of an item. The producer reads those of one round while the consumers write those of the next. Within a
  // group of 32, row r is at [r % 4][r / 4]: a producer thread copies rows r, r + 4, r + 8, ..., and so reads
  // contiguous entries.
  alignas(16) uint32_t tokens[2][kTileM];
  alignas(16) uint16_t neurons[2][kTileN];
  int4 items[2];           // the item of the round; once the round's last stage is full, the item two rounds later
  uint64_t drawn[2];       // barrier: items[] holds the item of two rounds later
  uint64_t rows_ready[2];  // barrier: tokens[] and neurons[] are filled
  Pipeline<kUpStages>::Storage pipeline;
  float l1_warps[kThreads / 32];
  bool last;
};

constexpr uint32_t kSharedBytes = kUpStages * kStageBytes + 2 * kPanels * kHalfBytes + sizeof(Shared);
static_assert(kSharedBytes <= kMaxSharedBytes, "stages, products and row lists must fit in one CTA's shared memory");

// A CTA's shared memory: the stages, the products of both halves, then struct Shared. The integers are shared
// addresses.
struct Memory {
  Shared& shared;
  uint32_t stages;    // [kUpStages] of kStageBytes
  uint32_t products;  // [2 halves][kPanels] operand tiles of kHalfBytes
  Pipeline<kUpStages> pipeline;
  Scheduler<2> scheduler;
  uint32_t rows_ready;

  __device__ __forceinline__ explicit Memory(uint8_t* raw)
      : shared(*reinterpret_cast<Shared*>(raw + kSharedBytes - sizeof(Shared))),
        stages(ptx::smem_address(raw)),
        products(stages + kUpStages * kStageBytes),
        pipeline(shared.pipeline),
        scheduler(shared.drawn),
        rows_ready(ptx::smem_address(shared.rows_ready)) {}

  // Called by one thread.
  __device__ __forceinline__ void init_barriers() const {
    if (stages % 1024 != 0) __trap();  // the 128-byte swizzle needs operand tiles at multiples of 1,024 bytes
    for (int s = 0; s < kUpStages; ++s) pipeline.init(s, 32 * kGatherWarps, kConsumerWarps);
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(scheduler.barrier(i), 1);
      ptx::mbarrier_init(rows_ready + 8 * i, kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
  }
};

// What all roles need to know about the product.
struct Problem {
  const TilePlan& plan;
  const Outputs& out;
  int64_t m, k;
  int column_tiles;  // column tiles of N, which determine the sizes of `slots` and `starts` per tile
  int k_blocks;      // stages of a product
  int items;

  __device__ __forceinline__ int4 item_at(int position) const {
    return position < items ? plan.items[position] : no_item();
  }
};

// The rows of a group that one lane of the producer copies: rows lane / 8, lane / 8 + 4, ... For each stage, the lane
// copies 16 of a row's 128 bytes.
using LaneRows = const uint8_t* [8];

__device__ __forceinline__ void point_to(LaneRows& rows, const void* matrix, int64_t pitch, uint32_t chunk,
                                         const uint32_t (&row)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) rows[i] = static_cast<const uint8_t*>(matrix) + row[i] * pitch + chunk * 16;
}

// Computes the addresses of the rows that the consumers have listed for a round: rows[0] are tokens, rows[1] and
// rows[2] neurons. `own` is the index of this lane's first row in the list.
__device__ __forceinline__ void look_up_rows(LaneRows (&rows)[1 + kNeuronGroups], const Shared& shared, int round,
                                             int own, const void* a, const void* w, int64_t pitch, uint32_t chunk) {
  const uint4 four = *reinterpret_cast<const uint4*>(shared.tokens[round & 1] + own);
  const uint4 more = *reinterpret_cast<const uint4*>(shared.tokens[round & 1] + own + 4);
  point_to(rows[0], a, pitch, chunk, {four.x, four.y, four.z, four.w, more.x, more.y, more.z, more.w});
#pragma unroll
  for (int g = 0; g < kNeuronGroups; ++g) {
    const uint4 eight = *reinterpret_cast<const uint4*>(shared.neurons[round & 1] + own + g * (kGatherWarps * kGroup));
    point_to(rows[g + 1], w, pitch, chunk,
             {eight.x & 0xffff, eight.x >> 16, eight.y & 0xffff, eight.y >> 16, eight.z & 0xffff, eight.z >> 16,
              eight.w & 0xffff, eight.w >> 16});
  }
}

// Copies this lane's rows of a group to the stage, where the group begins at `to`. If `bytes` is 0, because the columns
// are beyond K, it writes zeros. Eight rows take 1,024 bytes, with the same swizzle for each eight rows: within them,
// place[0] is the offset for row lane / 8, and place[1] for row lane / 8 + 4.
__device__ __forceinline__ void copy_group(uint32_t to, const LaneRows& rows, const uint32_t (&place)[2],
                                           uint32_t bytes) {
#pragma unroll
  for (int i = 0; i < 8; ++i) ptx::cp_async_16_or_zeros(to + i / 2 * 1024 + place[i % 2], rows[i], bytes);
}

// The role of gather warp `warp`: copies group `warp` of the tokens, and groups `warp` and `warp` + 4 of the neurons.
__device__ __forceinline__ void produce(const Memory& memory, const Problem& problem, const __nv_bfloat16* a,
                                        const __nv_bfloat16* w, int warp, uint32_t lane) {
  const uint32_t chunk = lane % 8;
  const uint32_t place[2] = {swizzle_128(lane / 8, chunk), swizzle_128(lane / 8 + 4, chunk)};
  const int64_t pitch = problem.k * 2;
  Pipeline<kUpStages>::State state;
  for (int round = 0;; ++round) {
    ptx::mbarrier_wait(memory.rows_ready + 8 * (round & 1), round >> 1 & 1);
    const Item item = item_of(memory.shared.items[round & 1]);
    if (!item.exists()) break;
    int unused;
    // If a half needs none of the item's blocks, its tokens are not copied.
    const bool tokens = item.tile.needed(warp * kGroup / kHalf, item.first, item.last, unused) != 0;
    const int neuron_groups = (item.slots + kGroup - 1) / kGroup - warp;  // groups from this warp's first one on
    LaneRows rows[1 + kNeuronGroups];
    const int own = warp * kGroup + static_cast<int>(lane) / 8 * 8;
    look_up_rows(rows, memory.shared, round, own, a, w, pitch, chunk);
    for (int kb = 0; kb < problem.k_blocks; ++kb) {
      const uint32_t bytes = kb * kTileK + chunk * 8 < problem.k ? 16 : 0;
      memory.pipeline.producer_acquire(state);
      const uint32_t to = memory.stages + state.stage * kStageBytes + warp * (kGroup * 128);
      if (tokens) copy_group(to, rows[0], place, bytes);
#pragma unroll
      for (int g = 0; g < kNeuronGroups; ++g) {
        if (neuron_groups > g * kGatherWarps) {
          copy_group(to + (g + 1) * kGatherWarps * (kGroup * 128), rows[g + 1], place, bytes);
        }
      }
      ptx::cp_async_mbarrier_arrive(memory.pipeline.producer_barrier(state.stage));
      state.advance();
      // A copy reads its address register some time after it is issued, and an instruction that overwrites the register
      // waits until then. So all pointers advance after the last copy: if each advanced before its copy, each would
      // wait.
#pragma unroll
      for (int g = 0; g < 1 + kNeuronGroups; ++g) {
#pragma unroll
        for (int i = 0; i < 8; ++i) rows[g][i] += kTileK * 2;
      }
    }
  }
}

__device__ __forceinline__ float rounded(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

// For one half of an item: where each block's nonzeros start in the lists. The last entry is where the last block's
// nonzeros end: the nonzeros of block b are lists[bounds[b]] .. lists[bounds[b + 1] - 1]. A block that the half does
// not need has an empty range.
using Bounds = uint32_t[kItemBlocks + 1];

// One consumer thread's nonzeros of an item: `first`, first + 128, ... among the nonzeros of its half. The thread loads
// its first kWords nonzeros before the product is available, and the others when it reads the product.
template <Epilogue kEpilogue>
struct ItemEpilogue {
  static constexpr int kWords = kEpilogue == kGradient ? 5 : 6;
  // What the gradient needs for each nonzero, in addition to the nonzero's word.
  struct Known {
    uint32_t by_neuron;  // index in the lists by neuron
    uint16_t place, u;   // place in the operand tile by neuron; u, or 1 if the layer is non-gated
  };
  const TilePlan& plan;
  const Outputs& out;
  const uint32_t product;  // shared address of this half's products
  const Bounds& bounds;
  const uint32_t first, end;
  uint32_t (&words)[kWords];
  Known (&known)[kWords];
  float l1 = 0.0f, dl1;

  __device__ __forceinline__ ItemEpilogue(const Problem& problem, uint32_t product, const Bounds& bounds,
                                          uint32_t (&words)[kWords], Known (&known)[kWords])
      : plan(problem.plan),
        out(problem.out),
        product(product),
        bounds(bounds),
        first(bounds[0] + threadIdx.x % 128),
        end(bounds[kItemBlocks]),
        words(words),
        known(known) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = first + 128 * i < end ? plan.lists[first + 128 * i] : 0;
    dl1 = kEpilogue == kGradient ? *out.gradient.dl1 : 0.0f;
  }

  __device__ __forceinline__ Known known_of(uint32_t at) const {
    const Gradient& to = out.gradient;
    return {to.at[at], to.places[at], to.ups == nullptr ? kOne : static_cast<const uint16_t*>(to.ups)[at]};
  }

  // Called while the last stage is multiplied. The loads of the words were issued before the first stage.
  __device__ __forceinline__ void load_known() {
    if constexpr (kEpilogue == kGradient) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        if (first + 128 * i < end) known[i] = known_of(first + 128 * i);
      }
    }
  }

  // Processes the nonzeros of blocks [from_block, end_block) of this half.
  __device__ __forceinline__ void pick(int from_block, int end_block) {
    const uint32_t begin = bounds[from_block], end = bounds[end_block];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t at = first + 128 * i;
      if (at >= begin && at < end) finish(words[i], at, known[i]);
    }
    for (uint32_t at = first + 128 * kWords; at < end; at += 128) {
      if (at < begin) continue;
      finish(plan.lists[at], at, kEpilogue == kGradient ? known_of(at) : Known());
    }
  }

  // Processes the nonzero `word`, which has index `at` in the lists.
  __device__ __forceinline__ void finish(uint32_t word, uint32_t at, const Known& known) {
    const float g = __uint_as_float(word & 0xffff0000);  // non-gated: h
    if constexpr (kEpilogue == kL1) {
      l1 += fabsf(g);
      return;
    }
    const uint32_t panel = ((at >= bounds[1]) + (at >= bounds[2]) + (at >= bounds[3])) % kPanels;
    const uint32_t bits = ptx::ld_shared_u16(product + panel * kHalfBytes + (word & 0xffff) * 2);
    const float value = __uint_as_float(bits << 16);
    if constexpr (kEpilogue == kUp) {
      const float h = rounded(g * value);
      out.hidden[at] = __float_as_uint(h) | (word & 0xffff);
      if (out.ups != nullptr) out.ups[at] = bits;
      l1 += fabsf(h);
    } else {
      store_gradients(word, at, g, value, known);
    }
  }

  __device__ __forceinline__ void store_gradients(uint32_t word, uint32_t at, float g, float product_of_dy,
                                                  const Known& known) const {
    const Gradient& to = out.gradient;
    const uint32_t by_neuron = known.by_neuron, place = known.place;
    const bool gated = to.ups != nullptr;
    const float u = __uint_as_float(static_cast<uint32_t>(known.u) << 16);
    const float h = rounded(g * u);
    const float sign = !gated || h > 0.0f ? 1.0f : h < 0.0f ? -1.0f : h;  // sign(NaN) is NaN
    const float dh = product_of_dy + dl1 * sign;
    const uint32_t dz = __float_as_uint(rounded(dh * u));
    to.dz[at] = dz | (word & 0xffff);
    to.dz_by_neuron[by_neuron] = dz | place;
    to.h_by_neuron[by_neuron] = __float_as_uint(h) | place;
    if (gated) {
      const uint32_t du = __float_as_uint(rounded(dh * g));
      to.du[at] = du | (word & 0xffff);
      to.du_by_neuron[by_neuron] = du | place;
    }
  }
};

// Consumer warp `warp` of eight. The first two items of a CTA are dealt by a fixed rule, and all later items are
// claimed, so that a CTA that finishes earlier, for example because its SM is nearer to L2, takes more items. If
// nothing is multiplied (kL1), all items are dealt.
template <Epilogue kEpilogue>
struct Consumer {
  using ThisEpilogue = ItemEpilogue<kEpilogue>;
  static constexpr bool kMultiplies = kEpilogue != kL1;
  const Memory& memory;
  const Problem& problem;
  int warp, half;
  uint32_t lane;
  uint32_t product;  // shared address of this half's products
  bool draws;        // whether this is the drawing thread
  Pipeline<kUpStages>::State state;
  uint32_t (&rows)[2];  // the entries of the next item's row list that this lane looks up, for up to 48 rows per warp
  int4 code, next;      // `code`: the current item, then the next one; `next`: the item after `code`
  Bounds& next_bounds;
  int ticket = 0;  // the drawing thread's ticket

  __device__ __forceinline__ Consumer(const Memory& memory, const Problem& problem, int warp, uint32_t lane,
                                      uint32_t (&rows)[2], Bounds& next_bounds)
      : memory(memory),
        problem(problem),
        warp(warp),
        half(warp / 4),
        lane(lane),
        product(memory.products + half * (kPanels * kHalfBytes)),
        draws(threadIdx.x == kDrawingThread),
        rows(rows),
        next_bounds(next_bounds) {}

  __device__ __forceinline__ void run() {
    code = problem.item_at(dealt_unit(0)), next = problem.item_at(dealt_unit(1));
    if constexpr (kMultiplies) {
      if (draws) memory.shared.items[0] = code, memory.shared.items[1] = next;
      ask_for_rows(item_of(code));
      hand_over_rows(0);
      ask_for_rows(item_of(next));
    }
    ask_for_bounds(item_of(code));
    for (int round = 0; item_of(code).exists(); ++round) {
      const Item item = item_of(code);
      code = next;
      if constexpr (kMultiplies) hand_over_rows(round + 1);
      ticket = 0;
      if (kMultiplies && draws) ticket = atomicAdd(problem.out.tickets + 1, 1);
      int from;
      const int blocks = item.tile.needed(half, item.first, item.last, from);
      Bounds bounds;
#pragma unroll
      for (int b = 0; b <= kItemBlocks; ++b) bounds[b] = next_bounds[b];
      uint32_t words[ThisEpilogue::kWords];
      typename ThisEpilogue::Known known[ThisEpilogue::kWords];
      ThisEpilogue epilogue(problem, product, bounds, words, known);
      if constexpr (kMultiplies) {
        const uint32_t b_offset = (from - item.first) * (kBlockColumns * 128);
        switch (blocks) {
          case 0: skip(round); break;
          case 1: multiply_blocks<1>(b_offset, round, epilogue); break;
          case 2: multiply_blocks<2>(b_offset, round, epilogue); break;
          case 3: multiply_blocks<3>(b_offset, round, epilogue); break;
          default: multiply_blocks<4>(b_offset, round, epilogue);
        }
      } else {
        look_ahead(round);
        epilogue.pick(0, kItemBlocks);
      }
      if constexpr (kEpilogue != kGradient) store_l1(item, epilogue.l1);
    }
  }

  // Loads this lane's rows of the next item. The loads are issued before the current item is multiplied, and
  // hand_over_rows writes the rows to shared memory afterwards. For a token that does not exist, row 0 is copied: no
  // list refers to the products of such a token.
  __device__ __forceinline__ void ask_for_rows(const Item& item) {
    if (!item.exists()) return;
    const TilePlan& plan = problem.plan;
    const int32_t* tokens = plan.tokens;
    const uint16_t* slots = plan.slots + static_cast<int64_t>(item.tile.index) * problem.column_tiles * kColumnTile +
                            item.first * kBlockColumns;
    const int of_item = kTileM + (item.last - item.first) * kBlockColumns;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = warp * kWarpRows + 32 * i + lane;
      if (i == 1 && lane >= kWarpRows - 32) break;
      rows[i] = 0;
      if (r < kTileM) {
        const int64_t position = static_cast<int64_t>(item.tile.index) * kTileM + r;
        if (position < problem.m) rows[i] = tokens == nullptr ? position : tokens[position];
      } else if (r < of_item) {
        rows[i] = slots[r - kTileM];
      }
    }
  }

  __device__ __forceinline__ void hand_over_rows(int round) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = warp * kWarpRows + 32 * i + lane;
      const int at = r / kGroup * kGroup + r % 4 * 8 + r % kGroup / 4;
      if (i == 1 && lane >= kWarpRows - 32) break;
      if (r < kTileM) {
        memory.shared.tokens[round & 1][at] = rows[i];
      } else {
        memory.shared.neurons[round & 1][at - kTileM] = rows[i];
      }
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(memory.rows_ready + 8 * (round & 1));
  }

  // Loads where this half's nonzeros of an item are in the lists: they are contiguous, block by block.
  __device__ __forceinline__ void ask_for_bounds(const Item& item) {
    int from;
    const int blocks = item.tile.needed(half, item.first, item.last, from);
    const uint32_t* starts = starts_of(problem.plan, item.tile.index, half, problem.column_tiles) + from;
#pragma unroll
    for (int b = 0; b <= kItemBlocks; ++b) next_bounds[b] = blocks == 0 ? 0 : starts[min(b, blocks)];
  }

  // Publishes the item that was claimed for two rounds later, by overwriting this round's item. Overwriting is safe,
  // because every reader has read this round's item before this warpgroup gets the round's last stage.
  __device__ __forceinline__ void publish_draw(int round) {
    if (!draws) return;
    memory.shared.items[round & 1] = problem.item_at(2 * static_cast<int>(gridDim.x) + ticket);
    ptx::mbarrier_arrive(memory.scheduler.barrier(round));
  }

  // Loads the rows of the item two rounds later, and the bounds of the next item.
  __device__ __forceinline__ void look_ahead(int round) {
    if constexpr (kMultiplies) {
      memory.scheduler.wait(round);
      next = memory.shared.items[round & 1];
      ask_for_rows(item_of(next));
    } else {
      next = problem.item_at(dealt_unit(round + 2));
    }
    ask_for_bounds(item_of(code));
  }

  // Skips an item of which this half needs no blocks.
  __device__ __forceinline__ void skip(int round) {
    memory.pipeline.consumer_skip(state, problem.k_blocks);
    publish_draw(round);
    look_ahead(round);
  }

  // Multiplies kBlocks blocks, which begin at b_offset in a stage's B. The products of up to kPanels blocks at a time
  // go to shared memory, one operand tile per block. Between two barriers of the half's threads, the epilogue reads the
  // products at its nonzeros.
  template <int kBlocks>
  __device__ __forceinline__ void multiply_blocks(uint32_t b_offset, int round, ThisEpilogue& epilogue) {
    uint32_t pairs[16 * kBlocks];
    {
      float d[32 * kBlocks];
      multiply<kBlocks, 0>(d, memory.pipeline, state, problem.k_blocks, memory.stages, b_offset, half, [&] {
        publish_draw(round);
        epilogue.load_known();
      });
#pragma unroll
      for (int i = 0; i < 16 * kBlocks; ++i) pairs[i] = ptx::cvt_bf16x2(d[2 * i], d[2 * i + 1]);
    }
    const uint32_t row = warp * 16 % kHalf + (lane & 15), chunk = lane / 16;
#pragma unroll
    for (int first = 0; first < kBlocks; first += kPanels) {
#pragma unroll
      for (int j = 4 * first; j < 4 * (first + kPanels) && j < 4 * kBlocks; ++j) {  // each j stores 16 slots
        ptx::stmatrix_x4(product + j / 4 % kPanels * kHalfBytes + swizzle_128(row, j % 4 * 2 + chunk), pairs[4 * j],
                         pairs[4 * j + 1], pairs[4 * j + 2], pairs[4 * j + 3]);
      }
      sync_half(half);  // wait until the half's threads have written all products
      if (first == 0) look_ahead(round);
      epilogue.pick(first, first + kPanels);
      sync_half(half);  // wait until the half's threads have read all products
    }
  }

  __device__ __forceinline__ void store_l1(const Item& item, float l1) const {
    for (int offset = 16; offset > 0; offset /= 2) l1 += __shfl_xor_sync(~0u, l1, offset);
    const int64_t part = static_cast<int64_t>(item.tile.index) * problem.column_tiles + item.index;
    if (lane == 0) problem.out.l1_partials[part * kConsumerWarps + warp] = l1;
  }
};

// Returns whether this CTA is the last of the grid to arrive here. The last one resets the counters to zero.
__device__ __forceinline__ bool is_last_cta(Shared& shared, int32_t* tickets) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    shared.last = atomicAdd(tickets, 1) == static_cast<int>(gridDim.x) - 1;
    if (shared.last) tickets[0] = tickets[1] = 0;
  }
  __syncthreads();
  return shared.last;
}

// Adds up l1 from the partial sums of all CTAs, always in the same order: thread t sums token tiles t, t + 384, ...;
// then the sums of a warp's threads are added, then those of the warps.
__device__ __forceinline__ void sum_l1(Shared& shared, const Problem& problem, int warp, uint32_t lane) {
  __threadfence();
  float sum = 0.0f;
  const int64_t token_tiles = (problem.m + kTileM - 1) / kTileM;
  for (int64_t t = threadIdx.x; t < token_tiles; t += kThreads) {
    const float4* partials =
        reinterpret_cast<const float4*>(problem.out.l1_partials + t * problem.column_tiles * kConsumerWarps);
    const int of = items_of(problem.plan.tiles[t].y) * (kConsumerWarps / 4);
    for (int i = 0; i < of; ++i) {
      const float4 four = __ldcg(partials + i);
      sum += (four.x + four.y) + (four.z + four.w);
    }
  }
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  if (lane == 0) shared.l1_warps[warp] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    float all = 0.0f;
    for (int w = 0; w < kThreads / 32; ++w) all += shared.l1_warps[w];
    *problem.out.l1 = all;
  }
}

template <Epilogue kEpilogue>
__global__ void __launch_bounds__(kThreads, 1)
    tile_sddmm_kernel(const __nv_bfloat16* a, const __nv_bfloat16* w, int64_t m, int64_t k, int64_t n,
                      const TilePlan plan, const Outputs out) {
  constexpr bool kMultiplies = kEpilogue != kL1;
  extern __shared__ __align__(1024) uint8_t raw[];
  const Memory memory(raw);
  const int warp = ptx::warp_index();
  const uint32_t lane = threadIdx.x % 32;
  const int column_tiles = static_cast<int>((n + kColumnTile - 1) / kColumnTile);
  const int k_blocks = static_cast<int>((k + kTileK - 1) / kTileK);
  if (threadIdx.x == 0) memory.init_barriers();
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const Problem problem = {plan, out, m, k, column_tiles, k_blocks, plan.totals[kItems]};

  if (warp < kGatherWarps) {
    if constexpr (kMultiplies) {
      ptx::setmaxnreg_dec<kProducerRegisters>();
      produce(memory, problem, a, w, warp, lane);
    }
  } else {
    if constexpr (kMultiplies) ptx::setmaxnreg_inc<kConsumerRegisters>();
    uint32_t rows[2] = {};
    Bounds next_bounds;
    Consumer<kEpilogue>(memory, problem, warp - kGatherWarps, lane, rows, next_bounds).run();
    __threadfence();
  }
  const bool last = is_last_cta(memory.shared, out.tickets);
  if (kEpilogue == kGradient || !last) return;
  sum_l1(memory.shared, problem, warp, lane);
}

}  // namespace

cudaError_t tile_up(const void* x, const void* w_up, int64_t m, int64_t k, int64_t n, const TilePlan& plan,
                    uint32_t* hidden, void* ups, float* l1_partials, float* l1, cudaStream_t stream) {
  const Outputs out = {hidden, static_cast<uint16_t*>(ups), l1_partials, l1, plan.totals + kUpTickets, {}};
  return launch_persistent(w_up != nullptr ? tile_sddmm_kernel<kUp> : tile_sddmm_kernel<kL1>, kThreads, kSharedBytes,
                           stream, x, w_up, m, k, n, plan, out);
}

cudaError_t tile_gradient(const void* dy, const void* w_down_t, int64_t m, int64_t k, int64_t n, const TilePlan& plan,
                          const Gradient& gradient, cudaStream_t stream) {
  return launch_persistent(tile_sddmm_kernel<kGradient>, kThreads, kSharedBytes, stream, dy, w_down_t, m, k, n, plan,
                           Outputs{nullptr, nullptr, nullptr, nullptr, gradient.tickets, gradient});
}

}  // namespace sparsellm
