// neuron_plan: sorts the nonzeros of a tile plan by neuron, because the gradients of the weights are sums over tokens.
// Neurons are ordered by frequency, most frequent first. Then the 128 neurons of a tile fire for about equally many
// tokens each, and a tile of rare neurons has few slots. The slots of a neuron tile are the tokens that fire at least
// one of its neurons, numbered in three groups like the slots of a token tile (tile/plan.cuh). In the example of
// TILE_ENGINE.md, with tiles of four neurons: neurons 5, 6, 1, 2 fire for 3, 2, 1, 1 tokens, so they are in this order,
// and the half {5, 6} has slots for tokens 0 to 3.
//
//   kernel     computes                                                                     work of a CTA
//   frequency  how many tokens fire each neuron                                             a token tile
//   rank       the order of the neurons                                                     128 neurons
//   mask       which tokens fire some neuron of each half tile                              a token tile
//   slots      the tokens of each neuron tile                                               a third of a neuron tile
//   count      how many nonzeros each token tile has in each block of each half             a token tile
//   starts     where each block starts; the pieces of all tiles, fullest first              a neuron tile, or pieces
//   place      each nonzero's index in the lists by neuron, and its place                   a token tile
//
// A token tile's nonzeros are contiguous in the lists. So the threads of its CTA take equal numbers of nonzeros,
// wherever blocks start, and each thread has several loads in flight.
//
// All arithmetic is on integers. The order of a block's nonzeros may differ between runs; no result depends on this
// order.
#include "common/host.h"
#include "tile/plan.cuh"

namespace sparsellm {
namespace {

constexpr int kPlanThreads = 1024;
constexpr int kRankNeurons = kPlanThreads / 8;  // neurons per CTA in the kernel `rank`
constexpr int kBuckets = 3 * kPlanThreads;      // of frequencies
constexpr int kMaxNeuronTiles = 65536 / kTileM;
static_assert(kMaxNeuronTiles <= kPlanThreads, "each neuron tile needs a thread");
constexpr int kMaxBlocks = 65536 / kBlockColumns;  // blocks of a token tile
constexpr int kSlotParts = 3;                      // CTAs per neuron tile in the kernel `slots`
constexpr int kShares = 128;                       // the work is divided into this many shares, about one per CTA of
                                                   // tile_weights
constexpr int kMinShare = 32;                      // minimum number of blocks in a share, because smaller tiles are not
                                                   // worth cutting
constexpr int kBatch = 4;                          // loads in flight per thread
// A half has slots in two groups: tokens that fire neurons of this half only, and tokens that fire neurons of both
// halves. In a group, the up to 128 tokens of a token tile have contiguous slots, which may begin anywhere in a block:
// slots 60 to 187 are in blocks 0, 1 and 2. So a token tile has nonzeros in at most three blocks of a group, and in at
// most six blocks of a half. Each of these six possible contributions to a block is a "part".
constexpr int kParts = 6;

// Calls use(i, load(i)) for i = first, first + stride, ... below `end`, with kBatch loads in flight per thread.
template <class Load, class Use>
__device__ __forceinline__ void in_batches(uint32_t first, uint32_t end, uint32_t stride, Load load, Use use) {
  using Loaded = decltype(load(first));
  for (; first < end; first += kBatch * stride) {
    Loaded loaded[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) loaded[i] = first + i * stride < end ? load(first + i * stride) : Loaded{};
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i * stride < end) use(first + i * stride, loaded[i]);
    }
  }
}

// Where a token tile's nonzeros are in the lists: those of the first half start at `begin`, those of the second half at
// `middle`.
struct Range {
  uint32_t begin, middle, end;
};

__device__ __forceinline__ Range list_of(const TilePlan& plan, int tile, int column_tiles) {
  const uint32_t* second = starts_of(plan, tile, 1, column_tiles);
  return {*starts_of(plan, tile, 0, column_tiles), *second, second[plan.tiles[tile].y]};
}

// Calls use(index in the lists, position within the tile, slot) for each nonzero of a token tile. Called by all threads
// of a CTA. Each warp has an equal, contiguous range of the nonzeros.
template <class Use>
__device__ __forceinline__ void for_each_nonzero(const TilePlan& plan, int tile, int column_tiles, Use use) {
  __shared__ uint32_t starts[2 * kMaxBlocks + 1];  // starts of the first half's blocks, then of the second half's, then
                                                   // the end
  const int blocks = plan.tiles[tile].y;
  // Loads as many starts as there can be, so as not to wait for `blocks`, which is also being loaded.
  for (int b = threadIdx.x; b <= column_tiles * 4; b += kPlanThreads) {
    const uint32_t first = starts_of(plan, tile, 0, column_tiles)[b];
    const uint32_t second = starts_of(plan, tile, 1, column_tiles)[b];
    if (b < blocks) starts[b] = first;
    if (b <= blocks) starts[blocks + b] = second;
  }
  __syncthreads();
  const uint32_t begin = starts[0], all = starts[2 * blocks] - begin;
  const uint32_t share = (all + kPlanThreads - 1) / kPlanThreads * 32;
  const uint32_t first = begin + threadIdx.x / 32 * share, end = begin + min((threadIdx.x / 32 + 1) * share, all);
  if (first >= end) return;
  int piece = 0;  // index in `starts` of the last block of a half that starts at or before `first`
  for (int above = 2 * blocks; above - piece > 1;) {
    const int middle = (piece + above) / 2;
    (starts[middle] <= first ? piece : above) = middle;
  }
  const auto load = [&](uint32_t at) { return plan.lists[at]; };
  in_batches(first + threadIdx.x % 32, end, 32, load, [&](uint32_t at, uint32_t word) {
    while (starts[piece + 1] <= at) ++piece;
    const int half = piece >= blocks, block = piece - half * blocks;
    const uint32_t place = word & 0xffff, row = place / kBlockColumns;
    use(at, half * kHalf + row, block * kBlockColumns + ((place / 8 ^ row) % 8) * 8 + place % 8);
  });
}

__global__ void __launch_bounds__(kPlanThreads, 2)
    frequency_kernel(const TilePlan plan, int column_tiles, int32_t* frequencies) {
  extern __shared__ uint32_t counts[];  // [slots] one byte each, because a neuron fires for at most 128 tokens of a
                                        // tile
  ptx::griddepcontrol_launch_dependents();
  for (int i = threadIdx.x; i < column_tiles * kColumnTile / 4; i += kPlanThreads) counts[i] = 0;
  __syncthreads();
  ptx::griddepcontrol_wait();
  for_each_nonzero(plan, blockIdx.x, column_tiles,
                   [&](uint32_t, uint32_t, uint32_t slot) { atomicAdd(&counts[slot / 4], 1u << slot % 4 * 8); });
  __syncthreads();
  const uint16_t* slots = plan.slots + static_cast<int64_t>(blockIdx.x) * column_tiles * kColumnTile;
  const int size = plan.tiles[blockIdx.x].x;
  const auto load = [&](int i) { return slots[i]; };
  in_batches(threadIdx.x, size, kPlanThreads, load, [&](int i, int neuron) {
    atomicAdd(frequencies + neuron, static_cast<int32_t>(counts[i / 4] >> i % 4 * 8 & 0xff));
  });
}

// Returns the sum of the values in all lower-numbered threads of the CTA, and sets `total` to the sum over all threads.
__device__ __forceinline__ uint32_t scan(uint32_t value, uint32_t* warp_sums, uint32_t& total) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t before = exclusive_scan(value, lane);
  if (lane == 31) warp_sums[warp] = before + value;
  __syncthreads();
  const uint32_t of_warp = warp_sums[lane], warps_before = exclusive_scan(of_warp, lane);
  total = __shfl_sync(~0u, warps_before + of_warp, 31);
  const uint32_t so_far = __shfl_sync(~0u, warps_before, warp);
  __syncthreads();
  return so_far + before;
}

// The bucket of a frequency. Buckets are numbered from frequent to rare. Each frequency below 256 has its own bucket.
// Larger ones share a bucket if their eight leading bits are equal, for example 256 and 257: the neurons of a tile need
// not be ordered more exactly.
__device__ __forceinline__ int bucket_of(int frequency) {
  static_assert(kMaxSplitTokens < 1 << 22 && kBuckets > 22 << 7, "each frequency must have a bucket");
  const int bits = __float_as_int(static_cast<float>(frequency)) >> 16;  // the exponent, and the seven bits after it
  return kBuckets - 1 - (frequency == 0 ? 0 : bits - (127 << 7) + 1);
}

// A neuron's rank is the number of neurons in earlier buckets, plus the number of lower-numbered neurons in its own
// bucket. Each CTA counts all neurons, and ranks kRankNeurons of them, with eight lanes per neuron. N is a multiple of
// 8.
__global__ void __launch_bounds__(kPlanThreads, 2) rank_kernel(int n, const NeuronPlan out) {
  __shared__ uint32_t lower[kBuckets], others[kBuckets], warp_sums[32];  // lower: numbered lower than this CTA's
  __shared__ int buckets[kRankNeurons];                                  // of this CTA's neurons
  ptx::griddepcontrol_launch_dependents();
  for (int i = threadIdx.x; i < kBuckets; i += kPlanThreads) lower[i] = others[i] = 0;
  __syncthreads();
  ptx::griddepcontrol_wait();
  const int first = blockIdx.x * kRankNeurons;
  const auto load = [&](int pair) { return reinterpret_cast<const int2*>(out.frequencies)[pair]; };
  in_batches(threadIdx.x, n / 2, kPlanThreads, load, [&](int pair, int2 frequencies) {
    const int one = bucket_of(frequencies.x), other = bucket_of(frequencies.y);
    uint32_t* counts = 2 * pair < first ? lower : others;
    atomicAdd(counts + one, 1u);
    atomicAdd(counts + other, 1u);
    if (static_cast<uint32_t>(2 * pair - first) < kRankNeurons) {
      buckets[2 * pair - first] = one;
      buckets[2 * pair - first + 1] = other;
    }
  });
  __syncthreads();
  constexpr int kEach = kBuckets / kPlanThreads;
  uint32_t sum = 0, total;
#pragma unroll
  for (int i = 0; i < kEach; ++i) sum += lower[kEach * threadIdx.x + i] + others[kEach * threadIdx.x + i];
  uint32_t before = scan(sum, warp_sums, total);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {  // afterwards, `lower` has the rank of the bucket's first neuron of this CTA
    const int bucket = kEach * threadIdx.x + i;
    const uint32_t of_lower = lower[bucket];
    lower[bucket] = before + of_lower;
    before += of_lower + others[bucket];
  }
  __syncthreads();
  const int mine = threadIdx.x / 8, lane = threadIdx.x % 8;
  if (first + mine >= n) return;  // whole warps, which have four neurons each
  const int bucket = buckets[mine];
  int rank = 0;
  for (int other = lane; other < mine; other += 8) rank += buckets[other] == bucket;
#pragma unroll
  for (int offset = 1; offset < 8; offset *= 2) rank += __shfl_xor_sync(~0u, rank, offset);
  rank += lower[bucket];
  if (lane == 0) {
    out.ranks[first + mine] = rank;
    out.neurons[rank] = first + mine;
  }
}

// Finds which tokens of a token tile fire at least one neuron of each half of each neuron tile. Also writes to `places`
// the rank of each nonzero's neuron, for the kernels `count` and `place`.
__global__ void __launch_bounds__(kPlanThreads, 2)
    mask_kernel(const TilePlan plan, int column_tiles, int halves, const NeuronPlan out) {
  extern __shared__ uint32_t masks[];  // [halves][4], followed by the rank of each slot's neuron
  uint16_t* ranks = reinterpret_cast<uint16_t*>(masks + 4 * halves);
  ptx::griddepcontrol_launch_dependents();
  for (int i = threadIdx.x; i < 4 * halves; i += kPlanThreads) masks[i] = 0;
  ptx::griddepcontrol_wait();
  const uint16_t* slots = plan.slots + static_cast<int64_t>(blockIdx.x) * column_tiles * kColumnTile;
  const int size = plan.tiles[blockIdx.x].x;
  const auto load = [&](int i) { return out.ranks[slots[i]]; };
  in_batches(threadIdx.x, size, kPlanThreads, load, [&](int i, int rank) { ranks[i] = rank; });
  __syncthreads();
  for_each_nonzero(plan, blockIdx.x, column_tiles, [&](uint32_t at, uint32_t position, uint32_t slot) {
    const uint32_t rank = ranks[slot], bit = 1u << position % 32;
    uint32_t* word = masks + rank / kHalf * 4 + position / 32;
    if ((*word & bit) == 0) atomicOr(word, bit);
    out.places[at] = rank;
  });
  __syncthreads();
  for (int i = threadIdx.x; i < 4 * halves; i += kPlanThreads) {
    out.masks[(static_cast<int64_t>(i / 4) * gridDim.x + blockIdx.x) * 4 + i % 4] = masks[i];
  }
}

// The tokens of a mask's word that are in one group: they fire neurons of the first half only (`which` is 0), of both
// halves (1), or of the second half only (2). first, second: the same word of both halves' masks.
__device__ __forceinline__ uint32_t group_of(uint32_t first, uint32_t second, int which) {
  return which == 0 ? first & ~second : which == 1 ? first & second : second & ~first;
}

// The group (0, 1 or 2) of the token that has bit `bit` in the word.
__device__ __forceinline__ int which_of(uint32_t first, uint32_t second, uint32_t bit) {
  return (first & bit) == 0 ? 2 : (second & bit) == 0 ? 0 : 1;
}

// Counts the tokens of each group in all words (`sizes`), and in the words before `begin` (`earlier`). Called by all
// threads of a CTA.
__device__ __forceinline__ void count_groups(const uint32_t* first, const uint32_t* second, int words, int begin,
                                             uint32_t (&sizes)[3], uint32_t (&earlier)[3]) {
  uint32_t mine[3] = {}, mine_earlier[3] = {};
#pragma unroll 4
  for (int w = threadIdx.x; w < words; w += kPlanThreads) {
    const uint32_t of_first = first[w], of_second = second[w];
#pragma unroll
    for (int which = 0; which < 3; ++which) {
      const uint32_t count = __popc(group_of(of_first, of_second, which));
      mine[which] += count;
      if (w < begin) mine_earlier[which] += count;
    }
  }
#pragma unroll
  for (int which = 0; which < 3; ++which) {
    const uint32_t of_warp = __reduce_add_sync(~0u, mine[which]);
    const uint32_t earlier_of_warp = __reduce_add_sync(~0u, mine_earlier[which]);
    if (threadIdx.x % 32 == 0) {
      atomicAdd(&sizes[which], of_warp);
      atomicAdd(&earlier[which], earlier_of_warp);
    }
  }
  __syncthreads();
}

// Computes the slots of a neuron tile. kSlotParts CTAs share a tile: each counts the tokens in all words of the tile's
// masks, but numbers only the tokens in its own words.
__global__ void __launch_bounds__(kPlanThreads, 2)
    slots_kernel(const TilePlan plan, int token_tiles, const NeuronPlan out) {
  __shared__ uint32_t warp_sums[32], sizes[3], earlier[3];  // tokens of each group: in all words, in the words before
                                                            // this CTA's
  __shared__ uint32_t first_words[kPlanThreads], second_words[kPlanThreads], starts[3][kPlanThreads];
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x < 3) sizes[threadIdx.x] = earlier[threadIdx.x] = 0;
  __syncthreads();
  ptx::griddepcontrol_wait();
  const int tile = blockIdx.x / kSlotParts, part = blockIdx.x % kSlotParts, words = token_tiles * 4;
  const int begin = words * part / kSlotParts, end = words * (part + 1) / kSlotParts;
  const uint32_t* first = out.masks + static_cast<int64_t>(tile) * 2 * words;
  const uint32_t* second = first + words;
  count_groups(first, second, words, begin, sizes, earlier);
  const uint32_t size = sizes[0] + sizes[1] + sizes[2];
  uint32_t so_far[3] = {earlier[0], sizes[0] + earlier[1], sizes[0] + sizes[1] + earlier[2]};
  int32_t* slots = out.slots + static_cast<int64_t>(tile) * token_tiles * kTokenTile;
  for (int from = begin; from < end; from += kPlanThreads) {
    const int w = from + threadIdx.x;
    const uint32_t of_first = w < end ? first[w] : 0, of_second = w < end ? second[w] : 0;
    first_words[threadIdx.x] = of_first;
    second_words[threadIdx.x] = of_second;
#pragma unroll
    for (int which = 0; which < 3; ++which) {
      uint32_t total;
      const uint32_t start = so_far[which] + scan(__popc(group_of(of_first, of_second, which)), warp_sums, total);
      starts[which][threadIdx.x] = start;
      if (w < end) out.before[(static_cast<int64_t>(tile) * 3 + which) * words + w] = start;
      so_far[which] += total;
    }
    __syncthreads();
    const int lane = threadIdx.x % 32;
    const uint32_t bit = 1u << lane;
    const auto load = [&](int i) {
      const int position = 32 * (from + i) + lane;
      return ((first_words[i] | second_words[i]) & bit) == 0 || plan.tokens == nullptr ? position
                                                                                       : plan.tokens[position];
    };
    in_batches(threadIdx.x / 32, min(end - from, kPlanThreads), kPlanThreads / 32, load, [&](int i, int token) {
      if (((first_words[i] | second_words[i]) & bit) == 0) return;
      const int which = which_of(first_words[i], second_words[i], bit);
      const uint32_t slot = starts[which][i] + __popc(group_of(first_words[i], second_words[i], which) & (bit - 1));
      slots[slot] = token;
      // The empty slots of the last block name the last token. They have no nonzeros, so that token's row is multiplied
      // by zeros.
      if (slot == size - 1) {
        for (uint32_t s = size; s % kBlockColumns != 0; ++s) slots[s] = token;
      }
    });
    __syncthreads();
  }
  if (part == 0 && threadIdx.x == 0) {
    const int blocks = blocks_of(size);
    out.tiles[tile] =
        make_int4(size, blocks, blocks_of(sizes[0] + sizes[1]), sizes[0] == size ? blocks : sizes[0] / kBlockColumns);
  }
}

// The block to which part `part` of a token tile belongs; part / kParts is the number of the half tile. Parts 0 to 2 of
// a half are consecutive blocks of the group of this half only, beginning with the block of the token tile's first
// slot. Parts 3 to 5 are the same for the group of both halves. before: the token tile's first word of the first row of
// NeuronPlan::before; words: from each row to the next.
__device__ __forceinline__ int block_of(const uint32_t* before, int64_t words, int part) {
  const int half = part / kParts, which = part % kParts >= 3 ? 1 : half % 2 * 2;
  return before[(half / 2 * 3 + which) * words] / kBlockColumns + part % 3;
}

// Counts a token tile's nonzeros in each part, and reserves list entries for them in each block. Writes to `at`, for
// each nonzero: its number within the part << 16 | the part << 8 | its slot within the block.
__global__ void __launch_bounds__(kPlanThreads, 2)
    count_kernel(const TilePlan plan, int column_tiles, int halves, const NeuronPlan out) {
  extern __shared__ uint32_t parts[];         // [halves][kParts] number of nonzeros
  uint32_t* masks = parts + halves * kParts;  // [halves][4] this token tile's words of the masks
  uint32_t* before = masks + halves * 4;      // [halves / 2][3][4] this token tile's words of `before`
  ptx::griddepcontrol_launch_dependents();
  for (int i = threadIdx.x; i < halves * kParts; i += kPlanThreads) parts[i] = 0;
  ptx::griddepcontrol_wait();
  const int token_tiles = gridDim.x, words = token_tiles * 4, w0 = blockIdx.x * 4;
  const Range list = list_of(plan, blockIdx.x, column_tiles);
  for (int i = threadIdx.x; i < halves * 4; i += kPlanThreads) {
    masks[i] = out.masks[static_cast<int64_t>(i / 4) * words + w0 + i % 4];
  }
  for (int i = threadIdx.x; i < halves * 6; i += kPlanThreads) {
    before[i] = out.before[static_cast<int64_t>(i / 4) * words + w0 + i % 4];
  }
  __syncthreads();
  const auto load = [&](uint32_t at) { return make_uint2(plan.lists[at], out.places[at]); };
  in_batches(list.begin + threadIdx.x, list.end, kPlanThreads, load, [&](uint32_t at, uint2 word_and_rank) {
    const uint32_t row = (word_and_rank.x & 0xffff) / kBlockColumns, rank = word_and_rank.y;
    const uint32_t position = at < list.middle ? row : kHalf + row, w = position / 32, bit = 1u << position % 32;
    const int tile = rank / kTileM;
    const uint32_t first = masks[tile * 8 + w], second = masks[tile * 8 + 4 + w];
    const int which = which_of(first, second, bit);
    const uint32_t* of_group = before + (tile * 3 + which) * 4;
    const uint32_t token_slot = of_group[w] + __popc(group_of(first, second, which) & (bit - 1));
    const int part = (which == 1 ? 3 : 0) + token_slot / kBlockColumns - of_group[0] / kBlockColumns;
    const uint32_t number = atomicAdd(&parts[rank / kHalf * kParts + part], 1u);
    out.at[at] = number << 16 | part << 8 | token_slot % kBlockColumns;  // the number is less than 64 * 64
  });
  __syncthreads();
  for (int i = threadIdx.x; i < halves * kParts; i += kPlanThreads) {
    if (parts[i] == 0) continue;
    const int block = block_of(before, 4, i);
    out.bases[static_cast<int64_t>(blockIdx.x) * halves * kParts + i] =
        atomicAdd(out.counts + static_cast<int64_t>(i / kParts) * token_tiles * 2 + block, parts[i]);
  }
}

// Cuts tiles into pieces. A tile with more blocks than a share is cut into pieces of at most half a share, so that all
// CTAs finish at about the same time. An example with 1,000 blocks in total and 8 column tiles: a share is 1,000 * 8 /
// 128 = 63 blocks, a tile of 60 blocks is one piece, and a tile of 70 blocks is three pieces of 23 or 24 blocks.
__device__ __forceinline__ void cut_into_pieces(int tiles, int column_tiles, const NeuronPlan& out,
                                                uint32_t* warp_sums) {
  __shared__ int parts_of[kMaxNeuronTiles], sizes[kMaxNeuronTiles];
  uint32_t blocks_of_all, pieces_of_all;
  int parts = 0, size = 0;  // number of pieces of this thread's tile, and blocks of the largest piece
  Tile mine = {};
  if (threadIdx.x < tiles) {
    const int4 code = out.tiles[threadIdx.x];
    mine = {static_cast<int>(threadIdx.x), code.x, code.z, code.w};
  }
  scan(mine.blocks(), warp_sums, blocks_of_all);
  if (threadIdx.x < tiles) {
    const int64_t units = static_cast<int64_t>(blocks_of_all) * column_tiles;
    const int share = max(static_cast<int>((units + kShares - 1) / kShares), kMinShare), most = (share + 1) / 2;
    parts = mine.blocks() <= share ? 1 : (mine.blocks() + most - 1) / most;
    size = (mine.blocks() + parts - 1) / parts;
    parts_of[threadIdx.x] = parts;
    sizes[threadIdx.x] = size;
  }
  const int base = scan(parts > 1 ? parts : 0, warp_sums, pieces_of_all);
  scan(parts, warp_sums, pieces_of_all);
  if (threadIdx.x < tiles) {
    int position = 0;
    for (int other = 0; other < tiles; ++other) {
      if (sizes[other] > size || (sizes[other] == size && other < threadIdx.x)) position += parts_of[other];
    }
    for (int part = 0; part < parts; ++part) {
      const int first = mine.blocks() * part / parts, end = mine.blocks() * (part + 1) / parts;
      out.order[position + part] = piece_code({mine, first, end, part, parts, base});
    }
  }
  if (threadIdx.x == 0) out.totals[kPieces] = pieces_of_all;
}

// Computes where each block's nonzeros start in the lists by neuron. The grid has one CTA more than there are tiles:
// the last CTA cuts the tiles into pieces.
__global__ void __launch_bounds__(kPlanThreads, 2)
    starts_kernel(int token_tiles, int column_tiles, const NeuronPlan out) {
  __shared__ uint32_t warp_sums[32];
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int tile = blockIdx.x, tiles = gridDim.x - 1, per_half = token_tiles * 2;
  if (tile == tiles) {
    cut_into_pieces(tiles, column_tiles, out, warp_sums);
    return;
  }
  uint32_t earlier = 0, so_far;  // nonzeros of all earlier tiles, whose lists come before this tile's list
#pragma unroll 4
  for (int i = threadIdx.x; i < tile * kTileM; i += kPlanThreads) earlier += out.frequencies[out.neurons[i]];
  scan(earlier, warp_sums, so_far);
  const uint4* counts = reinterpret_cast<const uint4*>(out.counts + static_cast<int64_t>(tile) * 2 * per_half);
  uint32_t* starts = out.starts + static_cast<int64_t>(tile) * 2 * (per_half + 1);
  for (int from = 0; from < 2 * per_half; from += 4 * kPlanThreads) {
    const int at = from + 4 * threadIdx.x;  // index of a block: those of the first half come first, then those of the
                                            // second half
    const uint4 four = at < 2 * per_half ? counts[at / 4] : make_uint4(0, 0, 0, 0);
    const uint32_t of_block[4] = {four.x, four.y, four.z, four.w};
    uint32_t total, start = so_far + scan(four.x + four.y + four.z + four.w, warp_sums, total);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int block = at + i;
      if (block < 2 * per_half) starts[block < per_half ? block : block + 1] = start;
      if (block == per_half) starts[per_half] = start;  // the end of the first half
      start += of_block[i];
    }
    so_far += total;
  }
  if (threadIdx.x == 0) starts[2 * per_half + 1] = so_far;
}

// Overwrites `at` (written by `count`) with each nonzero's index in the lists by neuron, and `places` (written by
// `mask`) with its place.
__global__ void __launch_bounds__(kPlanThreads, 2)
    place_kernel(const TilePlan plan, int column_tiles, int halves, const NeuronPlan out) {
  extern __shared__ uint32_t parts[];  // [halves][kParts] the index in the lists by neuron where this token tile's
                                       // nonzeros of each part start
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int token_tiles = gridDim.x, per_half = token_tiles * 2 + 1;
  const Range list = list_of(plan, blockIdx.x, column_tiles);
  const uint32_t* bases = out.bases + static_cast<int64_t>(blockIdx.x) * halves * kParts;
  for (int i = threadIdx.x; i < halves * kParts; i += kPlanThreads) {  // `bases` is undefined for parts without
                                                                       // nonzeros, whose start is not used
    const int block = min(block_of(out.before + blockIdx.x * 4, token_tiles * 4, i), per_half - 1);
    parts[i] = out.starts[static_cast<int64_t>(i / kParts) * per_half + block] + bases[i];
  }
  __syncthreads();
  const auto load = [&](uint32_t at) { return make_uint2(out.at[at], out.places[at]); };
  in_batches(list.begin + threadIdx.x, list.end, kPlanThreads, load, [&](uint32_t at, uint2 code_and_rank) {
    const uint32_t code = code_and_rank.x, rank = code_and_rank.y;
    out.at[at] = parts[rank / kHalf * kParts + (code >> 8 & 0xff)] + (code >> 16);
    out.places[at] = place_of(rank % kHalf, code & 0xff);
  });
}

}  // namespace

cudaError_t neuron_plan(const TilePlan& plan, int64_t m, int64_t k, int64_t n, const NeuronPlan& out,
                        cudaStream_t stream) {
  if (m > kMaxSplitTokens) return cudaErrorInvalidValue;
  const int token_tiles = static_cast<int>(ceil_div(m, kTokenTile));
  const int column_tiles = static_cast<int>(ceil_div(n, kColumnTile));
  const int neuron_tiles = static_cast<int>(ceil_div(n, kTileM)), halves = 2 * neuron_tiles;
  const uint32_t part_bytes = halves * kParts * 4, slot_bytes = column_tiles * kColumnTile;  // one byte per slot
  cudaError_t error = cudaSuccess;
  const auto then = [&](auto kernel, int64_t grid, int threads, uint32_t bytes, auto... arguments) {
    if (error == cudaSuccess) error = launch_early(kernel, grid, threads, bytes, 1, stream, arguments...);
  };
  then(frequency_kernel, token_tiles, kPlanThreads, slot_bytes, plan, column_tiles, out.frequencies);
  then(rank_kernel, ceil_div(n, kRankNeurons), kPlanThreads, 0, static_cast<int>(n), out);
  then(mask_kernel, token_tiles, kPlanThreads, halves * 16 + 2 * slot_bytes, plan, column_tiles, halves, out);
  then(slots_kernel, neuron_tiles * kSlotParts, kPlanThreads, 0, plan, token_tiles, out);
  then(count_kernel, token_tiles, kPlanThreads, part_bytes + halves * 40, plan, column_tiles, halves, out);
  then(starts_kernel, neuron_tiles + 1, kPlanThreads, 0, token_tiles, static_cast<int>(ceil_div(k, kTileN)), out);
  then(place_kernel, token_tiles, kPlanThreads, part_bytes, plan, column_tiles, halves, out);
  return error;
}

}  // namespace sparsellm
