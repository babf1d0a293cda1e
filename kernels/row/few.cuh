// The row engine for few tokens (decoding), where latency is all: one launch, and no trip through global memory between
// the CTAs of a row.
//
// A row's nonzeros are cut, by their count alone, into equal runs, one for each CTA of a cluster (rows with many take
// several clusters). A thread keeps 8 kVectors columns of x and y; the neurons of a batch have both their weight rows
// in flight at once, up to 64 KB per CTA. The cluster adds its CTAs' sums through distributed shared memory, each CTA a
// slice of the columns; where a row has several clusters, the last of them to finish a slice adds what all have left in
// global memory. A warp of its own lists nonzeros ahead of the others, and takes the l1 norm to its end meanwhile.
#pragma once

#include "row/common.cuh"

namespace sparsellm::row {

constexpr int kFewTokens = 128;     // M and
constexpr int kFewMaxWidth = 4096;  // K at most
constexpr int kFewWorkers = 256;    // threads at most: the multiple of 32 that covers K / (8 kVectors)
constexpr int kFewPerCta = 32;      // nonzeros of each CTA above which a row gets another cluster
constexpr int kMaxRanks = 8;        // CTAs of a cluster

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// From the shared address `address` of CTA `rank` of the cluster.
__device__ __forceinline__ float4 ld_cluster_v4(uint32_t address, uint32_t rank) {
  float4 v;
  asm volatile(
      "{\n .reg .b32 remote;\n mapa.shared::cluster.u32 remote, %4, %5;\n"
      " ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n}"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(address), "r"(rank)
      : "memory");
  return v;
}

__device__ __forceinline__ float ld_cluster(uint32_t address, uint32_t rank) {
  float v;
  asm volatile(
      "{\n .reg .b32 remote;\n mapa.shared::cluster.u32 remote, %1, %2;\n ld.shared::cluster.f32 %0, [remote];\n}"
      : "=f"(v)
      : "r"(address), "r"(rank)
      : "memory");
  return v;
}

__device__ __forceinline__ void add(float4& sum, const float4& v) {
  sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
}

// Sums of s[j] over the warp; lane l gets that of j = l / (32 / kBatch).
template <int kBatch>
__device__ __forceinline__ float warp_sums(float (&s)[kBatch], uint32_t lane) {
  int offset = 16;
#pragma unroll
  for (int width = kBatch / 2; width > 0; width /= 2, offset /= 2) {
    const bool upper = lane & offset;
#pragma unroll
    for (int j = 0; j < width; ++j) {
      const float given = upper ? s[j] : s[j + width];
      s[j] = (upper ? s[j + width] : s[j]) + __shfl_xor_sync(~0u, given, offset);
    }
  }
#pragma unroll
  for (offset = 16 / kBatch; offset > 0; offset /= 2) s[0] += __shfl_xor_sync(~0u, s[0], offset);
  return s[0];
}

struct FewArguments : RowArguments {  // tickets: 1 + [m, kMaxRanks] if clusters_per_row > 1
  int clusters_per_row;               // at most
  float* partials;                    // [m, clusters_per_row, k], if clusters_per_row > 1
  float* l1_parts;                    // [CTAs]
};

template <int kVectors, int kRanks, int kInFlight, bool kGated>
__global__ void __launch_bounds__(kFewWorkers + 32, kInFlight == 8 ? 1 : 2)
    row_few_kernel(const FewArguments a) {
  constexpr int kBatch = kInFlight / kVectors;  // neurons in flight
  constexpr int kGroup = 32 / kBatch;           // lanes that share a neuron's sum
  extern __shared__ float4 part[];              // [k / 4] this CTA's sum
  __shared__ uint32_t lists[2][kListed];
  __shared__ float dots[2][kBatch][kFewWorkers / 32];
  __shared__ float part_l1;
  __shared__ bool last;
  const int workers = blockDim.x - 32;
  const int warp = threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  const bool helper = static_cast<int>(threadIdx.x) >= workers;
  const uint32_t rank = blockIdx.x % kRanks;
  const int cluster = blockIdx.x / kRanks % a.clusters_per_row;
  const int64_t row = blockIdx.x / (kRanks * a.clusters_per_row);
  const int vectors = a.k / 8;  // of a weight row

  ptx::griddepcontrol_wait();
  const uint32_t count = a.packed.row_counts[row];
  const int clusters = min(max((count + kFewPerCta * kRanks - 1) / (kFewPerCta * kRanks), 1u),
                           static_cast<uint32_t>(a.clusters_per_row));
  // The whole batch is one cluster's work: its l1 does without global memory.
  const bool alone = a.m == 1 && clusters == 1;

  // One warp: this CTA's share of l1, in the order of CTAs; the last to come adds them up.
  const auto finish_l1 = [&](float share) {
    int position = 0;
    if (lane == 0) {
      a.l1_parts[blockIdx.x] = share;
      __threadfence();
      position = atomicAdd(a.tickets, 1);
    }
    if (__shfl_sync(~0u, position, 0) != static_cast<int>(gridDim.x) - 1) return;
    __threadfence();
    float sum = 0.0f;
#pragma unroll 8
    for (uint32_t i = lane; i < gridDim.x; i += 32) sum += __ldcg(a.l1_parts + i);
    sum = warp_sum(sum);
    if (lane == 0) {
      *a.l1 = sum;
      *a.tickets = 0;
    }
  };

  if (cluster >= clusters) {  // all CTAs of the cluster alike
    if (helper && !alone) finish_l1(0.0f);
    return;
  }

  const uint32_t parts = clusters * kRanks, index = cluster * kRanks + rank;
  const uint32_t begin = count * index / parts, end = count * (index + 1) / parts;
  if (threadIdx.x == 0) part_l1 = 0.0f;

  uint4 x[kVectors];
  float sums[kVectors][8];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int vector = v * workers + threadIdx.x;
    x[v] = make_uint4(0, 0, 0, 0);
    if (kGated && !helper && vector < vectors) x[v] = __ldg(reinterpret_cast<const uint4*>(a.x + row * a.k) + vector);
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[v][i] = 0.0f;
  }
  if (helper && begin < end) {
    list_nonzeros(a.packed, row, a.n, a.words_per_tile, begin, min(begin + kListed, end), lane, lists[0]);
  }
  __syncthreads();

  float l1 = 0.0f;
  int parity = 0;
  for (uint32_t at = begin, buffer = 0; at < end; at += kListed, buffer ^= 1) {
    if (helper) {
      const uint32_t next = at + kListed;
      if (next < end) {
        list_nonzeros(a.packed, row, a.n, a.words_per_tile, next, min(next + kListed, end), lane, lists[buffer ^ 1]);
      }
    } else {
      const uint32_t* list = lists[buffer];
      const int size = min(end - at, static_cast<uint32_t>(kListed));
      const auto load = [&](uint4 (&to)[kBatch][kVectors], const __nv_bfloat16* weights, int first) {
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const bool some = first + j < size;
          const int64_t neuron = some ? list[first + j] & 0xffff : 0;
          const uint4* weight_row = reinterpret_cast<const uint4*>(weights + neuron * a.k);
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            const int vector = v * workers + threadIdx.x;
            to[j][v] = make_uint4(0, 0, 0, 0);
            if (some && vector < vectors) to[j][v] = __ldg(weight_row + vector);
          }
        }
      };
      uint4 up[kBatch][kVectors], down[kBatch][kVectors];
      if constexpr (kGated) load(up, a.w_up, 0);
      load(down, a.w_down_t, 0);
#pragma unroll 1
      for (int first = 0; first < size; first += kBatch) {
        const int mine = first + lane / kGroup;  // the neuron whose h this lane computes
        const uint32_t word = mine < size ? list[mine] : 0;
        float h = gate_of(word);
        if constexpr (kGated) {
          float dot[kBatch];
#pragma unroll
          for (int j = 0; j < kBatch; ++j) {
            float four[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
              // x stays packed: the compiler would unpack it once and for all, and run out of registers.
              asm volatile("" : "+r"(x[v].x), "+r"(x[v].y), "+r"(x[v].z), "+r"(x[v].w));
              float x8[8];
              unpack(x[v], x8);
              multiply_add(four, up[j][v], x8);
            }
            dot[j] = (four[0] + four[1]) + (four[2] + four[3]);
          }
          load(up, a.w_up, first + kBatch);
          const float of_warp = warp_sums<kBatch>(dot, lane);
          if (lane % kGroup == 0) dots[parity][lane / kGroup][warp] = of_warp;
          ptx::bar_sync(1, workers);
          float u = 0.0f;
          for (int w = lane % kGroup; w < workers / 32; w += kGroup) u += dots[parity][lane / kGroup][w];
#pragma unroll
          for (int offset = kGroup / 2; offset > 0; offset /= 2) u += __shfl_xor_sync(~0u, u, offset);
          parity ^= 1;  // read again two batches on, behind another barrier
          h = mine < size ? hidden_of(word, u) : 0.0f;  // x may hold infinities
        }
        if (lane % kGroup == 0) l1 += fabsf(h);
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const float h_j = __shfl_sync(~0u, h, j * kGroup);
#pragma unroll
          for (int v = 0; v < kVectors; ++v) scale_add(sums[v], down[j][v], h_j);
        }
        load(down, a.w_down_t, first + kBatch);
      }
      if (warp == 0) {
        const float so_far = warp_sum(l1);
        if (lane == 0) part_l1 = so_far;
      }
    }
    __syncthreads();
  }

  if (helper) {
    __syncwarp();
    cluster_arrive();
    if (!alone) finish_l1(part_l1);
    __syncwarp();
    cluster_wait();
    if (alone && rank == 0 && lane == 0) {
      float sum = 0.0f;
      for (uint32_t r = 0; r < kRanks; ++r) sum += ld_cluster(ptx::smem_address(&part_l1), r);
      *a.l1 = sum;
    }
  } else {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int vector = v * workers + threadIdx.x;
      if (vector < vectors) {
        part[2 * vector] = make_float4(sums[v][0], sums[v][1], sums[v][2], sums[v][3]);
        part[2 * vector + 1] = make_float4(sums[v][4], sums[v][5], sums[v][6], sums[v][7]);
      }
    }
    __syncwarp();
    cluster_arrive();
    cluster_wait();
    const int quads = a.k / 4, per_rank = (quads + kRanks - 1) / kRanks;
    const int stop = min(static_cast<int>(rank + 1) * per_rank, quads);
    const auto store = [&](int quad, const float4& v) {
      *reinterpret_cast<uint2*>(a.y + row * a.k + 4 * quad) =
          make_uint2(ptx::cvt_bf16x2(v.x, v.y), ptx::cvt_bf16x2(v.z, v.w));
    };
    float4* slots = reinterpret_cast<float4*>(a.partials) + row * a.clusters_per_row * quads;
    for (int quad = rank * per_rank + threadIdx.x; quad < stop; quad += workers) {
      float4 v[kRanks];
#pragma unroll
      for (int r = 0; r < kRanks; ++r) v[r] = ld_cluster_v4(ptx::smem_address(part + quad), r);
#pragma unroll
      for (int r = 1; r < kRanks; ++r) add(v[0], v[r]);
      if (clusters == 1) {
        store(quad, v[0]);
      } else {
        slots[static_cast<int64_t>(cluster) * quads + quad] = v[0];
      }
    }
    if (clusters > 1) {
      __threadfence();
      ptx::bar_sync(1, workers);
      int32_t* ticket = a.tickets + 1 + row * kMaxRanks + rank;
      if (threadIdx.x == 0) {
        last = atomicAdd(ticket, 1) == clusters - 1;
        if (last) *ticket = 0;
      }
      ptx::bar_sync(1, workers);
      if (last) {
        __threadfence();
        for (int quad = rank * per_rank + threadIdx.x; quad < stop; quad += workers) {
          float4 sum = __ldcg(slots + quad);
#pragma unroll 4
          for (int c = 1; c < clusters; ++c) add(sum, __ldcg(slots + static_cast<int64_t>(c) * quads + quad));
          store(quad, sum);
        }
      }
    }
  }
  __syncwarp();
  ptx::cluster_sync();  // the others may still read this CTA's shared memory
}

}  // namespace sparsellm::row
