// gate_pack for the fewest tokens (decoding): the product is a stream of w, which all SMs should pull on from the first
// moment to the last, and latency is the rest.
//
// The eight CTAs of a cluster share a column tile, 32 neurons each, and two CTAs an SM. The warps of a CTA share K, and
// each multiplies all neurons and tokens of the CTA by mma.sync. What a lane multiplies it copies itself, through shared
// memory of its own, so that no warp waits for anything but its own copies before all have their sums. These are added
// in order, warp by warp, and meet as bf16 in the first CTA's shared memory, which packs them. Same numerics as the
// kernel for many tokens.
#pragma once

#include "gate_pack/small.cuh"

namespace sparsellm {

constexpr int kFewestTokens = 16;

namespace fewest {

using small::kPitch;

constexpr int kWarps = 8;
constexpr int kCluster = 8;
constexpr int kNeurons = kColumnTile / kCluster;
constexpr int kResident = 2;  // CTAs of an SM
constexpr int kDepth = 4;     // pieces of a warp in flight: 32 columns of k of all rows
constexpr uint32_t kCopied = 512;  // bytes of a warp's copy: 64 of each of eight rows, 16 a lane
constexpr int kNeuronCopies = kNeurons / 8, kTokenCopies = kFewestTokens / 8;
constexpr uint32_t kPiece = (kNeuronCopies + kTokenCopies) * kCopied;
constexpr uint32_t kOfWarp = kDepth * kPiece;
constexpr uint32_t kSumPitch = kNeurons + 8;  // floats of a token's sums: eight tokens lie in all banks
constexpr uint32_t kBytes = kWarps * kOfWarp + kFewestTokens * kPitch + sizeof(small::Sums);
static_assert(kResident * (kBytes + 1024) <= kMaxSharedBytes + 1024, "the system takes 1 KB of each CTA");
static_assert(kFewestTokens * kSumPitch * sizeof(float) <= kOfWarp, "a warp's sums take the place of its pieces");

// To the shared address `address` of CTA `rank`.
__device__ __forceinline__ void st_cluster_u32(uint32_t address, uint32_t rank, uint32_t v) {
  asm volatile(
      "{\n .reg .b32 remote;\n mapa.shared::cluster.u32 remote, %0, %1;\n"
      " st.shared::cluster.u32 [remote], %2;\n}" ::"r"(address),
      "r"(rank), "r"(v)
      : "memory");
}

__global__ void __launch_bounds__(32 * kWarps, kResident)
    gate_pack_fewest_kernel(const __nv_bfloat16* x, const __nv_bfloat16* w, int m, int64_t n, int k, int words_per_tile,
                            const Packed out) {
  extern __shared__ uint4 pieces[];
  const uint32_t tile = ptx::smem_address(pieces) + kWarps * kOfWarp;  // [tokens, 256 columns], rank 0's
  auto& totals = *reinterpret_cast<small::Sums*>(reinterpret_cast<uint8_t*>(pieces) + kWarps * kOfWarp +
                                                 kFewestTokens * kPitch);
  const int warp = threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t rank = ptx::cluster_rank();
  const int column_tile = blockIdx.x / kCluster;
  const int column_tiles = gridDim.x / kCluster;
  const uint32_t column = column_tile * kColumnTile;
  const uint32_t neuron = column + rank * kNeurons;  // this CTA's first
  const uint32_t row_bytes = 2 * k;

  if (warp == 0) totals.clear(lane);
  __syncwarp();
  ptx::cluster_arrive();
  ptx::griddepcontrol_wait();  // for clear_kernel, and all before it
  ptx::griddepcontrol_launch_dependents();  // not before: the next kernel finds done whatever is before gate_pack

  // Lane l has 16 bytes, l % 4 of 64, of row l / 4 of eight: of a token or a neuron. As operands of mma.sync these are
  // other columns of k than the instruction's, but for both operands the same. Two pieces side by side are one warp's.
  const uint32_t mine = ptx::smem_address(pieces) + warp * kOfWarp + 16 * lane;
  const int piece_count = 2 * ((k + 64 * kWarps - 1) / (64 * kWarps));
  const auto fetch = [&](int piece, uint32_t to) {
    if (piece < piece_count) {
      const int from = (piece / 2 * kWarps + warp) * 64 + piece % 2 * 32 + lane % 4 * 8;  // column of k
#pragma unroll
      for (int j = 0; j < kNeuronCopies; ++j) {
        ptx::cp_async_row_16(to + j * kCopied, w + from, neuron + 8 * j + lane / 4, row_bytes,
                             from < k && neuron + 8 * j < n ? 16 : 0);
      }
#pragma unroll
      for (int j = 0; j < kTokenCopies; ++j) {
        const int token = 8 * j + lane / 4;
        ptx::cp_async_row_16(to + (kNeuronCopies + j) * kCopied, x + from, token, row_bytes,
                             from < k && token < m ? 16 : 0);
      }
    }
    ptx::cp_async_commit_group();  // empty behind the last piece: groups are counted
  };
#pragma unroll
  for (int i = 0; i < kDepth; ++i) fetch(i, mine + i * kPiece);

  float d[kNeuronCopies][4] = {};
  uint32_t stage = mine;
  for (int piece = 0; piece < piece_count; ++piece) {
    ptx::cp_async_wait_group<kDepth - 1>();
    uint4 b[kNeuronCopies], a[kTokenCopies];
#pragma unroll
    for (int j = 0; j < kNeuronCopies; ++j) b[j] = ptx::ld_shared_v4(stage + j * kCopied);
#pragma unroll
    for (int j = 0; j < kTokenCopies; ++j) a[j] = ptx::ld_shared_v4(stage + (kNeuronCopies + j) * kCopied);
    const uint4 &low = a[0], &high = a[1];  // tokens 0..7, 8..15
#pragma unroll
    for (int j = 0; j < kNeuronCopies; ++j) ptx::mma_16x8x16(d[j], {low.x, high.x, low.y, high.y}, b[j].x, b[j].y);
#pragma unroll
    for (int j = 0; j < kNeuronCopies; ++j) ptx::mma_16x8x16(d[j], {low.z, high.z, low.w, high.w}, b[j].z, b[j].w);
    fetch(piece + kDepth, stage);
    stage += kPiece;
    if (stage == mine + kOfWarp) stage = mine;
  }

  float* sums = reinterpret_cast<float*>(pieces);  // [tokens, kSumPitch] of each warp
  __syncwarp();                                    // all lanes have read their last pieces
#pragma unroll
  for (int j = 0; j < kNeuronCopies; ++j) {
    float* to = sums + warp * (kOfWarp / 4) + lane / 4 * kSumPitch + 8 * j + lane % 4 * 2;
    *reinterpret_cast<float2*>(to) = make_float2(d[j][0], d[j][1]);
    *reinterpret_cast<float2*>(to + 8 * kSumPitch) = make_float2(d[j][2], d[j][3]);
  }
  __syncthreads();
  ptx::cluster_wait();  // the first CTA has begun: its memory may be written
  for (int i = threadIdx.x; i < m * (kNeurons / 2); i += 32 * kWarps) {
    const int token = i / (kNeurons / 2), pair = i % (kNeurons / 2);
    const float2* parts = reinterpret_cast<const float2*>(sums + token * kSumPitch) + pair;
    float2 sum = parts[0];
#pragma unroll
    for (int p = 1; p < kWarps; ++p) {
      const float2 part = parts[p * (kOfWarp / sizeof(float2))];
      sum.x += part.x;
      sum.y += part.y;
    }
    st_cluster_u32(tile + token * kPitch + rank * (kNeurons * 2) + pair * 4, 0, ptx::cvt_relu_bf16x2(sum.x, sum.y));
  }
  __syncwarp();
  ptx::cluster_sync();
  if (rank != 0) return;

  small::pack_tile<kWarps>(tile, m, n, column_tile, column_tiles, words_per_tile, out, totals);
}

}  // namespace fewest

inline cudaError_t gate_pack_fewest(const void* x, const void* w, int64_t m, int64_t k, int64_t n, int words_per_tile,
                                    const Packed& out, cudaStream_t stream) {
  using namespace fewest;
  const cudaError_t error =  // so that kResident CTAs have room
      cudaFuncSetAttribute(reinterpret_cast<const void*>(gate_pack_fewest_kernel),
                           cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  return launch_early(gate_pack_fewest_kernel, ceil_div(n, kColumnTile) * kCluster, 32 * kWarps, kBytes, kCluster,
                      stream, static_cast<const __nv_bfloat16*>(x), static_cast<const __nv_bfloat16*>(w),
                      static_cast<int>(m), n, static_cast<int>(k), words_per_tile, out);
}

}  // namespace sparsellm
