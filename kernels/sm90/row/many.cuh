// The row engine for many tokens, bound by what L2 gives: a warp for each unit of work, which mostly is a whole row.
//
// One CTA of 12 warps per SM, no barrier in its loop. A warp keeps up to 64 columns per lane: first of x, while it
// streams the W_up rows of (up to) 64 nonzeros, then of y, while it streams the W_down rows of the same; either way
// 8 KB are in flight in each warp, 96 KB per SM, whose shared memory nearly all stays L1. A warp per row rather than a
// CTA: nothing to synchronise, a short row wastes no threads, and x and y take turns in the registers. The warps of a
// CTA take neighbouring rows, which tend to share neurons and so find weights in L1.
//
// Rows with many nonzeros are planned beforehand: they come first, and are cut into chunks, each a unit that leaves a
// float32 partial; the last to finish adds them. Where the room for partials ends, one warp does the chunks in turn and
// adds them up in the same order: the same bits.
#pragma once

#include "row/common.cuh"

namespace sparsellm::row {

constexpr int kManyWarps = 12;
constexpr int kListed = 64;            // nonzeros of a row that a warp lists at a time
constexpr int kEqualChunks = 16;       // a row is cut into this many chunks before they grow to kListed nonzeros

enum Ticket { kUnits = 0, kSlots = 1, kNext = 2, kDone = 3 };

struct ManyArguments : RowArguments {  // tickets: [4]
  const int32_t* only_if;  // null, or nothing is done where it points to zero
  int smallest_chunk;
  int heavy_above;    // rows with more nonzeros are planned
  int range;          // neighbouring units a CTA takes at a time
  int slot_capacity;
  int4* units;        // [m + slot_capacity] row, chunk (-1: the whole row), the row's first slot
  int32_t* arrivals;  // [slot_capacity] of a row, at its first slot
  float* slots;       // [slot_capacity, k + 8] a chunk's sum, then its l1
  float* totals;      // [warps, k] a warp's sum over the chunks so far
  float* row_l1;      // [m]
};

// Nonzeros per chunk: depends on the row's count and the number of tokens alone.
__device__ __forceinline__ int chunk_of(int count, int smallest) {
  return min(max((count + kEqualChunks - 1) / kEqualChunks, smallest), kListed);
}

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

// Columns are done in pieces of 256 kVectors. kFull: k is a multiple of that, and every lane has columns.
template <int kVectors, bool kFull, bool kGated>
__global__ void __launch_bounds__(32 * kManyWarps, 1) row_many_kernel(const ManyArguments a) {
  constexpr int kDepth = 16 / kVectors < 8 ? 16 / kVectors : 8;  // weight rows in flight
  constexpr int kPiece = 256 * kVectors;
  ptx::griddepcontrol_wait();
  if (a.only_if != nullptr && *a.only_if == 0) return;
  __shared__ uint32_t lists[kManyWarps][kListed];
  __shared__ float hiddens[kManyWarps][kListed];
  __shared__ float scratch[kManyWarps];
  __shared__ int lock, range_next, range_end, units;
  __shared__ bool last;
  const uint32_t lane = threadIdx.x % 32;
  const int pieces = (a.k + kPiece - 1) / kPiece;
  uint32_t* list = lists[threadIdx.x / 32];
  float* hidden = hiddens[threadIdx.x / 32];
  if (threadIdx.x == 0) {
    lock = range_next = range_end = 0;
    units = a.tickets[kUnits];
  }
  __syncthreads();

  // The next unit of the CTA's range; whoever finds the range empty gets another while the other warps wait.
  const auto take = [&]() {
    int index = 0;
    if (lane == 0) {
      while (atomicCAS(&lock, 0, 1) != 0) __nanosleep(64);
      __threadfence_block();
      index = atomicAdd(&range_next, 1);
      if (index == atomicAdd(&range_end, 0)) {
        index = atomicAdd(a.tickets + kNext, a.range);
        atomicExch(&range_end, index + a.range);
        atomicExch(&range_next, index + 1);
      }
      __threadfence_block();
      atomicExch(&lock, 0);
    }
    return __shfl_sync(~0u, index, 0);
  };

  // Of a piece this lane has vectors 0..valid - 1, the first at column_of(piece), the others 256 columns apart.
  const auto column_of = [&](int piece) { return piece * kPiece + 8 * static_cast<int>(lane); };
  const auto valid_of = [&](int piece) { return kFull ? kVectors : (a.k - column_of(piece) + 255) >> 8; };

  // Calls use(i, vectors) with this lane's columns of the weight row of listed nonzero i, for i = 0..size - 1 in turn.
  // Vectors from `valid` on hold other columns of it: a load there costs less than a branch.
  const auto stream = [&](const __nv_bfloat16* weights, int piece, int size, auto use) {
    const __nv_bfloat16* mine = weights + (kFull ? column_of(piece) : min(column_of(piece), a.k - 8));
    const int valid = valid_of(piece);
    uint4 rows[kDepth][kVectors];
    const auto load = [&](uint4 (&to)[kVectors], int i) {
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
  };

  // The listed nonzeros, `size` of them: their h to `hidden`; returns the sum of |h|.
  const auto compute_hidden = [&](int64_t row, int size) {
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
        stream(a.w_up, piece, size, [&](int i, const uint4 (&w)[kVectors]) {
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
  };

  // Leaves a piece of what one row or chunk comes to: as y; or as float32 at `to`, before or after others are added.
  enum Place { kWhole, kFirst, kMiddle, kLast };
  const auto leave = [&](Place place, int64_t row, float* to, int piece, const float (&sums)[kVectors][8]) {
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
  };

  for (int index; (index = take()) < units + a.m;) {
    const int2 unit = index < units ? *reinterpret_cast<const int2*>(a.units + index) : make_int2(index - units, -1);
    const int64_t row = unit.x;
    const int count = a.packed.row_counts[row];
    if (index >= units && count > a.heavy_above) continue;  // among the units
    const int chunk = chunk_of(count, a.smallest_chunk);
    const int chunks = max((count + chunk - 1) / chunk, 1);
    const bool split = unit.y >= 0;
    const int stride = a.k + 8;  // of slots
    const auto first_slot = [&]() { return a.units[index].z; };  // read where it is needed: registers are short
    float row_l1 = 0.0f;
    for (int c = split ? unit.y : 0; c < (split ? unit.y + 1 : chunks); ++c) {
      const int size = min(count - c * chunk, chunk);
      __syncwarp();  // the chunk before has been read
      if (size > 0) list_nonzeros(a.packed, row, a.n, a.words_per_tile, c * chunk, c * chunk + size, lane, list);
      __syncwarp();
      const float l1 = size > 0 ? compute_hidden(row, size) : 0.0f;
      row_l1 += l1;
      for (int piece = 0; piece < pieces; ++piece) {
        float sums[kVectors][8];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
#pragma unroll
          for (int i = 0; i < 8; ++i) sums[v][i] = 0.0f;
        }
        stream(a.w_down_t, piece, size, [&](int i, const uint4 (&w)[kVectors]) {
          const float h = hidden[i];
#pragma unroll
          for (int v = 0; v < kVectors; ++v) scale_add(sums[v], w[v], h);
        });
        float* total = a.totals + static_cast<int64_t>(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * a.k;
        leave(split ? kFirst : chunks == 1 ? kWhole : c == 0 ? kFirst : c + 1 < chunks ? kMiddle : kLast, row,
              split ? a.slots + static_cast<int64_t>(first_slot() + c) * stride : total, piece, sums);
      }
    }
    if (split) {
      int position = 0;
      float* row_slots = a.slots + static_cast<int64_t>(first_slot()) * stride;
      if (lane == 0) row_slots[static_cast<int64_t>(unit.y) * stride + a.k] = row_l1;
      __threadfence();
      __syncwarp();
      if (lane == 0) position = atomicAdd(a.arrivals + first_slot(), 1);
      if (__shfl_sync(~0u, position, 0) != chunks - 1) continue;
      __threadfence();
      for (int vector = lane; vector < a.k / 8; vector += 32) {
        float sums[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[i] = -0.0f;  // -0.0 + p is p, whatever its sign
#pragma unroll 4
        for (int c = 0; c < chunks; ++c) {
          add_eight(reinterpret_cast<const float4*>(row_slots + static_cast<int64_t>(c) * stride) + 2 * vector, sums);
        }
        *reinterpret_cast<uint4*>(a.y + row * a.k + 8 * vector) = pack(sums);
      }
      row_l1 = 0.0f;
#pragma unroll 4
      for (int c = 0; c < chunks; ++c) row_l1 += __ldcg(row_slots + static_cast<int64_t>(c) * stride + a.k);
    }
    if (lane == 0) a.row_l1[row] = row_l1;
  }

  // l1: the last CTA adds what all have written, always in the same order.
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
