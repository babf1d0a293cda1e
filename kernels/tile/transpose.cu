// neuron_plan: the nonzeros of a tile plan once more, by neuron: for the gradients of the weights, which are sums over
// tokens. Neurons are put in order of frequency, so that a tile's 128 fire for few tokens, or for many, all alike; the
// tokens that fire any of them are its slots, numbered as a token tile's neurons are (tile/plan.cuh).
//
//   frequency  how many tokens fire each neuron                                             CTA: token tile
//   rank       the order of the neurons                                                     CTA: 128 neurons
//   mask       which tokens fire some neuron of each half tile                              CTA: token tile
//   slots      the tokens of each neuron tile                                               CTA: neuron tile
//   count      how many nonzeros each token tile has in each block of each half             CTA: token tile
//   starts     where each block starts; the order of the tiles, fullest first               CTA: neuron tile
//   place      where each nonzero goes                                                      CTA: token tile
//
// Integers only. The order of a block's nonzeros may differ between runs; no result depends on it.
#include "common/host.h"
#include "tile/plan.cuh"

namespace sparsellm {
namespace {

constexpr int kThreads512 = 512;
constexpr int kThreads1024 = 1024;
constexpr int kParts = 6;  // a token tile's tokens lie in at most three blocks of what one half has, three of both's

// The nonzeros of a token tile: use(index in the lists, position within the tile, neuron). CTAs of whole warps.
template <class Use>
__device__ __forceinline__ void for_each_nonzero(const TilePlan& plan, int tile, int column_tiles, Use use) {
  const uint32_t lane = threadIdx.x % 32;
  const uint16_t* slots = plan.slots + static_cast<int64_t>(tile) * column_tiles * kColumnTile;
  const int blocks = plan.tiles[tile].y;
  for (int piece = threadIdx.x / 32; piece < 2 * blocks; piece += blockDim.x / 32) {
    const int half = piece & 1, block = piece / 2;
    const uint32_t* starts = starts_of(plan, tile, half, column_tiles) + block;
    const uint32_t end = starts[1];
    for (uint32_t at = starts[0] + lane; at < end; at += 32) {
      const uint32_t place = plan.lists[at] & 0xffff, row = place / 64;
      const uint32_t slot = ((place / 8 ^ row) % 8) * 8 + place % 8;
      use(at, half * kHalf + row, slots[block * kBlockColumns + slot]);
    }
  }
}

__global__ void __launch_bounds__(kThreads512) frequency_kernel(const TilePlan plan, int column_tiles,
                                                               int32_t* frequencies) {
  extern __shared__ uint32_t counts[];  // [neurons]
  ptx::griddepcontrol_launch_dependents();
  for (int i = threadIdx.x; i < column_tiles * kColumnTile / 4; i += kThreads512) counts[i] = 0;
  __syncthreads();
  ptx::griddepcontrol_wait();
  // Bytes: a neuron fires for at most 128 tokens of a tile.
  for_each_nonzero(plan, blockIdx.x, column_tiles, [&](uint32_t, uint32_t, uint32_t neuron) {
    atomicAdd(&counts[neuron / 4], 1u << neuron % 4 * 8);
  });
  __syncthreads();
  for (int i = threadIdx.x; i < column_tiles * kColumnTile / 4; i += kThreads512) {
    for (int b = 0; b < 4; ++b) {
      const uint32_t count = counts[i] >> 8 * b & 0xff;
      if (count != 0) atomicAdd(frequencies + 4 * i + b, count);
    }
  }
}

__global__ void __launch_bounds__(kThreads1024) rank_kernel(int n, const NeuronPlan out) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int neuron = blockIdx.x * kTileM + threadIdx.x / 8;
  const int mine = neuron < n ? out.frequencies[neuron] : 0;
  int before = 0;
  for (int other = threadIdx.x % 8; other < n; other += 8) {
    const int its = out.frequencies[other];
    before += its > mine || (its == mine && other < neuron);
  }
  for (int offset = 4; offset > 0; offset /= 2) before += __shfl_xor_sync(~0u, before, offset);
  if (threadIdx.x % 8 == 0 && neuron < n) {
    out.ranks[neuron] = before;
    out.neurons[before] = neuron;
  }
}

__global__ void __launch_bounds__(kThreads512) mask_kernel(const TilePlan plan, int column_tiles, int halves,
                                                          const NeuronPlan out) {
  extern __shared__ uint32_t masks[];  // [halves][4]
  ptx::griddepcontrol_launch_dependents();
  for (int i = threadIdx.x; i < 4 * halves; i += kThreads512) masks[i] = 0;
  __syncthreads();
  ptx::griddepcontrol_wait();
  for_each_nonzero(plan, blockIdx.x, column_tiles, [&](uint32_t, uint32_t position, uint32_t neuron) {
    uint32_t* word = masks + out.ranks[neuron] / kHalf * 4 + position / 32;
    const uint32_t bit = 1u << position % 32;
    if ((*word & bit) == 0) atomicOr(word, bit);
  });
  __syncthreads();
  for (int i = threadIdx.x; i < 4 * halves; i += kThreads512) {
    out.masks[(static_cast<int64_t>(i / 4) * gridDim.x + blockIdx.x) * 4 + i % 4] = masks[i];
  }
}

// Sum over the threads before this one; `total` over all.
__device__ __forceinline__ uint32_t scan(uint32_t value, uint32_t* warp_sums, uint32_t& total) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t before = exclusive_scan(value, lane);
  if (lane == 31) warp_sums[warp] = before + value;
  __syncthreads();
  const uint32_t of_warp = lane < blockDim.x / 32 ? warp_sums[lane] : 0, warps_before = exclusive_scan(of_warp, lane);
  total = __shfl_sync(~0u, warps_before + of_warp, 31);
  const uint32_t so_far = __shfl_sync(~0u, warps_before, warp);
  __syncthreads();
  return so_far + before;
}

// The tokens of word w that fire neurons of the first half alone (0), of both (1), of the second alone (2).
__device__ __forceinline__ uint32_t group_of(uint32_t first, uint32_t second, int which) {
  return which == 0 ? first & ~second : which == 1 ? first & second : second & ~first;
}

__global__ void __launch_bounds__(kThreads1024) slots_kernel(const TilePlan plan, int token_tiles,
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
    for (int w0 = 0; w0 < words; w0 += kThreads1024) {
      const int w = w0 + threadIdx.x;
      const uint32_t group = w < words ? group_of(first[w], second[w], which) : 0;
      uint32_t total;
      uint32_t slot = size + scan(__popc(group), warp_sums, total);
      if (w < words) before[w] = slot;
      for (uint32_t rest = group; rest != 0; rest &= rest - 1) {
        const int position = 32 * w + __ffs(rest) - 1;
        slots[slot++] = plan.tokens == nullptr ? position : plan.tokens[position];
      }
      size += total;
    }
    sizes[which] = size - start;
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

// A nonzero's slot in its neuron's tile, and its part: which of the counters of a token tile counts it.
struct Spot {
  uint32_t rank, slot;
  int part;  // (rank / 64) * kParts + 0..5
};

__device__ __forceinline__ Spot spot_of(const NeuronPlan& out, int token_tiles, int token_tile, uint32_t position,
                                        uint32_t neuron) {
  const int words = token_tiles * 4, w = token_tile * 4 + position / 32;
  Spot spot;
  spot.rank = out.ranks[neuron];
  const int tile = spot.rank / kTileM, half = spot.rank / kHalf % 2;
  const uint32_t* masks = out.masks + static_cast<int64_t>(tile) * 2 * words + w;
  const uint32_t first = masks[0], second = masks[words], bit = 1u << position % 32;
  const int which = (first & second & bit) != 0 ? 1 : 2 * half;
  const uint32_t* before = out.before + (static_cast<int64_t>(tile) * 3 + which) * words;
  spot.slot = before[w] + __popc(group_of(first, second, which) & (bit - 1));
  const int block = spot.slot / kBlockColumns - before[token_tile * 4] / kBlockColumns;
  spot.part = spot.rank / kHalf * kParts + (which == 1 ? 3 : 0) + block;
  return spot;
}

__global__ void __launch_bounds__(kThreads512) count_kernel(const TilePlan plan, int column_tiles, int halves,
                                                           const NeuronPlan out) {
  extern __shared__ uint32_t parts[];  // [halves][kParts]
  ptx::griddepcontrol_launch_dependents();
  for (int i = threadIdx.x; i < halves * kParts; i += kThreads512) parts[i] = 0;
  __syncthreads();
  ptx::griddepcontrol_wait();
  const int token_tiles = gridDim.x, words = token_tiles * 4;
  for_each_nonzero(plan, blockIdx.x, column_tiles, [&](uint32_t, uint32_t position, uint32_t neuron) {
    atomicAdd(&parts[spot_of(out, token_tiles, blockIdx.x, position, neuron).part], 1u);
  });
  __syncthreads();
  for (int i = threadIdx.x; i < halves * kParts; i += kThreads512) {
    if (parts[i] == 0) continue;
    const int half = i / kParts, which = i % kParts >= 3 ? 1 : half % 2 * 2;
    const uint32_t* before = out.before + (static_cast<int64_t>(half / 2) * 3 + which) * words;
    const int block = before[blockIdx.x * 4] / kBlockColumns + i % 3;
    out.bases[static_cast<int64_t>(blockIdx.x) * halves * kParts + i] =
        atomicAdd(out.counts + static_cast<int64_t>(half) * token_tiles * 2 + block, parts[i]);
  }
}

__global__ void __launch_bounds__(kThreads1024) starts_kernel(int token_tiles, const NeuronPlan out) {
  __shared__ uint32_t warp_sums[32], list;
  __shared__ bool last;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int tile = blockIdx.x, blocks = out.tiles[tile].y, per_half = token_tiles * 2;
  const uint32_t* counts = out.counts + static_cast<int64_t>(tile) * 2 * per_half;
  uint32_t sum = 0, all;
  for (int half = 0; half < 2; ++half) {
    for (int b = threadIdx.x; b < blocks; b += kThreads1024) sum += counts[half * per_half + b];
  }
  scan(sum, warp_sums, all);
  if (threadIdx.x == 0) list = atomicAdd(reinterpret_cast<uint32_t*>(out.totals), all);
  __syncthreads();
  uint32_t so_far = list;
  for (int half = 0; half < 2; ++half) {
    uint32_t* starts = out.starts + (static_cast<int64_t>(tile) * 2 + half) * (per_half + 1);
    for (int b0 = 0; b0 < blocks; b0 += kThreads1024) {
      const int b = b0 + threadIdx.x;
      uint32_t total;
      const uint32_t before = scan(b < blocks ? counts[half * per_half + b] : 0, warp_sums, total);
      if (b < blocks) starts[b] = so_far + before;
      so_far += total;
    }
    if (threadIdx.x == 0) starts[blocks] = so_far;
  }

  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(out.totals + 1, 1) == static_cast<int>(gridDim.x) - 1;
  __syncthreads();
  if (!last) return;
  const int tiles = gridDim.x;
  for (int t = threadIdx.x; t < tiles; t += kThreads1024) {
    const int4 mine = out.tiles[t];
    int position = 0;
    for (int other = 0; other < tiles; ++other) {
      const int its = out.tiles[other].y;
      position += its > mine.y || (its == mine.y && other < t);
    }
    out.order[position] = make_int4(t, mine.y, mine.z, mine.w);
  }
  if (threadIdx.x < 2) out.totals[threadIdx.x] = 0;
}

__global__ void __launch_bounds__(kThreads512) place_kernel(const TilePlan plan, int column_tiles, int halves,
                                                           const NeuronPlan out) {
  extern __shared__ uint32_t parts[];  // [halves][kParts] placed so far
  ptx::griddepcontrol_launch_dependents();
  for (int i = threadIdx.x; i < halves * kParts; i += kThreads512) parts[i] = 0;
  __syncthreads();
  ptx::griddepcontrol_wait();
  const int token_tiles = gridDim.x;
  const uint32_t* bases = out.bases + static_cast<int64_t>(blockIdx.x) * halves * kParts;
  for_each_nonzero(plan, blockIdx.x, column_tiles, [&](uint32_t at, uint32_t position, uint32_t neuron) {
    const Spot spot = spot_of(out, token_tiles, blockIdx.x, position, neuron);
    const uint32_t* starts = out.starts + static_cast<int64_t>(spot.rank / kHalf) * (token_tiles * 2 + 1);
    out.at[at] = starts[spot.slot / kBlockColumns] + bases[spot.part] + atomicAdd(&parts[spot.part], 1u);
    out.places[at] = place_of(spot.rank % kHalf, spot.slot % kBlockColumns);
  });
}

}  // namespace

cudaError_t neuron_plan(const TilePlan& plan, int64_t m, int64_t n, const NeuronPlan& out, cudaStream_t stream) {
  const int token_tiles = static_cast<int>(ceil_div(m, kTokenTile));
  const int column_tiles = static_cast<int>(ceil_div(n, kColumnTile));
  const int neuron_tiles = static_cast<int>(ceil_div(n, kTileM)), halves = 2 * neuron_tiles;
  const uint32_t part_bytes = halves * kParts * 4;
  cudaError_t error = launch_early(frequency_kernel, token_tiles, kThreads512, column_tiles * kColumnTile, 1, stream,
                                   plan, column_tiles, out.frequencies);
  const auto then = [&](auto kernel, int64_t grid, int threads, uint32_t bytes, auto... arguments) {
    if (error == cudaSuccess) error = launch_early(kernel, grid, threads, bytes, 1, stream, arguments...);
  };
  then(rank_kernel, neuron_tiles, kThreads1024, 0, static_cast<int>(n), out);
  then(mask_kernel, token_tiles, kThreads512, halves * 16, plan, column_tiles, halves, out);
  then(slots_kernel, neuron_tiles, kThreads1024, 0, plan, token_tiles, out);
  then(count_kernel, token_tiles, kThreads512, part_bytes, plan, column_tiles, halves, out);
  then(starts_kernel, neuron_tiles, kThreads1024, 0, token_tiles, out);
  then(place_kernel, token_tiles, kThreads512, part_bytes, plan, column_tiles, halves, out);
  return error;
}

}  // namespace sparsellm
