// What the kernels of the tile engine share: how a token tile's neurons become units of work.
//
// A token tile's neurons (its union) are numbered in ascending order: slot s is neuron slots[s]. Slots are counted in
// blocks of 64. The up product is cut into items of up to four blocks, as even as can be.
#pragma once

#include "common/tile.cuh"
#include "common/twell.cuh"

namespace sparsellm {

constexpr int kItemBlocks = kTileN / kBlockColumns;

__device__ __forceinline__ int blocks_of(int size) { return (size + kBlockColumns - 1) / kBlockColumns; }
__device__ __forceinline__ int items_of(int blocks) { return (blocks + kItemBlocks - 1) / kItemBlocks; }

// Item `index` of a tile of `blocks` blocks: blocks [first, last).
__device__ __forceinline__ void item_blocks(int blocks, int index, int& first, int& last) {
  const int items = items_of(blocks);
  first = blocks * index / items;
  last = blocks * (index + 1) / items;
}

// The item that holds block `block`.
__device__ __forceinline__ int item_with(int blocks, int block) {
  return ((block + 1) * items_of(blocks) - 1) / blocks;
}

// A unit of the up product: item `index` of a tile, blocks [first, last) of its slots.
struct Item {
  int tile, index, first, last;
};

__device__ __forceinline__ int2 item_code(int tile, int blocks, int index) {
  int first, last;
  item_blocks(blocks, index, first, last);
  return {tile, index << 22 | first << 11 | last};  // at most 256 items and 1,024 blocks
}

__device__ __forceinline__ Item item_of(int2 code) {
  return {code.x, code.y >> 22 & 0x3ff, code.y >> 11 & 0x7ff, code.y & 0x7ff};
}

// Work `i` of CTA `cta` of `ctas`, of a list sorted by size: every other round backwards, so that no CTA is always
// dealt the larger one.
__device__ __forceinline__ int deal(int round, int cta, int ctas) {
  return round * ctas + (round & 1 ? ctas - 1 - cta : cta);
}

}  // namespace sparsellm
