// tile_weights: the gradients of the weights, dW[neuron] = sum over the tokens that fire it of dz[token, neuron]
// x[token]: dW_g and dW_u from dz, du and x, dW_d^T from h and dy. Tiles of 128 neurons (NeuronPlan), whose slots are
// tokens.
//
// A unit is one tile times 256 columns of dW, over all blocks of the tile, or those of a piece of it; fuller ones come
// first, all columns of one together: units as large that begin together go through the same rows of x in step, and
// find them in L2. Four warps copy the rows of a block's tokens (an MN-major operand). A consumer warpgroup multiplies
// the blocks that its 64 neurons need; each of its warps fetches its 16 rows of the other operand (tile_operands)
// itself, and no barrier joins the four: a warp's share of a WGMMA reads the rows of its own accumulators and no others,
// which PTX does not say, but bits do. A consumer stores its sums before it lets the blocks pass that it does not need:
// the other one multiplies meanwhile.
//
// Two weights (dW_g and dW_u) share the copies of the rows: a unit is then one half of a tile, and each consumer has
// one of the operands.
//
// Units are drawn, the first ones too: with a CTA that has to wait for its SM waits nothing else. A gathering thread
// draws the next unit late in the one before, so that it goes to whoever is through first.
//
// Of a tile in pieces, each leaves its sums in global memory, and whoever comes last adds them up.
//
// Numerics: float32 over a tile's slots, block by block in that order, piece by piece; rounded to bf16 once, or, where
// dW is float32, not. Deterministic.
#include "common/host.h"
#include "tile/gather.cuh"
#include "tile/plan.cuh"

namespace sparsellm {
namespace {

constexpr uint32_t kWarpBytes = kHalfBytes / 4;     // of an operand tile, 16 rows
constexpr int kOperands = 4;                        // operand tiles of a consumer in flight
constexpr int kRowStages = 5;                       // of B
constexpr uint32_t kPlaces = 4;                     // for units that are drawn
constexpr int kDrawAhead = 6;                       // blocks from a draw to the end,
constexpr int kTicketBlocks = 2;                    // and until its ticket is there
static_assert(kTicketBlocks < kRowStages, "a stage may wait for a consumer that waits for the next unit");

// The units of a piece are drawn one after the other, all columns of a half together.
struct alignas(16) Unit {
  int4 code;   // of the piece
  int column;  // counted in units; -1: there is no unit
  int half;    // paired
};

struct Shared {
  Unit units[kPlaces];  // of the rounds, in turn; read where needed: the consumers have no registers left
  uint64_t drawn[kPlaces];
  uint64_t left[kPlaces];  // by all warps
  uint64_t full[kRowStages];
  uint64_t empty[kRowStages];
  uint64_t arrived[kConsumerWarps][kOperands];
  bool last[2];  // [consumer] to finish a tile in pieces
};

constexpr uint32_t kSharedBytes = 2 * kOperands * kHalfBytes + kRowStages * kBBytes + sizeof(Shared);
static_assert(kSharedBytes <= kMaxSharedBytes, "both operands and the barriers share one CTA's memory");

// kPaired: a unit is one half of a tile, whose blocks both consumers multiply by the same rows: each has an operand and
// a dW of its own.
template <bool kPaired, class Out>
__global__ void __launch_bounds__(kThreads, 1) tile_weights_kernel(const WeightGradient a) {
  extern __shared__ __align__(1024) uint8_t raw[];
  const uint32_t operands = ptx::smem_address(raw);  // [consumer][kOperands]
  const uint32_t stages = operands + 2 * kOperands * kHalfBytes;
  Shared& shared = *reinterpret_cast<Shared*>(raw + kSharedBytes - sizeof(Shared));
  const uint32_t full = ptx::smem_address(shared.full);
  const uint32_t empty = ptx::smem_address(shared.empty);
  const int warp = ptx::warp_index();
  const uint32_t lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    if (operands % 1024 != 0) __trap();  // what the swizzle is counted from
    for (int s = 0; s < kRowStages; ++s) {
      ptx::mbarrier_init(full + 8 * s, 32 * kGatherWarps);
      ptx::mbarrier_init(empty + 8 * s, kConsumerWarps);
    }
    for (uint32_t i = 0; i < kPlaces; ++i) {
      ptx::mbarrier_init(ptx::smem_address(shared.drawn + i), 2);
      ptx::mbarrier_init(ptx::smem_address(shared.left + i), kGatherWarps + kConsumerWarps);
    }
    for (int i = 0; i < kConsumerWarps * kOperands; ++i) {
      ptx::mbarrier_init(ptx::smem_address(shared.arrived) + 8 * i, 1);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();

  const NeuronPlan& plan = a.plan;
  const auto columns = [&] { return static_cast<int>((a.k + kTileN - 1) / kTileN); };
  const auto unit_in = [&](uint32_t round) -> Unit& { return shared.units[round % kPlaces]; };
  const auto wait_for = [&](uint32_t round) {
    ptx::mbarrier_wait(ptx::smem_address(shared.drawn + round % kPlaces), round / kPlaces & 1);
  };
  const auto leave = [&](uint32_t round) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::smem_address(shared.left + round % kPlaces));
  };
  const int64_t slots_per_tile = (a.m + kTileM - 1) / kTileM * kTileM;
  if (warp < kGatherWarps) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    const Gather gather(warp, lane);
    RingOf<kRowStages> ring;
    const int of_piece = columns() * (kPaired ? 2 : 1), count = plan.totals[kPieces] * of_piece;
    int ticket = 0;
    // Every CTA draws once in vain: the last of these draws is the last of all, and sets the counter back.
    const auto draw = [&] {
      unsigned int* counter = reinterpret_cast<unsigned int*>(a.tickets + kSplitUnits * 4);
      if (threadIdx.x == 0) ticket = static_cast<int>(atomicInc(counter, count + gridDim.x - 1));
    };
    const auto publish = [&](uint32_t round) {
      // All wait: a loop for one thread alone, and the compiler no longer has the stage in a uniform register.
      ptx::mbarrier_wait(ptx::smem_address(shared.left + round % kPlaces), (round / kPlaces & 1) ^ 1);
      if (threadIdx.x != 0) return;
      Unit& unit = unit_in(round);
      const uint32_t drawn = ptx::smem_address(shared.drawn + round % kPlaces);
      const bool exists = ticket < count;  // what does not repeats the first piece
      ptx::cp_async_16(ptx::smem_address(&unit.code), plan.order + (exists ? ticket / of_piece : 0));
      ptx::cp_async_mbarrier_arrive(drawn);
      unit.column = exists ? ticket % columns() : -1;
      unit.half = ticket / columns() % 2;
      ptx::mbarrier_arrive(drawn);
    };
    struct Range {
      int column, tile, first, last, draw;  // at which block the next unit is drawn
    };
    const auto range_in = [&](uint32_t round) {
      wait_for(round);
      const Unit unit = unit_in(round);
      leave(round);
      const Piece piece = piece_of(unit.code);
      Range range = {unit.column, piece.tile.index, piece.first, piece.last, 0};
      int from;
      const int steps = piece.tile.needed(kPaired ? unit.half : 0, piece.first, piece.last, from);
      if constexpr (kPaired) range.first = from, range.last = from + steps;
      // Where the first consumer ends, it wants the next unit, and lets no block pass before.
      range.draw = max(range.first, (steps == 0 ? range.last : from + steps) - kDrawAhead);
      return range;
    };
    draw();
    publish(0);
    Range next_range = range_in(0);
    uint4 next;  // this thread's slots of a block, one block ahead
    const auto load = [&](const Range& of, int block) {
      if (of.first == of.last) return;  // nothing is there, not even to look at
      next = *reinterpret_cast<const uint4*>(plan.slots + of.tile * slots_per_tile + block * kTileK + gather.first_row);
    };
    const auto look_ahead = [&](uint32_t round) {
      next_range = range_in(round);
      load(next_range, next_range.first);
    };
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
        ptx::mbarrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
        gather.copy(stages + ring.stage * kBBytes, a.rows, slots, column, a.k, a.k);
        ptx::cp_async_mbarrier_arrive(full + 8 * ring.stage);
        ring.advance();
      }
      if (of.first == of.last) {
        draw();
        publish(round + 1);
        look_ahead(round + 1);
      }
    }
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    const int consumer = warp / 4 - 1;          // the half of a tile that this one multiplies, or, paired, the operand
    const uint32_t thread = threadIdx.x % 128;  // of the warpgroup
    const auto dw = static_cast<Out*>(kPaired && consumer != 0 ? a.dw[1] : a.dw[0]);
    const auto release = [&](uint32_t stage) {
      if (lane == 0) ptx::mbarrier_arrive(empty + 8 * stage);
    };
    // The products of a unit that this consumer needs: of blocks [from, from + steps) of the tile.
    struct Work {
      Piece piece;
      int half, from, steps;
    };
    const auto work_of = [&](uint32_t round) {
      wait_for(round);
      const Unit& unit = unit_in(round);
      Work work = {piece_of(unit.code), kPaired ? unit.half : consumer, 0, 0};
      work.steps = work.piece.tile.needed(work.half, work.piece.first, work.piece.last, work.from);
      if (work.steps == 0) work.from = work.piece.last;  // it lets all pass, then stores
      return work;
    };
    // Operand tiles are used in turn, and the one of a step is fetched to where that of kOperands steps before has
    // been: each warp fetches its own 16 rows, which no other reads.
    const uint32_t own = operands + consumer * (kOperands * kHalfBytes);
    const uint32_t arrived = ptx::smem_address(shared.arrived[warp - 4]);
    RingOf<kOperands> used;
    const auto operand = static_cast<const uint8_t*>(kPaired && consumer != 0 ? a.operands[1] : a.operands[0]);
    const auto fetch = [&](const Work& of, int step, uint32_t to) {
      const int64_t tile = (of.piece.tile.index * (slots_per_tile / kTileK) + of.from + step) * 2 + of.half;
      const uint32_t at = warp % 4 * kWarpBytes;
      ptx::bulk_load_if(lane == 0 && step < of.steps, own + to * kHalfBytes + at, operand + tile * kHalfBytes + at,
                        kWarpBytes, arrived + 8 * to);
    };
    const auto fetch_first = [&](const Work& of) {
#pragma unroll
      for (int step = 0; step < kOperands; ++step) fetch(of, step, (used.stage + step) % kOperands);
    };
    RingOf<kRowStages> ring;
    Work next = work_of(0);
    int passing = 0;  // stages that this consumer does not need, behind those that it did
    if (unit_in(0).column >= 0) fetch_first(next);
    for (uint32_t round = 0; unit_in(round).column >= 0; leave(round++)) {
      const Work work = next;
      const Piece& of = work.piece;
      const int half = work.half;
      int out[2];  // this lane's two neurons
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t position =
            static_cast<int64_t>(of.tile.index) * kTileM + half * kHalf + warp % 4 * 16 + lane / 4 + 8 * i;
        out[i] = position >= a.n ? -1 : plan.neurons[position];
      }
      float d[128];
      if constexpr (!kPaired) pass_by(ring, passing + work.from - of.first, full, release);
      if (work.steps != 0) {
        const auto multiply_block = [&](bool first) {
          ptx::mbarrier_wait(full + 8 * ring.stage, ring.phase);
          ptx::mbarrier_wait(arrived + 8 * used.stage, used.phase);
          ptx::fence_proxy_async();  // cp.async wrote B
          const uint32_t h = own + used.stage * kHalfBytes, b = stages + ring.stage * kBBytes;
          ptx::wgmma_fence();
#pragma unroll
          for (int step = 0; step < kTileK / 16; ++step) {
            ptx::wgmma<4, 1>(d, ptx::wgmma_descriptor(h + step * 32, 16, 1024),
                             ptx::wgmma_descriptor(b + step * 16 * 128, kPanelBytes, 1024), !first || step != 0);
          }
          ptx::wgmma_commit_group();
        };
        multiply_block(true);
#pragma unroll 1
        for (int step = 1; step < work.steps; ++step) {
          const uint32_t stage = ring.stage, operand = used.stage;
          ring.advance();
          used.advance();
          multiply_block(false);
          ptx::wgmma_wait_group<1>();
          release(stage);
          fetch(work, step - 1 + kOperands, operand);
        }
        ptx::wgmma_wait_group<0>();
        release(ring.stage);
        ring.advance();
        used.advance();
      } else {  // nothing is there for this half
#pragma unroll
        for (int i = 0; i < 128; ++i) d[i] = 0.0f;
      }
      // Once dW is stored: until then the other consumer has stages to multiply.
      const Unit& unit = unit_in(round);
      const Piece piece = piece_of(unit.code);
      passing = piece.last - work.from - work.steps;
      next = work_of(round + 1);
      if (unit_in(round + 1).column >= 0) fetch_first(next);
      if (piece.parts > 1) {
        const int place = unit.column + piece.base * columns();
        // The sums of a piece, as its threads hold them: [register / 4][thread][4].
        const auto partials_of = [&](int part) {
          const int64_t sums = static_cast<int64_t>(place + part * columns()) * 4 + half * 2 + kPaired * consumer;
          const int64_t at = sums * (kHalf * kTileN);
          return reinterpret_cast<float4*>(a.partials + at) + thread;
        };
        float4* partials = partials_of(piece.part);
#pragma unroll
        for (int j = 0; j < 32; ++j) {
          partials[j * 128] = make_float4(d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]);
        }
        __threadfence();
        ptx::bar_sync(1 + consumer, 128);
        if (thread == 0) {
          int32_t* ticket = a.tickets + place * 4 + half * 2 + kPaired * consumer;
          const bool last = atomicAdd(ticket, 1) == piece.parts - 1;
          if (last) *ticket = 0;
          __threadfence();
          shared.last[consumer] = last;
        }
        ptx::bar_sync(1 + consumer, 128);
        if (!shared.last[consumer]) continue;
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
      }
      if constexpr (sizeof(Out) == 4) {  // four lanes store the 32 bytes of 8 columns
        const int64_t column = static_cast<int64_t>(unit.column) * kTileN;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          Out* to = dw + out[i] * a.k + column + lane % 4 * 2;
#pragma unroll
          for (int g = 0; g < kTileN / 8; ++g) {
            if (out[i] >= 0 && column + 8 * g < a.k) {
              *reinterpret_cast<float2*>(to + 8 * g) = make_float2(d[4 * g + 2 * i], d[4 * g + 2 * i + 1]);
            }
          }
        }
        continue;
      }
      // Four lanes have 32 columns of a row in four registers each: 64 bytes, of which each lane then stores 16.
      const int64_t column = static_cast<int64_t>(unit.column) * kTileN + lane % 4 * 8;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Out* to = dw + out[i] * a.k + column;
#pragma unroll
        for (int c = 0; c < kTileN / 32; ++c) {
          uint32_t v[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float* pair = d + 4 * (4 * c + j) + 2 * i;
            v[j] = ptx::cvt_bf16x2(pair[0], pair[1]);
          }
          transpose_quad(v, lane);
          if (out[i] >= 0 && column + 32 * c < a.k) {
            ptx::st_global_v4(to + 32 * c, make_uint4(v[0], v[1], v[2], v[3]));
          }
        }
      }
    }
    if constexpr (!kPaired) pass_by(ring, passing, full, release);
  }
}

}  // namespace

cudaError_t tile_weights(const WeightGradient& a, cudaStream_t stream) {
  int count = 0;
  const cudaError_t error = multiprocessors(&count);
  if (error != cudaSuccess) return error;
  const bool two = a.operands[1] != nullptr;
  const auto to_float = two ? tile_weights_kernel<true, float> : tile_weights_kernel<false, float>;
  const auto to_bf16 = two ? tile_weights_kernel<true, __nv_bfloat16> : tile_weights_kernel<false, __nv_bfloat16>;
  return launch_early(a.float_dw ? to_float : to_bf16, count, kThreads, kSharedBytes, 1, stream, a);
}

}  // namespace sparsellm
