// What the kernels of the tile engine share: how a token tile's neurons become units of work.
//
// A tile's neurons (its union) are numbered: slot s is neuron slots[s]. First come those that only its first half of
// 64 tokens fires, then those of both halves, then those of the second half alone, each group ascending. Slots are
// counted in blocks of 64: the first half needs blocks [0, end), the second blocks [begin, blocks), and a warpgroup
// multiplies no others. The up product is cut into items of up to four blocks, as even as can be.
//
// A tile's nonzeros are one list of words, the first half's, block by block, then the second half's: bf16 << 16 |
// place, the place being the value's offset, counted in halfwords, in a [64, 64] operand tile of swizzled 128-byte rows.
#pragma once

#include "common/tile.cuh"
#include "common/twell.cuh"

namespace sparsellm {

constexpr int kGatherWarps = 4;  // both products: one warpgroup gathers rows, a consumer warpgroup is a tile's half

constexpr int kItemBlocks = kTileN / kBlockColumns;
constexpr int kHalf = kTileM / 2;
constexpr uint32_t kHalfBytes = kHalf * 128;  // of an operand tile

__device__ __forceinline__ int blocks_of(int size) { return (size + kBlockColumns - 1) / kBlockColumns; }
__device__ __forceinline__ int items_of(int blocks) { return (blocks + kItemBlocks - 1) / kItemBlocks; }

// Row of a half, slot of a block.
__device__ __forceinline__ uint32_t place_of(uint32_t row, uint32_t slot) {
  return swizzle_128(row, slot / 8) / 2 + slot % 8;
}

// Where a half's pieces start: plan.starts of [MT][2][NT * 4 + 1].
__device__ __forceinline__ const uint32_t* starts_of(const TilePlan& plan, int tile, int half, int column_tiles) {
  return plan.starts + (static_cast<int64_t>(tile) * 2 + half) * (column_tiles * 4 + 1);
}

// A tile as its consumers see it.
struct Tile {
  int index, blocks;
  int end, begin;     // of the first half's blocks, of the second half's

  // The blocks among [first, last) that half 0 or 1 needs: `from` and how many.
  __device__ __forceinline__ int needed(int half, int first, int last, int& from) const {
    from = half == 0 ? first : max(first, begin);
    const int to = half == 0 ? min(last, end) : last;
    return max(to - from, 0);
  }
};

__device__ __forceinline__ Tile tile_of(int4 code) { return {code.x, code.y, code.z, code.w}; }

// A unit of tile_spmm, or a part of one: blocks [first, last) of a tile's slots, times one column tile of y. Where there
// are several parts, `owner` is the CTA of the first; the following CTAs have the others.
struct Unit {
  Tile tile;
  int half, column;
  int first, last;
  int part, parts, owner;
  uint32_t next;  // where the next unit starts in all work
  bool exists;
};

__device__ __forceinline__ Unit whole(const Tile& tile, int column, bool exists) {
  return {tile, 0, column, 0, tile.blocks, 0, 1, 0, 0, exists};
}

// All work on neuron tiles, laid out in a line: tile by tile, (paired) half by half, column tile by column tile, a unit
// being as long as its blocks, one at least, and kUnitCost more, for what its beginning and end cost. It fits 32 bits:
// the tensors that it is about would not fit the device's memory otherwise. Every CTA has the next `share` of it.
constexpr uint32_t kUnitCost = 4;  // blocks

// A CTA's share: [begin, end) of the line. It starts in the unit that starts at `start`.
struct Stretch {
  uint32_t begin, end, share, start;
  int tile, column;  // column: paired, 2 column + half
};

__device__ __forceinline__ uint32_t length_of(int blocks) { return max(blocks, 1) + kUnitCost; }

// Blocks of a unit: paired, those that a half needs.
__device__ __forceinline__ int blocks_of(const Tile& tile, int half, bool paired) {
  return !paired ? tile.blocks : half == 0 ? tile.end : tile.blocks - tile.begin;
}

// Of NeuronPlan.order: where each CTA starts follows the tiles.
__device__ __forceinline__ Stretch stretch_of(const int4* order, int tiles, bool paired, const int32_t* totals) {
  const int4 code = order[tiles + 2 * blockIdx.x + paired];
  const uint32_t share = code.w, begin = blockIdx.x * share;
  const uint32_t all = totals[paired ? kPairedWork : kWork];
  return {begin, min(begin + share, all), share, static_cast<uint32_t>(code.z), code.x, code.y};
}

// What of the unit that starts at `start` is in this CTA's stretch.
__device__ __forceinline__ Unit part_of(const Stretch& stretch, uint32_t start, const Tile& tile, int column,
                                        bool paired) {
  const int half = paired ? column % 2 : 0, blocks = blocks_of(tile, half, paired);
  const uint32_t at = start + kUnitCost, next = start + length_of(blocks);
  const uint32_t from = max(stretch.begin, at), to = min(stretch.end, next);
  const int offset = paired && half == 1 ? tile.begin : 0;
  const int owner = at / stretch.share, last_owner = (next - 1) / stretch.share;
  return {tile,
          half,
          paired ? column / 2 : column,
          offset + min(static_cast<int>(from - at), blocks),
          offset + min(static_cast<int>(to - at), blocks),
          static_cast<int>(blockIdx.x) - owner,
          last_owner - owner + 1,
          owner,
          next,
          at < stretch.end};
}

// A unit of the up product: blocks [first, last) of a tile's slots, the tile's item `index`.
struct Item {
  int index, first, last;
  Tile tile;
};

__device__ __forceinline__ int4 item_code(const Tile& tile, int index) {
  const int items = items_of(tile.blocks);
  const int first = tile.blocks * index / items, last = tile.blocks * (index + 1) / items;
  return {tile.index, tile.end << 16 | tile.begin, first << 16 | last, index};  // at most 1,024 blocks
}

__device__ __forceinline__ Item item_of(int4 code) {
  return {code.w, code.z >> 16, code.z & 0xffff, {code.x, 0, code.y >> 16, code.y & 0xffff}};
}

// Work `i` of CTA `cta` of `ctas`, of a list sorted by size: every other round backwards, so that no CTA is always
// dealt the larger one.
__device__ __forceinline__ int deal(int round, int cta, int ctas) {
  return round * ctas + (round & 1 ? ctas - 1 - cta : cta);
}

}  // namespace sparsellm
