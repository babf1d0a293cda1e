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

// Work `i` of CTA `cta` of `ctas`, of a list sorted by size: every other round backwards, so that no CTA is always dealt
// the larger one.
__device__ __forceinline__ int deal(int round, int cta, int ctas) {
  return round * ctas + (round & 1 ? ctas - 1 - cta : cta);
}

}  // namespace sparsellm
