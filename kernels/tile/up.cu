// tile_up: u = x w_up^T on the neurons of each token tile, h = g u.
//
// An item is one token tile times up to 256 of its slots. Three warps gather rows with cp.async, 128 tokens and the
// slots' rows of w_up alike; one warp meanwhile scatters the gate into a zeroed tile, which the consumers multiply by u
// in place, sends the result off to h and looks the rows of the next item up.
//
// Numerics: u is accumulated in float32 over K and rounded to bf16 once; h = g u rounded to bf16 once. l1 is summed in
// float32 in a fixed order. Deterministic.
#include "common/host.h"
#include "tile/plan.cuh"

namespace sparsellm {
namespace {

constexpr int kGatherWarps = 3;  // the first copies tokens, the others neurons
constexpr int kGroup = 32;  // rows of a stage that a warp copies with eight instructions
constexpr int kTokenGroups = kTileM / kGroup;
constexpr int kMaxGroups = 4;  // of one warp: the tokens' four, or half of each of four blocks
constexpr int kRows = kTileM + kTileN;

struct Shared {
  // The rows of this item's and the next one's stages: tokens, then neurons, in groups of 32; within a group
  // [row % 4][row / 4], so that a thread reads its own ones side by side.
  alignas(16) uint32_t rows[2][kRows];
  uint64_t rows_ready[2];
  uint64_t full[kStages];
  uint64_t empty[kStages];
  uint64_t gate_ready;
  uint64_t hidden_ready;
  float l1[kConsumerWarps];
  float l1_warps[kThreads / 32];
  bool last;
};

constexpr uint32_t kSharedBytes = 1024 + kStages * kStageBytes + kTileBytes + sizeof(Shared);
static_assert(kSharedBytes <= kMaxSharedBytes, "stages, the gate tile and the row list share one CTA's memory");

constexpr uint32_t kPanelBytes = kTileM * 128;  // the gate tile: panels of 64 slots

template <int kBlocks, bool kGated>
__device__ __forceinline__ float multiply_item(Ring& ring, int k_blocks, uint32_t stages, uint32_t tile, uint32_t full,
                                               uint32_t empty, uint32_t gate_ready, uint32_t parity, int warp,
                                               uint32_t lane) {
  float d[32 * kBlocks];
  const int warpgroup = warp / 4 - 1;
  if constexpr (kGated) {
    multiply<kBlocks, 0, true>(d, ring, k_blocks, stages, full, warpgroup, [&](uint32_t stage) {
      if (lane == 0) ptx::mbarrier_arrive(empty + 8 * stage);
    });
  }
  ptx::mbarrier_wait(gate_ready, parity);
  const uint32_t row = (warp - 4) * 16 + (lane & 15);
  float l1 = 0.0f;
#pragma unroll
  for (int j = 0; j < 4 * kBlocks; ++j) {  // 16 slots
    const uint32_t address = tile + j / 4 * kPanelBytes + swizzle_128(row, j % 4 * 2 + lane / 16);
    uint32_t h[4];
    ptx::ldmatrix_x4(h, address);
    if constexpr (kGated) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t u = ptx::cvt_bf16x2(d[8 * j + 2 * i], d[8 * j + 2 * i + 1]);
        const __nv_bfloat162 product = __hmul2(reinterpret_cast<const __nv_bfloat162&>(h[i]),
                                               reinterpret_cast<const __nv_bfloat162&>(u));
        h[i] = reinterpret_cast<const uint32_t&>(product);
      }
      ptx::stmatrix_x4(address, h[0], h[1], h[2], h[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      l1 += fabsf(__uint_as_float(h[i] << 16)) + fabsf(__uint_as_float(h[i] & 0xffff0000));
    }
  }
  return l1;
}

template <bool kGated>
__global__ void __launch_bounds__(kThreads, 1)
    tile_up_kernel(const __nv_bfloat16* x, const __nv_bfloat16* w_up, const __grid_constant__ CUtensorMap h_map,
                   int64_t m, int64_t k, int64_t n, int words_per_tile, const Packed packed, const TilePlan plan,
                   float* l1_partials, float* l1_out) {
  extern __shared__ uint8_t raw[];
  const uint32_t stages = (ptx::smem_address(raw) + 1023) & ~1023u;
  const uint32_t tile = stages + kStages * kStageBytes;
  Shared& shared = *reinterpret_cast<Shared*>(raw + (tile + kTileBytes - ptx::smem_address(raw)));
  const uint32_t full = ptx::smem_address(shared.full);
  const uint32_t empty = ptx::smem_address(shared.empty);
  const uint32_t gate_ready = ptx::smem_address(&shared.gate_ready);
  const uint32_t rows_ready = ptx::smem_address(shared.rows_ready);
  const uint32_t hidden_ready = ptx::smem_address(&shared.hidden_ready);
  const int warp = threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  const int column_tiles = static_cast<int>((n + kColumnTile - 1) / kColumnTile);
  const int k_blocks = kGated ? static_cast<int>((k + kTileK - 1) / kTileK) : 0;

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(full + 8 * s, 32 * kGatherWarps);
      ptx::mbarrier_init(empty + 8 * s, kConsumerWarps);
    }
    for (int i = 0; i < 2; ++i) ptx::mbarrier_init(rows_ready + 8 * i, 1);
    ptx::mbarrier_init(gate_ready, 1);
    ptx::mbarrier_init(hidden_ready, kConsumerWarps);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();

  const int items = plan.totals[0];
  // The item of a round; one that does not exist repeats the first.
  const auto item_in = [&](int round) {
    const int position = deal(round, blockIdx.x, gridDim.x);
    return plan.items[position < items ? position : 0];
  };
  const auto token_at = [&](int64_t position) -> int64_t {
    return position >= m ? -1 : plan.tokens == nullptr ? position : plan.tokens[position];
  };

  if (warp < 4) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (warp < kGatherWarps) {
      if constexpr (kGated) {
        const uint32_t chunk = lane % 8;
        const uint32_t place[2] = {swizzle_128(lane / 8, chunk), swizzle_128(lane / 8 + 4, chunk)};
        const auto source = reinterpret_cast<const uint8_t*>(warp == 0 ? x : w_up);
        const uint32_t pitch = static_cast<uint32_t>(k) * 2;
        Ring ring;
        for (int round = 0; deal(round, blockIdx.x, gridDim.x) < items; ++round) {
          const Item item = item_of(item_in(round));
          // Tokens: all four groups. Neurons: half of each block, so every second group.
          const int first_group = warp == 0 ? 0 : kTokenGroups + warp - 1;
          const int step = warp == 0 ? 1 : 2;
          const int groups = warp == 0 ? kTokenGroups : item.last - item.first;
          const uint32_t* rows = shared.rows[round & 1] + first_group * kGroup + lane / 8 * 8;
          ptx::mbarrier_wait(rows_ready + 8 * (round & 1), round >> 1 & 1);
          uint4 row[kMaxGroups][2];  // this thread's rows of each group, kept while k advances
#pragma unroll
          for (int g = 0; g < kMaxGroups; ++g) {
            if (g < groups) {
              row[g][0] = reinterpret_cast<const uint4*>(rows + g * step * kGroup)[0];
              row[g][1] = reinterpret_cast<const uint4*>(rows + g * step * kGroup)[1];
            }
          }
          for (int kb = 0; kb < k_blocks; ++kb) {
            const uint32_t column = kb * kTileK + chunk * 8;
            const uint32_t bytes = column < k ? 16 : 0;
            const uint8_t* from = source + 2 * static_cast<uint64_t>(column);
            ptx::mbarrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
            uint32_t to = stages + ring.stage * kStageBytes + first_group * (kGroup * 128);
#pragma unroll
            for (int g = 0; g < kMaxGroups; ++g) {
              if (g < groups) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {  // fours of rows: even ones go to place[0], odd ones to place[1]
                  const uint32_t half = to + i * 2048;
                  ptx::cp_async_row_16(half + place[0], from, row[g][i].x, pitch, bytes);
                  ptx::cp_async_row_16(half + place[1], from, row[g][i].y, pitch, bytes);
                  ptx::cp_async_row_16(half + 1024 + place[0], from, row[g][i].z, pitch, bytes);
                  ptx::cp_async_row_16(half + 1024 + place[1], from, row[g][i].w, pitch, bytes);
                }
                to += step * (kGroup * 128);
              }
            }
            ptx::cp_async_mbarrier_arrive(full + 8 * ring.stage);
            ring.advance();
          }
        }
      }
    } else {
      const auto prepare_rows = [&](int round, const Item& item) {
        if (!kGated || deal(round, blockIdx.x, gridDim.x) >= items) return;
        const uint16_t* slots = plan.slots + static_cast<int64_t>(item.tile) * column_tiles * kColumnTile +
                                item.first * kBlockColumns;
        const int of_item = kTileM + (item.last - item.first) * kBlockColumns;
        uint32_t row[kRows / 32];
#pragma unroll
        for (int i = 0; i < kRows / 32; ++i) {
          const int r = 32 * i + lane;
          row[i] = 0;
          if (r < kTileM) {  // where there is no token, any will do: what comes of it is never written
            const int64_t token = token_at(static_cast<int64_t>(item.tile) * kTileM + r);
            row[i] = token >= 0 ? token : 0;
          } else if (r < of_item) {
            row[i] = slots[r - kTileM];
          }
        }
#pragma unroll
        for (int i = 0; i < kRows / 32; ++i) shared.rows[round & 1][32 * i + lane % 4 * 8 + lane / 4] = row[i];
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(rows_ready + 8 * (round & 1));
      };
      int2 next = item_in(0);
      prepare_rows(0, item_of(next));
      for (int round = 0; deal(round, blockIdx.x, gridDim.x) < items; ++round) {
        const Item item = item_of(next);
        next = item_in(round + 1);
        const int blocks = item.last - item.first;
        const int slot0 = item.first * kBlockColumns;
        for (uint32_t at = lane * 16; at < blocks * kPanelBytes; at += 512) {
          ptx::st_shared_v4(tile + at, make_uint4(0, 0, 0, 0));
        }
        __syncwarp();
        const auto put = [&](int row, int slot, uint16_t bits) {
          ptx::st_shared_u16(tile + slot / 64 * kPanelBytes + swizzle_128(row, slot % 64 / 8) + slot % 8 * 2, bits);
        };
        const uint16_t* offsets =
            plan.offsets + (static_cast<int64_t>(item.tile) * (column_tiles + 1) + item.index) * kTileM;
        bool any_long = false;
        for (int row0 = 0; row0 < kTileM; row0 += 32) {
          const uint32_t begin = offsets[row0 + lane];
          const uint32_t end = offsets[kTileM + row0 + lane];
          // Eight lanes to a row, four rows at a time: the first eight nonzeros of all rows, the next eight, ...
          const uint32_t* lists = plan.lists + (static_cast<int64_t>(item.tile) * kTileM + row0) * kRowCapacity;
          const uint32_t longest = __reduce_max_sync(~0u, end - begin);
          for (uint32_t first = lane % 8; first < longest + lane % 8; first += 8) {
            uint32_t word[8];
            bool valid[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              const int row = 4 * i + lane / 8;
              const uint32_t at = __shfl_sync(~0u, begin, row) + first;
              valid[i] = at < __shfl_sync(~0u, end, row);
              word[i] = valid[i] ? (lists + row * kRowCapacity)[at] : 0;
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              if (valid[i]) put(row0 + 4 * i + lane / 8, (word[i] & 0xffff) - slot0, word[i] >> 16);
            }
          }
          any_long |= __any_sync(~0u, begin == kLongRow);
        }
        if (any_long) {  // all long rows of the tile together, from the packed form
          const int64_t tile_words = static_cast<int64_t>(item.tile) * column_tiles * 8;
          const uint16_t* neurons = plan.slots + tile_words * 32;
          const int first_tile = neurons[slot0] / kColumnTile;
          const int tiles = neurons[item.last * kBlockColumns - 1] / kColumnTile - first_tile + 1;
          for_each_quad(
              packed, n, words_per_tile, column_tiles, kTileM, first_tile, tiles, lane,
              [&](int row) {
                return offsets[row] == kLongRow ? token_at(static_cast<int64_t>(item.tile) * kTileM + row) : -1;
              },
              [&](int row, const uint4& four, uint32_t valid) {
                for_each_word(four, valid, [&](uint32_t entry) {
                  const uint32_t column = entry & 0xffff;
                  const uint32_t word = plan.mask[tile_words + column / 32];
                  const int slot = plan.prefix[tile_words + column / 32] +
                                   __popc(word & ((1u << column % 32) - 1)) - slot0;
                  if (slot >= 0 && slot < blocks * kBlockColumns) put(row, slot, entry >> 16);
                });
              });
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(gate_ready);
        prepare_rows(round + 1, item_of(next));
        ptx::mbarrier_wait(hidden_ready, round & 1);
        if (lane == 0) {
          for (int b = 0; b < blocks; ++b) {
            ptx::tma_store_2d(&h_map, tile + b * kPanelBytes, slot0 + b * kBlockColumns, item.tile * kTileM);
          }
          ptx::bulk_commit_group();
          float sum = 0.0f;
          for (int w = 0; w < kConsumerWarps; ++w) sum += shared.l1[w];
          l1_partials[static_cast<int64_t>(item.tile) * column_tiles + item.index] = sum;
          ptx::bulk_wait_group_read<0>();
        }
        __syncwarp();
      }
      __threadfence();
    }
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    Ring ring;
    uint32_t parity = 0;
    for (int round = 0; deal(round, blockIdx.x, gridDim.x) < items; ++round, parity ^= 1) {
      const Item item = item_of(item_in(round));
      float l1;
      switch (item.last - item.first) {
        case 1:
          l1 = multiply_item<1, kGated>(ring, k_blocks, stages, tile, full, empty, gate_ready, parity, warp, lane);
          break;
        case 2:
          l1 = multiply_item<2, kGated>(ring, k_blocks, stages, tile, full, empty, gate_ready, parity, warp, lane);
          break;
        case 3:
          l1 = multiply_item<3, kGated>(ring, k_blocks, stages, tile, full, empty, gate_ready, parity, warp, lane);
          break;
        default:
          l1 = multiply_item<4, kGated>(ring, k_blocks, stages, tile, full, empty, gate_ready, parity, warp, lane);
      }
      for (int offset = 16; offset > 0; offset /= 2) l1 += __shfl_xor_sync(~0u, l1, offset);
      if (lane == 0) shared.l1[warp - 4] = l1;
      ptx::fence_proxy_async();
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(hidden_ready);
    }
  }

  // l1: the last CTA adds what all have written, always in the same order.
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    shared.last = atomicAdd(plan.totals + 2, 1) == static_cast<int>(gridDim.x) - 1;
  }
  __syncthreads();
  if (!shared.last) return;
  __threadfence();
  float sum = 0.0f;
  const int64_t tiles = (m + kTileM - 1) / kTileM;
  for (int64_t t = threadIdx.x; t < tiles; t += kThreads) {
    const int of = items_of(blocks_of(plan.sizes[t]));
    for (int i = 0; i < of; ++i) sum += __ldcg(l1_partials + t * column_tiles + i);
  }
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  if (lane == 0) shared.l1_warps[warp] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    float all = 0.0f;
    for (int w = 0; w < kThreads / 32; ++w) all += shared.l1_warps[w];
    *l1_out = all;
    for (int i = 0; i < 3; ++i) plan.totals[i] = 0;  // as they were found
  }
}

}  // namespace

cudaError_t tile_up(const void* x, const void* w_up, int64_t m, int64_t k, int64_t n, int words_per_tile,
                    const Packed& packed, const TilePlan& plan, void* h, float* l1_partials, float* l1,
                    cudaStream_t stream) {
  int count = 0;
  cudaError_t error = multiprocessors(&count);
  if (error != cudaSuccess) return error;
  CUtensorMap h_map;
  error = tensor_map(&h_map, h, ceil_div(m, kTokenTile) * kTokenTile, n, kTileM);
  if (error != cudaSuccess) return error;
  const auto kernel = w_up != nullptr ? tile_up_kernel<true> : tile_up_kernel<false>;
  return launch_early(kernel, count, kThreads, kSharedBytes, 1, stream, static_cast<const __nv_bfloat16*>(x),
                      static_cast<const __nv_bfloat16*>(w_up), h_map, m, k, n, words_per_tile, packed, plan,
                      l1_partials, l1);
}

}  // namespace sparsellm
