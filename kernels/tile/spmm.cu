// tile_spmm: y[row] = sum over slots of h[row, slot] w[slots[slot]], each tile of 128 rows over its own slots; the sum of
// two such, with one set of slots, where two lists and weights are given.
//
// Forward: rows are tokens, slots neurons, h the hidden values: y = h W_d. Backward: dx = dz W_g + du W_u; and with rows
// that are neurons and slots that are tokens, dW = dz^T x.
//
// A unit is one tile times 256 columns of y, over all slots of the tile, or those of a piece of it; fuller ones come
// first, all columns of one together: units as large that begin together go through the same rows of w in step, and find
// them in L2. Four warps copy, for each block, its rows of w (an MN-major operand) and its pieces of the list. A consumer
// warpgroup multiplies the blocks that its 64 rows need: while one block is multiplied it scatters the next one's h into
// a zeroed operand tile.
//
// Where two lists meet the same weights (dW_g and dW_u), their products share the copies of the rows: a unit is then one
// half of a tile, and each consumer has one of the lists.
//
// Of a tile in pieces, each leaves its sums in global memory, and whoever comes last adds them up.
//
// Numerics: float32 over a tile's slots, block by block in that order (of two lists, first one, then the other); piece by
// piece, where a tile is in pieces; rounded to bf16 once, or, where y is float32, not. Deterministic.
#include "common/host.h"
#include "tile/plan.cuh"

namespace sparsellm {
namespace {

constexpr int kGatherRows = kTileK / kGatherWarps;  // of a stage, for each warp
constexpr uint32_t kPanelBytes = kTileK * 128;      // B: 64 rows of k, panels of 64 columns
constexpr int kBuffers = 3;                         // operand tiles of h that each half has
constexpr uint32_t kPieceWords = 448;               // of a half's piece of the list that a stage has room for
constexpr uint32_t kPieceBytes = kPieceWords * 4;
constexpr int kSpmmStages = 5;
constexpr uint32_t kSpmmStageBytes = kBBytes + 2 * kPieceBytes;

struct Shared {
  uint2 pieces[kSpmmStages][2];  // [consumer] of its list, begin and end; in the stage from the multiple of four before on
  uint64_t full[kSpmmStages];
  uint64_t empty[kSpmmStages];
  bool last[2];  // [consumer] to finish a tile in pieces
};

constexpr uint32_t kSharedBytes = 2 * kBuffers * kHalfBytes + kSpmmStages * kSpmmStageBytes + sizeof(Shared);
static_assert(kSharedBytes <= kMaxSharedBytes, "h, B, the list's pieces and the barriers share one CTA's memory");

// Lane q of four has words v[0..3] of column q of a 4 x 4 matrix, and gets those of row q.
__device__ __forceinline__ void transpose_quad(uint32_t (&v)[4], uint32_t lane) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = (lane & step) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t got = __shfl_xor_sync(~0u, upper ? v[i] : v[i + step], step);
      if (upper) v[i] = got;
      else v[i + step] = got;
    }
  }
}

// 16 slots of a block, as a thread holds them.
template <class Index>
struct Sixteen {
  static constexpr int kQuads = sizeof(Index) * 16 / 16;
  uint4 quads[kQuads];

  __device__ __forceinline__ void load(const Index* from) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) quads[q] = reinterpret_cast<const uint4*>(from)[q];
  }
  __device__ __forceinline__ uint32_t operator[](int i) const {
    if constexpr (sizeof(Index) == 2) {
      return half_of(quads[i / 8], i % 8);
    } else {
      const uint4& v = quads[i / 4];
      return i % 4 == 0 ? v.x : i % 4 == 1 ? v.y : i % 4 == 2 ? v.z : v.w;
    }
  }
};

// kPaired: a unit is one half of a tile, whose blocks both consumers multiply by the same weights: each has a list and a
// y of its own.
template <class Index, int kSources, bool kPaired = false, class Out = __nv_bfloat16>
__global__ void __launch_bounds__(kThreads, 1) tile_spmm_kernel(const Spmm a) {
  extern __shared__ __align__(1024) uint8_t raw[];
  const uint32_t hidden = ptx::smem_address(raw);              // [half][kBuffers]
  const uint32_t stages = hidden + 2 * kBuffers * kHalfBytes;  // B of each
  const uint32_t pieces = stages + kSpmmStages * kBBytes;      // [stage][consumer]
  Shared& shared = *reinterpret_cast<Shared*>(raw + kSharedBytes - sizeof(Shared));
  const uint32_t full = ptx::smem_address(shared.full);
  const uint32_t empty = ptx::smem_address(shared.empty);
  const int warp = threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  const int column_tiles = static_cast<int>((a.k + kTileN - 1) / kTileN);  // of y

  if (threadIdx.x == 0) {
    if (hidden % 1024 != 0) __trap();  // what the swizzle is counted from
    for (int s = 0; s < kSpmmStages; ++s) {
      ptx::mbarrier_init(full + 8 * s, 32 * kGatherWarps + 2);
      ptx::mbarrier_init(empty + 8 * s, kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();

  constexpr bool kSplit = sizeof(Index) == 4;
  const int pieces_of_all = kSplit ? a.totals[kPieces] : static_cast<int>((a.m + kTileM - 1) / kTileM);
  const int units_of_piece = column_tiles * (kPaired ? 2 : 1), units = pieces_of_all * units_of_piece;
  const auto half_of_unit = [&](int unit) { return unit / column_tiles % 2; };  // kPaired
  // What a round is about; one that does not exist repeats the first. Asked for a round ahead, it is there in time.
  const auto code_in = [&](int round) {
    const int unit = deal(round, blockIdx.x, gridDim.x);
    return a.order[unit < units ? unit / units_of_piece : 0];
  };
  const auto decoded = [](int4 code) { return kSplit ? piece_of(code) : whole(tile_of(code)); };

  if (warp < kGatherWarps) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    uint32_t place[8];  // of this thread's chunk in rows 0..7
#pragma unroll
    for (int i = 0; i < 8; ++i) place[i] = swizzle_128(i, lane % 8);
    const uint32_t pitch = static_cast<uint32_t>(a.k) * 2;
    RingOf<kSpmmStages> ring;
    struct Range {
      int tile, first, last, half;
    };
    // Two warps to a consumer's piece of the list, 128 words in turn.
    const int consumer = warp % 2;
    const auto range_in = [&](int round) {
      const Piece piece = decoded(code_in(round));
      Range range = {piece.tile.index, piece.first, piece.last, consumer};
      if constexpr (kPaired) {
        range.half = half_of_unit(deal(round, blockIdx.x, gridDim.x));
        range.last = piece.tile.needed(range.half, piece.first, piece.last, range.first);
        range.last += range.first;
      }
      return range;
    };
    Range next_range = range_in(0);
    const uint32_t first_word = warp / 2 * 128 + lane * 4;
    // This warp's slots of a block, and its consumer's piece of the list: one block ahead.
    Sixteen<Index> next;
    uint2 next_piece;
    const auto load = [&](const Range& of, int block) {
      if (of.first == of.last) {  // nothing is there, not even to look at
        next_piece = make_uint2(0, 0);
        return;
      }
      next.load(static_cast<const Index*>(a.slots) + of.tile * a.slots_per_tile + block * kTileK +
                warp * kGatherRows);
      const uint32_t* starts = a.starts + (static_cast<int64_t>(of.tile) * 2 + of.half) * a.starts_per_half + block;
      next_piece = make_uint2(starts[0], starts[1]);
    };
    load(next_range, next_range.first);
    for (int round = 0, unit; (unit = deal(round, blockIdx.x, gridDim.x)) < units; ++round) {
      const Range of = next_range;
      next_range = range_in(round + 1);
      const int64_t column = static_cast<int64_t>(unit % column_tiles) * kTileN + lane * 8;
      const uint32_t bytes = column < a.k ? 16 : 0;
      for (int block = of.first; block < of.last; ++block) {
        const Sixteen<Index> slots = next;
        const uint2 piece = next_piece;
        if (block + 1 < of.last) {
          load(of, block + 1);
        } else {
          load(next_range, next_range.first);
        }
#pragma unroll
        for (int s = 0; s < kSources; ++s) {
          const uint8_t* source = static_cast<const uint8_t*>(a.weights[s]) + 2 * column;
          ptx::mbarrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
          const uint32_t words = pieces + (ring.stage * 2 + consumer) * kPieceBytes;
          const uint32_t* list = (kPaired ? consumer : s) == 0 ? a.lists[0] : a.lists[1];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t word = first_word + 256 * i, at = (piece.x & ~3u) + word;
            if (word < kPieceWords && at < piece.y) ptx::cp_async_16(words + word * 4, list + at);
          }
          const uint32_t b = stages + ring.stage * kBBytes + (lane / 8) * kPanelBytes + warp * kGatherRows * 128;
#pragma unroll
          for (int i = 0; i < kGatherRows; ++i) {
            ptx::cp_async_row_16(b + i / 8 * 1024 + place[i % 8], source, slots[i], pitch, bytes);
          }
          ptx::cp_async_mbarrier_arrive(full + 8 * ring.stage);
          if (warp < 2 && lane == 0) {
            shared.pieces[ring.stage][consumer] = piece;
            ptx::mbarrier_arrive(full + 8 * ring.stage);
          }
          ring.advance();
        }
      }
      if (of.first == of.last) load(next_range, next_range.first);
    }
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    const int consumer = warp / 4 - 1;           // the half of a tile that this one multiplies, or, paired, the list
    const uint32_t thread = threadIdx.x % 128;  // of the warpgroup
    const auto y = static_cast<Out*>(kPaired && consumer != 0 ? a.more_y : a.y);
    const auto release = [&](uint32_t stage) {
      if (lane == 0) ptx::mbarrier_arrive(empty + 8 * stage);
    };
    // The h of this consumer in the block of a full stage, to the zeroed operand tile at `to`.
    const auto scatter = [&](uint32_t to, uint32_t stage, const uint32_t* list) {
      const uint2 piece = shared.pieces[stage][consumer];
      const uint32_t words = pieces + (stage * 2 + consumer) * kPieceBytes, base = piece.x & ~3u;
      const auto put = [&](uint32_t word) { ptx::st_shared_u16(to + (word & 0xffff) * 2, word >> 16); };
#pragma unroll
      for (uint32_t i = 0; i < (kPieceWords + 127) / 128; ++i) {
        const uint32_t word = 128 * i + thread;
        if (word < kPieceWords && base + word >= piece.x && base + word < piece.y) {
          put(ptx::ld_shared_u32(words + word * 4));
        }
      }
      for (uint32_t at = base + kPieceWords + thread; at < piece.y; at += 128) put(list[at]);
      ptx::fence_proxy_async();  // for what was scattered, and for B, which cp.async wrote
      ptx::bar_sync(1 + consumer, 128);
    };
    // Each warp zeroes the 16 rows that its own share of a product reads, once that has ended for this warp. Three
    // tiles take turns, so that between this and the next scattering there is a barrier of that of another tile.
    const uint32_t own = hidden + consumer * (kBuffers * kHalfBytes);
    const auto zero = [&](uint32_t which) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ptx::st_shared_v4(own + which * kHalfBytes + thread / 32 * 2048 + i * 512 + lane * 16, make_uint4(0, 0, 0, 0));
      }
    };
    for (int i = 0; i < kBuffers; ++i) zero(i);
    ptx::bar_sync(1 + consumer, 128);
    RingOf<kSpmmStages> ring;
    constexpr bool kAhead = !kSplit || kPaired;  // else registers are short, and units are large
    int4 next_code = code_in(0);
    uint32_t which = 0;
    int passing = 0;  // stages that this consumer does not need, behind those that it did
    for (int round = 0, unit; (unit = deal(round, blockIdx.x, gridDim.x)) < units; ++round) {
      const Piece of = decoded(kAhead ? next_code : code_in(round));
      if constexpr (kAhead) next_code = code_in(round + 1);
      const int half = kPaired ? half_of_unit(unit) : consumer;
      int out[2];  // this lane's two rows of y
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t position =
            static_cast<int64_t>(of.tile.index) * kTileM + half * kHalf + warp % 4 * 16 + lane / 4 + 8 * i;
        out[i] = position >= a.m ? -1 : a.rows == nullptr ? position : a.rows[position];
      }
      int from;
      const int needed = of.tile.needed(half, of.first, of.last, from);
      if (needed == 0) from = of.first;
      float d[128];
      if constexpr (!kPaired) pass_by(ring, passing + kSources * (from - of.first), full, release);
      if (needed != 0) {
        const auto multiply_block = [&](bool first, int source) {
          ptx::mbarrier_wait(full + 8 * ring.stage, ring.phase);
          const uint32_t h = own + which * kHalfBytes;
          scatter(h, ring.stage, (kPaired ? consumer : source) == 0 ? a.lists[0] : a.lists[1]);
          const uint32_t b = stages + ring.stage * kBBytes;
          ptx::wgmma_fence();
#pragma unroll
          for (int step = 0; step < kTileK / 16; ++step) {
            ptx::wgmma<4, 1>(d, ptx::wgmma_descriptor(h + step * 32, 16, 1024),
                             ptx::wgmma_descriptor(b + step * 16 * 128, kPanelBytes, 1024), !first || step != 0);
          }
          ptx::wgmma_commit_group();
        };
        const auto turn = [](uint32_t which) { return which == kBuffers - 1 ? 0 : which + 1; };
        multiply_block(true, 0);
        uint32_t previous = ring.stage;
        ring.advance();
        for (int left = kSources * needed - 1; left > 0; --left) {
          const uint32_t before = which;
          which = turn(which);
          multiply_block(false, kSources == 1 ? 0 : left % 2);
          ptx::wgmma_wait_group<1>();
          release(previous);
          zero(before);
          previous = ring.stage;
          ring.advance();
        }
        ptx::wgmma_wait_group<0>();
        release(previous);
        zero(which);
        which = turn(which);
      } else {  // nothing is there for this half
#pragma unroll
        for (int i = 0; i < 128; ++i) d[i] = 0.0f;
      }
      passing = kSources * (of.last - from - needed);  // once y is stored: until then the others have stages to fill
      if (const Piece piece = decoded(a.order[unit / units_of_piece]); kSplit && piece.parts > 1) {
        const int place = unit % column_tiles + piece.base * column_tiles;
        // The sums of a piece, as its threads hold them: [register / 4][thread][4].
        const auto partials_of = [&](int part) {
          const int64_t sums = static_cast<int64_t>(place + part * column_tiles) * 4 + half * 2 + kPaired * consumer;
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
        const int64_t column = static_cast<int64_t>(unit % column_tiles) * kTileN;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          Out* to = y + out[i] * a.k + column + lane % 4 * 2;
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
      const int64_t column = static_cast<int64_t>(unit % column_tiles) * kTileN + lane % 4 * 8;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Out* to = y + out[i] * a.k + column;
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
            *reinterpret_cast<uint4*>(to + 32 * c) = make_uint4(v[0], v[1], v[2], v[3]);
          }
        }
      }
    }
    if constexpr (!kPaired) pass_by(ring, passing, full, release);
  }
}

}  // namespace

cudaError_t tile_spmm(const Spmm& a, cudaStream_t stream) {
  int count = 0;
  const cudaError_t error = multiprocessors(&count);
  if (error != cudaSuccess) return error;
  const bool two = a.lists[1] != nullptr;
  const bool paired = a.more_y != nullptr;
  // Nobody asks for anything else.
  if (a.wide_slots != (a.totals != nullptr) || two != (paired || a.weights[1] != nullptr) ||
      (two && paired != a.wide_slots) || (a.float_y && !a.wide_slots)) {
    return cudaErrorInvalidValue;
  }
  const auto to_float = two ? tile_spmm_kernel<uint32_t, 1, true, float> : tile_spmm_kernel<uint32_t, 1, false, float>;
  const auto to_bf16 = two ? tile_spmm_kernel<uint32_t, 1, true> : tile_spmm_kernel<uint32_t, 1>;
  const auto wide = a.float_y ? to_float : to_bf16;
  const auto kernel = a.wide_slots ? wide : two ? tile_spmm_kernel<uint16_t, 2> : tile_spmm_kernel<uint16_t, 1>;
  return launch_early(kernel, count, kThreads, kSharedBytes, 1, stream, a);
}

}  // namespace sparsellm
