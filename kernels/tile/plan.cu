// tile_plan: for each token tile the neurons that fire in it, ascending, and the nonzeros of its tokens in terms of
// them; then, by the last CTA to finish, the order of the tiles (fullest first) and the items of the up product.
// Integers only. The order of equally full tiles may differ between runs; no result depends on it.
#include "common/host.h"
#include "tile/plan.cuh"

namespace sparsellm {
namespace {

constexpr int kPlanThreads = 512;
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

static_assert(kMaxBlocks / kItemBlocks <= 256, "an item's index fits a byte");

__global__ void __launch_bounds__(kPlanThreads)
    tile_plan_kernel(const Packed packed, int64_t m, int64_t n, int words_per_tile, const TilePlan plan) {
  __shared__ uint32_t mask[kMaxMaskWords];
  __shared__ uint16_t prefix[kMaxMaskWords];
  __shared__ uint8_t item_of_block[kMaxBlocks];
  __shared__ uint32_t warp_sums[kPlanWarps];
  __shared__ uint32_t cursor[kMaxBlocks + 1];  // how many tiles have this many blocks; then the first's position
  __shared__ uint32_t items_before[kMaxBlocks + 1];
  __shared__ bool last;
  const int column_tiles = static_cast<int>((n + kColumnTile - 1) / kColumnTile);
  const int mask_words = column_tiles * 8;
  const int64_t tile = blockIdx.x;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();

  // A warp has kRows positions: lane r keeps the token of the r-th (-1: none) and how many nonzeros it has.
  constexpr int kRows = kTokenTile / kPlanWarps;
  const int row0 = warp * kRows;
  int64_t my_token = -1;
  int my_count = 0;
  if (lane < kRows) {
    const int64_t position = tile * kTokenTile + row0 + lane;
    if (position < m) {
      my_token = plan.tokens == nullptr ? position : plan.tokens[position];
      my_count = packed.row_counts[my_token];
    }
  }
  // Calls use(r, count, i, word) for each position that is no long row: its nonzeros 32 at a time (i = 0, 32, ... +
  // lane, until i exceeds the count), all lanes together. The loads of all the warp's rows are in flight at once.
  const auto for_each_row = [&](auto use) {
    int longest = my_count > kRowCapacity ? 0 : my_count;
    longest = __reduce_max_sync(~0u, longest);
    for (int first = 0; first <= longest; first += 32) {
      const int i = first + lane;
      uint32_t word[kRows];
      int count[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64_t token = __shfl_sync(~0u, my_token, r);
        count[r] = __shfl_sync(~0u, my_count, r);
        word[r] = count[r] <= kRowCapacity && i < count[r] ? plan.rows[token * kRowCapacity + i] : 0;
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (first <= count[r] && count[r] <= kRowCapacity) use(r, count[r], i, word[r]);
      }
    }
  };

  if (plan.tokens == nullptr) {
    for (int w = threadIdx.x; w < mask_words; w += kPlanThreads) mask[w] = packed.mask[tile * mask_words + w];
  } else {
    for (int w = threadIdx.x; w < mask_words; w += kPlanThreads) mask[w] = 0;
    __syncthreads();
    const auto add = [&](uint32_t word) {
      const uint32_t column = word & 0xffff, bit = 1u << column % 32;
      if ((mask[column / 32] & bit) == 0) atomicOr(&mask[column / 32], bit);
    };
    for_each_row([&](int, int count, int i, uint32_t word) {
      if (i < count) add(word);
    });
    if (__any_sync(~0u, my_count > kRowCapacity)) {  // the warp's long rows together, from the packed form
      for_each_quad(
          packed, n, words_per_tile, column_tiles, kRows, 0, column_tiles, lane,
          [&](int r) -> int64_t {
            const int64_t position = tile * kTokenTile + row0 + r;
            if (position >= m) return -1;
            const int64_t token = plan.tokens[position];
            return packed.row_counts[token] > kRowCapacity ? token : -1;
          },
          [&](int, const uint4& four, uint32_t valid) { for_each_word(four, valid, add); });
    }
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
  // The last block is filled up with its last neuron: no token's gate is there, so what is finite becomes zero.
  if (mine != 0 && before == size) {
    const uint16_t neuron = slots[size - 1];
    for (uint32_t s = size; s % kBlockColumns != 0; ++s) slots[s] = neuron;
  }

  // Each position's nonzeros with slots for columns, and where in them the items begin: both ascend.
  const int blocks = blocks_of(size);
  const int items = items_of(blocks);
  for (int b = threadIdx.x; b < blocks; b += kPlanThreads) item_of_block[b] = item_with(blocks, b);
  __syncthreads();
  uint16_t* offsets = plan.offsets + tile * (column_tiles + 1) * kTokenTile;
  int item[kRows];  // of the nonzero before
#pragma unroll
  for (int r = 0; r < kRows; ++r) item[r] = -1;
  for_each_row([&](int r, int count, int i, uint32_t word) {
    const int row = row0 + r;
    int mine = items;
    if (i < count) {
      const uint32_t column = word & 0xffff;
      const uint32_t slot = prefix[column / 32] + __popc(mask[column / 32] & ((1u << column % 32) - 1));
      plan.lists[(tile * kTokenTile + row) * kRowCapacity + i] = (word & 0xffff0000) | slot;
      mine = item_of_block[slot / kBlockColumns];
    }
    int previous = __shfl_up_sync(~0u, mine, 1);
    if (lane == 0) previous = item[r];
    item[r] = __shfl_sync(~0u, mine, 31);
    if (i <= count) {  // the lane behind the last nonzero closes the items that are left
      for (int j = previous + 1; j <= mine; ++j) offsets[j * kTokenTile + row] = i;
    }
  });
  for (uint32_t rest = __ballot_sync(~0u, my_count > kRowCapacity); rest != 0; rest &= rest - 1) {
    for (int i = lane; i <= items; i += 32) offsets[i * kTokenTile + row0 + __ffs(rest) - 1] = kLongRow;
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
    plan.order[position] = make_int2(t, of);
    for (int i = 0; i < items; ++i) plan.items[items_before[of] + position * items + i] = item_code(t, of, i);
  }
  if (threadIdx.x == 0) plan.totals[0] = items_so_far;
}

}  // namespace

cudaError_t tile_plan(const Packed& packed, int64_t m, int64_t n, int words_per_tile, const TilePlan& plan,
                      cudaStream_t stream) {
  return launch_early(tile_plan_kernel, ceil_div(m, kTokenTile), kPlanThreads, 0, 1, stream, packed, m, n,
                      words_per_tile, plan);
}

}  // namespace sparsellm
