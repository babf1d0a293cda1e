// tile_plan: finds, for each token tile, the neurons that fire in it and its nonzeros, block by block (tile/plan.cuh).
// The CTA that finishes last then writes the order of the tiles, fullest first, and the work items of tile_up.
//
// A tile's list is a contiguous part of `lists`, which the tile reserves once it knows how many nonzeros it has. If the
// nonzeros of all tiles exceed the capacity of `lists`, the fullest tiles leave, so that as many as possible stay (of
// equally full tiles, the lowest-numbered ones): a tile that leaves gets no blocks, and the overflow path computes its
// tokens. So which tiles leave does not depend on which of them reserves its part first. If too many nonzeros are in
// long rows, pack_rows has stored only some of these rows, which may be others in the next run: every tile with a long
// row leaves. If too many are in wide segments, the same is true of the values that gate_pack has stored: every tile
// leaves.
//
// A CTA reads its tile's rows three times: to find which neurons fire; to count how many nonzeros each warp has in each
// block; and to write the nonzeros to the lists. A warp reads its rows as one sequence of quads (16 aligned bytes of a
// row), 32 quads at a time. If each lane read a row of its own instead, all lanes would wait for the longest row.
//
// Numerics: values are only moved. The nonzeros of a half's block are sorted by row modulo 8 (modulo 16 if the CTA has
// 1,024 threads), then by row, then by column, which is the same in every run. The location of a tile's list and the
// order of equally full tiles may differ between runs; no result depends on them.
#include "common/host.h"
#include "tile/plan.cuh"

namespace sparsellm {
namespace {

constexpr int kFewTiles = 256;  // up to this many token tiles, a CTA has 1,024 threads
constexpr int kMaxBlocks = 65536 / kBlockColumns;
constexpr int kStaticBytes = 4096;  // upper bound on static shared memory

static_assert(kMaxBlocks < 0x8000, "a block number must fit in half of an item's word");

// The arrays in dynamic shared memory: their sizes depend on n, because they have entries per neuron or per block.
struct Tables {
  int blocks;
  uint16_t* slot_of;  // [neurons] first one flag byte per half: this half fires the neuron; later the neuron's slot
  uint32_t* counts;   // [warps][blocks] nonzeros of each warp in each block
  uint32_t* next;     // [warps][blocks + 1] the index in `lists` of each warp's next nonzero of each block

  __host__ __device__ static int bytes(int column_tiles, int warps) {
    return column_tiles * kColumnTile * 2 + warps * (2 * column_tiles * 4 + 1) * 4;
  }

  __device__ Tables(void* memory, int column_tiles, int warps) : blocks(column_tiles * 4) {
    slot_of = static_cast<uint16_t*>(memory);
    counts = reinterpret_cast<uint32_t*>(slot_of + column_tiles * kColumnTile);
    next = counts + warps * blocks;
  }

  // Sets bit i of `first` if the first half fires neuron 32 w + i, and bit i of `second` if the second half does. Valid
  // while slot_of still holds flags.
  __device__ __forceinline__ void fired(int w, uint32_t& first, uint32_t& second) const {
    const uint4* flags = reinterpret_cast<const uint4*>(slot_of + 32 * w);
    first = second = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 v = flags[i];  // flags of two neurons per word: bits 0 and 8, bits 16 and 24
      const uint32_t spread = v.x | v.y << 2 | v.z << 4 | v.w << 6;
      first |= ((spread | spread >> 15) & 0xff) << 8 * i;
      second |= ((spread >> 8 | spread >> 23) & 0xff) << 8 * i;
    }
  }
};

// A row of a warp's sequence of quads. The sequence has four positions per quad. Position p belongs to this row if p +
// offset, modulo 2^32, is less than `count`; it is then the row's nonzero p + offset. An example: two rows with 5 and 9
// nonzeros. The first row takes two quads, and its nonzeros have positions 0 to 4 (offset 0). The second row takes the
// next three quads, and its nonzeros have positions 8 to 16 (offset -8).
struct alignas(16) Row {
  uint32_t offset, start, count;
  uint32_t place;  // place of the row's value in slot 0 of a block
};

__device__ __forceinline__ uint32_t warp_scan(uint32_t value) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, value, offset);
    if (threadIdx.x % 32 >= offset) value += other;
  }
  return value;
}

// Returns the sum of the values in all lower-numbered threads of the CTA, and sets `total` to the sum over all threads.
template <int kPlanThreads>
__device__ __forceinline__ uint32_t block_scan(uint32_t value, uint32_t* warp_sums, uint32_t& total) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, sum = warp_scan(value);
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  const uint32_t of_warp = lane < kPlanThreads / 32 ? warp_sums[lane] : 0;
  total = __reduce_add_sync(~0u, of_warp);
  const uint32_t before = __reduce_add_sync(~0u, lane < warp ? of_warp : 0);
  __syncthreads();
  return before + sum - value;
}

__device__ __forceinline__ bool long_rows_fit(const TilePlan& plan) {
  return static_cast<uint32_t>(plan.totals[kLongWords]) <= plan.long_capacity;
}
// Whether the lists can hold all nonzeros. If they cannot, some tiles leave. If they can, so can `wide` (engines.cpp).
__device__ __forceinline__ bool nonzeros_fit(const Packed& packed, const TilePlan& plan) {
  return packed.counters[kNonzeros] <= plan.capacity && long_rows_fit(plan);
}

constexpr uint32_t kNeverFits = ~0u;  // the fullness of a tile with nonzeros that may not have been stored

// Whether this CTA's tile stays, in a call whose lists overflow. Called by all threads of all CTAs. Together, the CTAs
// first count every tile's nonzeros: each warp draws one tile after another, and the warps that a CTA waits for have
// drawn theirs, so they run. Then each CTA adds up the nonzeros of all tiles that are not fuller than its own.
__device__ __forceinline__ bool tile_stays(const Packed& packed, int64_t m, const TilePlan& plan) {
  __shared__ unsigned long long up_to_this;
  const uint32_t lane = threadIdx.x % 32;
  const int tiles = gridDim.x, tile = blockIdx.x;
  if (threadIdx.x == 0) up_to_this = 0;
#pragma unroll 1
  for (;;) {
    int other = 0;
    if (lane == 0) other = atomicAdd(plan.totals + kTilesToCount, 1);
    other = __shfl_sync(~0u, other, 0);
    if (other >= tiles) break;
    uint32_t count = 0;
    bool is_long = false;
#pragma unroll 1
    for (int row = lane; row < kTokenTile; row += 32) {
      const int64_t position = static_cast<int64_t>(other) * kTokenTile + row;
      if (position >= m) break;
      const uint32_t of_row = packed.row_counts[plan.tokens == nullptr ? position : plan.tokens[position]];
      count += of_row;
      is_long |= of_row > kRowCapacity;
    }
    __syncwarp();
    count = __reduce_add_sync(~0u, count);
    const bool never_fits = (__any_sync(~0u, is_long) && !long_rows_fit(plan)) || !wide_fits(packed);
    if (lane == 0) {
      plan.fullness[other] = never_fits ? kNeverFits : count;
      ptx::add_release(plan.totals + kTilesCounted, 1);
    }
  }
  if (threadIdx.x == 0) {
    while (static_cast<int>(ptx::ld_acquire(reinterpret_cast<uint32_t*>(plan.totals + kTilesCounted))) < tiles) {
      __nanosleep(100);
    }
    __threadfence();
  }
  __syncthreads();
  const uint32_t own = __ldcg(plan.fullness + tile);
  unsigned long long sum = 0;
#pragma unroll 1
  for (int other = threadIdx.x; other < tiles; other += blockDim.x) {
    const uint32_t its = __ldcg(plan.fullness + other);
    if (its < own || (its == own && other <= tile)) sum += its;
  }
  if (sum != 0) atomicAdd(&up_to_this, sum);
  __syncthreads();
  const bool stays = own != kNeverFits && up_to_this <= static_cast<unsigned long long>(plan.capacity);
  if (threadIdx.x == 0) plan.fullness[tiles + tile] = !stays;
  return stays;
}

// Lists the tokens of the tiles that left. Called by all threads of the CTA that finishes last.
template <int kPlanThreads>
__device__ __forceinline__ void list_rest(const Packed& packed, int64_t m, const TilePlan& plan, uint32_t* warp_sums) {
  const int tiles = gridDim.x;
  uint32_t left = 0;  // number of tiles that left; the lower half of `fullness` now lists them
#pragma unroll 1
  for (int from = 0; from < tiles; from += kPlanThreads) {
    const int t = from + static_cast<int>(threadIdx.x);
    const uint32_t leaves = t < tiles ? __ldcg(plan.fullness + tiles + t) : 0;
    uint32_t all;
    const uint32_t at = left + block_scan<kPlanThreads>(leaves, warp_sums, all);
    if (leaves != 0) plan.fullness[at] = t;
    left += all;
  }
  __syncthreads();
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < left * kTokenTile; i += kPlanThreads) {
    const int64_t position = static_cast<int64_t>(__ldcg(plan.fullness + i / kTokenTile)) * kTokenTile + i % kTokenTile;
    if (position < m) plan.rest_tokens[i] = plan.tokens == nullptr ? position : plan.tokens[position];
  }
  if (threadIdx.x == 0) {
    // Only the last of all tiles may have fewer tokens than others, and if it is listed, it is the last one there.
    const bool with_last = __ldcg(plan.fullness + tiles + tiles - 1) != 0;
    plan.totals[kRest] = left;
    plan.totals[kRestTokens] = left * kTokenTile - (with_last ? static_cast<int64_t>(tiles) * kTokenTile - m : 0);
    plan.totals[kTilesToCount] = plan.totals[kTilesCounted] = 0;
    packed.counters[kRestCalls] += 1;
    packed.counters[kRestTiles] += left;
  }
}

// Writes the order of the tiles, fullest first, and their items. Called by all threads of one CTA. memory: 2 (blocks +
// 1) words of shared memory.
template <int kPlanThreads>
__device__ __forceinline__ void order_tiles(const Packed& packed, int64_t m, const TilePlan& plan, int blocks,
                                            uint32_t* memory, uint32_t* warp_sums) {
  __shared__ unsigned long long in_union;
  uint32_t* cursor = memory;  // [b] number of tiles with b blocks; later the next of these tiles' index in `order`
  uint32_t* items_before = memory + blocks + 1;
  const int tiles = gridDim.x;
  for (int b = threadIdx.x; b <= blocks; b += kPlanThreads) cursor[b] = 0;
  if (threadIdx.x == 0) in_union = 0;
  __syncthreads();
  uint32_t neurons = 0;  // the sum over a warp's threads is less than 2^32
#pragma unroll 4
  for (int t = threadIdx.x; t < tiles; t += kPlanThreads) {
    const int4 of = __ldcg(plan.tiles + t);
    neurons += of.x;
    atomicAdd(&cursor[of.y], 1);
  }
  neurons = __reduce_add_sync(~0u, neurons);
  if (threadIdx.x % 32 == 0) atomicAdd(&in_union, static_cast<unsigned long long>(neurons));
  __syncthreads();
  if (threadIdx.x == 0) {
    // If the nonzeros do not fit, the counter keeps what gate_pack counted for tiles of tokens in their original order.
    if (nonzeros_fit(packed, plan)) packed.counters[kUnion] = in_union;
    plan.totals[kListWords] = plan.totals[kLongWords] = 0;
  }
  uint32_t tiles_so_far = 0, items_so_far = 0;
#pragma unroll 1
  for (int from = blocks; from >= 0; from -= kPlanThreads) {  // fullest first
    const int b = from - static_cast<int>(threadIdx.x);
    const uint32_t count = b >= 0 ? cursor[b] : 0;
    uint32_t all_tiles, all_items;
    const uint32_t tiles_here = block_scan<kPlanThreads>(count, warp_sums, all_tiles);
    const uint32_t items_here = block_scan<kPlanThreads>(b >= 0 ? count * items_of(b) : 0u, warp_sums, all_items);
    if (b >= 0) {
      cursor[b] = tiles_so_far + tiles_here;
      items_before[b] = items_so_far + items_here - (tiles_so_far + tiles_here) * items_of(b);
    }
    tiles_so_far += all_tiles;
    items_so_far += all_items;
  }
  if (threadIdx.x == 0) plan.totals[kItems] = items_so_far;
  __syncthreads();
#pragma unroll 1
  for (int t = threadIdx.x; t < tiles; t += kPlanThreads) {
    const int4 of = __ldcg(plan.tiles + t);
    const int items = items_of(of.y);
    const uint32_t position = atomicAdd(&cursor[of.y], 1);
    plan.order[position] = make_int4(t, of.x, of.z, of.w);
    for (int i = 0; i < items; ++i) {
      plan.items[items_before[of.y] + position * items + i] = item_code({t, of.x, of.z, of.w}, i);
    }
  }
}

// The work of one CTA, which plans one token tile. All threads must call the methods in the order of their definition.
template <int kPlanThreads>
struct TilePlanner {
  static constexpr int kPlanWarps = kPlanThreads / 32;
  static constexpr int kHalfWarps = kPlanWarps / 2;      // warps that read the rows of a half
  static constexpr int kRows = kTokenTile / kPlanWarps;  // rows per warp
  static constexpr int kSets = kHalfWarps < 8 ? 8 : kHalfWarps, kRowsOfSet = kHalf / kSets;

  struct Shared {
    Row (&rows_of)[kPlanWarps][kRows];
    uint2 (&slots_of)[kPlanWarps];
    uint32_t (&of_half)[2];  // nonzeros of each half of this tile
    uint32_t& list;          // index in `lists` where the tile's nonzeros start
  };

  const Packed& packed;
  int64_t m;
  const TilePlan& plan;
  const Shared& shared;
  const Tables& tables;
  int column_tiles, tile;
  uint32_t lane, upto, warp;
  int half;
  Row* rows;                       // this warp's rows that are not empty
  uint32_t quads = 0, before = 0;  // quads of all the warp's rows; quads of the rows before row `lane`
  int blocks = 0;                  // blocks of the tile's slots

  __device__ __forceinline__ TilePlanner(const Packed& packed, int64_t m, const TilePlan& plan, const Shared& shared,
                                         const Tables& tables, int column_tiles)
      : packed(packed),
        m(m),
        plan(plan),
        shared(shared),
        tables(tables),
        column_tiles(column_tiles),
        tile(blockIdx.x),
        lane(threadIdx.x % 32),
        upto(ptx::lanes_up_to()),
        warp(ptx::warp_index()),
        half(warp / kHalfWarps),
        rows(shared.rows_of[warp]) {}

  // Assigns rows to warps. If a half has eight or more warps, warp w of the half has rows w, w + 8, w + 16, ... (kSets
  // 8), or every sixteenth row (kSets 16). If a half has four warps, warp w first has every eighth row from 2 w on,
  // then every eighth row from 2 w + 1 on: warp 1 has rows 2, 10, 18, ... and then 3, 11, 19, ... Lane r looks up the
  // warp's r-th row.
  __device__ __forceinline__ void look_up_rows() {
    uint32_t start = 0, count = 0;
    const uint32_t row = lane % kRowsOfSet * kSets + warp % kHalfWarps * (kRows / kRowsOfSet) + lane / kRowsOfSet;
    const int64_t position = static_cast<int64_t>(tile) * kTokenTile + half * kHalf + row;
    if (lane < kRows && position < m) {
      const int64_t token = plan.tokens == nullptr ? position : plan.tokens[position];
      count = packed.row_counts[token];
      start = token * kRowCapacity;
      if (count > kRowCapacity) start = plan.rows[start + kRowCapacity - 1];  // for a long row, this word is the index
                                                                              // of its first word
    }
    if (!nonzeros_fit(packed, plan) && !tile_stays(packed, m, plan)) count = 0;
    const uint32_t of_warp = __reduce_add_sync(~0u, count);
    if (lane == 0) atomicAdd(&shared.of_half[half], of_warp);
    // A long row may start anywhere in a quad: a row of 600 nonzeros that starts at word 7 has 3 words of another row
    // before it in its first quad, and spans 151 quads.
    const uint32_t lead = start % 4, mine = count == 0 ? 0 : (lead + count + 3) / 4;
    const uint32_t sums = warp_scan(mine);
    before = sums - mine;
    quads = __shfl_sync(~0u, sums, 31);
    const uint32_t some = __ballot_sync(~0u, count != 0);
    if (count != 0) {
      rows[__popc(some & upto) - 1] = {0 - 4 * before - lead, start, count, place_of(row, 0)};
    } else {
      before = ~0u;
    }
    __syncwarp();
  }

  // Returns 32 bits: bit i is set if quad first + i is the first quad of a row.
  __device__ __forceinline__ uint32_t starts_among(uint32_t first) const {
    return __reduce_or_sync(~0u, __funnelshift_lc(0u, 1u, before - first));
  }

  // Calls use(word) for each nonzero of the warp's rows.
  template <class Use>
  __device__ __forceinline__ void for_each_nonzero(Use use) const {
    constexpr int kBatch = 2;   // loads in flight per lane
    const Row* row = rows - 1;  // the last row that started before the current quads
#pragma unroll 1
    for (uint32_t first = 0; first < quads; first += 32 * kBatch) {
      uint4 words[kBatch];
      uint32_t nth[kBatch], count[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const uint32_t quad = first + 32 * b + lane, starts = starts_among(first + 32 * b);
        const Row of = row[__popc(starts & upto)];
        row += __popc(starts);
        nth[b] = 4 * quad + of.offset;
        count[b] = of.count;
        if (quad < quads) words[b] = *reinterpret_cast<const uint4*>(plan.rows + (of.start + nth[b]));
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (nth[b] < count[b]) use(words[b].x);
        if (nth[b] + 1 < count[b]) use(words[b].y);
        if (nth[b] + 2 < count[b]) use(words[b].z);
        if (nth[b] + 3 < count[b]) use(words[b].w);
      }
    }
  }

  __device__ __forceinline__ void flag_neurons() const {
    uint8_t* flags = reinterpret_cast<uint8_t*>(tables.slot_of) + half;
    for_each_nonzero([&](uint32_t word) { flags[2 * (word & 0xffff)] = 1; });
    __syncthreads();
  }

  // Numbers the neurons: slots go first to the neurons that fire only in the first half, then to those that fire in
  // both halves, then to those that fire only in the second half. Also reserves the tile's part of the lists.
  __device__ __forceinline__ void number_slots() {
    const int words = column_tiles * 8, per_thread = (words + kPlanThreads - 1) / kPlanThreads;
    const int begin = threadIdx.x * per_thread, end = min(begin + per_thread, words);  // words of 32 neurons
    uint2 mine = {0, 0};  // number of neurons: x: first half only | both halves << 16; y: second half only
    uint32_t first, second;
#pragma unroll 1
    for (int w = begin; w < end; ++w) {
      tables.fired(w, first, second);
      mine.x += __popc(first & ~second) | __popc(first & second) << 16;
      mine.y += __popc(second & ~first);
    }
    const uint2 sum = {warp_scan(mine.x), warp_scan(mine.y)};
    if (lane == 31) shared.slots_of[warp] = sum;
    __syncthreads();
    const uint2 of_warp = lane < kPlanWarps ? shared.slots_of[lane] : uint2{0, 0};
    const auto over_all = [&](uint32_t value) { return __reduce_add_sync(~0u, value); };
    const auto over_before = [&](uint32_t value) { return __reduce_add_sync(~0u, lane < warp ? value : 0); };
    const uint32_t own = over_all(of_warp.x & 0xffff), both = over_all(of_warp.x >> 16);
    const uint32_t size = own + both + over_all(of_warp.y);
    uint32_t next_own = over_before(of_warp.x & 0xffff) + ((sum.x - mine.x) & 0xffff);
    uint32_t next_both = own + over_before(of_warp.x >> 16) + ((sum.x - mine.x) >> 16);
    uint32_t next_second = own + both + over_before(of_warp.y) + sum.y - mine.y;
    uint16_t* slots = plan.slots + static_cast<int64_t>(tile) * column_tiles * kColumnTile;
#pragma unroll 1
    for (int w = begin; w < end; ++w) {
      tables.fired(w, first, second);
#pragma unroll 1
      for (uint32_t rest = first | second; rest != 0; rest &= rest - 1) {
        const uint32_t bit = rest & -rest, column = 32 * w + __ffs(rest) - 1;
        const uint32_t slot = (first & bit) == 0 ? next_second++ : (second & bit) != 0 ? next_both++ : next_own++;
        tables.slot_of[column] = slot;
        slots[slot] = column;
      }
    }
    if (threadIdx.x == kPlanThreads - 1) {  // chosen because the last thread usually has no neurons
      shared.list =
          atomicAdd(reinterpret_cast<uint32_t*>(plan.totals + kListWords), shared.of_half[0] + shared.of_half[1]);
    }
    __syncthreads();
    blocks = blocks_of(size);
    if (threadIdx.x == 0) {
      plan.tiles[tile] = make_int4(size, blocks, blocks_of(own + both), own == size ? blocks : own / kBlockColumns);
      ptx::add_release(plan.totals + kPlanTickets, 1);
    }
    // The empty slots of the last block name the last neuron, whose weights are then read again. Empty slots have no
    // nonzeros, so these weights are multiplied by zeros.
    if (warp == kPlanWarps - 1 && size % kBlockColumns != 0) {
      const uint16_t neuron = slots[size - 1];
#pragma unroll 1
      for (uint32_t s = size + lane; s < blocks * kBlockColumns; s += 32) slots[s] = neuron;
    }
  }

  // Counts how many nonzeros each warp has in each block, and computes from that where each block starts in the lists,
  // and where each warp's nonzeros start within the block.
  __device__ __forceinline__ void start_blocks() const {
    uint32_t* counts = tables.counts + warp * tables.blocks;
    for_each_nonzero([&](uint32_t word) { atomicAdd(&counts[tables.slot_of[word & 0xffff] / kBlockColumns], 1u); });
    __syncthreads();
    uint32_t* next = tables.next + warp * (tables.blocks + 1);
    uint32_t* starts = plan.starts + (static_cast<int64_t>(tile) * 2 + half) * (tables.blocks + 1);
    const bool writes = warp % kHalfWarps == 0;
    uint32_t so_far = shared.list + (half == 0 ? 0 : shared.of_half[0]);
#pragma unroll 1
    for (int from = 0; from < blocks; from += 32) {
      const int b = from + lane;
      uint32_t of_block = 0, of_before = 0;
      if (b < blocks) {
#pragma unroll 4
        for (int w = half * kHalfWarps; w < (half + 1) * kHalfWarps; ++w) {
          const uint32_t count = tables.counts[w * tables.blocks + b];
          if (w < static_cast<int>(warp)) of_before += count;
          of_block += count;
        }
      }
      const uint32_t sums = warp_scan(of_block), start = so_far + sums - of_block;
      if (b < blocks) {
        next[b] = start + of_before;
        if (writes) starts[b] = start;
      }
      so_far += __shfl_sync(~0u, sums, 31);
    }
    if (writes && lane == 0) starts[blocks] = so_far;
    __syncwarp();
  }

  // Writes the nonzeros to the lists, one word per lane. Lanes whose words belong to the same block are peers, and
  // write to consecutive entries of the list. Lanes without a nonzero are also peers of one another: they get a block
  // number above those of all blocks.
  __device__ __forceinline__ void place_nonzeros() const {
    uint32_t* next = tables.next + warp * (tables.blocks + 1);
    const Row* row_before = rows - 1;
#pragma unroll 1
    for (uint32_t quad = 0; quad < quads; quad += 32) {
      const uint32_t starts = starts_among(quad);
      uint32_t word[4], place[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // a warp's 32 lanes read eight quads per j
        const Row of = row_before[__popc(starts << (24 - 8 * j) << (7 - lane / 4))];
        const uint32_t nth = 4 * quad + 32 * j + lane + of.offset;
        place[j] = of.place;
        word[j] = nth < of.count ? plan.rows[of.start + nth] : 0;  // no nonzero's word is 0
      }
      row_before += __popc(starts);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (quad + 8 * j >= quads) break;
        const uint32_t slot = tables.slot_of[word[j] & 0xffff];
        const uint32_t block = word[j] != 0 ? slot / kBlockColumns : tables.blocks;
        const uint32_t peers = __match_any_sync(~0u, block), end = next[block] + __popc(peers & upto);
        __syncwarp();
        if (peers <= upto) next[block] = end;  // done by the last of the peers
        if (word[j] != 0) plan.lists[end - 1] = (word[j] & 0xffff0000) | (place[j] ^ slot % kBlockColumns);
        __syncwarp();
      }
    }
  }
};

template <int kPlanThreads>
__global__ void __launch_bounds__(kPlanThreads, 2048 / kPlanThreads)
    tile_plan_kernel(const Packed packed, int64_t m, int64_t n, const TilePlan plan) {
  using Planner = TilePlanner<kPlanThreads>;
  extern __shared__ uint32_t dynamic[];
  // The shared variables are declared one by one rather than in a struct, so that the compiler knows that a store to
  // one of them does not change the others.
  __shared__ Row rows_of[Planner::kPlanWarps][Planner::kRows];
  __shared__ uint32_t warp_sums[Planner::kPlanWarps];
  __shared__ uint2 slots_of[Planner::kPlanWarps];
  __shared__ uint32_t of_half[2], list;
  __shared__ bool takes_all;
  const int column_tiles = static_cast<int>((n + kColumnTile - 1) / kColumnTile);
  const Tables tables(dynamic, column_tiles, Planner::kPlanWarps);
  const typename Planner::Shared shared = {rows_of, slots_of, of_half, list};
  Planner planner(packed, m, plan, shared, tables, column_tiles);

  ptx::griddepcontrol_launch_dependents();
  for (uint4* at = reinterpret_cast<uint4*>(dynamic) + threadIdx.x; at < reinterpret_cast<uint4*>(tables.next);
       at += kPlanThreads) {
    *at = make_uint4(0, 0, 0, 0);
  }
  if (threadIdx.x < 2) of_half[threadIdx.x] = 0;
  __syncthreads();
  ptx::griddepcontrol_wait();

  planner.look_up_rows();
  planner.flag_neurons();
  planner.number_slots();
  planner.start_blocks();
  planner.place_nonzeros();

  // The CTA that takes the last ticket orders the tiles; no other CTA waits for that.
  if (threadIdx.x == 0) {
    const int tiles = gridDim.x;
    takes_all = atomicCAS(plan.totals + kPlanTickets, tiles, 0) == tiles;
  }
  __syncthreads();
  if (!takes_all) return;
  __threadfence();
  if (!nonzeros_fit(packed, plan)) list_rest<kPlanThreads>(packed, m, plan, warp_sums);
  order_tiles<kPlanThreads>(packed, m, plan, tables.blocks, tables.counts, warp_sums);
}

}  // namespace

cudaError_t tile_plan(const Packed& packed, int64_t m, int64_t n, const TilePlan& plan, cudaStream_t stream) {
  // If there is at most about one tile per SM, the fullest tile determines the time, so each tile gets 1,024 threads.
  // With more tiles, 512 threads are enough, because several CTAs share an SM, and some compute while others wait. The
  // tables of very wide layers leave shared memory for fewer warps only.
  const int64_t tiles = ceil_div(m, kTokenTile);
  const int column_tiles = static_cast<int>(ceil_div(n, kColumnTile));
  const auto bytes = [&](int threads) { return Tables::bytes(column_tiles, threads / 32); };
  int threads = tiles > kFewTiles ? 512 : 1024;
  while (bytes(threads) + kStaticBytes > kMaxSharedBytes) threads /= 2;
  const auto kernel = threads == 256   ? tile_plan_kernel<256>
                      : threads == 512 ? tile_plan_kernel<512>
                                       : tile_plan_kernel<1024>;
  return launch_early(kernel, tiles, threads, bytes(threads), 1, stream, packed, m, n, plan);
}

}  // namespace sparsellm
