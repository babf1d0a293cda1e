// gate_pack for up to 16 tokens (decoding). Reading w limits the speed, so every SM should read w all the time.
//
// The four CTAs of a cluster share a column tile, 64 neurons each. There is one CTA per SM: with more and smaller CTAs,
// some SMs would have two, and would finish last. The warps of a CTA divide K: each multiplies all neurons and tokens
// of the CTA over its own columns of k, with mma.sync. Each lane copies exactly the part of w that it multiplies to
// shared memory, so a warp needs no barrier with other warps for w; the first barrier comes when all warps have their
// sums. x is read once per cluster: each CTA copies its share of the tokens to all four CTAs, one round (512 columns of
// k) at a time. At the end, each CTA adds its warps' sums in order and sends them as bf16 to the shared memory of the
// cluster's first CTA, which packs them. Numerics: as in the kernel for many tokens.
//
// kFloat8: w is e4m3 with a scale per neuron. A lane's 16 bytes of a row are then 16 columns instead of eight, and are
// converted to bf16, which is exact, right before they are multiplied. The scales multiply the sums of all warps.
#pragma once

#include "common/pipeline.cuh"
#include "gate_pack/pack.cuh"

namespace sparsellm {

constexpr int kFewestTokens = 16;

namespace fewest {

constexpr int kWarps = 8;             // warps that multiply
constexpr int kFeedingWarp = kWarps;  // one additional warp, which fetches x
constexpr int kThreads = 32 * (kWarps + 1);
constexpr int kCluster = 4;
constexpr int kNeurons = kColumnTile / kCluster;
constexpr int kDepth = 4;          // pieces in flight per warp. A piece is 64 bytes of each row of the CTA's neurons
constexpr uint32_t kCopied = 512;  // bytes that a warp copies at once: 64 bytes of each of eight rows, 16 per lane
constexpr int kNeuronCopies = kNeurons / 8;
constexpr uint32_t kPiece = kNeuronCopies * kCopied;
constexpr uint32_t kOfWarp = kDepth * kPiece;
constexpr int kRound = 64 * kWarps;  // columns of k per round: each warp has two pieces, or one if kFloat8
// Bytes between tokens. The padding lets what eight lanes read of two rows at once use all banks: 64 contiguous bytes
// of each or, if kFloat8, 16 of every 32 bytes.
template <bool kFloat8>
constexpr uint32_t kTokenPitch = kRound * 2 + (kFloat8 ? 16 : 64);
// Shared memory holds x for three rounds of 16 tokens or, if there are fewer tokens, for up to kSlots rounds.
constexpr int kTokenRows = 3 * kFewestTokens;
constexpr int kSlots = 8;
constexpr uint32_t kSumPitch = kNeurons + 8;  // floats between tokens. The padding lets the sums of eight tokens use
                                              // all banks
constexpr uint32_t kPitch =
    kColumnTile * 2 + 16;  // bytes between tokens in the tile. The padding lets the chunks of eight tokens use all
                           // banks

// Spreads the lowest four bits to a byte each: 0b1011 gives 0x01000101.
__device__ __forceinline__ uint32_t bytes_of(uint32_t bits) { return (bits & 0xf) * 0x00204081 & 0x01010101; }

using FewestPipeline = Pipeline<kSlots, kCluster>;

struct Shared {
  uint4 pieces[kWarps * kOfWarp / 16];
  uint4 tokens[kTokenRows * kTokenPitch<false> / 16];  // [slots, m] rows: x of the rounds in flight
  uint4 tile[kFewestTokens * kPitch / 16];      // [m] rows of 256 columns; used in rank 0
  FewestPipeline::Storage pipeline;             // a stage is x of a round
  uint64_t finished;                            // barrier in rank 0: the tile has arrived
  uint32_t fired[kColumnTile / 32];
  Sums totals;
};
static_assert(sizeof(Shared) <= kMaxSharedBytes, "Shared must fit in one CTA's shared memory");
static_assert(kDepth % 2 == 0, "kDepth must be even: a round takes two slots, one per half");
static_assert(kFewestTokens * kSumPitch * sizeof(float) <= kOfWarp, "a warp's sums must fit in place of its pieces");

// One CTA. kFloat8: w is e4m3. Arrays in registers are locals of functions: if they were members, the members next to
// them would stay in local memory until loops are unrolled.
template <bool kFloat8>
struct FewestCta {
  static constexpr int kHalves = kFloat8 ? 1 : 2;    // pieces per warp and round
  static constexpr int kColumns = kFloat8 ? 16 : 8;  // columns of a lane's 16 bytes of a row
  static constexpr uint32_t kTokenPitch = fewest::kTokenPitch<kFloat8>;
  Shared& shared;
  const __nv_bfloat16* x;
  const __nv_bfloat16* w;  // to the addresses, two e4m3 values are one bf16 value
  int m;
  int64_t n;
  int k, slots;
  const Packed& out;
  FewestPipeline pipeline;
  uint32_t tokens, finished;
  int warp;
  uint32_t lane, rank;
  int column_tile, column_tiles;
  uint32_t column, neuron;  // the first column of the tile; this CTA's first neuron
  uint32_t row_bytes;
  int rounds;
  FewestPipeline::State state;  // its stage is the current slot of x

  __device__ __forceinline__ FewestCta(Shared& shared, const __nv_bfloat16* x, const __nv_bfloat16* w, int m, int64_t n,
                                       int k, int slots, const Packed& out)
      : shared(shared),
        x(x),
        w(w),
        m(m),
        n(n),
        k(k),
        slots(slots),
        out(out),
        pipeline(shared.pipeline),
        tokens(ptx::smem_address(shared.tokens)),
        finished(ptx::smem_address(&shared.finished)),
        warp(ptx::warp_index()),
        lane(threadIdx.x % 32),
        rank(ptx::cluster_rank()),
        column_tile(blockIdx.x / kCluster),
        column_tiles(gridDim.x / kCluster),
        column(column_tile * kColumnTile),
        neuron(column + rank * kNeurons),
        row_bytes(2 * k),
        rounds((k + kRound - 1) / kRound) {}

  // Called by the feeding warp while the other warps start to fetch w.
  __device__ __forceinline__ void init() const {
    shared.totals.clear(lane);
    if (lane < kColumnTile / 32) shared.fired[lane] = 0;
    if (lane == 0) {
      for (int s = 0; s < kSlots; ++s) pipeline.init(s, 1, kCluster * kWarps);
      ptx::mbarrier_init(finished, 1);
      ptx::fence_mbarrier_init();
      ptx::mbarrier_arrive_expect_tx(finished, m * kColumnTile * 2);
    }
    __syncwarp();
  }

  // The role of the feeding warp: copies tokens rank, rank + 4, ... of x to all CTAs of the cluster, one round at a
  // time.
  __device__ __forceinline__ void feed(int zeroed) {
    for (int i = lane; blockIdx.x == 0 && i < zeroed; i += 32) out.counters[i] = 0;
    ptx::cluster_wait();  // wait until all CTAs have initialized their barriers
    if (lane == 0) {
      for (int round = 0; round < rounds; ++round, state.advance(slots)) {
        const uint32_t barrier = pipeline.producer_barrier(state.stage);
        const uint32_t bytes = min(kRound * 2, static_cast<int>(row_bytes) - round * kRound * 2);
        pipeline.producer_acquire(state);
        ptx::mbarrier_arrive_expect_tx(barrier, m * bytes);
        for (int token = rank; token < m; token += kCluster) {
          ptx::bulk_load_multicast(tokens + (state.stage * m + token) * kTokenPitch,
                                   x + static_cast<int64_t>(token) * k + round * kRound, bytes, barrier,
                                   (1 << kCluster) - 1);
        }
      }
    }
    __syncwarp();
  }

  // A piece has 64 bytes of k of each row. Lane l loads 16 of these bytes: chunk l % 4 of row l / 4 of eight neurons,
  // and the same columns of eight tokens. mma.sync expects other columns of k in this lane. That does not matter: both
  // operands have the same columns in the same positions, so the same products are summed. A warp has neighbouring
  // pieces of each round.
  __device__ __forceinline__ uint32_t column_of(int round, int half) const {
    return round * kRound + warp * 64 + half * 32 + lane % 4 * kColumns;
  }

  // Requests this lane's part of a piece of w, for all neurons of the CTA.
  __device__ __forceinline__ void fetch(int round, int half, uint32_t to) const {
    if (round < rounds) {
      const int from = column_of(round, half);
#pragma unroll
      for (int j = 0; j < kNeuronCopies; ++j) {
        ptx::cp_async_row_16(to + j * kCopied, w + from * 8 / kColumns,
                             neuron + 8 * j + lane / 4, kFloat8 ? k : row_bytes,
                             from < k && neuron + 8 * j < n ? 16 : 0);
      }
    }
    ptx::cp_async_commit_group();  // also if nothing was requested, because cp_async_wait_group counts groups
  }

  // The address of this lane's chunk of a token's row in slot 0. For a token >= m, this is the row of the last token:
  // the sums of such a token are never read.
  __device__ __forceinline__ uint32_t row_of(int token) const {
    return tokens + min(token, m - 1) * kTokenPitch + warp * 128 + lane % 4 * (2 * kColumns);
  }

  // kFloat8: reads the scales of the eight neurons whose sums this thread adds in add_warps.
  static_assert(kThreads % (kNeurons / 8) == 0, "a thread must add sums of the same neurons for each token");
  __device__ __forceinline__ void read_scales(const float* scales, float4 (&eight)[2]) const {
    const uint32_t first = neuron + threadIdx.x % (kNeurons / 8) * 8;
    if (first >= n) return;
    eight[0] = __ldg(reinterpret_cast<const float4*>(scales + first));
    eight[1] = __ldg(reinterpret_cast<const float4*>(scales + first) + 1);
  }

  // The role of the other warps: each computes all products over its own columns of k in float32, and writes them to
  // `sums`.
  __device__ __forceinline__ void multiply(float* sums) {
    const uint32_t mine = ptx::smem_address(shared.pieces) + warp * kOfWarp + 16 * lane;
#pragma unroll
    for (int i = 0; i < kDepth; ++i) fetch(i / kHalves, i % kHalves, mine + i * kPiece);
    ptx::cluster_wait();  // wait until all CTAs have initialized their barriers

    const uint32_t low_row = row_of(lane / 4), high_row = row_of(8 + lane / 4);
    float d[kNeuronCopies][4] = {};
    uint32_t stage = mine;
    for (int round = 0; round < rounds; ++round, state.advance(slots)) {
      pipeline.consumer_wait(state);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        ptx::cp_async_wait_group<kDepth - 1>();
        uint4 b[kNeuronCopies], low = {}, high = {};  // low: tokens 0..7, high: tokens 8..15; zeros beyond column k
#pragma unroll
        for (int j = 0; j < kNeuronCopies; ++j) b[j] = ptx::ld_shared_v4(stage + j * kCopied);
        uint4 low_8 = {}, high_8 = {};  // kFloat8: the lane's other eight columns
        if (column_of(round, half) < k) {
          const uint32_t at = state.stage * m * kTokenPitch + half * 64;
          low = ptx::ld_shared_v4(low_row + at);
          high = ptx::ld_shared_v4(high_row + at);
          if constexpr (kFloat8) {
            low_8 = ptx::ld_shared_v4(low_row + at + 16);
            high_8 = ptx::ld_shared_v4(high_row + at + 16);
          }
        }
        const auto multiply = [&](const uint32_t(&tokens)[4], auto first, auto second) {
#pragma unroll
          for (int j = 0; j < kNeuronCopies; ++j) ptx::mma_16x8x16(d[j], tokens, b[j].*first, b[j].*second);
        };
        const auto multiply_e4m3 = [&](const uint32_t(&tokens)[4], auto word) {
#pragma unroll
          for (int j = 0; j < kNeuronCopies; ++j) {
            const uint2 four = ptx::bf16x4_of_e4m3x4(b[j].*word);
            ptx::mma_16x8x16(d[j], tokens, four.x, four.y);
          }
        };
        if constexpr (kFloat8) {
          multiply_e4m3({low.x, high.x, low.y, high.y}, &uint4::x);
          multiply_e4m3({low.z, high.z, low.w, high.w}, &uint4::y);
          multiply_e4m3({low_8.x, high_8.x, low_8.y, high_8.y}, &uint4::z);
          multiply_e4m3({low_8.z, high_8.z, low_8.w, high_8.w}, &uint4::w);
        } else {
          multiply({low.x, high.x, low.y, high.y}, &uint4::x, &uint4::y);
          multiply({low.z, high.z, low.w, high.w}, &uint4::z, &uint4::w);
        }
        fetch(round + kDepth / kHalves, half, stage);
        stage += kPiece;
        if (stage == mine + kOfWarp) stage = mine;
      }
      if (round + slots < rounds) {  // x of a later round will be copied to this slot, so release it
        __syncwarp();
        pipeline.consumer_release(state.stage);
      }
    }

    float* to = sums + warp * (kOfWarp / 4) + lane / 4 * kSumPitch + lane % 4 * 2;
    __syncwarp();  // wait until all lanes have read their last pieces, which the sums overwrite
#pragma unroll
    for (int j = 0; j < kNeuronCopies; ++j) {
      *reinterpret_cast<float2*>(to + 8 * j) = make_float2(d[j][0], d[j][1]);
      *reinterpret_cast<float2*>(to + 8 * j + 8 * kSumPitch) = make_float2(d[j][2], d[j][3]);
    }
  }

  // Adds the warps' sums in order, and sends the results as bf16 to the tile of the cluster's first CTA.
  __device__ __forceinline__ void add_warps(const float* sums, uint32_t tile, const float4 (&scales)[2]) const {
    for (int i = threadIdx.x; i < m * (kNeurons / 8); i += kThreads) {
      const int token = i / (kNeurons / 8), octet = i % (kNeurons / 8);
      const float4* parts = reinterpret_cast<const float4*>(sums + token * kSumPitch) + 2 * octet;
      float4 low = parts[0], high = parts[1];
      const auto add = [](float4& sum, const float4& part) {
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      };
#pragma unroll
      for (int p = 1; p < kWarps; ++p) {
        add(low, parts[p * (kOfWarp / sizeof(float4))]);
        add(high, parts[p * (kOfWarp / sizeof(float4)) + 1]);
      }
      if constexpr (kFloat8) {
        low.x *= scales[0].x, low.y *= scales[0].y, low.z *= scales[0].z, low.w *= scales[0].w;
        high.x *= scales[1].x, high.y *= scales[1].y, high.z *= scales[1].z, high.w *= scales[1].w;
      }
      const uint4 eight = {ptx::cvt_relu_bf16x2(low.x, low.y), ptx::cvt_relu_bf16x2(low.z, low.w),
                           ptx::cvt_relu_bf16x2(high.x, high.y), ptx::cvt_relu_bf16x2(high.z, high.w)};
      ptx::st_async_cluster(tile + token * kPitch + rank * (kNeurons * 2) + octet * 16, 0, eight, finished);
    }
  }

  // Called in the first CTA of a cluster: packs the tile, four tokens per warp. counts: whether to add to the counters.
  __device__ __forceinline__ void pack(uint32_t tile, bool counts) const {
    ptx::mbarrier_wait(finished, 0);
    if (const int first = 4 * warp; first < m) {
      const int token = first + lane / 8;
      const uint32_t seen = pack_tokens<128>(tile + token * kPitch + lane % 8 * 16, token, token < m, lane, n,
                                             column_tile, column_tiles, out, shared.totals, counts);
      add_fired(shared.fired, seen, lane);
    }
    __syncthreads();
    if (warp == 0) {
      const uint32_t word = shared.fired[lane / 4];
      const uint32_t bits = word >> lane % 4 * 8;
      if (column + 8 * lane < n) {
        *reinterpret_cast<uint2*>(out.fired + column + 8 * lane) = make_uint2(bytes_of(bits), bytes_of(bits >> 4));
      }
      if (lane % 4 == 0) {
        out.mask[column_tile * 8 + lane / 4] = word;
        if (counts) atomicAdd(shared.totals.counts + kUnion, __popc(word));
      }
      __syncwarp();
      if (counts) add_counts(out, shared.totals, lane);
    }
  }
};

template <bool kFloat8>
__global__ void __launch_bounds__(kThreads, 1)
    gate_pack_fewest_kernel(const __nv_bfloat16* x, const __nv_bfloat16* w, int m, int64_t n, int k, int slots,
                            const Packed out, int zeroed, const float* scales) {
  extern __shared__ uint4 raw[];
  FewestCta<kFloat8> cta(*reinterpret_cast<Shared*>(raw), x, w, m, n, k, slots, out);
  float* sums = reinterpret_cast<float*>(cta.shared.pieces);  // at the end, each warp's sums: [tokens, kSumPitch]
  if (cta.warp == kFeedingWarp) cta.init();
  ptx::cluster_arrive_relaxed();
  ptx::griddepcontrol_wait();
  // The next kernel may start only after the wait, because it relies on all kernels before gate_pack being done.
  ptx::griddepcontrol_launch_dependents();
  float4 scales_of_eight[2];
  if constexpr (kFloat8) cta.read_scales(scales, scales_of_eight);
  if (cta.warp == kFeedingWarp) {
    cta.feed(zeroed);
  } else {
    cta.multiply(sums);
  }
  __syncthreads();
  const uint32_t tile = ptx::smem_address(cta.shared.tile);
  cta.add_warps(sums, tile, scales_of_eight);
  if (cta.rank == 0) cta.pack(tile, zeroed == 0);
}

}  // namespace fewest

// scales: null if w is bf16. zeroed: see gate_pack_small.
inline cudaError_t gate_pack_fewest(const void* x, const void* w, const float* scales, int64_t m, int64_t k, int64_t n,
                                    const Packed& out, int64_t zeroed, cudaStream_t stream) {
  using namespace fewest;
  const auto kernel = scales == nullptr ? gate_pack_fewest_kernel<false> : gate_pack_fewest_kernel<true>;
  const cudaError_t error =  // optional, but all timings were taken with it
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                           cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  const int slots = m * kSlots < kTokenRows ? kSlots : kTokenRows / static_cast<int>(m);
  return launch_early(kernel, ceil_div(n, kColumnTile) * kCluster, fewest::kThreads, sizeof(fewest::Shared), kCluster,
                      stream, static_cast<const __nv_bfloat16*>(x), static_cast<const __nv_bfloat16*>(w),
                      static_cast<int>(m), n, static_cast<int>(k), slots, out, static_cast<int>(zeroed), scales);
}

}  // namespace sparsellm
