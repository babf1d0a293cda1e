// Definitions that the kernels of the tile engine share: how a token tile's neurons become units of work.
//
// A token tile is 128 tokens, in two halves of 64. The neurons that fire for at least one token of the tile are
// numbered: slot s is neuron slots[s]. The neurons that fire only in the first half come first, then those that fire in
// both halves, then those that fire only in the second half. Within each of these three groups, neurons ascend. Every
// 64 slots form a block. The first half needs blocks [0, end), the second half needs blocks [begin, blocks), and a
// warpgroup multiplies only the blocks that its half needs. An example: with 100 neurons of the first half only, 200 of
// both and 50 of the second only, the first half needs slots 0..299, which are in blocks 0..4, and the second half
// needs slots 100..349, which are in blocks 1..5. The work of tile_up is divided into items of up to four blocks, as
// evenly as possible: 6 blocks form two items of three blocks.
//
// A tile's nonzeros are one list of words: the first half's nonzeros, block by block, then the second half's. A word is
// bf16 << 16 | place. The place is the value's offset, counted in bf16 values, in an operand tile of [64 rows, 64
// slots] with swizzled 128-byte rows. So a kernel scatters a list into an operand tile without further arithmetic.
//
// A tile of neurons (NeuronPlan) has the same structure, but its rows are neurons and its slots are tokens.
#pragma once

#include "common/tile.cuh"
#include "common/twell.cuh"

namespace sparsellm {

// In all products of the tile engine, one warpgroup gathers rows, and each of the two consumer warpgroups has one half
// of the tile.
constexpr int kGatherWarps = 4;

constexpr int kItemBlocks = kTileN / kBlockColumns;
constexpr int kHalf = kTileM / 2;
constexpr uint32_t kHalfBytes = kHalf * 128;  // bytes of an operand tile: 64 rows of 64 bf16 values

__device__ __forceinline__ int blocks_of(int size) { return (size + kBlockColumns - 1) / kBlockColumns; }
__device__ __forceinline__ int items_of(int blocks) { return (blocks + kItemBlocks - 1) / kItemBlocks; }

// The place of a value: its offset in an operand tile, from its row in the half and its slot in the block.
__device__ __forceinline__ uint32_t place_of(uint32_t row, uint32_t slot) {
  return swizzle_128(row, slot / 8) / 2 + slot % 8;
}

// The row of plan.starts, [MT][2][NT * 4 + 1], for one half of a tile: for each block, the index in the lists where the
// half's nonzeros of that block start.
__device__ __forceinline__ const uint32_t* starts_of(const TilePlan& plan, int tile, int half, int column_tiles) {
  return plan.starts + (static_cast<int64_t>(tile) * 2 + half) * (column_tiles * 4 + 1);
}

// A tile of tokens or of neurons, and which of its blocks each of its two halves needs.
struct Tile {
  int index, size;  // size: number of slots
  int end, begin;   // the first half needs blocks [0, end), the second half needs blocks [begin, blocks())

  __device__ __forceinline__ int blocks() const { return blocks_of(size); }

  // Returns how many of the blocks [first, last) half 0 or 1 needs, and sets `from` to the first of these.
  __device__ __forceinline__ int needed(int half, int first, int last, int& from) const {
    from = half == 0 ? first : max(first, begin);
    const int to = half == 0 ? min(last, end) : last;
    return max(to - from, 0);
  }
};

__device__ __forceinline__ Tile tile_of(int4 code) { return {code.x, code.y, code.z, code.w}; }

// One of the `parts` pieces of a tile, the one with index `part`: blocks [first, last) of the tile's slots. If parts >
// 1, the piece with index i writes its partial sums to partials[base + i].
struct Piece {
  Tile tile;
  int first, last, part, parts, base;
};

__device__ __forceinline__ int4 piece_code(const Piece& piece) {
  return {piece.tile.index | piece.base << 16, piece.first | piece.last << 16, piece.tile.end | piece.tile.begin << 16,
          piece.part | piece.parts << 16};
}

__device__ __forceinline__ Piece piece_of(int4 code) {
  const auto low = [](int word) { return word & 0xffff; };
  const auto high = [](int word) { return static_cast<int>(static_cast<uint32_t>(word) >> 16); };
  return {
      {low(code.x), 0, low(code.z), high(code.z)}, low(code.y), high(code.y), low(code.w), high(code.w), high(code.x)};
}

// A work item of tile_up: blocks [first, last) of a tile, which have `slots` slots. `index` counts the items of a tile.
struct Item {
  int index, first, last, slots;
  Tile tile;

  __device__ __forceinline__ bool exists() const { return tile.index >= 0; }
};

// The code that marks the end of the items.
__device__ __forceinline__ int4 no_item() { return {-1, 0, 0, 0}; }

__device__ __forceinline__ int4 item_code(const Tile& tile, int index) {
  const int blocks = tile.blocks(), items = items_of(blocks);  // at most 1,024 blocks
  const int first = blocks * index / items, last = blocks * (index + 1) / items;
  const int slots = min(tile.size, last * kBlockColumns) - first * kBlockColumns;
  return {tile.index, tile.end << 16 | tile.begin, first << 16 | last, slots << 16 | index};
}

__device__ __forceinline__ Item item_of(int4 code) {
  return {code.w & 0xffff, code.z >> 16, code.z & 0xffff, code.w >> 16, {code.x, 0, code.y >> 16, code.y & 0xffff}};
}

// Transposes a 4 x 4 matrix across four lanes: before, lane q has column q in v[0..3]; afterwards, it has row q.
__device__ __forceinline__ void transpose_quad(uint32_t (&v)[4], uint32_t lane) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = (lane & step) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t got = __shfl_xor_sync(~0u, upper ? v[i] : v[i + step], step);
      if (upper)
        v[i] = got;
      else
        v[i + step] = got;
    }
  }
}

// The position among all rows of this lane's row `i` (0 or 1) of a tile's half: by WGMMA's accumulator layout, a lane
// has sums of rows lane / 4 and lane / 4 + 8 of its warp's 16.
__device__ __forceinline__ int64_t position_of(int tile, int half, int warp, uint32_t lane, int i) {
  return static_cast<int64_t>(tile) * kTileM + half * kHalf + warp % 4 * 16 + lane / 4 + 8 * i;
}

// Stores a consumer thread's sums as bf16 to 256 columns of rows `rows` (none where -1) of a matrix of `columns`
// columns. Each 32 columns of a row are spread over four lanes, in four registers each. After a transpose among the
// four lanes, each lane stores 16 contiguous bytes.
__device__ __forceinline__ void store_rows(__nv_bfloat16* matrix, const int (&rows)[2], int column_tile,
                                           int64_t columns, const float (&d)[128], uint32_t lane) {
  const int64_t column = static_cast<int64_t>(column_tile) * kTileN + lane % 4 * 8;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    __nv_bfloat16* to = matrix + rows[i] * columns + column;
    const bool exists = rows[i] >= 0;
#pragma unroll
    for (int c = 0; c < kTileN / 32; ++c) {
      uint32_t v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* pair = d + 4 * (4 * c + j) + 2 * i;
        v[j] = ptx::cvt_bf16x2(pair[0], pair[1]);
      }
      transpose_quad(v, lane);
      if (exists && column + 32 * c < columns) {
        ptx::st_global_v4(to + 32 * c, make_uint4(v[0], v[1], v[2], v[3]));
      }
    }
  }
}

}  // namespace sparsellm
