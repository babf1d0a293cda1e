// tile_weights: the gradients of the weights. dW[neuron] = sum of dz[token, neuron] x[token] over the tokens that fire
// the neuron. dW_g and dW_u come from dz, du and x; dW_d^T comes from h and dy. The tiles have 128 neurons
// (NeuronPlan), and their slots are tokens.
//
// A unit of work is a tile, or a piece of one, times 256 columns of dW, over all blocks of the tile or piece. Fuller
// tiles come first, and all units of a tile come one after another: units of equal size that start together read the
// same rows of x at about the same time, and so find them in L2. Roles:
//
//   Producer        warps 0-3: copy the rows of x (or dy) of a block's tokens, an MN-major operand
//   Consumer        warps 4-11: a warpgroup multiplies the blocks that its 64 neurons need. Each of its warps fetches
//                   its own 16 rows of the other operand (tile_operands), without a barrier among the four warps. This
//                   relies on a warp's share of a WGMMA reading only the rows of its own accumulators. PTX does not
//                   promise that; a test that compares every bit would fail if it changed.
//   drawing thread  the first producer thread claims all units, including the first ones, so that no unit waits for a
//                   CTA that is not yet running. It claims the next unit late in the current unit, so that the next
//                   unit goes to the CTA that finishes first.
//
// A consumer stores its sums before it skips the remaining blocks, which only the other half needs, so that the other
// consumer multiplies these blocks during the stores. If there are two operands (for dW_g and dW_u), both are
// multiplied by the same copies of rows: then a unit is one half of a tile ("paired"), and each consumer has one of the
// operands. If a tile is cut into pieces, each piece's sums are written to global memory, and the last consumer to
// finish adds them up.
//
// Numerics: dW is accumulated in float32 over a tile's slots, block by block in ascending order; sums of pieces are
// added in order. dW is rounded to bf16 once, or not at all if dW is float32. A float32 dW may be added to what is
// there, which rounds once more. Deterministic.
#include "common/host.h"
#include "common/wgmma.cuh"
#include "tile/gather.cuh"
#include "tile/plan.cuh"

namespace sparsellm {
namespace {

constexpr uint32_t kWarpBytes = kHalfBytes / 4;  // 16 rows of an operand tile
constexpr int kOperands = 4;                     // operand tiles in flight per consumer
constexpr int kRowStages = 5;                    // stages of B
constexpr uint32_t kPlaces = 4;                  // slots for claimed units: the unit of round r is in slot r % 4
constexpr int kDrawAhead = 6;                    // the next unit is claimed this many blocks before the end of this one
constexpr int kTicketBlocks = 2;                 // the ticket is read this many blocks after its request, when it
                                                 // has arrived
static_assert(kTicketBlocks < kRowStages, "kTicketBlocks must be below kRowStages, or both roles could deadlock");

constexpr int kDrawingThread = 0;

// Named barriers (bar.sync): kConsumerBarrier + c is that of consumer c's 128 threads; barrier 0 is __syncthreads.
enum NamedBarrier { kConsumerBarrier = 1 };

// A unit. The units of a piece have consecutive tickets: first all columns of one half, then those of the other.
struct alignas(16) Unit {
  int4 code;   // code of the piece
  int column;  // index of the 256 columns; -1 if there is no unit
  int half;    // half of the tile, if paired
};

struct Shared {
  Unit units[kPlaces];      // consumers read a unit again where they need it, because no registers are left
  uint64_t drawn[kPlaces];  // barrier: the unit has been written
  uint64_t left[kPlaces];   // barrier: all warps are done with the unit, so the slot may be overwritten
  Pipeline<kRowStages>::Storage pipeline;
  uint64_t arrived[kConsumerWarps][kOperands];  // barrier: a warp's rows of an operand tile have arrived
  bool last[2];                                 // [consumer] whether the consumer is the last to finish a cut tile
};

constexpr uint32_t kSharedBytes = 2 * kOperands * kHalfBytes + kRowStages * kBBytes + sizeof(Shared);
static_assert(kSharedBytes <= kMaxSharedBytes, "operands and barriers must fit in one CTA's shared memory");

// A CTA's shared memory: the operand tiles of both consumers, B of the stages, then struct Shared. The integers are
// shared addresses.
struct Memory {
  Shared& shared;
  uint32_t operands;  // [consumer][kOperands]
  uint32_t stages;
  Pipeline<kRowStages> pipeline;
  Scheduler<kPlaces> scheduler;

  __device__ __forceinline__ explicit Memory(uint8_t* raw)
      : shared(*reinterpret_cast<Shared*>(raw + kSharedBytes - sizeof(Shared))),
        operands(ptx::smem_address(raw)),
        stages(operands + 2 * kOperands * kHalfBytes),
        pipeline(shared.pipeline),
        scheduler(shared.drawn) {}

  // Called by one thread.
  __device__ __forceinline__ void init_barriers() const {
    if (operands % 1024 != 0) __trap();  // the 128-byte swizzle needs operand tiles at multiples of 1,024 bytes
    for (int s = 0; s < kRowStages; ++s) pipeline.init(s, 32 * kGatherWarps, kConsumerWarps);
    for (uint32_t i = 0; i < kPlaces; ++i) {
      ptx::mbarrier_init(scheduler.barrier(i), 2);
      ptx::mbarrier_init(ptx::smem_address(shared.left + i), kGatherWarps + kConsumerWarps);
    }
    for (int i = 0; i < kConsumerWarps * kOperands; ++i) {
      ptx::mbarrier_init(ptx::smem_address(shared.arrived) + 8 * i, 1);
    }
    ptx::fence_mbarrier_init();
  }

  __device__ __forceinline__ Unit& unit_in(uint32_t round) const { return shared.units[round % kPlaces]; }
  // Called by a warp after its last read of the unit of a round.
  __device__ __forceinline__ void leave(uint32_t round, uint32_t lane) const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::smem_address(shared.left + round % kPlaces));
  }
};

__device__ __forceinline__ int columns_of(const WeightGradient& a) {  // units of 256 columns per row of dW
  return static_cast<int>((a.k + kTileN - 1) / kTileN);
}
__device__ __forceinline__ int64_t slots_per_tile(const WeightGradient& a) {
  return (a.m + kTileM - 1) / kTileM * kTileM;
}

// The role of the producer warps: claim units of work, and copy the rows that each unit needs.
template <bool kPaired>
struct Producer {
  // What to copy for a unit: blocks [first, last) of a tile's slots. The next unit is claimed before block `draw`.
  struct Range {
    int column, tile, first, last, draw;
  };
  const Memory& memory;
  const WeightGradient& a;
  const Gather& gather;
  uint32_t lane;
  int of_piece;  // units per piece
  int count;     // units in total
  int ticket = 0;
  Range next_range;
  uint4 next;  // this thread's slots of the next block
  Pipeline<kRowStages>::State state;

  __device__ __forceinline__ Producer(const Memory& memory, const WeightGradient& a, const Gather& gather,
                                      uint32_t lane)
      : memory(memory),
        a(a),
        gather(gather),
        lane(lane),
        of_piece(columns_of(a) * (kPaired ? 2 : 1)),
        count(a.plan.totals[kPieces] * of_piece) {}

  __device__ __forceinline__ void run() {
    draw();
    publish(0);
    next_range = range_in(0);
    load(next_range, next_range.first);
    for (uint32_t round = 0; next_range.column >= 0; ++round) {
      const Range of = next_range;
      const int64_t column = Gather::column_of(of.column, lane);
      for (int block = of.first; block < of.last; ++block) {
        const uint32_t slots[kThreadRows] = {next.x, next.y, next.z, next.w};
        if (block == of.draw) draw();
        if (block == min(of.draw + kTicketBlocks, of.last - 1)) publish(round + 1);
        if (block + 1 < of.last) {
          load(of, block + 1);
        } else {
          look_ahead(round + 1);
        }
        memory.pipeline.producer_acquire(state);
        gather.copy(memory.stages + state.stage * kBBytes, a.rows, slots, column, a.k, a.k);
        ptx::cp_async_mbarrier_arrive(memory.pipeline.producer_barrier(state.stage));
        state.advance();
      }
      if (of.first == of.last) {
        draw();
        publish(round + 1);
        look_ahead(round + 1);
      }
    }
  }

  // Claims a ticket. At the end, every CTA claims one ticket for which there is no unit. The last of these claims is
  // the last of all, and resets the counter: with 10 units and 3 CTAs, the counter goes from 0 to 12, and the 13th
  // claim resets it to 0.
  __device__ __forceinline__ void draw() {
    unsigned int* counter = reinterpret_cast<unsigned int*>(a.tickets + kSplitUnits * 4);
    if (threadIdx.x == kDrawingThread) ticket = static_cast<int>(atomicInc(counter, count + gridDim.x - 1));
  }

  // Publishes to all warps the unit that the drawing thread has claimed for a round. All threads wait for the slot to
  // be free, although only one writes it: if only one thread looped, the compiler would no longer keep the stage in a
  // uniform register.
  __device__ __forceinline__ void publish(uint32_t round) {
    ptx::mbarrier_wait(ptx::smem_address(memory.shared.left + round % kPlaces), (round / kPlaces & 1) ^ 1);
    if (threadIdx.x != kDrawingThread) return;
    Unit& unit = memory.unit_in(round);
    const uint32_t drawn = ptx::smem_address(memory.shared.drawn + round % kPlaces);
    const bool exists = ticket < count;  // a unit that does not exist gets the code of the first piece
    ptx::cp_async_16(ptx::smem_address(&unit.code), a.plan.order + (exists ? ticket / of_piece : 0));
    ptx::cp_async_mbarrier_arrive(drawn);
    unit.column = exists ? ticket % columns_of(a) : -1;
    unit.half = ticket / columns_of(a) % 2;
    ptx::mbarrier_arrive(drawn);
  }

  __device__ __forceinline__ Range range_in(uint32_t round) {
    memory.scheduler.wait(round);
    const Unit unit = memory.unit_in(round);
    memory.leave(round, lane);
    const Piece piece = piece_of(unit.code);
    Range range = {unit.column, piece.tile.index, piece.first, piece.last, 0};
    int from;
    const int steps = piece.tile.needed(kPaired ? unit.half : 0, piece.first, piece.last, from);
    if constexpr (kPaired) range.first = from, range.last = from + steps;
    // The first consumer waits for the next unit as soon as it has multiplied its last block, before it skips (and so
    // releases) the blocks that only the second half needs. So the unit must be claimed before that block: otherwise
    // the producer would wait for stages, and the first consumer for the unit, forever.
    range.draw = max(range.first, (steps == 0 ? range.last : from + steps) - kDrawAhead);
    return range;
  }

  // Loads this thread's slots of a block, one block before they are used.
  __device__ __forceinline__ void load(const Range& of, int block) {
    if (of.first == of.last) return;  // the unit has no slots, and its entries are undefined
    next =
        *reinterpret_cast<const uint4*>(a.plan.slots + of.tile * slots_per_tile(a) + block * kTileK + gather.first_row);
  }
  __device__ __forceinline__ void look_ahead(uint32_t round) {
    next_range = range_in(round);
    load(next_range, next_range.first);
  }
};

// The role of a consumer warpgroup. kPaired: a unit is one half of a tile; both consumers multiply its blocks by the
// same rows, each with its own operand and dW. Otherwise consumer c multiplies half c of the tile. kAdd: adds to dW.
template <bool kPaired, class Out, bool kAdd>
struct Consumer {
  using Accumulators = float[128];
  // What this consumer multiplies for a unit: blocks [from, from + steps) of the tile.
  struct Work {
    Piece piece;
    int half, from, steps;
  };
  const Memory& memory;
  const WeightGradient& a;
  int warp;
  uint32_t lane;
  int consumer;
  uint32_t thread;  // index within the warpgroup
  Out* dw;
  // Operand tiles are used in rotation: a step's tile overwrites the tile of kOperands steps earlier.
  uint32_t own, arrived;
  const uint8_t* operand;
  PipelineState<kOperands> used;
  Pipeline<kRowStages>::State state;
  Work next;
  int passing = 0;  // stages that this consumer must still skip, after the last block that it needs

  __device__ __forceinline__ Consumer(const Memory& memory, const WeightGradient& a, int warp, uint32_t lane)
      : memory(memory),
        a(a),
        warp(warp),
        lane(lane),
        consumer(warp / 4 - 1),
        thread(threadIdx.x % 128),
        dw(static_cast<Out*>(kPaired && consumer != 0 ? a.dw[1] : a.dw[0])),
        own(memory.operands + consumer * (kOperands * kHalfBytes)),
        arrived(ptx::smem_address(memory.shared.arrived[warp - kGatherWarps])),
        operand(static_cast<const uint8_t*>(kPaired && consumer != 0 ? a.operands[1] : a.operands[0])) {}

  __device__ __forceinline__ void run() {
    next = work_of(0);
    if (memory.unit_in(0).column >= 0) fetch_first(next);
    for (uint32_t round = 0; memory.unit_in(round).column >= 0; memory.leave(round++, lane)) {
      const Work work = next;
      int neurons[2];
      look_up(work, neurons);
      Accumulators d;
      if constexpr (!kPaired) memory.pipeline.consumer_skip(state, passing + work.from - work.piece.first);
      if (work.steps != 0) {
        multiply_work(work, d);
      } else {  // this half needs no block, so its sums are zero
#pragma unroll
        for (int i = 0; i < 128; ++i) d[i] = 0.0f;
      }
      const Unit& unit = memory.unit_in(round);
      const Piece piece = piece_of(unit.code);
      passing = piece.last - work.from - work.steps;  // these stages are skipped after dW has been stored
      next = work_of(round + 1);
      if (memory.unit_in(round + 1).column >= 0) fetch_first(next);
      if (piece.parts > 1 && !add_pieces(piece, work.half, unit.column, d)) continue;
      if constexpr (sizeof(Out) == 4) {
        if constexpr (!kAdd) {
          store_floats(neurons, unit.column, d);
        } else if (piece.parts > 1 || work.steps != 0) {  // otherwise the sums are zero
          add_floats(neurons, unit.column, d);
        }
      } else {
        store_rows(dw, neurons, unit.column, a.k, d, lane);
      }
    }
    if constexpr (!kPaired) memory.pipeline.consumer_skip(state, passing);
  }

  __device__ __forceinline__ Work work_of(uint32_t round) const {
    memory.scheduler.wait(round);
    const Unit& unit = memory.unit_in(round);
    Work work = {piece_of(unit.code), kPaired ? unit.half : consumer, 0, 0};
    work.steps = work.piece.tile.needed(work.half, work.piece.first, work.piece.last, work.from);
    if (work.steps == 0) work.from = work.piece.last;  // the consumer skips all blocks, then stores
    return work;
  }

  // Fetches this warp's 16 rows of a step's operand tile, which no other warp reads.
  __device__ __forceinline__ void fetch(const Work& of, int step, uint32_t to) const {
    const int64_t tile = (of.piece.tile.index * (slots_per_tile(a) / kTileK) + of.from + step) * 2 + of.half;
    const uint32_t at = warp % 4 * kWarpBytes;
    ptx::bulk_load_if(lane == 0 && step < of.steps, own + to * kHalfBytes + at, operand + tile * kHalfBytes + at,
                      kWarpBytes, arrived + 8 * to);
  }
  __device__ __forceinline__ void fetch_first(const Work& of) const {
#pragma unroll
    for (int step = 0; step < kOperands; ++step) fetch(of, step, (used.stage + step) % kOperands);
  }

  // The neurons whose sums this lane has; -1 if a neuron does not exist.
  __device__ __forceinline__ void look_up(const Work& work, int (&neurons)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t position = position_of(work.piece.tile.index, work.half, warp, lane, i);
      neurons[i] = position >= a.n ? -1 : a.plan.neurons[position];
    }
  }

  __device__ __forceinline__ void multiply_work(const Work& work, Accumulators& d) {
    multiply_block(d, true);
#pragma unroll 1
    for (int step = 1; step < work.steps; ++step) {
      const uint32_t stage = state.stage, operand = used.stage;
      state.advance();
      used.advance();
      multiply_block(d, false);
      ptx::wgmma_wait_group<1>();
      memory.pipeline.consumer_release(stage);
      fetch(work, step - 1 + kOperands, operand);
    }
    ptx::wgmma_wait_group<0>();
    memory.pipeline.consumer_release(state.stage);
    state.advance();
    used.advance();
  }

  __device__ __forceinline__ void multiply_block(Accumulators& d, bool first) const {
    memory.pipeline.consumer_wait(state);
    ptx::mbarrier_wait(arrived + 8 * used.stage, used.phase);
    ptx::fence_proxy_async();  // before WGMMA reads B, which cp.async wrote
    const uint32_t h = own + used.stage * kHalfBytes, b = memory.stages + state.stage * kBBytes;
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTileK / 16; ++step) {
      ptx::wgmma<4, 1>(d, ptx::wgmma_descriptor(h + step * 32, 16, 1024),
                       ptx::wgmma_descriptor(b + step * 16 * 128, kPanelBytes, 1024), !first || step != 0);
    }
    ptx::wgmma_commit_group();
  }

  // Writes a piece's sums to global memory, in the layout of the threads' registers: [register / 4][thread][4]. Returns
  // true in the last consumer that writes sums of the same tile, half and columns; there, d becomes the sum of all
  // pieces, added in order.
  __device__ __forceinline__ bool add_pieces(const Piece& piece, int half, int column, Accumulators& d) const {
    const int place = column + piece.base * columns_of(a);
    const auto partials_of = [&](int part) {
      const int64_t sums = static_cast<int64_t>(place + part * columns_of(a)) * 4 + half * 2 + kPaired * consumer;
      const int64_t at = sums * (kHalf * kTileN);
      return reinterpret_cast<float4*>(a.partials + at) + thread;
    };
    float4* partials = partials_of(piece.part);
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      partials[j * 128] = make_float4(d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]);
    }
    __threadfence();
    ptx::bar_sync(kConsumerBarrier + consumer, 128);
    if (thread == 0) {
      int32_t* ticket = a.tickets + place * 4 + half * 2 + kPaired * consumer;
      const bool last = atomicAdd(ticket, 1) == piece.parts - 1;
      if (last) *ticket = 0;
      __threadfence();
      memory.shared.last[consumer] = last;
    }
    ptx::bar_sync(kConsumerBarrier + consumer, 128);
    if (!memory.shared.last[consumer]) return false;
#pragma unroll
    for (int i = 0; i < 128; ++i) d[i] = 0.0f;
    for (int part = 0; part < piece.parts; ++part) {
      partials = partials_of(part);
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        const float4 v = __ldcg(partials + j * 128);
        d[4 * j] += v.x;
        d[4 * j + 1] += v.y;
        d[4 * j + 2] += v.z;
        d[4 * j + 3] += v.w;
      }
    }
    return true;
  }

  // Four lanes together store the 32 bytes of 8 columns.
  __device__ __forceinline__ void store_floats(const int (&neurons)[2], int unit_column, const Accumulators& d) const {
    const int64_t column = static_cast<int64_t>(unit_column) * kTileN;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Out* to = dw + neurons[i] * a.k + column + lane % 4 * 2;
#pragma unroll
      for (int g = 0; g < kTileN / 8; ++g) {
        if (neurons[i] >= 0 && column + 8 * g < a.k) {
          *reinterpret_cast<float2*>(to + 8 * g) = make_float2(d[4 * g + 2 * i], d[4 * g + 2 * i + 1]);
        }
      }
    }
  }

  // Adds to what is there. Whole tiles of columns need no predicates, which are too few for many loads at once.
  __device__ __forceinline__ void add_floats(const int (&neurons)[2], int unit_column, const Accumulators& d) const {
    const int columns = static_cast<int>(a.k) - unit_column * kTileN;
    if (columns >= kTileN) {
      add_columns<16>(neurons, unit_column, kTileN, d);
    } else {
      add_columns<1>(neurons, unit_column, columns, d);
    }
  }
  template <int kAtOnce>  // loads in flight per lane
  __device__ __forceinline__ void add_columns(const int (&neurons)[2], int unit_column, int columns,
                                              const Accumulators& d) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (neurons[i] < 0) continue;
      float2* to = reinterpret_cast<float2*>(dw + neurons[i] * a.k + unit_column * kTileN + lane % 4 * 2);
#pragma unroll
      for (int first = 0; first < kTileN / 8; first += kAtOnce) {
        if (8 * first >= columns) break;
        float2 there[kAtOnce];
#pragma unroll
        for (int g = 0; g < kAtOnce; ++g) there[g] = to[4 * (first + g)];
#pragma unroll
        for (int g = 0; g < kAtOnce; ++g) {
          const int at = 4 * (first + g) + 2 * i;
          to[4 * (first + g)] = make_float2(there[g].x + d[at], there[g].y + d[at + 1]);
        }
      }
    }
  }
};

template <bool kPaired, class Out, bool kAdd = false>
__global__ void __launch_bounds__(kThreads, 1) tile_weights_kernel(const WeightGradient a) {
  extern __shared__ __align__(1024) uint8_t raw[];
  const Memory memory(raw);
  const int warp = ptx::warp_index();
  const uint32_t lane = threadIdx.x % 32;
  if (threadIdx.x == 0) memory.init_barriers();
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  if (warp < kGatherWarps) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    const Gather gather(warp, lane);
    Producer<kPaired>(memory, a, gather, lane).run();
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    Consumer<kPaired, Out, kAdd>(memory, a, warp, lane).run();
  }
}

}  // namespace

cudaError_t tile_weights(const WeightGradient& a, cudaStream_t stream) {
  const bool two = a.operands[1] != nullptr;
  const auto to_float = two ? tile_weights_kernel<true, float> : tile_weights_kernel<false, float>;
  const auto to_bf16 = two ? tile_weights_kernel<true, __nv_bfloat16> : tile_weights_kernel<false, __nv_bfloat16>;
  const auto add = two ? tile_weights_kernel<true, float, true> : tile_weights_kernel<false, float, true>;
  return launch_persistent(a.add ? add : a.float_dw ? to_float : to_bf16, kThreads, kSharedBytes, stream, a);
}

}  // namespace sparsellm
