// tile_operands: expands lists by neuron to dense operand tiles of 64 x 64 values, with zeros where there is no
// nonzero. tile_weights reads the same operand tiles for every 256 columns of dW. It is faster to scatter the lists
// once here, and to copy whole operand tiles there, than to scatter the lists for every 256 columns.
//
// A CTA handles up to kBlocks blocks of half a neuron tile. For each block and list, it zeroes an operand tile in
// shared memory, scatters the list into it, and stores it with one bulk copy while it makes the next operand tile.
// Numerics: values are only copied.
#include "common/host.h"
#include "tile/plan.cuh"

namespace sparsellm {
namespace {

constexpr int kOperandThreads = 128;
constexpr int kBlocks = 8;   // blocks per CTA
constexpr int kBuffers = 2;  // operand tiles that are made and stored in turn

__global__ void __launch_bounds__(kOperandThreads) tile_operands_kernel(const Operands a, int chunks) {
  __shared__ __align__(1024) uint8_t buffers[kBuffers][kHalfBytes];
  ptx::griddepcontrol_launch_dependents();
  const int chunk = blockIdx.x % chunks, half = blockIdx.x / chunks % 2, tile = blockIdx.x / chunks / 2;
  const uint32_t thread = threadIdx.x;
  ptx::griddepcontrol_wait();
  const int4 sizes = a.plan.tiles[tile];
  const int all_blocks = static_cast<int>((a.m + kTileM - 1) / kTileM) * 2;  // blocks that a neuron tile can have
  const Tile of = {tile, sizes.x, sizes.z, sizes.w};
  int from;
  const int needed = of.needed(half, chunk * kBlocks, min((chunk + 1) * kBlocks, of.blocks()), from);
  const uint32_t* starts = a.plan.starts + (static_cast<int64_t>(tile) * 2 + half) * (all_blocks + 1) + from;
  uint32_t which = 0;
  for (int block = 0; block < needed; ++block) {
    const uint32_t begin = starts[block], end = starts[block + 1];
#pragma unroll
    for (int l = 0; l < 2; ++l) {
      if (a.lists[l] == nullptr) break;
      const uint32_t to = ptx::smem_address(buffers[which]);
      if (thread == 0) ptx::bulk_wait_read<kBuffers - 1>();
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kHalfBytes / 16 / kOperandThreads; ++i) {
        ptx::st_shared_v4(to + (i * kOperandThreads + thread) * 16, make_uint4(0, 0, 0, 0));
      }
      __syncthreads();
      for (uint32_t at = begin + thread; at < end; at += kOperandThreads) {
        const uint32_t word = a.lists[l][at];
        ptx::st_shared_u16(to + (word & 0xffff) * 2, word >> 16);
      }
      ptx::fence_proxy_async();
      __syncthreads();
      if (thread == 0) {
        const int64_t at = (static_cast<int64_t>(tile) * all_blocks + from + block) * 2 + half;
        ptx::bulk_store(static_cast<uint8_t*>(a.operands[l]) + at * kHalfBytes, to, kHalfBytes);
        ptx::bulk_commit_group();
      }
      which = (which + 1) % kBuffers;
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
