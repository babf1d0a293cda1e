// tile_spmm: y[row] = sum over slots of h[row, slot] w[slots[slot]], each tile of 128 rows over its own slots; the sum
// of two such, with one set of slots, where two lists and weights are given. Forward: y = h W_d. Backward: dx = dz W_g +
// du W_u.
//
// A unit is one tile times 256 columns of y, over all blocks of the tile; fuller ones come first, all columns of one
// together. Four warps copy, for each block, its rows of w (an MN-major operand) and its pieces of the list. A consumer
// warpgroup multiplies the blocks that its 64 rows need: while one block is multiplied it scatters the next one's h
// into a zeroed operand tile. It stores its y before it lets the blocks pass that it does not need: the other consumer
// multiplies meanwhile.
//
// Numerics: float32 over a tile's slots, block by block in that order, of two lists first one, then the other; rounded
// to bf16 once. Deterministic.
#include "common/host.h"
#include "tile/gather.cuh"
#include "tile/plan.cuh"

namespace sparsellm {
namespace {

constexpr int kBuffers = 3;            // operand tiles of h that each half has
constexpr uint32_t kPieceWords = 448;  // of a half's piece of the list that a stage has room for
constexpr uint32_t kPieceBytes = kPieceWords * 4;
constexpr uint32_t kPieceLoads = (kPieceWords + 255) / 256;  // of it, two words each, for each thread of the half
constexpr int kSpmmStages = 5;
constexpr uint32_t kSpmmStageBytes = kBBytes + 2 * kPieceBytes;

struct Shared {
  uint2 pieces[kSpmmStages][2];  // [consumer] of its list, begin and end; in the stage from the multiple of four before on
  uint64_t full[kSpmmStages];
  uint64_t empty[kSpmmStages];
};

constexpr uint32_t kSharedBytes = 2 * kBuffers * kHalfBytes + kSpmmStages * kSpmmStageBytes + sizeof(Shared);
static_assert(kSharedBytes <= kMaxSharedBytes, "h, B, the list's pieces and the barriers share one CTA's memory");

template <int kSources>
__global__ void __launch_bounds__(kThreads, 1) tile_spmm_kernel(const Spmm a) {
  extern __shared__ __align__(1024) uint8_t raw[];
  const uint32_t hidden = ptx::smem_address(raw);              // [half][kBuffers]
  const uint32_t stages = hidden + 2 * kBuffers * kHalfBytes;  // B of each
  const uint32_t pieces = stages + kSpmmStages * kBBytes;      // [stage][consumer]
  Shared& shared = *reinterpret_cast<Shared*>(raw + kSharedBytes - sizeof(Shared));
  const uint32_t full = ptx::smem_address(shared.full);
  const uint32_t empty = ptx::smem_address(shared.empty);
  const int warp = ptx::warp_index();
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

  const int units = static_cast<int>((a.m + kTileM - 1) / kTileM) * column_tiles;
  // What a round is about; one that does not exist repeats the first. Asked for a round ahead, it is there in time.
  const auto code_in = [&](int round) {
    const int unit = deal(round, blockIdx.x, gridDim.x);
    return a.order[unit < units ? unit / column_tiles : 0];
  };

  if (warp < kGatherWarps) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    const Gather gather(warp, lane);
    RingOf<kSpmmStages> ring;
    const int consumer = warp % 2;  // two warps to a consumer's piece of the list, 128 words in turn
    const uint32_t first_word = warp / 2 * 128 + lane * 4;
    // This thread's slots of two blocks, and where its consumer's pieces of the list lie: asked for while the two before
    // are copied, to be there in time. A tile's slots and starts have room for an even number of blocks.
    struct Known {
      uint2 slots[2];
      uint32_t starts[3];
    };
    Tile next_tile = tile_of(code_in(0));
    Known next;
    const auto load = [&](const Tile& of, int block) {
      if (of.size == 0) return;  // nothing is there, not even to look at
      const uint16_t* slots = a.slots + of.index * a.slots_per_tile + block * kTileK + gather.first_row;
      const uint32_t* starts = a.starts + (static_cast<int64_t>(of.index) * 2 + consumer) * a.starts_per_half + block;
#pragma unroll
      for (int i = 0; i < 2; ++i) next.slots[i] = *reinterpret_cast<const uint2*>(slots + i * kTileK);
#pragma unroll
      for (int i = 0; i < 3; ++i) next.starts[i] = starts[i];
    };
    load(next_tile, 0);
    for (int round = 0, unit; (unit = deal(round, blockIdx.x, gridDim.x)) < units; ++round) {
      const Tile of = next_tile;
      const int blocks = of.blocks();
      next_tile = tile_of(code_in(round + 1));
      const int64_t column = Gather::column_of(unit % column_tiles, lane);
      for (int block = 0; block < blocks; block += 2) {
        const Known known = next;
        if (block + 2 < blocks) {
          load(of, block + 2);
        } else {
          load(next_tile, 0);
        }
#pragma unroll
        for (int i = 0; i < 2 * kSources; ++i) {
          const int which = i / kSources, s = i % kSources;
          if (block + which == blocks) break;
          const uint2 four = known.slots[which];
          const uint32_t slots[kThreadRows] = {four.x & 0xffff, four.x >> 16, four.y & 0xffff, four.y >> 16};
          const uint32_t begin = known.starts[which], end = known.starts[which + 1];
          const uint32_t first = (begin & ~3u) + first_word, left = end - min(end, first);
          const uint32_t words = pieces + (ring.stage * 2 + consumer) * kPieceBytes + first_word * 4;
          ptx::mbarrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
          const bool any = (block + which) * kTileK + gather.first_row < of.size;  // of these slots exists
          gather.copy(stages + ring.stage * kBBytes, a.weights[s], slots, column, a.k, any ? a.k : 0);
#pragma unroll
          for (uint32_t w = 0; w < kPieceWords; w += 256) {
            if (first_word + w < kPieceWords && w < left) ptx::cp_async_16(words + 4 * w, a.lists[s] + first + w);
          }
          ptx::cp_async_mbarrier_arrive(full + 8 * ring.stage);
          if (warp < 2 && lane == 0) {
            shared.pieces[ring.stage][consumer] = make_uint2(begin, end);
            ptx::mbarrier_arrive(full + 8 * ring.stage);
          }
          ring.advance();
        }
      }
      if (of.size == 0) load(next_tile, 0);
    }
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    const int consumer = warp / 4 - 1;  // the half of a tile that this one multiplies
    const uint32_t thread = threadIdx.x % 128;  // of the warpgroup
    const auto release = [&](uint32_t stage) {
      if (lane == 0) ptx::mbarrier_arrive(empty + 8 * stage);
    };
    RingOf<kSpmmStages> ring;
    // This consumer's piece of the list in a stage, as far as that has room: pairs of words, 256 apart.
    struct Piece {
      uint2 bounds;
      uint2 words[kPieceLoads];
    };
    constexpr uint32_t kBoundsBytes = sizeof(shared.pieces[0]);
    const uint32_t piece_bounds = ptx::smem_address(&shared.pieces[0][consumer]);
    uint32_t piece_words[kPieceLoads];
#pragma unroll
    for (uint32_t i = 0; i < kPieceLoads; ++i) {
      piece_words[i] = pieces + consumer * kPieceBytes + min(8 * thread + 1024 * i, kPieceBytes - 8);
    }
    const auto read = [&](Piece& piece) {
      ptx::mbarrier_wait(full + 8 * ring.stage, ring.phase);
      piece.bounds = ptx::ld_shared_v2(piece_bounds + ring.stage * kBoundsBytes);
#pragma unroll
      for (uint32_t i = 0; i < kPieceLoads; ++i) {  // all, whatever the bounds: beside them, not after them
        piece.words[i] = ptx::ld_shared_v2(piece_words[i] + ring.stage * (2 * kPieceBytes));
      }
    };
    // Its h, to the zeroed operand tile at `to`. Without branches: they would take as long as the stores.
    const auto scatter = [&](uint32_t to, const Piece& piece, const uint32_t* list) {
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
    const uint64_t first_h = ptx::wgmma_descriptor(own, 16, 1024);
    const uint64_t first_b = ptx::wgmma_descriptor(stages, kPanelBytes, 1024);
    int4 next_code = code_in(0);
    uint32_t which = 0;
    int passing = 0;  // stages that this consumer does not need, behind those that it did
    for (int round = 0, unit; (unit = deal(round, blockIdx.x, gridDim.x)) < units; ++round) {
      const Tile of = tile_of(next_code);
      const int blocks = of.blocks();
      next_code = code_in(round + 1);
      int out[2];  // this lane's two rows of y
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t position =
            static_cast<int64_t>(of.index) * kTileM + consumer * kHalf + warp % 4 * 16 + lane / 4 + 8 * i;
        out[i] = position >= a.m ? -1 : a.tokens == nullptr ? position : a.tokens[position];
      }
      int from;
      const int needed = of.needed(consumer, 0, blocks, from);
      if (needed == 0) from = 0;
      float d[128];
      pass_by(ring, passing + kSources * from, full, release);
      if (needed != 0) {
        Piece piece;
        const auto multiply_block = [&](bool first, int source) {
          scatter(own + which * kHalfBytes, piece, source == 0 ? a.lists[0] : a.lists[1]);
          const uint64_t h = ptx::advanced(first_h, which * kHalfBytes);
          const uint64_t b = ptx::advanced(first_b, ring.stage * kBBytes);
          ptx::wgmma_fence();
#pragma unroll
          for (int step = 0; step < kTileK / 16; ++step) {
            ptx::wgmma<4, 1>(d, ptx::advanced(h, step * 32), ptx::advanced(b, step * 16 * 128), !first || step != 0);
          }
          ptx::wgmma_commit_group();
        };
        // A product that has ended: its stage is let go, its operand tile zeroed.
        const auto finish = [&](uint32_t stage, uint32_t tile) {
          release(stage);
          zero(tile);
        };
        const auto turn = [](uint32_t which) { return which == kBuffers - 1 ? 0 : which + 1; };
        read(piece);
        multiply_block(true, 0);
        uint32_t last = ring.stage, last_but_one = last, before = which;  // products whose end is not known
        for (int done = 1; done < kSources * needed; ++done) {
          ring.advance();
          read(piece);
          if (done > 1) {
            ptx::wgmma_wait_group<1>();
            finish(last_but_one, before);
          }
          last_but_one = last;
          before = which;
          which = turn(which);
          multiply_block(false, done % kSources);
          last = ring.stage;
        }
        ptx::wgmma_wait_group<0>();
        if (kSources * needed > 1) finish(last_but_one, before);
        finish(last, which);
        which = turn(which);
        ring.advance();
      } else {  // nothing is there for this half
#pragma unroll
        for (int i = 0; i < 128; ++i) d[i] = 0.0f;
      }
      passing = kSources * (blocks - from - needed);  // once y is stored
      // Four lanes have 32 columns of a row in four registers each: 64 bytes, of which each lane then stores 16.
      const int64_t column = static_cast<int64_t>(unit % column_tiles) * kTileN + lane % 4 * 8;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        __nv_bfloat16* to = static_cast<__nv_bfloat16*>(a.y) + out[i] * a.k + column;
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
    pass_by(ring, passing, full, release);
  }
}

}  // namespace

cudaError_t tile_spmm(const Spmm& a, cudaStream_t stream) {
  int count = 0;
  const cudaError_t error = multiprocessors(&count);
  if (error != cudaSuccess) return error;
  return launch_early(a.lists[1] != nullptr ? tile_spmm_kernel<2> : tile_spmm_kernel<1>, count, kThreads, kSharedBytes, 1,
                      stream, a);
}

}  // namespace sparsellm
