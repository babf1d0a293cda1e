// tile_plan: for each token tile the neurons that fire in it and its nonzeros, block by block (tile/plan.cuh); then, by
// the last CTA to finish, the order of the tiles (fullest first) and the items of the up product.
//
// A tile's list is one piece of `lists`, taken when its size is known. Where all nonzeros together have no room there,
// no tile gets any blocks, and all is left to row_rest: no decision depends on which CTA comes first.
//
// Values are only moved. A block's nonzeros are sorted by warp, then by row: the same always. Where a list lies, and
// the order of equally full tiles, may differ between runs; no result depends on it.
#include "common/host.h"
#include "tile/plan.cuh"

namespace sparsellm {
namespace {

constexpr int kFewTiles = 256;
constexpr int kMaxBlocks = 65536 / kBlockColumns;

static_assert(kMaxBlocks < 0x8000, "blocks fit half of an item's word");

// What depends on n: everything that is per neuron or per block.
struct Tables {
  int words, blocks;
  uint32_t* masks;    // [2][words] neurons that the tile's first, second half fires
  uint32_t* starts;   // [2][blocks] where each half's blocks start within the tile's list
  uint16_t* slot_of;  // [neurons]
  uint16_t* before;   // [3][words] slots before each word: first half's own, both halves', second half's own neurons
  uint16_t* counts;   // [warps][blocks] nonzeros of each warp in each block; then those of the warps before it

  __host__ __device__ static int bytes(int column_tiles, int warps) {
    const int words = column_tiles * 8, blocks = column_tiles * 4;
    const int first = words * 14, then = warps * blocks * 2;
    return 2 * blocks * 4 + column_tiles * 512 + (first > then ? first : then);
  }

  __device__ Tables(void* memory, int column_tiles) : words(column_tiles * 8), blocks(column_tiles * 4) {
    starts = static_cast<uint32_t*>(memory);
    slot_of = reinterpret_cast<uint16_t*>(starts + 2 * blocks);
    masks = reinterpret_cast<uint32_t*>(slot_of + column_tiles * kColumnTile);
    before = reinterpret_cast<uint16_t*>(masks + 2 * words);
    counts = reinterpret_cast<uint16_t*>(masks);  // once there are slots, masks and before are not needed
  }

  // The neurons of word w that are the first half's own (0), both halves' (1), the second half's own (2).
  __device__ uint32_t group(int w, int which) const {
    const uint32_t first = masks[w], second = masks[words + w];
    return which == 0 ? first & ~second : which == 1 ? first & second : second & ~first;
  }
};

template <class T>
__device__ __forceinline__ T warp_scan(T value, uint32_t lane) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const T other = __shfl_up_sync(~0u, value, offset);
    if (lane >= offset) value += other;
  }
  return value;
}

// Sum over the threads before this one; `total` over all.
template <class T>
__device__ __forceinline__ T block_scan(T value, void* scratch, T& total) {
  T* warp_sums = static_cast<T*>(scratch);
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const T sum = warp_scan(value, lane);
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  const T of_warp = lane < blockDim.x / 32 ? warp_sums[lane] : 0, sums = warp_scan(of_warp, lane);
  total = __shfl_sync(~0u, sums, 31);
  const T before = __shfl_sync(~0u, sums - of_warp, warp);
  __syncthreads();
  return before + sum - value;
}

template <int kPlanThreads>
__global__ void __launch_bounds__(kPlanThreads, kPlanThreads == 512 ? 3 : 1)  // CTAs of an SM
    tile_plan_kernel(const Packed packed, int64_t m, int64_t n, const TilePlan plan) {
  constexpr int kPlanWarps = kPlanThreads / 32;
  constexpr int kHalfWarps = kPlanWarps / 2;      // that read the rows of a half
  constexpr int kRows = kTokenTile / kPlanWarps;  // of a warp
  extern __shared__ uint32_t dynamic[];
  __shared__ unsigned long long warp_sums[kPlanWarps];
  __shared__ uint32_t cursor[kMaxBlocks + 1];  // how many tiles have this many blocks; then the first's position
  __shared__ uint32_t items_before[kMaxBlocks + 1];
  __shared__ uint32_t nonzeros, list;  // of this tile: how many, and where its list starts
  __shared__ bool last;
  const int column_tiles = static_cast<int>((n + kColumnTile - 1) / kColumnTile);
  const Tables tables(dynamic, column_tiles);
  const int tile = blockIdx.x;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, below = (1u << lane) - 1;

  ptx::griddepcontrol_launch_dependents();
  for (int w = threadIdx.x; w < 2 * tables.words; w += kPlanThreads) tables.masks[w] = 0;
  if (threadIdx.x == 0) nonzeros = 0;
  __syncthreads();
  ptx::griddepcontrol_wait();

  // A warp has every eighth row of a half. Lane r keeps how many nonzeros its r-th row has, and where they are.
  const int half_of_warp = warp / kHalfWarps;
  const auto row_of = [&](int r) { return r * kHalfWarps + warp % kHalfWarps; };
  const int64_t all_nonzeros = packed.counters[kNonzeros];
  const uint32_t long_words = plan.totals[kLongWords];
  uint32_t my_start = 0;
  int my_count = 0;
  if (lane < kRows) {
    const int64_t position = static_cast<int64_t>(tile) * kTokenTile + half_of_warp * kHalf + row_of(lane);
    if (position < m) {
      const int64_t token = plan.tokens == nullptr ? position : plan.tokens[position];
      my_count = packed.row_counts[token];
      my_start = token * kRowCapacity;
      if (my_count > kRowCapacity) my_start = plan.rows[my_start + kRowCapacity - 1];
    }
  }
  const bool fits = all_nonzeros <= plan.capacity && long_words <= plan.long_capacity;
  if (!fits) my_count = 0;
  const uint32_t of_warp = __reduce_add_sync(~0u, my_count);
  if (lane == 0) atomicAdd(&nonzeros, of_warp);

  // Calls use(r, valid, word) with the nonzeros of the warp's rows, up to 32 of one row at a time, all lanes together
  // and always in the same order.
  const auto for_each_nonzero = [&](auto use) {
    constexpr int kBatch = 6;  // loads in flight in each lane
    for (int r = 0, first = 0; r < kRows;) {
      uint32_t word[kBatch];
      int of[kBatch], left[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        left[b] = 0;
        while (r < kRows && (left[b] = __shfl_sync(~0u, my_count, r) - first) <= 0) {
          ++r;
          first = 0;
        }
        of[b] = r;
        const uint32_t at = __shfl_sync(~0u, my_start, r) + first + lane;
        word[b] = static_cast<int>(lane) < left[b] ? plan.rows[at] : 0;
        first += 32;
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (left[b] > 0) use(of[b], static_cast<int>(lane) < left[b], word[b]);
      }
    }
  };

  uint32_t* half_mask = tables.masks + half_of_warp * tables.words;
  for_each_nonzero([&](int, bool valid, uint32_t word) {
    const uint32_t column = word & 0xffff, bit = 1u << column % 32;
    if (valid && (half_mask[column / 32] & bit) == 0) atomicOr(&half_mask[column / 32], bit);
  });
  __syncthreads();
  if (threadIdx.x == 0) list = atomicAdd(reinterpret_cast<uint32_t*>(plan.totals + kListWords), nonzeros);

  // Slots.
  constexpr int kBits = 21;  // three counts in one word
  const auto three = [&](int word) {
    return static_cast<unsigned long long>(__popc(tables.group(word, 2))) << 2 * kBits |
           static_cast<unsigned long long>(__popc(tables.group(word, 1))) << kBits | __popc(tables.group(word, 0));
  };
  const int per_thread = (tables.words + kPlanThreads - 1) / kPlanThreads;
  const int begin = threadIdx.x * per_thread;
  const int end = min(begin + per_thread, tables.words);
  unsigned long long mine = 0, all;
#pragma unroll 1
  for (int w = begin; w < end; ++w) mine += three(w);
  unsigned long long before = block_scan(mine, warp_sums, all);
  constexpr uint32_t kCount = (1u << kBits) - 1;
  const int own = all & kCount, shared = all >> kBits & kCount;
  const int size = own + shared + static_cast<int>(all >> 2 * kBits);
#pragma unroll 1
  for (int w = begin; w < end; ++w) {
    tables.before[w] = before & kCount;
    tables.before[tables.words + w] = own + (before >> kBits & kCount);
    tables.before[2 * tables.words + w] = own + shared + (before >> 2 * kBits);
    before += three(w);
  }
  __syncthreads();
  uint16_t* slots = plan.slots + static_cast<int64_t>(tile) * column_tiles * kColumnTile;
  for (uint32_t column = threadIdx.x; column < tables.words * 32; column += kPlanThreads) {
    const int w = column / 32;
    const int which = (tables.masks[w] >> lane & 1) == 0 ? 2 : tables.masks[tables.words + w] >> lane & 1;
    const uint32_t members = tables.group(w, which);
    if ((members >> lane & 1) == 0) continue;
    const uint32_t slot = tables.before[which * tables.words + w] + __popc(members & below);
    tables.slot_of[column] = slot;
    slots[slot] = column;
    // The last block is filled up with its last neuron: no token's gate is there, so nothing comes of it.
    if (slot == size - 1) {
      for (uint32_t s = size; s % kBlockColumns != 0; ++s) slots[s] = column;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kPlanWarps * tables.blocks; i += kPlanThreads) tables.counts[i] = 0;
  __syncthreads();

  // How many nonzeros each warp has in each block, where each block starts, and the nonzeros. Lanes with nonzeros in
  // one block are peers: the lowest counts for all.
  const int blocks = blocks_of(size);
  uint16_t* warp_counts = tables.counts + warp * tables.blocks;
  const auto for_each_place = [&](auto use) {
    for_each_nonzero([&](int r, bool valid, uint32_t word) {
      const uint32_t slot = valid ? tables.slot_of[word & 0xffff] : 0;
      const uint32_t block = valid ? slot / kBlockColumns : kMaxBlocks;
      const uint32_t peers = __match_any_sync(~0u, block);
      uint32_t nth = 0;
      if (valid && (peers & below) == 0) {
        nth = warp_counts[block];
        warp_counts[block] = nth + __popc(peers);
      }
      use(r, valid, word, slot, block, peers, nth);
      __syncwarp();
    });
  };
  for_each_place([](int, bool, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t) {});
  __syncthreads();
  uint32_t listed = 0;
  for (int half = 0; half < 2; ++half) {
    for (int first = 0; first < blocks; first += kPlanThreads) {
      const int b = first + threadIdx.x;
      uint32_t of_block = 0;
      if (b < blocks) {
        for (int w = half * kHalfWarps; w < (half + 1) * kHalfWarps; ++w) {
          const uint32_t count = tables.counts[w * tables.blocks + b];
          tables.counts[w * tables.blocks + b] = of_block;
          of_block += count;
        }
      }
      uint32_t of_all;
      const uint32_t start = listed + block_scan(of_block, warp_sums, of_all);
      if (b < blocks) tables.starts[half * tables.blocks + b] = start;
      listed += of_all;
    }
  }
  if (threadIdx.x == 0) {
    plan.tiles[tile] = make_int4(size, blocks, blocks_of(own + shared), own == size ? blocks : own / kBlockColumns);
  }
  __syncthreads();
  uint32_t* starts = plan.starts + static_cast<int64_t>(tile) * 2 * (tables.blocks + 1);
  for (int b = threadIdx.x; b <= blocks; b += kPlanThreads) {
    starts[b] = list + (b < blocks ? tables.starts[b] : blocks == 0 ? 0 : tables.starts[tables.blocks]);
    starts[tables.blocks + 1 + b] = list + (b < blocks ? tables.starts[tables.blocks + b] : listed);
  }
  const uint32_t* warp_starts = tables.starts + half_of_warp * tables.blocks;
  for_each_place([&](int r, bool valid, uint32_t word, uint32_t slot, uint32_t block, uint32_t peers, uint32_t nth) {
    nth = __shfl_sync(~0u, nth, __ffs(peers) - 1) + __popc(peers & below);
    if (!valid) return;
    plan.lists[list + warp_starts[block] + nth] =
        (word & 0xffff0000) | place_of(row_of(r), slot % kBlockColumns);
  });

  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(plan.totals + kPlanTickets, 1) == static_cast<int>(gridDim.x) - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();

  const int tiles = gridDim.x;
  for (int b = threadIdx.x; b <= tables.blocks; b += kPlanThreads) cursor[b] = 0;
  __syncthreads();
  unsigned long long in_union = 0, of_union;
  for (int t = threadIdx.x; t < tiles; t += kPlanThreads) {
    const int4 of = __ldcg(plan.tiles + t);
    in_union += of.x;
    atomicAdd(&cursor[of.y], 1);
  }
  block_scan(in_union, warp_sums, of_union);
  uint32_t tiles_so_far = 0, items_so_far = 0;
#pragma unroll 1
  for (int from = tables.blocks; from >= 0; from -= kPlanThreads) {  // fullest first
    const int b = from - static_cast<int>(threadIdx.x);
    const uint32_t count = b >= 0 ? cursor[b] : 0;
    uint32_t all_tiles, all_items;
    const auto tiles_here = block_scan(count, warp_sums, all_tiles);
    const auto items_here = block_scan<uint32_t>(b >= 0 ? count * items_of(b) : 0, warp_sums, all_items);
    if (b >= 0) {
      cursor[b] = tiles_so_far + tiles_here;
      items_before[b] = items_so_far + items_here - (tiles_so_far + tiles_here) * items_of(b);
    }
    tiles_so_far += all_tiles;
    items_so_far += all_items;
  }
  __syncthreads();
#pragma unroll 1
  for (int t = threadIdx.x; t < tiles; t += kPlanThreads) {
    const int4 of = __ldcg(plan.tiles + t);
    const int items = items_of(of.y);
    const uint32_t position = atomicAdd(&cursor[of.y], 1);
    plan.order[position] = make_int4(t, of.y, of.z, of.w);
    for (int i = 0; i < items; ++i) {
      plan.items[items_before[of.y] + position * items + i] = item_code({t, of.y, of.z, of.w}, i);
    }
  }
  if (threadIdx.x == 0) {
    const bool fits = packed.counters[kNonzeros] <= plan.capacity &&
                    static_cast<uint32_t>(plan.totals[kLongWords]) <= plan.long_capacity;
    plan.totals[kItems] = items_so_far;
    plan.totals[kRest] = fits ? 0 : 1;
    plan.totals[kPlanTickets] = plan.totals[kListWords] = plan.totals[kLongWords] = 0;
    if (fits) packed.counters[kUnion] = of_union;  // else that of the tiles of 128 tokens in a row stays
    if (!fits) packed.counters[kOverflow] += m;
  }
}

}  // namespace

cudaError_t tile_plan(const Packed& packed, int64_t m, int64_t n, const TilePlan& plan, cudaStream_t stream) {
  // With a tile for each multiprocessor or less, the fullest one is what takes time; else they fill one another's gaps.
  const int64_t tiles = ceil_div(m, kTokenTile);
  const int column_tiles = static_cast<int>(ceil_div(n, kColumnTile));
  const int threads = tiles > kFewTiles ? 512 : 1024;
  const auto kernel = threads == 512 ? tile_plan_kernel<512> : tile_plan_kernel<1024>;
  return launch_early(kernel, tiles, threads, Tables::bytes(column_tiles, threads / 32), 1, stream, packed, m, n,
                      plan);
}

}  // namespace sparsellm
