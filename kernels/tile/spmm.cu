// tile_spmm: y[row] = sum over slots of h[row, slot] w[slots[slot]], each tile of 128 rows over its own slots; the sum of
// two such, with one set of slots, where two lists and weights are given.
//
// Forward: rows are tokens, slots neurons, h the hidden values: y = h W_d. Backward: dx = dz W_g + du W_u; and with rows
// that are neurons and slots that are tokens, dW = dz^T x.
//
// A unit is one tile times 256 columns of y, over all slots of the tile; units of full tiles come first. Four warps
// copy, for each block, its rows of w (an MN-major operand) and its pieces of the list. A consumer warpgroup multiplies
// the blocks that its 64 rows need: while one block is multiplied it scatters the next one's h into a zeroed operand
// tile.
//
// Numerics: float32 over a tile's slots, block by block in that order (of two lists, first one, then the other),
// rounded to bf16 once. Deterministic.
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
  uint2 pieces[kSpmmStages][2];  // [half] of the list, begin and end; in the stage from the multiple of four before on
  uint64_t full[kSpmmStages];
  uint64_t empty[kSpmmStages];
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

template <class Index, int kSources>
__global__ void __launch_bounds__(kThreads, 1) tile_spmm_kernel(const Spmm a) {
  extern __shared__ __align__(1024) uint8_t raw[];
  const uint32_t hidden = ptx::smem_address(raw);              // [half][kBuffers]
  const uint32_t stages = hidden + 2 * kBuffers * kHalfBytes;  // B of each
  const uint32_t pieces = stages + kSpmmStages * kBBytes;      // [stage][half]
  Shared& shared = *reinterpret_cast<Shared*>(raw + kSharedBytes - sizeof(Shared));
  const uint32_t full = ptx::smem_address(shared.full);
  const uint32_t empty = ptx::smem_address(shared.empty);
  const int warp = threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  const int column_tiles = static_cast<int>((a.k + kTileN - 1) / kTileN);  // of y
  const int units = static_cast<int>((a.m + kTileM - 1) / kTileM) * column_tiles;
  const auto y = static_cast<__nv_bfloat16*>(a.y);

  // The tile of a round; one that does not exist repeats the first. Asked for a round ahead, it is there in time.
  const auto tile_in = [&](int round) {
    const int unit = deal(round, blockIdx.x, gridDim.x);
    return tile_of(a.order[unit < units ? unit / column_tiles : 0]);
  };

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

  if (warp < kGatherWarps) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    uint32_t place[8];  // of this thread's chunk in rows 0..7
#pragma unroll
    for (int i = 0; i < 8; ++i) place[i] = swizzle_128(i, lane % 8);
    const uint32_t pitch = static_cast<uint32_t>(a.k) * 2;
    RingOf<kSpmmStages> ring;
    Tile next_tile = tile_in(0);
    // Two warps to a half's piece of the list, 128 words in turn.
    const int half = warp % 2;
    const uint32_t first_word = warp / 2 * 128 + lane * 4;
    // This warp's slots of a block, and its half's piece of the list: one block ahead.
    Sixteen<Index> next;
    uint2 next_piece;
    const auto load = [&](const Tile& of, int block) {
      next.load(static_cast<const Index*>(a.slots) + of.index * a.slots_per_tile + block * kTileK +
                warp * kGatherRows);
      const uint32_t* starts = a.starts + (static_cast<int64_t>(of.index) * 2 + half) * a.starts_per_half + block;
      next_piece = of.blocks != 0 ? make_uint2(starts[0], starts[1]) : make_uint2(0, 0);
    };
    load(next_tile, 0);
    for (int round = 0, unit; (unit = deal(round, blockIdx.x, gridDim.x)) < units; ++round) {
      const Tile of = next_tile;
      next_tile = tile_in(round + 1);
      const int64_t column = static_cast<int64_t>(unit % column_tiles) * kTileN + lane * 8;
      const uint32_t bytes = column < a.k ? 16 : 0;
      for (int block = 0; block < of.blocks; ++block) {
        const Sixteen<Index> slots = next;
        const uint2 piece = next_piece;
        if (block + 1 < of.blocks) {
          load(of, block + 1);
        } else {
          load(next_tile, 0);
        }
#pragma unroll
        for (int s = 0; s < kSources; ++s) {
          const uint8_t* source = static_cast<const uint8_t*>(a.weights[s]) + 2 * column;
          ptx::mbarrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
          const uint32_t words = pieces + (ring.stage * 2 + half) * kPieceBytes;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t word = first_word + 256 * i, at = (piece.x & ~3u) + word;
            if (word < kPieceWords && at < piece.y) ptx::cp_async_16(words + word * 4, a.lists[s] + at);
          }
          const uint32_t b = stages + ring.stage * kBBytes + (lane / 8) * kPanelBytes + warp * kGatherRows * 128;
#pragma unroll
          for (int i = 0; i < kGatherRows; ++i) {
            ptx::cp_async_row_16(b + i / 8 * 1024 + place[i % 8], source, slots[i], pitch, bytes);
          }
          ptx::cp_async_mbarrier_arrive(full + 8 * ring.stage);
          if (warp < 2 && lane == 0) {
            shared.pieces[ring.stage][half] = piece;
            ptx::mbarrier_arrive(full + 8 * ring.stage);
          }
          ring.advance();
        }
      }
      if (of.blocks == 0) load(next_tile, 0);
    }
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    const int half = warp / 4 - 1;
    const uint32_t thread = threadIdx.x % 128;  // of the warpgroup
    const auto release = [&](uint32_t stage) {
      if (lane == 0) ptx::mbarrier_arrive(empty + 8 * stage);
    };
    // The h of this half in the block of a full stage, to the zeroed operand tile at `to`.
    const auto scatter = [&](uint32_t to, uint32_t stage, const uint32_t* list) {
      const uint2 piece = shared.pieces[stage][half];
      const uint32_t words = pieces + (stage * 2 + half) * kPieceBytes, base = piece.x & ~3u;
      const auto put = [&](uint32_t word) { ptx::st_shared_u16(to + (word & 0xffff) * 2, word >> 16); };
#pragma unroll
      for (uint32_t i = 0; i < (kPieceWords + 127) / 128; ++i) {
        const uint32_t word = 128 * i + thread;
        if (word < kPieceWords && base + word >= piece.x && base + word < piece.y) {
          put(ptx::ld_shared_u32(words + word * 4));
        }
      }
      for (uint32_t at = base + kPieceWords + thread; at < piece.y; at += 128) put(list[at]);
      ptx::fence_proxy_async();
      ptx::bar_sync(1 + half, 128);
    };
    // Each warp zeroes the 16 rows that its own share of a product reads, once that has ended for this warp. Three
    // tiles take turns, so that between this and the next scattering there is a barrier of that of another tile.
    const uint32_t own = hidden + half * (kBuffers * kHalfBytes);
    const auto zero = [&](uint32_t which) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ptx::st_shared_v4(own + which * kHalfBytes + thread / 32 * 2048 + i * 512 + lane * 16, make_uint4(0, 0, 0, 0));
      }
    };
    for (int i = 0; i < kBuffers; ++i) zero(i);
    ptx::bar_sync(1 + half, 128);
    RingOf<kSpmmStages> ring;
    Tile next_tile = tile_in(0);
    uint32_t which = 0;
    for (int round = 0, unit; (unit = deal(round, blockIdx.x, gridDim.x)) < units; ++round) {
      const Tile of = next_tile;
      next_tile = tile_in(round + 1);
      int out[2];  // this lane's two rows of y
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t position = static_cast<int64_t>(of.index) * kTileM + (warp - 4) * 16 + lane / 4 + 8 * i;
        out[i] = position >= a.m ? -1 : a.rows == nullptr ? position : a.rows[position];
      }
      int from;
      const int needed = of.needed(half, 0, of.blocks, from);
      float d[128];
      if (needed != 0) {
        const auto multiply_block = [&](bool first, int source) {
          ptx::mbarrier_wait(full + 8 * ring.stage, ring.phase);
          const uint32_t h = own + which * kHalfBytes;
          scatter(h, ring.stage, source == 0 ? a.lists[0] : a.lists[1]);
          ptx::fence_proxy_async();  // cp.async wrote B
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
        pass_by(ring, kSources * from, full, release);
        multiply_block(true, 0);
        uint32_t previous = ring.stage;
        ring.advance();
        for (int i = 1; i < kSources * needed; ++i) {
          const uint32_t before = which;
          which = turn(which);
          multiply_block(false, i % kSources);
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
        pass_by(ring, kSources * (of.blocks - from - needed), full, release);
      } else {  // nothing is there for this half
        pass_by(ring, kSources * of.blocks, full, release);
#pragma unroll
        for (int i = 0; i < 128; ++i) d[i] = 0.0f;
      }
      // Four lanes have 32 columns of a row in four registers each: 64 bytes, of which each lane then stores 16.
      const int64_t column = static_cast<int64_t>(unit % column_tiles) * kTileN + lane % 4 * 8;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        __nv_bfloat16* to = y + out[i] * a.k + column;
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
  }
}

}  // namespace

cudaError_t tile_spmm(const Spmm& a, cudaStream_t stream) {
  int count = 0;
  const cudaError_t error = multiprocessors(&count);
  if (error != cudaSuccess) return error;
  const bool two = a.lists[1] != nullptr;
  if (two && a.wide_slots) return cudaErrorInvalidValue;  // nobody asks for it
  const auto kernel = a.wide_slots ? tile_spmm_kernel<uint32_t, 1> : two ? tile_spmm_kernel<uint16_t, 2>
                                                                        : tile_spmm_kernel<uint16_t, 1>;
  return launch_early(kernel, count, kThreads, kSharedBytes, 1, stream, a);
}

}  // namespace sparsellm
