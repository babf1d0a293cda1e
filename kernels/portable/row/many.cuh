// The row engine for many tokens, which is limited by L2 bandwidth. Each warp computes one unit of work at a time,
// which is usually a whole row.
//
// One CTA of 12 warps runs on each SM, without a barrier in its loop. A lane keeps up to 64 columns in registers: first
// columns of x, while its warp streams the W_up rows of up to 64 nonzeros, and then columns of y, while the warp
// streams the W_down rows of these nonzeros. Each warp has 8 KB of loads in flight, which are 96 KB per SM; nearly all
// of the SM's shared memory remains L1. A row is given to a warp rather than to a CTA: then nothing has to be
// synchronized, a short row leaves no threads idle, and x and y can use the same registers in turn. The warps of a CTA
// take neighbouring rows, which tend to fire the same neurons and so find weights in L1.
//
// Rows with many nonzeros are planned beforehand: they are computed first, and are cut into chunks. Each chunk is a
// unit that writes a float32 sum, and the warp that finishes last adds the sums. If no memory is left for such sums,
// one warp computes all chunks of the row in turn and adds their sums in the same order, so the bits are the same.
#pragma once

#include "row/common.cuh"

namespace sparsellm::row {

constexpr int kManyWarps = 12;
constexpr int kListed = 64;       // nonzeros of a row that are listed at a time, for one warp
constexpr int kEqualChunks = 16;  // rows are cut into this many chunks, until a chunk would exceed kListed nonzeros

// Counters in global memory: the number of planned units; the number of slots that are taken; the next unit to hand
// out; the number of CTAs that are done.
enum Ticket { kUnits = 0, kSlots = 1, kNext = 2, kDone = 3 };

struct ManyArguments : RowArguments {  // tickets: [4], see Ticket
  int smallest_chunk;
  int heavy_above;  // rows with more nonzeros than this are planned
  int range;        // neighbouring units that a CTA takes at a time
  int slot_capacity;
  int4* units;        // [m + slot_capacity] (row, chunk or -1 for the whole row, the row's first slot)
  int32_t* arrivals;  // [slot_capacity] at the first slot of a row: how many of its chunks are done
  float* slots;       // [slot_capacity, k + 8] one chunk per slot: its sum, then its l1
  float* totals;      // [warps, k] a warp's sum over the chunks of a row so far
  float* row_l1;      // [m] each row's sum of |h|
};

// Number of nonzeros per chunk, which depends only on the row's count and on `smallest`, and so on the number of
// tokens. If `smallest` is 8, a row of 100 nonzeros has chunks of 8, a row of 400 has chunks of 25, and a row of 2,000
// has chunks of 64.
__device__ __forceinline__ int chunk_of(int count, int smallest) {
  return min(max((count + kEqualChunks - 1) / kEqualChunks, smallest), kListed);
}

// Plans the rows with many nonzeros, one thread per row. A row becomes one unit per chunk if there are slots for all
// its chunks; otherwise, it becomes one unit.
__global__ void row_plan_kernel(const ManyArguments a) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  const int count = row < a.m ? a.packed.row_counts[row] : 0;
  if (count <= a.heavy_above) return;
  const int chunk = chunk_of(count, a.smallest_chunk);
  const int chunks = (count + chunk - 1) / chunk;
  int slot = atomicAdd(a.tickets + kSlots, chunks);
  if (slot + chunks > a.slot_capacity) slot = -1;
  int at = atomicAdd(a.tickets + kUnits, slot < 0 ? 1 : chunks);
  if (slot < 0) {
    a.units[at] = make_int4(row, -1, 0, 0);
  } else {
    a.arrivals[slot] = 0;
    for (int c = 0; c < chunks; ++c) a.units[at++] = make_int4(row, c, slot, 0);
  }
}

// The units that a CTA has taken, in shared memory. Units are numbered: the planned units come first, then the rows. A
// CTA takes a.range neighbouring units at a time.
struct UnitRange {
  int &lock, &next, &end;

  // Returns a warp's next unit. A warp that finds no unit left takes the next range from global memory, while the other
  // warps of the CTA wait for the lock.
  __device__ __forceinline__ int take(const ManyArguments& a, uint32_t lane) const {
    int index = 0;
    if (lane == 0) {
      while (atomicCAS(&lock, 0, 1) != 0) __nanosleep(64);
      __threadfence_block();
      index = atomicAdd(&next, 1);
      if (index == atomicAdd(&end, 0)) {
        index = atomicAdd(a.tickets + kNext, a.range);
        atomicExch(&end, index + a.range);
        atomicExch(&next, index + 1);
      }
      __threadfence_block();
      atomicExch(&lock, 0);
    }
    return __shfl_sync(~0u, index, 0);
  }
};

// One warp and its unit. Columns are processed in pieces of 256 kVectors columns. Of a piece, this lane has vectors 0
// .. valid - 1 of eight columns: vector 0 is at column_of(piece), and each further vector is 256 columns later. kFull:
// k is a multiple of a piece, so all lanes have all kVectors vectors. Arrays in registers are locals, passed by
// reference: if they were members, the members next to them would stay in local memory until loops are unrolled.
template <int kVectors, bool kFull, bool kGated>
struct ManyWarp {
  static constexpr int kDepth = 16 / kVectors < 8 ? 16 / kVectors : 8;  // weight rows in flight
  static constexpr int kPiece = 256 * kVectors;
  using Sums = float[kVectors][8];
  // What a chunk's sum is: the sum of a whole row, or the first, a middle or the last one of several sums of a row.
  enum Place { kWhole, kFirst, kMiddle, kLast };

  const ManyArguments& a;
  uint32_t* list;  // the chunk's nonzeros
  float* hidden;   // h at the chunk's nonzeros
  uint32_t lane;
  int pieces;

  __device__ __forceinline__ ManyWarp(const ManyArguments& a, uint32_t* list, float* hidden)
      : a(a), list(list), hidden(hidden), lane(threadIdx.x % 32), pieces((a.k + kPiece - 1) / kPiece) {}

  __device__ __forceinline__ int column_of(int piece) const { return piece * kPiece + 8 * static_cast<int>(lane); }
  __device__ __forceinline__ int valid_of(int piece) const {
    return kFull ? kVectors : (a.k - column_of(piece) + 255) >> 8;
  }

  // Computes unit `index`: the first `units` units are planned, and all later ones are rows.
  __device__ __forceinline__ void do_unit(int index, int units) const {
    const int2 unit = index < units ? *reinterpret_cast<const int2*>(a.units + index) : make_int2(index - units, -1);
    const int64_t row = unit.x;
    const int count = a.packed.row_counts[row];
    if (index >= units && count > a.heavy_above) return;  // skip the row, which is among the planned units
    const int chunk = chunk_of(count, a.smallest_chunk);
    const int chunks = max((count + chunk - 1) / chunk, 1);
    const bool split = unit.y >= 0;
    const int stride = a.k + 8;                                  // floats between slots
    const auto first_slot = [&]() { return a.units[index].z; };  // read where it is needed, because registers are
                                                                 // scarce
    float row_l1 = 0.0f;
    for (int c = split ? unit.y : 0; c < (split ? unit.y + 1 : chunks); ++c) {
      const int size = min(count - c * chunk, chunk);
      __syncwarp();  // wait until all lanes have read the previous chunk
      if (size > 0) list_nonzeros(a.packed, row, a.n, c * chunk, c * chunk + size, lane, list);
      __syncwarp();
      const float l1 = size > 0 ? compute_hidden(row, size) : 0.0f;
      row_l1 += l1;
      for (int piece = 0; piece < pieces; ++piece) {
        Sums sums;
        multiply(piece, size, sums);
        float* total = a.totals + static_cast<int64_t>(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * a.k;
        leave(split            ? kFirst
              : chunks == 1    ? kWhole
              : c == 0         ? kFirst
              : c + 1 < chunks ? kMiddle
                               : kLast,
              row, split ? a.slots + static_cast<int64_t>(first_slot() + c) * stride : total, piece, sums);
      }
    }
    if (split && !add_chunks(row, unit.y, chunks, stride, first_slot, row_l1)) return;
    if (lane == 0) a.row_l1[row] = row_l1;
  }

  // Calls use(i, vectors) for i = 0 .. size - 1 in order, where `vectors` are this lane's columns of the weight row of
  // listed nonzero i. Vectors from `valid` on contain other columns of the row and are ignored: a load costs less than
  // a branch.
  template <class Use>
  __device__ __forceinline__ void stream(const void* weights, int piece, int size, Use use) const {
    const int column = kFull ? column_of(piece) : min(column_of(piece), a.k - 8);
    const __nv_bfloat16* mine = static_cast<const __nv_bfloat16*>(weights) + column;
    const int valid = valid_of(piece);
    uint4 rows[kDepth][kVectors];
    const auto load = [&](uint4(&to)[kVectors], int i) {
      const __nv_bfloat16* weight_row = mine + static_cast<int64_t>(list[i] & 0xffff) * a.k;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        to[v] = __ldg(reinterpret_cast<const uint4*>(weight_row + (v < valid ? 256 * v : 0)));
      }
    };
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      if (d < size) load(rows[d], d);
    }
#pragma unroll 1
    for (int first = 0; first < size; first += kDepth) {
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        if (first + d < size) {
          use(first + d, rows[d]);
          if (first + d + kDepth < size) load(rows[d], first + d + kDepth);
        }
      }
    }
  }

  // Computes h of the `size` listed nonzeros, writes it to `hidden`, and returns the sum of |h|.
  __device__ __forceinline__ float compute_hidden(int64_t row, int size) const {
    if constexpr (kGated) {
      for (int piece = 0; piece < pieces; ++piece) {
        const __nv_bfloat16* columns = a.x + row * a.k + column_of(piece);
        const int valid = valid_of(piece);
        float x[kVectors][8];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          uint4 eight = make_uint4(0, 0, 0, 0);
          if (v < valid) eight = __ldg(reinterpret_cast<const uint4*>(columns + 256 * v));
          unpack(eight, x[v]);
        }
        stream(a.w_up, piece, size, [&](int i, const uint4(&w)[kVectors]) {
          float four[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            if (v < valid) multiply_add(four, w[v], x[v]);
          }
          const float dot = warp_sum((four[0] + four[1]) + (four[2] + four[3]));
          if (lane == 0) hidden[i] = piece == 0 ? dot : hidden[i] + dot;
        });
      }
      __syncwarp();
    }
    float l1 = 0.0f;
    for (int i = lane; i < size; i += 32) {
      const float h = kGated ? hidden_of(list[i], hidden[i]) : gate_of(list[i]);
      hidden[i] = h;
      l1 += fabsf(h);
    }
    __syncwarp();
    return warp_sum(l1);
  }

  // Computes sums = h W_d over the listed nonzeros, for one piece of the columns.
  __device__ __forceinline__ void multiply(int piece, int size, Sums& sums) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[v][i] = 0.0f;
    }
    stream(a.w_down_t, piece, size, [&](int i, const uint4(&w)[kVectors]) {
      const float h = hidden[i];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) scale_add(sums[v], w[v], h);
    });
  }

  // Writes a chunk's sum for one piece of the columns. If the chunk is the whole row or the last chunk, writes it as y;
  // otherwise, writes it as float32 at `to`. For middle and last chunks, first adds the sum of the previous chunks,
  // which is at `to`.
  __device__ __forceinline__ void leave(Place place, int64_t row, float* to, int piece, const Sums& sums) const {
    __nv_bfloat16* y = a.y + row * a.k + column_of(piece);
    float4* floats = reinterpret_cast<float4*>(to + column_of(piece));
    const int valid = valid_of(piece);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v >= valid) break;
      float eight[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) eight[i] = sums[v][i];
      if (place == kMiddle || place == kLast) add_eight(floats + 64 * v, eight);
      if (place == kWhole || place == kLast) {
        *reinterpret_cast<uint4*>(y + 256 * v) = pack(eight);
      } else {
        floats[64 * v] = make_float4(eight[0], eight[1], eight[2], eight[3]);
        floats[64 * v + 1] = make_float4(eight[4], eight[5], eight[6], eight[7]);
      }
    }
  }

  // Called after chunk `chunk` of a row has written its sum. Returns whether this warp is the last of the row's warps.
  // If so, the warp has added the chunks' sums in order, written y, and set row_l1 to the sum of the chunks' l1.
  template <class FirstSlot>
  __device__ __forceinline__ bool add_chunks(int64_t row, int chunk, int chunks, int stride, FirstSlot first_slot,
                                             float& row_l1) const {
    int position = 0;
    float* row_slots = a.slots + static_cast<int64_t>(first_slot()) * stride;
    if (lane == 0) row_slots[static_cast<int64_t>(chunk) * stride + a.k] = row_l1;
    __threadfence();
    __syncwarp();
    if (lane == 0) position = atomicAdd(a.arrivals + first_slot(), 1);
    if (__shfl_sync(~0u, position, 0) != chunks - 1) return false;
    __threadfence();
    for (int vector = lane; vector < a.k / 8; vector += 32) {
      float sums[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i] = -0.0f;  // -0.0 + p is p, whatever the sign of p
#pragma unroll 4
      for (int c = 0; c < chunks; ++c) {
        add_eight(reinterpret_cast<const float4*>(row_slots + static_cast<int64_t>(c) * stride) + 2 * vector, sums);
      }
      *reinterpret_cast<uint4*>(a.y + row * a.k + 8 * vector) = pack(sums);
    }
    row_l1 = 0.0f;
#pragma unroll 4
    for (int c = 0; c < chunks; ++c) row_l1 += __ldcg(row_slots + static_cast<int64_t>(c) * stride + a.k);
    return true;
  }
};

template <int kVectors, bool kFull, bool kGated>
__global__ void __launch_bounds__(32 * kManyWarps, 1) row_many_kernel(const ManyArguments a) {
  ptx::griddepcontrol_wait();
  __shared__ uint32_t lists[kManyWarps][kListed];
  __shared__ float hiddens[kManyWarps][kListed];
  __shared__ float scratch[kManyWarps];
  __shared__ int lock, range_next, range_end, units;
  __shared__ bool last;
  const ManyWarp<kVectors, kFull, kGated> warp(a, lists[threadIdx.x / 32], hiddens[threadIdx.x / 32]);
  const UnitRange range = {lock, range_next, range_end};
  if (threadIdx.x == 0) {
    lock = range_next = range_end = 0;
    units = a.tickets[kUnits];
  }
  __syncthreads();
  for (int index; (index = range.take(a, warp.lane)) < units + a.m;) warp.do_unit(index, units);

  // l1: the CTA that finishes last adds all rows' l1, in a fixed order.
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(a.tickets + kDone, 1) == static_cast<int>(gridDim.x) - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  const float all = ordered_sum(a.row_l1, a.m, scratch);
  if (threadIdx.x == 0) {
    *a.l1 = all;
    for (int t = 0; t < 4; ++t) a.tickets[t] = 0;
  }
}

}  // namespace sparsellm::row
