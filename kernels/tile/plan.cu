// tile_plan: for each token tile the neurons that fire in it, ascending, and its nonzeros as a list; then, by the last
// CTA to finish, the order of the tiles (fullest first) and the items of the up product. Integers only. The order of
// equally full tiles may differ between runs; no result depends on it.
#include "common/host.h"
#include "tile/plan.cuh"

namespace sparsellm {
namespace {

constexpr int kPlanThreads = 1024;
constexpr int kPlanWarps = kPlanThreads / 32;
constexpr int kMaxMaskWords = 65536 / 32;
constexpr int kMaxBlocks = 65536 / kBlockColumns;

// Sum over the threads before this one; `total` over all.
__device__ uint32_t block_scan(uint32_t value, uint32_t* warp_sums, uint32_t& total) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t before = exclusive_scan(value, lane);
  if (lane == 31) warp_sums[warp] = before + value;
  __syncthreads();
  uint32_t sum = 0;
  total = 0;
  for (uint32_t w = 0; w < kPlanWarps; ++w) {
    if (w < warp) sum += warp_sums[w];
    total += warp_sums[w];
  }
  __syncthreads();
  return sum + before;
}

__global__ void __launch_bounds__(kPlanThreads)
    tile_plan_kernel(const Packed packed, int64_t m, int64_t n, int words_per_tile, const TilePlan plan) {
  __shared__ uint32_t mask[kMaxMaskWords];
  __shared__ uint16_t prefix[kMaxMaskWords];
  __shared__ uint32_t warp_sums[kPlanWarps];
  __shared__ uint32_t row_start[kTokenTile];
  __shared__ uint32_t cursor[kMaxBlocks + 1];  // how many tiles have this many blocks; then the first's position
  __shared__ uint32_t items_before[kMaxBlocks + 1];
  __shared__ bool last;
  const int column_tiles = static_cast<int>((n + kColumnTile - 1) / kColumnTile);
  const int mask_words = column_tiles * 8;
  const int64_t tile = blockIdx.x;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  // Every nonzero of the tile, a few rows to a warp.
  constexpr int kRows = kTokenTile / kPlanWarps;
  const auto token_at = [&](int row) -> int64_t {
    const int64_t position = tile * kTokenTile + row;
    return position >= m ? -1 : plan.tokens == nullptr ? position : plan.tokens[position];
  };
  const auto walk = [&](auto use) {
    for_each_quad(packed, n, words_per_tile, column_tiles, kRows, 0, column_tiles, lane,
                  [&](int row) { return token_at(warp * kRows + row); }, use);
  };

  if (plan.tokens == nullptr) {
    for (int w = threadIdx.x; w < mask_words; w += kPlanThreads) mask[w] = packed.mask[tile * mask_words + w];
  } else {
    for (int w = threadIdx.x; w < mask_words; w += kPlanThreads) mask[w] = 0;
    __syncthreads();
    walk([&](int, const uint4& four, uint32_t valid) {
      for_each_word(four, valid, [&](uint32_t word) {
        const uint32_t column = word & 0xffff, bit = 1u << column % 32;
        if ((mask[column / 32] & bit) == 0) atomicOr(&mask[column / 32], bit);
      });
    });
  }
  __syncthreads();

  const int per_thread = (mask_words + kPlanThreads - 1) / kPlanThreads;
  const int begin = threadIdx.x * per_thread;
  const int end = min(begin + per_thread, mask_words);
  uint32_t mine = 0, size;
  for (int w = begin; w < end; ++w) mine += __popc(mask[w]);
  uint32_t before = block_scan(mine, warp_sums, size);
  uint16_t* slots = plan.slots + tile * column_tiles * kColumnTile;
  for (int w = begin; w < end; ++w) {
    prefix[w] = before;
    plan.prefix[tile * mask_words + w] = before;
    if (plan.tokens != nullptr) plan.mask[tile * mask_words + w] = mask[w];
    for (uint32_t rest = mask[w]; rest != 0; rest &= rest - 1) slots[before++] = 32 * w + __ffs(rest) - 1;
  }
  if (threadIdx.x == 0) plan.sizes[tile] = size;
  // The last block is filled up with its last neuron: any would do, since no token's gate is there.
  if (mine != 0 && before == size) {
    const uint16_t neuron = slots[size - 1];
    for (uint32_t s = size; s % kBlockColumns != 0; ++s) slots[s] = neuron;
  }

  // The list: rows one after the other, each in the order of the walk.
  const int64_t token = threadIdx.x < kTokenTile ? token_at(threadIdx.x) : -1;
  uint32_t nonzeros;
  const uint32_t start = block_scan(token >= 0 ? packed.row_counts[token] : 0, warp_sums, nonzeros);
  if (threadIdx.x < kTokenTile) row_start[threadIdx.x] = start;
  __syncthreads();
  if (threadIdx.x == 0) {
    plan.list_sizes[tile] = nonzeros;
    if (nonzeros > kListCapacity) atomicAdd(reinterpret_cast<unsigned long long*>(packed.counters) + kOverflow, 1ull);
  }
  if (nonzeros <= kListCapacity) {
    uint2* list = plan.lists + tile * kListCapacity + row_start[warp * kRows];
    walk([&](int row, const uint4& four, uint32_t valid) {
      const uint32_t mine = __popc(valid);
      const uint32_t before = exclusive_scan(mine, lane);
      uint2* at = list + before;
      list += __shfl_sync(~0u, before + mine, 31);
      for_each_word(four, valid, [&](uint32_t word) {
        const uint32_t column = word & 0xffff;
        const uint32_t slot = prefix[column / 32] + __popc(mask[column / 32] & ((1u << column % 32) - 1));
        *at++ = make_uint2((word & 0xffff0000) | slot, warp * kRows + row);
      });
    });
  }

  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(plan.totals + 1, 1) == static_cast<int>(gridDim.x) - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();

  const int tiles = gridDim.x;
  for (int b = threadIdx.x; b <= kMaxBlocks; b += kPlanThreads) cursor[b] = 0;
  __syncthreads();
  unsigned long long in_union = 0;
  for (int t = threadIdx.x; t < tiles; t += kPlanThreads) {
    const int of = __ldcg(plan.sizes + t);
    in_union += of;
    atomicAdd(&cursor[blocks_of(of)], 1);
  }
  for (int offset = 16; offset > 0; offset /= 2) in_union += __shfl_xor_sync(~0u, in_union, offset);
  auto counter = reinterpret_cast<unsigned long long*>(packed.counters) + kUnion;
  if (threadIdx.x == 0) *counter = 0;
  __syncthreads();
  if (lane == 0) atomicAdd(counter, in_union);

  uint32_t tiles_so_far = 0, items_so_far = 0;
  for (int from = kMaxBlocks; from >= 0; from -= kPlanThreads) {  // fullest first
    const int b = from - static_cast<int>(threadIdx.x);
    const uint32_t count = b >= 0 ? cursor[b] : 0;
    uint32_t all_tiles, all_items;
    const uint32_t tiles_here = block_scan(count, warp_sums, all_tiles);
    const uint32_t items_here = block_scan(b >= 0 ? count * items_of(b) : 0, warp_sums, all_items);
    if (b >= 0) {
      cursor[b] = tiles_so_far + tiles_here;
      items_before[b] = items_so_far + items_here - (tiles_so_far + tiles_here) * items_of(b);
    }
    tiles_so_far += all_tiles;
    items_so_far += all_items;
  }
  __syncthreads();
  for (int t = threadIdx.x; t < tiles; t += kPlanThreads) {
    const int of = blocks_of(__ldcg(plan.sizes + t));
    const int items = items_of(of);
    const uint32_t position = atomicAdd(&cursor[of], 1);
    plan.order[position] = t;
    for (int i = 0; i < items; ++i) plan.items[items_before[of] + position * items + i] = t << 8 | i;
  }
  if (threadIdx.x == 0) plan.totals[0] = items_so_far;
}

}  // namespace

cudaError_t tile_plan(const Packed& packed, int64_t m, int64_t n, int words_per_tile, const TilePlan& plan,
                      cudaStream_t stream) {
  return launch(tile_plan_kernel, ceil_div(m, kTokenTile), kPlanThreads, 0, 1, stream, packed, m, n, words_per_tile,
                plan);
}

}  // namespace sparsellm
