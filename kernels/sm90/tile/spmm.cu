// tile_spmm: y[row] = sum of h[row, s] w[slots[s]] over slots s, where each tile of 128 rows has its own slots. With
// two lists and two weights, y is the sum of two such products over the same slots. Forward: y = h W_d. Backward: dx =
// dz W_g + du W_u.
//
// A unit of work is one token tile times 256 columns of y, over all blocks of the tile. Fuller tiles come first, and
// all units of a tile come one after another. A stage holds, for one block, 64 rows of w and the block's nonzeros of
// both halves (two pieces of the list). Roles:
//
//   Producer  warps 0-3: copy the rows of w (an MN-major operand), and the pieces of the list of both halves
//   Consumer  warps 4-11: a warpgroup multiplies the blocks that its half, 64 rows of y, needs. While one block is
//             multiplied, the warpgroup scatters the next block's h from the list into a zeroed operand tile.
//
// A consumer stores its y before it skips the remaining blocks, which only the other half needs, so that the other
// consumer multiplies these blocks during the stores.
//
// Numerics: y is accumulated in float32 over a tile's slots, block by block in ascending order, for each block the
// first list before the second, and rounded to bf16 once. Deterministic.
#include "common/host.h"
#include "common/wgmma.cuh"
#include "tile/gather.cuh"
#include "tile/plan.cuh"

namespace sparsellm {
namespace {

constexpr int kBuffers = 3;            // operand tiles of h per half, used in rotation
constexpr uint32_t kPieceWords = 448;  // words that a stage can hold of one half's list piece
constexpr uint32_t kPieceBytes = kPieceWords * 4;
constexpr uint32_t kPieceLoads = (kPieceWords + 255) / 256;  // two-word loads per thread to read a piece
constexpr int kSpmmStages = 5;
constexpr uint32_t kSpmmStageBytes = kBBytes + 2 * kPieceBytes;

// Named barriers (bar.sync): kConsumerBarrier + c is that of consumer c's 128 threads; barrier 0 is __syncthreads.
enum NamedBarrier { kConsumerBarrier = 1 };

struct Shared {
  // [consumer] begin and end of the consumer's piece of the list. 16-byte copies start at multiples of four words, so
  // the copy in a stage starts at the last multiple of four at or before `begin`: for piece [10, 30), at word 8.
  uint2 pieces[kSpmmStages][2];
  Pipeline<kSpmmStages>::Storage pipeline;
};

constexpr uint32_t kSharedBytes = 2 * kBuffers * kHalfBytes + kSpmmStages * kSpmmStageBytes + sizeof(Shared);
static_assert(kSharedBytes <= kMaxSharedBytes, "h, B, pieces and barriers must fit in one CTA's shared memory");

// A CTA's shared memory: the operand tiles of h, B of the stages, the stages' pieces of the list, then struct Shared.
// The integers are shared addresses.
struct Memory {
  Shared& shared;
  uint32_t hidden;  // [half][kBuffers]
  uint32_t stages;  // [stage] B
  uint32_t pieces;  // [stage][consumer]
  Pipeline<kSpmmStages> pipeline;

  __device__ __forceinline__ explicit Memory(uint8_t* raw)
      : shared(*reinterpret_cast<Shared*>(raw + kSharedBytes - sizeof(Shared))),
        hidden(ptx::smem_address(raw)),
        stages(hidden + 2 * kBuffers * kHalfBytes),
        pieces(stages + kSpmmStages * kBBytes),
        pipeline(shared.pipeline) {}

  // Called by one thread.
  __device__ __forceinline__ void init_barriers() const {
    if (hidden % 1024 != 0) __trap();  // the 128-byte swizzle needs operand tiles at multiples of 1,024 bytes
    for (int s = 0; s < kSpmmStages; ++s) pipeline.init(s, 32 * kGatherWarps + 2, kConsumerWarps);
    ptx::fence_mbarrier_init();
  }
};

// Iterates over the work units of one CTA. Units are distributed over all CTAs in rounds.
struct Rounds {
  const Spmm& a;
  int column_tiles;  // column tiles of y
  int units;

  __device__ __forceinline__ explicit Rounds(const Spmm& a)
      : a(a),
        column_tiles(static_cast<int>((a.k + kTileN - 1) / kTileN)),
        units(static_cast<int>((a.m + kTileM - 1) / kTileM) * column_tiles) {}

  // The tile code for a round's unit, or the first tile's code if the round has no unit. The load is issued one round
  // ahead, so that the code has arrived when it is needed.
  __device__ __forceinline__ int4 code_in(int round) const {
    const int unit = dealt_unit(round);
    return a.order[unit < units ? unit / column_tiles : 0];
  }
};

// The role of the producer warps: fill one stage for each block and list. Two of the four warps copy the pieces of the
// list for each consumer, in turns of 128 words.
template <int kSources>
struct Producer {
  // This thread's slots of two blocks, and where its consumer's pieces of the list start. These loads are issued while
  // the previous two blocks are copied, so that they have arrived in time. The loads may read one block beyond the
  // last: slots and starts have memory for an even number of blocks.
  struct Known {
    uint2 slots[2];
    uint32_t starts[3];
  };
  const Memory& memory;
  const Spmm& a;
  const Gather& gather;
  int warp;
  uint32_t lane;
  int consumer;
  uint32_t first_word;
  Known& next;
  Pipeline<kSpmmStages>::State state;

  __device__ __forceinline__ Producer(const Memory& memory, const Spmm& a, const Gather& gather, int warp,
                                      uint32_t lane, Known& next)
      : memory(memory),
        a(a),
        gather(gather),
        warp(warp),
        lane(lane),
        consumer(warp % 2),
        first_word(warp / 2 * 128 + lane * 4),
        next(next) {}

  __device__ __forceinline__ void run(const Rounds& rounds) {
    Tile next_tile = tile_of(rounds.code_in(0));
    load(next_tile, 0);
    for (int round = 0, unit; (unit = dealt_unit(round)) < rounds.units; ++round) {
      const Tile of = next_tile;
      const int blocks = of.blocks();
      next_tile = tile_of(rounds.code_in(round + 1));
      const int64_t column = Gather::column_of(unit % rounds.column_tiles, lane);
      for (int block = 0; block < blocks; block += 2) {
        const Known known = next;
        if (block + 2 < blocks) {
          load(of, block + 2);
        } else {
          load(next_tile, 0);
        }
#pragma unroll
        for (int i = 0; i < 2 * kSources; ++i) {
          const int which = i / kSources, source = i % kSources;
          if (block + which == blocks) break;
          const bool any = (block + which) * kTileK + gather.first_row < of.size;  // this thread's first slot exists
          copy_block(source, known.slots[which], known.starts[which], known.starts[which + 1], any, column);
        }
      }
      if (of.size == 0) load(next_tile, 0);
    }
  }

  __device__ __forceinline__ void load(const Tile& of, int block) {
    if (of.size == 0) return;  // the tile has no slots, and its entries are undefined
    const uint16_t* slots = a.slots + of.index * a.slots_per_tile + block * kTileK + gather.first_row;
    const uint32_t* starts = a.starts + (static_cast<int64_t>(of.index) * 2 + consumer) * a.starts_per_half + block;
#pragma unroll
    for (int i = 0; i < 2; ++i) next.slots[i] = *reinterpret_cast<const uint2*>(slots + i * kTileK);
#pragma unroll
    for (int i = 0; i < 3; ++i) next.starts[i] = starts[i];
  }

  // Copies the rows of `four` slots (zeros if `any` is false), and as much of the list's piece [begin, end) as the
  // stage can hold.
  __device__ __forceinline__ void copy_block(int source, uint2 four, uint32_t begin, uint32_t end, bool any,
                                             int64_t column) {
    const uint32_t slots[kThreadRows] = {four.x & 0xffff, four.x >> 16, four.y & 0xffff, four.y >> 16};
    const uint32_t first = (begin & ~3u) + first_word, left = end - min(end, first);
    const uint32_t words = memory.pieces + (state.stage * 2 + consumer) * kPieceBytes + first_word * 4;
    memory.pipeline.producer_acquire(state);
    gather.copy(memory.stages + state.stage * kBBytes, a.weights[source], slots, column, a.k, any ? a.k : 0);
#pragma unroll
    for (uint32_t w = 0; w < kPieceWords; w += 256) {
      if (first_word + w < kPieceWords && w < left) ptx::cp_async_16(words + 4 * w, a.lists[source] + first + w);
    }
    ptx::cp_async_mbarrier_arrive(memory.pipeline.producer_barrier(state.stage));
    if (warp < 2 && lane == 0) {
      memory.shared.pieces[state.stage][consumer] = make_uint2(begin, end);
      ptx::mbarrier_arrive(memory.pipeline.producer_barrier(state.stage));
    }
    state.advance();
  }
};

// The role of a consumer warpgroup: multiplies the blocks that one half of each tile needs.
template <int kSources>
struct Consumer {
  using Accumulators = float[128];
  // The part of this consumer's piece of the list that fits in the stage: this thread's pairs of words, 256 words
  // apart.
  struct Piece {
    uint2 bounds;
    uint2 words[kPieceLoads];
  };
  const Memory& memory;
  const Spmm& a;
  int warp;
  uint32_t lane;
  int consumer;     // the half of a tile that this consumer multiplies
  uint32_t thread;  // index within the warpgroup
  uint32_t own;     // address of this half's first operand tile
  uint32_t piece_bounds;
  uint32_t (&piece_words)[kPieceLoads];  // addresses of this thread's words in the first stage
  uint64_t first_h, first_b;             // descriptors of this half's first operand tile, and of B of the first stage
  Pipeline<kSpmmStages>::State state;
  uint32_t which = 0;  // index of the current operand tile
  int passing = 0;     // stages that this consumer must still skip, after the last block that it needs

  __device__ __forceinline__ Consumer(const Memory& memory, const Spmm& a, int warp, uint32_t lane,
                                      uint32_t (&piece_words)[kPieceLoads])
      : memory(memory),
        a(a),
        warp(warp),
        lane(lane),
        consumer(warp / 4 - 1),
        thread(threadIdx.x % 128),
        own(memory.hidden + consumer * (kBuffers * kHalfBytes)),
        piece_bounds(ptx::smem_address(&memory.shared.pieces[0][consumer])),
        piece_words(piece_words) {
#pragma unroll
    for (uint32_t i = 0; i < kPieceLoads; ++i) {
      piece_words[i] = memory.pieces + consumer * kPieceBytes + min(8 * thread + 1024 * i, kPieceBytes - 8);
    }
  }

  __device__ __forceinline__ void run(const Rounds& rounds) {
    for (int i = 0; i < kBuffers; ++i) zero(i);
    sync();
    first_h = ptx::wgmma_descriptor(own, 16, 1024);
    first_b = ptx::wgmma_descriptor(memory.stages, kPanelBytes, 1024);
    int4 next_code = rounds.code_in(0);
    for (int round = 0, unit; (unit = dealt_unit(round)) < rounds.units; ++round) {
      const Tile of = tile_of(next_code);
      const int blocks = of.blocks();
      next_code = rounds.code_in(round + 1);
      int rows[2];
      look_up(of, rows);
      int from;
      const int needed = of.needed(consumer, 0, blocks, from);
      if (needed == 0) from = 0;
      Accumulators d;
      memory.pipeline.consumer_skip(state, passing + kSources * from);
      if (needed != 0) {
        multiply_tile(needed, d);
      } else {  // this half needs no block, so its y is zero
#pragma unroll
        for (int i = 0; i < 128; ++i) d[i] = 0.0f;
      }
      passing = kSources * (blocks - from - needed);  // these stages are skipped after y has been stored
      store_rows(static_cast<__nv_bfloat16*>(a.y), rows, unit % rounds.column_tiles, a.k, d, lane);
    }
    memory.pipeline.consumer_skip(state, passing);
  }

  __device__ __forceinline__ void sync() const { ptx::bar_sync(kConsumerBarrier + consumer, 128); }

  // The rows of y that this lane has; -1 if a row does not exist.
  __device__ __forceinline__ void look_up(const Tile& of, int (&rows)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t position = position_of(of.index, consumer, warp, lane, i);
      rows[i] = position >= a.m ? -1 : a.tokens == nullptr ? position : a.tokens[position];
    }
  }

  // Multiplies `needed` blocks with at most two products in flight: while one runs, the next block's h is read and
  // scattered.
  __device__ __forceinline__ void multiply_tile(int needed, Accumulators& d) {
    Piece piece;
    read(piece);
    multiply_block(d, piece, true, 0);
    uint32_t last = state.stage, last_but_one = last, before = which;  // stages and operand tile of products that may
                                                                       // still run
    for (int done = 1; done < kSources * needed; ++done) {
      state.advance();
      read(piece);
      if (done > 1) {
        ptx::wgmma_wait_group<1>();
        finish(last_but_one, before);
      }
      last_but_one = last;
      before = which;
      which = turn(which);
      multiply_block(d, piece, false, done % kSources);
      last = state.stage;
    }
    ptx::wgmma_wait_group<0>();
    if (kSources * needed > 1) finish(last_but_one, before);
    finish(last, which);
    which = turn(which);
    state.advance();
  }

  static __device__ __forceinline__ uint32_t turn(uint32_t which) { return which == kBuffers - 1 ? 0 : which + 1; }

  __device__ __forceinline__ void read(Piece& piece) const {
    constexpr uint32_t kBoundsBytes = sizeof(memory.shared.pieces[0]);
    memory.pipeline.consumer_wait(state);
    piece.bounds = ptx::ld_shared_v2(piece_bounds + state.stage * kBoundsBytes);
#pragma unroll
    for (uint32_t i = 0; i < kPieceLoads; ++i) {  // loads as many words as fit, so as not to wait for the bounds
      piece.words[i] = ptx::ld_shared_v2(piece_words[i] + state.stage * (2 * kPieceBytes));
    }
  }

  __device__ __forceinline__ void multiply_block(Accumulators& d, const Piece& piece, bool first, int source) const {
    scatter(own + which * kHalfBytes, piece, source == 0 ? a.lists[0] : a.lists[1]);
    const uint64_t h = ptx::advanced(first_h, which * kHalfBytes);
    const uint64_t b = ptx::advanced(first_b, state.stage * kBBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTileK / 16; ++step) {
      ptx::wgmma<4, 1>(d, ptx::advanced(h, step * 32), ptx::advanced(b, step * 16 * 128), !first || step != 0);
    }
    ptx::wgmma_commit_group();
  }

  // Scatters the h of a piece to the zeroed operand tile at `to`. The stores are predicated, because branches around
  // them would take as long as the stores. Words that did not fit in the stage are read from the list in global memory.
  __device__ __forceinline__ void scatter(uint32_t to, const Piece& piece, const uint32_t* list) const {
    const uint32_t skipped = piece.bounds.x & 3, count = piece.bounds.y - piece.bounds.x;
    const uint32_t here = min(count, kPieceWords - skipped), first = 2 * thread - skipped;
    const auto address = [&](uint32_t word) { return to + (word & 0xffff) * 2; };
#pragma unroll
    for (uint32_t i = 0; i < kPieceLoads; ++i) {
      const uint32_t low = piece.words[i].x, high = piece.words[i].y;
      ptx::st_shared_u16_below(first + 256 * i, here, address(low), low >> 16);
      ptx::st_shared_u16_below(first + 256 * i + 1, here, address(high), high >> 16);
    }
    if (here != count) {
#pragma unroll 1
      for (uint32_t at = piece.bounds.x + here + thread; at < piece.bounds.y; at += 128) {
        const uint32_t word = list[at];
        ptx::st_shared_u16(address(word), word >> 16);
      }
    }
    ptx::fence_proxy_async();  // before WGMMA reads the scattered h, and B, which cp.async wrote
    sync();
  }

  // Called once a product has ended: releases its stage, and zeroes its operand tile.
  __device__ __forceinline__ void finish(uint32_t stage, uint32_t operand_tile) const {
    memory.pipeline.consumer_release(stage);
    zero(operand_tile);
  }

  // Each warp zeroes the 16 rows that its own share of a product reads, once the product has ended for this warp. No
  // barrier is needed between zeroing and the next scatter into the same operand tile: three tiles are used in
  // rotation, so before that scatter, all warps pass the barrier of another tile's scatter.
  __device__ __forceinline__ void zero(uint32_t operand_tile) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ptx::st_shared_v4(own + operand_tile * kHalfBytes + thread / 32 * 2048 + i * 512 + lane * 16,
                        make_uint4(0, 0, 0, 0));
    }
  }
};

template <int kSources>
__global__ void __launch_bounds__(kThreads, 1) tile_spmm_kernel(const Spmm a) {
  extern __shared__ __align__(1024) uint8_t raw[];
  const Memory memory(raw);
  const int warp = ptx::warp_index();
  const uint32_t lane = threadIdx.x % 32;
  if (threadIdx.x == 0) memory.init_barriers();
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const Rounds rounds(a);
  if (warp < kGatherWarps) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    const Gather gather(warp, lane);
    typename Producer<kSources>::Known known;
    Producer<kSources>(memory, a, gather, warp, lane, known).run(rounds);
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    uint32_t piece_words[kPieceLoads];
    Consumer<kSources>(memory, a, warp, lane, piece_words).run(rounds);
  }
}

}  // namespace

cudaError_t tile_spmm(const Spmm& a, cudaStream_t stream) {
  return launch_persistent(a.lists[1] != nullptr ? tile_spmm_kernel<2> : tile_spmm_kernel<1>, kThreads, kSharedBytes,
                           stream, a);
}

}  // namespace sparsellm
