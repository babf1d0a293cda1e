// The row engine for few tokens, but more than clusters are for: one launch, and every CTA has the same
// share of the nonzeros, whatever rows they are in.
//
// The nonzeros of the whole batch, row after row, are cut into equal runs, one for each CTA; a run is cut at the ends
// of rows into pieces, and a piece into batches of up to kFewWarps. One warp copies the weight rows of each nonzero,
// and x's row, to shared memory, as many batches ahead as there is room for. Eight others compute u and h of a nonzero
// each, and then all columns of y, 8 kVectors to a thread. A row that is one piece is written at once; else each piece
// leaves a float32 sum in global memory, and the last to come adds them in order.
#pragma once

#include "common/tile.cuh"
#include "row/common.cuh"

namespace sparsellm::row {

constexpr int kFewTokens = 128;             // M and
constexpr int kFewMaxWidth = 4096;          // K at most
constexpr int kFewWarps = 8;                // that compute: nonzeros of a batch, at most
constexpr int kFewWorkers = 32 * kFewWarps;
constexpr int kFewThreads = kFewWorkers + 32;
constexpr int kFewStages = 3;               // batches in flight,
constexpr uint32_t kFewBytes = 220 << 10;   // in as much shared memory, at most
constexpr int kFewListed = 512;             // nonzeros of a run that are listed at a time
constexpr uint32_t kShortestRun = 8;
static_assert(1 + kFewTokens <= kRowTickets, "l1 and each row have a ticket");

struct FewArguments : RowArguments {  // tickets: [1 + m]
  int batch;        // nonzeros of a batch, at most
  float* partials;  // [CTAs, 2, k] sums of a run's first row, if it began before, and of its last, if it goes on
  float* l1_parts;  // [CTAs]
};

// Rows of k values in a stage: those of w_up, those of w_down_t, then x's; non-gated, those of w_down_t.
constexpr uint32_t few_stage_rows(int batch, bool gated) { return gated ? 2 * batch + 1 : batch; }

template <int kVectors, bool kGated>
__global__ void __launch_bounds__(kFewThreads, 1) row_few_kernel(const FewArguments a) {
  extern __shared__ uint4 stages[];
  __shared__ uint64_t full[kFewStages], empty[kFewStages], summed;
  __shared__ uint32_t starts[kFewTokens + 1];  // nonzeros before each row; behind the last row, all
  __shared__ uint32_t largest;                 // nonzeros of a row
  __shared__ uint32_t list[kFewListed];
  __shared__ uint8_t row_of[kFewListed];
  __shared__ float hidden[2][kFewWarps];
  __shared__ float l1_of[kFewWarps];
  __shared__ bool last;
  const int warp = ptx::warp_index();
  const uint32_t lane = threadIdx.x % 32;
  const bool helper = warp == kFewWarps;
  const uint32_t cta = blockIdx.x;
  const int vectors = a.k / 8;  // of 16 bytes, in a row
  const uint32_t row_bytes = 16 * vectors;

  if (threadIdx.x == 0) {
    for (int s = 0; s < kFewStages; ++s) {
      ptx::mbarrier_init(ptx::smem_address(full + s), 1);
      ptx::mbarrier_init(ptx::smem_address(empty + s), kFewWarps);
    }
    ptx::mbarrier_init(ptx::smem_address(&summed), kFewWarps);
    ptx::fence_mbarrier_init();
  }
  ptx::griddepcontrol_wait();
  if (warp == 0) {
    uint32_t counts[kFewTokens / 32], all = 0, most = 0;
#pragma unroll
    for (int i = 0; i < kFewTokens / 32; ++i) {
      const int row = kFewTokens / 32 * lane + i;
      counts[i] = row < a.m ? a.packed.row_counts[row] : 0;
      all += counts[i];
      most = max(most, counts[i]);
    }
    uint32_t before = exclusive_scan(all, lane);
#pragma unroll
    for (int i = 0; i < kFewTokens / 32; ++i) {
      starts[kFewTokens / 32 * lane + i] = before;
      before += counts[i];
    }
    most = __reduce_max_sync(~0u, most);
    if (lane == 31) starts[kFewTokens] = before;
    if (lane == 0) largest = most;
  }
  __syncthreads();

  // A nonzero is two weight rows of bf16, a piece's sum a row of float32: as many bytes. Runs as long as the root of
  // the largest row make equal, and their sum least, what a CTA reads of weights and what the last reads of sums.
  const uint32_t total = starts[kFewTokens];
  const uint32_t share = max((total + gridDim.x - 1) / gridDim.x, __float2uint_ru(__fsqrt_rn(largest)));
  const uint32_t run = max(share, kShortestRun);
  const uint32_t runs = (total + run - 1) / run;
  const uint32_t begin = min(cta * run, total), end = min(begin + run, total);

  for (int row = cta; row < a.m; row += gridDim.x) {
    if (starts[row] != starts[row + 1]) continue;
    uint4* y = reinterpret_cast<uint4*>(a.y + static_cast<int64_t>(row) * a.k);
    for (int vector = threadIdx.x; vector < vectors; vector += kFewThreads) y[vector] = make_uint4(0, 0, 0, 0);
  }
  if (total == 0 && cta == 0 && threadIdx.x == 0) *a.l1 = 0.0f;
  if (begin == end) return;

  int first_row = 0;  // of the run: as many rows end before it
#pragma unroll
  for (int i = 1; i <= kFewTokens / 32; ++i) first_row += starts[kFewTokens / 32 * lane + i] <= begin;
  first_row = __reduce_add_sync(~0u, first_row);

  RingOf<kFewStages> ring;
  int parity = 0;
  float l1 = 0.0f;  // of this warp's nonzeros
  float sums[kVectors][8];
  for (uint32_t from = begin; from < end; from += kFewListed) {
    const uint32_t to = min(from + kFewListed, end);
    if (from != begin) __syncthreads();  // the list has been read
    for (int row = first_row + warp; row < a.m && starts[row] < to; row += kFewThreads / 32) {
      const uint32_t first = max(from, starts[row]), stop = min(to, starts[row + 1]);
      if (first >= stop) continue;
      list_nonzeros(a.packed, row, a.n, a.words_per_tile, first - starts[row], stop - starts[row], lane,
                    list + (first - from));
      for (uint32_t i = first + lane; i < stop; i += 32) row_of[i - from] = static_cast<uint8_t>(row);
    }
    __syncthreads();

    for (uint32_t at = from, size; at < to; at += size, ring.advance()) {
      const int64_t row = row_of[at - from];
      const uint32_t row_begin = starts[row], row_end = starts[row + 1];
      size = min(static_cast<uint32_t>(a.batch), min(row_end, to) - at);
      const uint32_t* words = list + (at - from);
      uint4* up = stages + static_cast<int>(ring.stage * few_stage_rows(a.batch, kGated)) * vectors;
      uint4* down = kGated ? up + a.batch * vectors : up;
      uint4* x = down + a.batch * vectors;
      const uint32_t full_stage = ptx::smem_address(full + ring.stage);
      const uint32_t empty_stage = ptx::smem_address(empty + ring.stage);

      if (helper) {
        ptx::mbarrier_wait(empty_stage, ring.phase ^ 1);
        if (lane == 0) ptx::mbarrier_arrive_expect_tx(full_stage, few_stage_rows(size, kGated) * row_bytes);
        __syncwarp();
        const auto copy = [&](uint4* to_stage, const __nv_bfloat16* rows, int64_t index) {
          ptx::bulk_load(ptx::smem_address(to_stage), rows + index * a.k, row_bytes, full_stage);
        };
        if (kGated && lane == 31) copy(x, a.x, row);
        if (lane < size) {
          const int64_t neuron = words[lane] & 0xffff;
          if constexpr (kGated) copy(up + lane * vectors, a.w_up, neuron);
          copy(down + lane * vectors, a.w_down_t, neuron);
        }
        continue;
      }

      ptx::mbarrier_wait(full_stage, ring.phase);
      if (warp < size) {
        const uint32_t word = words[warp];
        float h = gate_of(word);
        if constexpr (kGated) {
          const uint4* mine = up + warp * vectors;
          float four[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
          for (int vector = lane; vector < vectors; vector += 32) {
            float x8[8];
            unpack(x[vector], x8);
            multiply_add(four, mine[vector], x8);
          }
          h = hidden_of(word, warp_sum((four[0] + four[1]) + (four[2] + four[3])));
        }
        l1 += fabsf(h);
        if (lane == 0) hidden[parity][warp] = h;
      }
      if (at + size == end && lane == 0) {
        l1_of[warp] = l1;
        ptx::mbarrier_arrive(ptx::smem_address(&summed));
      }
      ptx::bar_sync(1, kFewWorkers);

      if (at == begin || at == row_begin) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
#pragma unroll
          for (int i = 0; i < 8; ++i) sums[v][i] = 0.0f;
        }
      }
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int vector = v * kFewWorkers + threadIdx.x;
        if (vector >= vectors) break;
        uint4 rows[kFewWarps];
#pragma unroll
        for (int j = 0; j < kFewWarps; ++j) {
          if (j < size) rows[j] = down[j * vectors + vector];
        }
#pragma unroll
        for (int j = 0; j < kFewWarps; ++j) {
          if (j < size) scale_add(sums[v], rows[j], hidden[parity][j]);
        }
      }
      parity ^= 1;  // read again two batches on, behind another barrier
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(empty_stage);

      if (at + size != min(row_end, end)) continue;
      uint4* y = reinterpret_cast<uint4*>(a.y + row * a.k);
      if (row_begin >= begin && row_end <= end) {  // the row is one piece
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const int vector = v * kFewWorkers + threadIdx.x;
          if (vector < vectors) y[vector] = pack(sums[v]);
        }
        continue;
      }
      // One piece in each CTA from `first` on. Only there it is the run's last row, which has the second place.
      const uint32_t first = row_begin / run, pieces = (row_end - 1) / run - first + 1;
      const auto place = [&](uint32_t c) {
        return reinterpret_cast<float4*>(a.partials + static_cast<int64_t>(2 * c + (c == first)) * a.k);
      };
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int vector = v * kFewWorkers + threadIdx.x;
        if (vector >= vectors) break;
        float4* to_place = place(cta) + 2 * vector;
        to_place[0] = make_float4(sums[v][0], sums[v][1], sums[v][2], sums[v][3]);
        to_place[1] = make_float4(sums[v][4], sums[v][5], sums[v][6], sums[v][7]);
      }
      __threadfence();
      ptx::bar_sync(1, kFewWorkers);
      if (threadIdx.x == 0) {
        int32_t* ticket = a.tickets + 1 + row;
        last = atomicAdd(ticket, 1) == static_cast<int>(pieces) - 1;
        if (last) *ticket = 0;
      }
      ptx::bar_sync(1, kFewWorkers);
      if (!last) continue;
      __threadfence();
      for (int vector = threadIdx.x; vector < vectors; vector += kFewWorkers) {
        float eight[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) eight[i] = -0.0f;  // -0.0 + p is p, whatever its sign
#pragma unroll 8
        for (uint32_t c = first; c < first + pieces; ++c) add_eight(place(c) + 2 * vector, eight);
        y[vector] = pack(eight);
      }
    }
  }

  // l1: this CTA's share; the last CTA adds all, in order.
  if (!helper) return;
  ptx::mbarrier_wait(ptx::smem_address(&summed), 0);
  const float part = warp_sum(lane < kFewWarps ? l1_of[lane] : 0.0f);
  int position = 0;
  if (lane == 0) {
    a.l1_parts[cta] = part;
    __threadfence();
    position = atomicAdd(a.tickets, 1);
  }
  if (__shfl_sync(~0u, position, 0) != static_cast<int>(runs) - 1) return;
  __threadfence();
  float sum = 0.0f;
  for (uint32_t i = lane; i < runs; i += 32) sum += __ldcg(a.l1_parts + i);
  sum = warp_sum(sum);
  if (lane == 0) {
    *a.l1 = sum;
    *a.tickets = 0;
  }
}

}  // namespace sparsellm::row
