// tile_operands: expands lists by neuron to dense operand tiles of 64 x 64 values, with zeros where there is no
// nonzero. tile_weights reads the same operand tiles for every 256 columns of dW. It is faster to scatter the lists
// once here, and to copy whole operand tiles there, than to scatter the lists for every 256 columns.
//
// A CTA handles up to kBlocks blocks of half a neuron tile. For each block and list, it zeroes an operand tile in
// shared memory, scatters the list into it, and stores it with one bulk copy while it makes the next operand tile. The
// words of a list are loaded one operand tile ahead. Numerics: values are only copied.
#include "common/host.h"
#include "tile/plan.cuh"

namespace sparsellm {
namespace {

constexpr int kOperandThreads = 128;
constexpr int kBlocks = 4;         // blocks per CTA
constexpr int kBuffers = 2;        // operand tiles that are made and stored in turn
constexpr int kAhead = 4;          // words of the next operand tile that each thread loads ahead
constexpr uint32_t kNoWord = ~0u;  // no word has this place
static_assert(kHalf * kBlockColumns <= 0xffff, "kNoWord must not be a place");

// What a thread scatters into an operand tile: the words begin, begin + kOperandThreads, ... below `end` of a list.
struct Words {
  const uint32_t* list;
  uint32_t begin, end;
};

__global__ void __launch_bounds__(kOperandThreads) tile_operands_kernel(const Operands a, int chunks) {
  __shared__ __align__(1024) uint8_t buffers[kBuffers][kHalfBytes];
  __shared__ uint32_t starts[kBlocks + 1];
  ptx::griddepcontrol_launch_dependents();
  const int chunk = blockIdx.x % chunks, half = blockIdx.x / chunks % 2, tile = blockIdx.x / chunks / 2;
  const uint32_t thread = threadIdx.x;
  ptx::griddepcontrol_wait();
  const int4 sizes = a.plan.tiles[tile];
  const int all_blocks = static_cast<int>((a.m + kTileM - 1) / kTileM) * 2;  // blocks that a neuron tile can have
  const Tile of = {tile, sizes.x, sizes.z, sizes.w};
  int from;
  const int needed = of.needed(half, chunk * kBlocks, min((chunk + 1) * kBlocks, of.blocks()), from);
  if (needed == 0) return;
  if (thread <= needed) {
    starts[thread] = a.plan.starts[(static_cast<int64_t>(tile) * 2 + half) * (all_blocks + 1) + from + thread];
  }
  __syncthreads();
  const int lists = a.lists[1] == nullptr ? 1 : 2, count = needed * lists;
  const auto words_of = [&](int i) {
    const int block = i / lists;
    return Words{i % lists == 0 ? a.lists[0] : a.lists[1], starts[block] + thread, starts[block + 1]};
  };
  uint32_t ahead[kAhead];
  const auto load = [&](const Words& words) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const uint32_t at = words.begin + j * kOperandThreads;
      ahead[j] = at < words.end ? words.list[at] : kNoWord;
    }
  };
  load(words_of(0));
  for (int i = 0; i < count; ++i) {
    const uint32_t to = ptx::smem_address(buffers[i % kBuffers]);
    const auto scatter = [&](uint32_t word) { ptx::st_shared_u16(to + (word & 0xffff) * 2, word >> 16); };
    if (thread == 0) ptx::bulk_wait_read<kBuffers - 1>();
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kHalfBytes / 16 / kOperandThreads; ++j) {
      ptx::st_shared_v4(to + (j * kOperandThreads + thread) * 16, make_uint4(0, 0, 0, 0));
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (ahead[j] != kNoWord) scatter(ahead[j]);
    }
    if (i + 1 < count) load(words_of(i + 1));
    const Words words = words_of(i);  // those that were not loaded ahead, if there are any
    for (uint32_t at = words.begin + kAhead * kOperandThreads; at < words.end; at += kOperandThreads) {
      scatter(words.list[at]);
    }
    ptx::fence_proxy_async();
    __syncthreads();
    if (thread == 0) {
      const int64_t at = (static_cast<int64_t>(tile) * all_blocks + from + i / lists) * 2 + half;
      ptx::bulk_store(static_cast<uint8_t*>(i % lists == 0 ? a.operands[0] : a.operands[1]) + at * kHalfBytes, to,
                      kHalfBytes);
      ptx::bulk_commit_group();
    }
  }
  if (thread == 0) ptx::bulk_wait();
}

}  // namespace

cudaError_t tile_operands(const Operands& a, cudaStream_t stream) {
  const int chunks = static_cast<int>(ceil_div(ceil_div(a.m, kTileM) * 2, kBlocks));
  return launch_early(tile_operands_kernel, ceil_div(a.n, kTileM) * 2 * chunks, kOperandThreads, 0, 1, stream, a,
                      chunks);
}

}  // namespace sparsellm
