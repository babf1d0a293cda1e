// neuron_plan: the nonzeros of a tile plan once more, by neuron: for the gradients of the weights, which are sums over
// tokens. Neurons are put in order of frequency, so that a tile's 128 fire for few tokens, or for many, all alike; the
// tokens that fire any of them are its slots, numbered as a token tile's neurons are (tile/plan.cuh).
//
//   frequency  how many tokens fire each neuron                                             CTA: token tile
//   rank       the order of the neurons                                                     CTA: 128 neurons
//   mask       which tokens fire some neuron of each half tile                              CTA: token tile
//   slots      the tokens of each neuron tile                                               CTA: neuron tile
//   count      how many nonzeros each token tile has in each block of each half             CTA: token tile
//   starts     where each block starts; pieces of tiles, fullest first                      CTA: neuron tile
//   place      where each nonzero goes                                                      CTA: token tile
//
// Integers only. The order of a block's nonzeros may differ between runs; no result depends on it.
#include "common/host.h"
#include "tile/plan.cuh"

namespace sparsellm {
namespace {

constexpr int kPlanThreads = 1024;
constexpr int kMaxNeuronTiles = 65536 / kTileM;
static_assert(kMaxNeuronTiles <= kPlanThreads, "a thread for each neuron tile");
constexpr int kPieceWarps = 2;  // that go through a piece together
constexpr int kShares = 128;  // of all work: one for each CTA, or nearly
constexpr int kMinShare = 32;  // blocks
constexpr int kBatch = 4;  // words that a thread loads at a time
constexpr int kParts = 6;  // a token tile's tokens lie in at most three blocks of what one half has, three of both's

// The nonzeros of a token tile: use(index in the lists, position within the tile, slot).
template <class Use>
__device__ __forceinline__ void for_each_nonzero(const TilePlan& plan, int tile, int column_tiles, Use use) {
  const int warp = threadIdx.x / 32, blocks = plan.tiles[tile].y;
  const uint32_t offset = warp % kPieceWarps * 32 + threadIdx.x % 32;
  for (int piece = warp / kPieceWarps; piece < 2 * blocks; piece += kPlanThreads / 32 / kPieceWarps) {
    const int half = piece & 1, block = piece / 2;
    const uint32_t* starts = starts_of(plan, tile, half, column_tiles) + block;
    const uint32_t end = starts[1];
    for (uint32_t first = starts[0] + offset; first < end; first += kBatch * kPieceWarps * 32) {
      uint32_t words[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const uint32_t at = first + i * kPieceWarps * 32;
        words[i] = at < end ? plan.lists[at] : 0;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const uint32_t at = first + i * kPieceWarps * 32, place = words[i] & 0xffff, row = place / 64;
        if (at < end) use(at, half * kHalf + row, block * kBlockColumns + ((place / 8 ^ row) % 8) * 8 + place % 8);
      }
    }
  }
}

// The ranks of a token tile's neurons, by slot.
__device__ __forceinline__ void load_ranks(const TilePlan& plan, const NeuronPlan& out, int tile, int column_tiles,
                                           uint16_t* ranks) {
  const uint16_t* slots = plan.slots + static_cast<int64_t>(tile) * column_tiles * kColumnTile;
  const int size = plan.tiles[tile].x;
  for (int i = threadIdx.x; i < size; i += kPlanThreads) ranks[i] = out.ranks[slots[i]];
}

__global__ void __launch_bounds__(kPlanThreads, 1) frequency_kernel(const TilePlan plan, int column_tiles,
                                                                  int32_t* frequencies) {
  extern __shared__ uint32_t counts[];  // [slots] bytes: a neuron fires for at most 128 tokens of a tile
  ptx::griddepcontrol_launch_dependents();
  for (int i = threadIdx.x; i < column_tiles * kColumnTile / 4; i += kPlanThreads) counts[i] = 0;
  __syncthreads();
  ptx::griddepcontrol_wait();
  for_each_nonzero(plan, blockIdx.x, column_tiles, [&](uint32_t, uint32_t, uint32_t slot) {
    atomicAdd(&counts[slot / 4], 1u << slot % 4 * 8);
  });
  __syncthreads();
  const uint16_t* slots = plan.slots + static_cast<int64_t>(blockIdx.x) * column_tiles * kColumnTile;
  const int size = plan.tiles[blockIdx.x].x;
  for (int i = threadIdx.x; i < size; i += kPlanThreads) {
    atomicAdd(frequencies + slots[i], static_cast<int32_t>(counts[i / 4] >> i % 4 * 8 & 0xff));
  }
}

// A warp for each neuron.
__global__ void __launch_bounds__(kPlanThreads, 1) rank_kernel(int n, const NeuronPlan out) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int neuron = blockIdx.x * (kPlanThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (neuron >= n) return;
  const int mine = out.frequencies[neuron];
  int before = 0;
#pragma unroll 4
  for (int other = lane; other < n; other += 32) {
    const int its = out.frequencies[other];
    before += its > mine || (its == mine && other < neuron);
  }
  for (int offset = 16; offset > 0; offset /= 2) before += __shfl_xor_sync(~0u, before, offset);
  if (lane == 0) {
    out.ranks[neuron] = before;
    out.neurons[before] = neuron;
  }
}

__global__ void __launch_bounds__(kPlanThreads, 1) mask_kernel(const TilePlan plan, int column_tiles, int halves,
                                                             const NeuronPlan out) {
  extern __shared__ uint32_t masks[];  // [halves][4], then the ranks of the slots
  uint16_t* ranks = reinterpret_cast<uint16_t*>(masks + 4 * halves);
  ptx::griddepcontrol_launch_dependents();
  for (int i = threadIdx.x; i < 4 * halves; i += kPlanThreads) masks[i] = 0;
  ptx::griddepcontrol_wait();
  load_ranks(plan, out, blockIdx.x, column_tiles, ranks);
  __syncthreads();
  for_each_nonzero(plan, blockIdx.x, column_tiles, [&](uint32_t, uint32_t position, uint32_t slot) {
    uint32_t* word = masks + ranks[slot] / kHalf * 4 + position / 32;
    const uint32_t bit = 1u << position % 32;
    if ((*word & bit) == 0) atomicOr(word, bit);
  });
  __syncthreads();
  for (int i = threadIdx.x; i < 4 * halves; i += kPlanThreads) {
    out.masks[(static_cast<int64_t>(i / 4) * gridDim.x + blockIdx.x) * 4 + i % 4] = masks[i];
  }
}

// Sum over the threads before this one; `total` over all.
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

// The tokens of word w that fire neurons of the first half alone (0), of both (1), of the second alone (2).
__device__ __forceinline__ uint32_t group_of(uint32_t first, uint32_t second, int which) {
  return which == 0 ? first & ~second : which == 1 ? first & second : second & ~first;
}

__device__ __forceinline__ int which_of(uint32_t first, uint32_t second, uint32_t bit) {
  return (first & bit) == 0 ? 2 : (second & bit) == 0 ? 0 : 1;
}

__global__ void __launch_bounds__(kPlanThreads, 1) slots_kernel(const TilePlan plan, int token_tiles,
                                                            const NeuronPlan out) {
  __shared__ uint32_t warp_sums[32];
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int tile = blockIdx.x, words = token_tiles * 4;
  const uint32_t* first = out.masks + static_cast<int64_t>(tile) * 2 * words;
  const uint32_t* second = first + words;
  int32_t* slots = out.slots + static_cast<int64_t>(tile) * token_tiles * kTokenTile;
  uint32_t sizes[3], size = 0;
  for (int which = 0; which < 3; ++which) {
    const uint32_t start = size;
    uint32_t* before = out.before + (static_cast<int64_t>(tile) * 3 + which) * words;
    for (int w0 = 0; w0 < words; w0 += kPlanThreads) {
      const int w = w0 + threadIdx.x;
      const uint32_t group = w < words ? group_of(first[w], second[w], which) : 0;
      uint32_t total;
      const uint32_t slot = size + scan(__popc(group), warp_sums, total);
      if (w < words) before[w] = slot;
      size += total;
    }
    sizes[which] = size - start;
  }
  __syncthreads();
  const uint32_t lane = threadIdx.x % 32, bit = 1u << lane;
  const uint32_t* before = out.before + static_cast<int64_t>(tile) * 3 * words;
  for (int w = threadIdx.x / 32; w < words; w += kPlanThreads / 32) {
    const uint32_t of_first = first[w], of_second = second[w];
    if (((of_first | of_second) & bit) == 0) continue;
    const int which = which_of(of_first, of_second, bit), position = 32 * w + lane;
    const uint32_t slot = before[which * words + w] + __popc(group_of(of_first, of_second, which) & (bit - 1));
    slots[slot] = plan.tokens == nullptr ? position : plan.tokens[position];
  }
  __syncthreads();
  // The last block is filled up with its last token: it has no nonzeros there, so nothing comes of it.
  if (threadIdx.x < kBlockColumns && size != 0) {
    const uint32_t slot = size + threadIdx.x;
    if (slot < (size + kBlockColumns - 1) / kBlockColumns * kBlockColumns) slots[slot] = slots[size - 1];
  }
  if (threadIdx.x == 0) {
    const int blocks = blocks_of(size);
    out.tiles[tile] = make_int4(size, blocks, blocks_of(sizes[0] + sizes[1]),
                                sizes[0] == size ? blocks : sizes[0] / kBlockColumns);
  }
}

// The block that part `part` of a token tile's `halves` x kParts lies in: of the half tile part / kParts.
__device__ __forceinline__ int block_of(const NeuronPlan& out, int token_tiles, int token_tile, int part) {
  const int half = part / kParts, which = part % kParts >= 3 ? 1 : half % 2 * 2;
  const int64_t words = token_tiles * 4;
  return out.before[(half / 2 * 3 + which) * words + token_tile * 4] / kBlockColumns + part % 3;
}

__global__ void __launch_bounds__(kPlanThreads, 1) count_kernel(const TilePlan plan, int column_tiles, int halves,
                                                              const NeuronPlan out) {
  extern __shared__ uint32_t parts[];              // [halves][kParts]
  uint32_t* masks = parts + halves * kParts;       // [halves][4] of this token tile, and so the next
  uint32_t* before = masks + halves * 4;           // [halves / 2][3][4]
  uint16_t* ranks = reinterpret_cast<uint16_t*>(before + halves * 6);  // of the slots
  ptx::griddepcontrol_launch_dependents();
  for (int i = threadIdx.x; i < halves * kParts; i += kPlanThreads) parts[i] = 0;
  ptx::griddepcontrol_wait();
  const int token_tiles = gridDim.x, words = token_tiles * 4, w0 = blockIdx.x * 4;
  for (int i = threadIdx.x; i < halves * 4; i += kPlanThreads) {
    masks[i] = out.masks[static_cast<int64_t>(i / 4) * words + w0 + i % 4];
  }
  for (int i = threadIdx.x; i < halves * 6; i += kPlanThreads) {
    before[i] = out.before[static_cast<int64_t>(i / 4) * words + w0 + i % 4];
  }
  load_ranks(plan, out, blockIdx.x, column_tiles, ranks);
  __syncthreads();
  for_each_nonzero(plan, blockIdx.x, column_tiles, [&](uint32_t at, uint32_t position, uint32_t slot) {
    const uint32_t rank = ranks[slot], w = position / 32, bit = 1u << position % 32;
    const int tile = rank / kTileM;
    const uint32_t first = masks[tile * 8 + w], second = masks[tile * 8 + 4 + w];
    const int which = which_of(first, second, bit);
    const uint32_t* of_group = before + (tile * 3 + which) * 4;
    const uint32_t token_slot = of_group[w] + __popc(group_of(first, second, which) & (bit - 1));
    const int part = (which == 1 ? 3 : 0) + token_slot / kBlockColumns - of_group[0] / kBlockColumns;
    const uint32_t number = atomicAdd(&parts[rank / kHalf * kParts + part], 1u);
    out.at[at] = number << 16 | part << 8 | token_slot % kBlockColumns;  // at most 64 x 64 in a block
    out.places[at] = rank;
  });
  __syncthreads();
  for (int i = threadIdx.x; i < halves * kParts; i += kPlanThreads) {
    if (parts[i] == 0) continue;
    const int block = block_of(out, token_tiles, blockIdx.x, i);
    out.bases[static_cast<int64_t>(blockIdx.x) * halves * kParts + i] =
        atomicAdd(out.counts + static_cast<int64_t>(i / kParts) * token_tiles * 2 + block, parts[i]);
  }
}

__global__ void __launch_bounds__(kPlanThreads, 1) starts_kernel(int token_tiles, int column_tiles,
                                                             const NeuronPlan out) {
  __shared__ uint32_t warp_sums[32], list;
  __shared__ int parts_of[kMaxNeuronTiles], sizes[kMaxNeuronTiles];
  __shared__ bool last;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int tile = blockIdx.x, blocks = out.tiles[tile].y, per_half = token_tiles * 2;
  const uint32_t* counts = out.counts + static_cast<int64_t>(tile) * 2 * per_half;
  uint32_t sum = 0, all;
  for (int half = 0; half < 2; ++half) {
    for (int b = threadIdx.x; b < blocks; b += kPlanThreads) sum += counts[half * per_half + b];
  }
  scan(sum, warp_sums, all);
  if (threadIdx.x == 0) list = atomicAdd(reinterpret_cast<uint32_t*>(out.totals) + kNeuronListWords, all);
  __syncthreads();
  uint32_t so_far = list;
  for (int half = 0; half < 2; ++half) {
    uint32_t* starts = out.starts + (static_cast<int64_t>(tile) * 2 + half) * (per_half + 1);
    for (int b0 = 0; b0 < blocks; b0 += kPlanThreads) {
      const int b = b0 + threadIdx.x;
      uint32_t total;
      const uint32_t before = scan(b < blocks ? counts[half * per_half + b] : 0, warp_sums, total);
      if (b < blocks) starts[b] = so_far + before;
      so_far += total;
    }
    if (threadIdx.x == 0) starts[blocks] = so_far;
  }

  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(out.totals + kNeuronTickets, 1) == static_cast<int>(gridDim.x) - 1;
  __syncthreads();
  if (!last) return;
  // A tile with more blocks than a CTA's share is cut into pieces of at most half of that.
  const int tiles = gridDim.x;
  uint32_t blocks_of_all, pieces_of_all;
  int parts = 0, size = 0;  // of this thread's tile
  Tile mine = {};
  if (threadIdx.x < tiles) {
    const int4 code = out.tiles[threadIdx.x];
    mine = {static_cast<int>(threadIdx.x), code.y, code.z, code.w};
  }
  scan(mine.blocks, warp_sums, blocks_of_all);
  if (threadIdx.x < tiles) {
    const int64_t units = static_cast<int64_t>(blocks_of_all) * column_tiles;
    const int share = max(static_cast<int>((units + kShares - 1) / kShares), kMinShare), most = (share + 1) / 2;
    parts = mine.blocks <= share ? 1 : (mine.blocks + most - 1) / most;
    size = (mine.blocks + parts - 1) / parts;
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
      const int first = mine.blocks * part / parts, end = mine.blocks * (part + 1) / parts;
      out.order[position + part] = piece_code({mine, first, end, part, parts, base});
    }
  }
  if (threadIdx.x == 0) {
    out.totals[kPieces] = pieces_of_all;
    out.totals[kNeuronListWords] = out.totals[kNeuronTickets] = 0;
  }
}

__global__ void __launch_bounds__(kPlanThreads, 1) place_kernel(const TilePlan plan, int column_tiles, int halves,
                                                           const NeuronPlan out) {
  extern __shared__ uint32_t parts[];  // [halves][kParts] where this tile's nonzeros of each start
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int token_tiles = gridDim.x, per_half = token_tiles * 2 + 1;
  const uint32_t* bases = out.bases + static_cast<int64_t>(blockIdx.x) * halves * kParts;
  for (int i = threadIdx.x; i < halves * kParts; i += kPlanThreads) {  // parts without nonzeros have any start
    const int block = min(block_of(out, token_tiles, blockIdx.x, i), per_half - 1);
    parts[i] = out.starts[static_cast<int64_t>(i / kParts) * per_half + block] + bases[i];
  }
  __syncthreads();
  // A tile's nonzeros lie side by side.
  const int blocks = plan.tiles[blockIdx.x].y;
  if (blocks == 0) return;
  const uint32_t end = starts_of(plan, blockIdx.x, 1, column_tiles)[blocks];
  for (uint32_t at = starts_of(plan, blockIdx.x, 0, column_tiles)[0] + threadIdx.x; at < end; at += kPlanThreads) {
    const uint32_t code = out.at[at], rank = out.places[at];
    out.at[at] = parts[rank / kHalf * kParts + (code >> 8 & 0xff)] + (code >> 16);
    out.places[at] = place_of(rank % kHalf, code & 0xff);
  }
}

}  // namespace

cudaError_t neuron_plan(const TilePlan& plan, int64_t m, int64_t k, int64_t n, const NeuronPlan& out,
                        cudaStream_t stream) {
  if (m > kMaxSplitTokens) return cudaErrorInvalidValue;
  const int token_tiles = static_cast<int>(ceil_div(m, kTokenTile));
  const int column_tiles = static_cast<int>(ceil_div(n, kColumnTile));
  const int neuron_tiles = static_cast<int>(ceil_div(n, kTileM)), halves = 2 * neuron_tiles;
  const uint32_t part_bytes = halves * kParts * 4, rank_bytes = column_tiles * kColumnTile * 2;
  cudaError_t error = launch_early(frequency_kernel, token_tiles, kPlanThreads, column_tiles * kColumnTile, 1, stream,
                                   plan, column_tiles, out.frequencies);
  const auto then = [&](auto kernel, int64_t grid, uint32_t bytes, auto... arguments) {
    if (error == cudaSuccess) error = launch_early(kernel, grid, kPlanThreads, bytes, 1, stream, arguments...);
  };
  then(rank_kernel, ceil_div(n, kPlanThreads / 32), 0, static_cast<int>(n), out);
  then(mask_kernel, token_tiles, halves * 16 + rank_bytes, plan, column_tiles, halves, out);
  then(slots_kernel, neuron_tiles, 0, plan, token_tiles, out);
  then(count_kernel, token_tiles, part_bytes + halves * 40 + rank_bytes, plan, column_tiles, halves, out);
  then(starts_kernel, neuron_tiles, 0, token_tiles, static_cast<int>(ceil_div(k, kTileN)), out);
  then(place_kernel, token_tiles, part_bytes, plan, column_tiles, halves, out);
  return error;
}

}  // namespace sparsellm
