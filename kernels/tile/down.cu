// tile_down: y = h w_down_t[slots], each token tile over its own neurons.
//
// A unit is one token tile times 256 columns of y, over all slots of the tile; units of full tiles come first. h comes
// by TMA; three warps gather rows of w_down_t with cp.async (an MN-major operand); the fourth writes the finished tile
// to the rows of its tokens while the next is multiplied.
//
// Numerics: float32 over the slots in ascending order, rounded to bf16 once. Deterministic.
#include "common/host.h"
#include "tile/plan.cuh"

namespace sparsellm {
namespace {

constexpr int kGatherWarps = 3;
constexpr int kGatherRows = 24;  // of a stage's 64, for each gather warp but the last, which has the other 16
constexpr uint32_t kPanelBytes = kTileK * 128;  // B: 64 rows of k, panels of 64 columns

struct Shared {
  uint64_t full[kStages];
  uint64_t empty[kStages];
  uint64_t tile_full;
  uint64_t tile_free;
};

constexpr uint32_t kPaddedTileBytes = kTileM * 528;
constexpr uint32_t kSharedBytes = 1024 + kStages * kStageBytes + kPaddedTileBytes + sizeof(Shared);
static_assert(kSharedBytes <= kMaxSharedBytes, "stages, the finished tile and the barriers share one CTA's memory");

// The finished tile: rows of 512 bytes, 16 more apart, so that eight rows' chunks fall into different banks.
__device__ __forceinline__ uint32_t tile_offset(uint32_t row, uint32_t chunk) { return row * 528 + chunk * 16; }

__global__ void __launch_bounds__(kThreads, 1)
    tile_down_kernel(const __grid_constant__ CUtensorMap h_map, const __nv_bfloat16* w_down_t, int64_t m, int64_t k,
                     int64_t n, const TilePlan plan, __nv_bfloat16* y) {
  extern __shared__ uint8_t raw[];
  const uint32_t stages = (ptx::smem_address(raw) + 1023) & ~1023u;
  const uint32_t tile = stages + kStages * kStageBytes;
  Shared& shared = *reinterpret_cast<Shared*>(raw + (tile + kPaddedTileBytes - ptx::smem_address(raw)));
  const uint32_t full = ptx::smem_address(shared.full);
  const uint32_t empty = ptx::smem_address(shared.empty);
  const uint32_t tile_full = ptx::smem_address(&shared.tile_full);
  const uint32_t tile_free = ptx::smem_address(&shared.tile_free);
  const int warp = threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  const int64_t slot_pitch = (n + kColumnTile - 1) / kColumnTile * kColumnTile;
  const int column_tiles = static_cast<int>((k + kTileN - 1) / kTileN);  // of y
  const int units = static_cast<int>((m + kTileM - 1) / kTileM) * column_tiles;

  // The tile of a round; one that does not exist repeats the first. Asked for a round ahead, it is there in time.
  const auto tile_in = [&](int round) {
    const int unit = deal(round, blockIdx.x, gridDim.x);
    return plan.order[unit < units ? unit / column_tiles : 0];
  };

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(full + 8 * s, 32 * kGatherWarps + 1);
      ptx::mbarrier_init(empty + 8 * s, kConsumerWarps);
    }
    ptx::mbarrier_init(tile_full, kConsumerWarps);
    ptx::mbarrier_init(tile_free, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();

  if (warp < 4) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (warp < kGatherWarps) {
      uint32_t place[8];  // of this thread's chunk in rows 0..7
#pragma unroll
      for (int i = 0; i < 8; ++i) place[i] = swizzle_128(i, lane % 8);
      const uint32_t pitch = static_cast<uint32_t>(k) * 2;
      constexpr int kQuads = kGatherRows / 8;
      const int quads = warp < kGatherWarps - 1 ? kQuads : (kTileK - (kGatherWarps - 1) * kGatherRows) / 8;
      Ring ring;
      int2 next_tile = tile_in(0);
      const auto slots_of = [&](int tile) {
        return reinterpret_cast<const uint4*>(plan.slots + tile * slot_pitch + warp * kGatherRows);
      };
      // This warp's neurons of a block: loaded one block ahead, eight to a register quad.
      uint4 next[kQuads];
      const auto load = [&](const uint4* slots) {
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
          if (q < quads) next[q] = slots[q];
        }
      };
      load(slots_of(next_tile.x));
      for (int round = 0, unit; (unit = deal(round, blockIdx.x, gridDim.x)) < units; ++round) {
        const int token_tile = next_tile.x;
        const int blocks = next_tile.y;
        next_tile = tile_in(round + 1);
        const int64_t column = static_cast<int64_t>(unit % column_tiles) * kTileN + lane * 8;
        const uint4* slots = slots_of(token_tile);
        const uint8_t* source = reinterpret_cast<const uint8_t*>(w_down_t) + 2 * column;
        const uint32_t bytes = column < k ? 16 : 0;
        for (int kb = 0; kb < blocks; ++kb) {
          uint4 neurons[kQuads];
#pragma unroll
          for (int q = 0; q < kQuads; ++q) neurons[q] = next[q];
          load(kb + 1 < blocks ? slots + (kb + 1) * (kTileK / 8) : slots_of(next_tile.x));
          ptx::mbarrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
          const uint32_t a = stages + ring.stage * kStageBytes;
          if (threadIdx.x == 0) {
            ptx::mbarrier_arrive_expect_tx(full + 8 * ring.stage, kABytes);
            ptx::tma_load_2d(a, &h_map, kb * kTileK, token_tile * kTileM, full + 8 * ring.stage);
          }
          __syncwarp();
          const uint32_t b = a + kABytes + (lane / 8) * kPanelBytes + warp * kGatherRows * 128;
#pragma unroll
          for (int q = 0; q < kQuads; ++q) {
            if (q < quads) {
#pragma unroll
              for (int i = 0; i < 8; ++i) {
                ptx::cp_async_row_16(b + q * 1024 + place[i], source, half_of(neurons[q], i), pitch, bytes);
              }
            }
          }
          ptx::cp_async_mbarrier_arrive(full + 8 * ring.stage);
          ring.advance();
        }
        if (blocks == 0) load(slots_of(next_tile.x));
      }
    } else {
      uint32_t parity = 0;
      int2 next_tile = tile_in(0);
      for (int round = 0, unit; (unit = deal(round, blockIdx.x, gridDim.x)) < units; ++round, parity ^= 1) {
        const int64_t position0 = static_cast<int64_t>(next_tile.x) * kTileM;
        next_tile = tile_in(round + 1);
        const int64_t column = static_cast<int64_t>(unit % column_tiles) * kTileN;
        const uint32_t bytes = 2 * static_cast<uint32_t>(min(static_cast<int64_t>(kTileN), k - column));
        int64_t token[kTileM / 32];
#pragma unroll
        for (int i = 0; i < kTileM / 32; ++i) {
          const int64_t position = position0 + 32 * i + lane;
          token[i] = position >= m ? -1 : plan.tokens == nullptr ? position : plan.tokens[position];
        }
        ptx::mbarrier_wait(tile_full, parity);
#pragma unroll
        for (int i = 0; i < kTileM / 32; ++i) {
          if (token[i] >= 0) ptx::bulk_store(y + token[i] * k + column, tile + tile_offset(32 * i + lane, 0), bytes);
        }
        ptx::bulk_commit_group();
        ptx::bulk_wait_group_read<0>();
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(tile_free);
      }
    }
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    const int warpgroup = warp / 4 - 1;
    const uint32_t row = (warp - 4) * 16 + (lane & 15);
    Ring ring;
    uint32_t parity = 0;
    int2 next_tile = tile_in(0);
    for (int round = 0; deal(round, blockIdx.x, gridDim.x) < units; ++round, parity ^= 1) {
      const int blocks = next_tile.y;
      next_tile = tile_in(round + 1);
      if (blocks != 0) {
        float d[128];
        multiply<4, 1, true>(d, ring, blocks, stages, full, warpgroup, [&](uint32_t stage) {
          if (lane == 0) ptx::mbarrier_arrive(empty + 8 * stage);
        });
        ptx::mbarrier_wait(tile_free, parity ^ 1);
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          ptx::stmatrix_x4(tile + tile_offset(row, 2 * j + lane / 16), ptx::cvt_bf16x2(d[8 * j], d[8 * j + 1]),
                           ptx::cvt_bf16x2(d[8 * j + 2], d[8 * j + 3]), ptx::cvt_bf16x2(d[8 * j + 4], d[8 * j + 5]),
                           ptx::cvt_bf16x2(d[8 * j + 6], d[8 * j + 7]));
        }
      } else {  // no neuron fires in the tile
        ptx::mbarrier_wait(tile_free, parity ^ 1);
        for (int j = 0; j < 16; ++j) ptx::stmatrix_x4(tile + tile_offset(row, 2 * j + lane / 16), 0, 0, 0, 0);
      }
      ptx::fence_proxy_async();
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(tile_full);
    }
  }
}

}  // namespace

cudaError_t tile_down(const void* h, const void* w_down_t, int64_t m, int64_t k, int64_t n, const TilePlan& plan,
                      void* y, cudaStream_t stream) {
  int count = 0;
  cudaError_t error = multiprocessors(&count);
  if (error != cudaSuccess) return error;
  CUtensorMap h_map;
  error = tensor_map(&h_map, h, ceil_div(m, kTokenTile) * kTokenTile, n, kTileM);
  if (error != cudaSuccess) return error;
  return launch_early(tile_down_kernel, count, kThreads, kSharedBytes, 1, stream, h_map,
                      static_cast<const __nv_bfloat16*>(w_down_t), m, k, n, plan, static_cast<__nv_bfloat16*>(y));
}

}  // namespace sparsellm
