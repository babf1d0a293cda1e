// The row engine for few tokens, but more than clusters are for (65 to 128): one launch, and every CTA has the same
// share of the nonzeros, whatever rows they are in.
//
// The nonzeros of all rows, one row after the other, are cut into equal runs, one for each CTA. A run is cut at the
// ends of rows into pieces, and a piece into batches of up to kFewWarps nonzeros: of rows of 10 and 30 nonzeros in runs
// of 20, the first CTA has batches of 8, 2, 8 and 2, the second one of 8, 8 and 4. One warp copies the weight rows of
// each nonzero, and the row of x, to shared memory, as many batches ahead as there is room for. The eight other warps
// compute u and h of a nonzero each, and then all columns of y, 8 kVectors to a thread. A row that is one piece is
// written at once; else each piece leaves a float32 sum in global memory, and the last CTA to come adds the pieces in
// order.
#pragma once

#include "common/tile.cuh"
#include "row/common.cuh"

namespace sparsellm::row {

constexpr int kFewTokens = 128;     // M at most
constexpr int kFewMaxWidth = 4096;  // K at most
constexpr int kFewWarps = 8;        // warps that compute; a batch has at most one nonzero for each
constexpr int kFewWorkers = 32 * kFewWarps;
constexpr int kFewThreads = kFewWorkers + 32;
constexpr int kFewStages = 3;              // batches in flight
constexpr uint32_t kFewBytes = 220 << 10;  // shared memory that they take, at most
constexpr int kFewListed = 512;            // nonzeros of a run that are listed at a time
constexpr uint32_t kShortestRun = 8;
static_assert(1 + kFewTokens <= kRowTickets, "l1 and each row have a ticket");

struct FewArguments : RowArguments {  // tickets: [1 + m]
  int batch;                          // nonzeros of a batch, at most
  float* partials;  // [CTAs, 2, k] sums of a run's first row, if it began before, and of its last, if it goes on
  float* l1_parts;  // [CTAs]
};

// Rows of k values in a stage: those of w_up, those of w_down_t, then x's; non-gated, those of w_down_t.
constexpr uint32_t few_stage_rows(int batch, bool gated) { return gated ? 2 * batch + 1 : batch; }

// One CTA. Methods are called by all threads unless they say which. Arrays in registers are locals, passed by
// reference: as members they would keep the scalars beside them in local memory until loops are unrolled.
template <int kVectors, bool kGated>
struct FewCta {
  enum Warp { kPlanning = 0, kCopying = kFewWarps };  // the copying warp is the ninth, and does not compute
  static constexpr int kWorkerBarrier = 1;  // the named barrier of the warps that compute; 0 is that of __syncthreads
  using RowSums = float[kVectors][8];       // a thread's part of a row of y

  struct Shared {
    uint64_t (&full)[kFewStages];
    uint64_t (&empty)[kFewStages];
    uint64_t& summed;                    // barrier: all warps' l1 is there
    uint32_t (&starts)[kFewTokens + 1];  // nonzeros before each row; behind the last row, all
    uint32_t& largest;                   // nonzeros of the fullest row
    uint32_t (&list)[kFewListed];
    uint8_t (&row_of)[kFewListed];  // of each listed nonzero
    float (&hidden)[2][kFewWarps];  // two batches take turns
    float (&l1_of)[kFewWarps];
    bool& last;
  };

  // Nonzeros [at, at + size) of the batch of tokens, all of one row, and a stage with what they multiply.
  struct Batch {
    uint32_t at, size;
    int64_t row;
    uint32_t row_begin, row_end;  // the row's nonzeros
    const uint32_t* words;
    uint4 *up, *down, *x;  // [size, vectors], the same, [vectors]
    uint32_t full, empty;
  };

  const FewArguments& a;
  const Shared& shared;
  uint4* stages;
  int warp;
  uint32_t lane, cta;
  int vectors;  // of 16 bytes, in a row
  uint32_t row_bytes;
  uint32_t run_length = 0, runs = 0;
  uint32_t begin = 0, end = 0;  // the nonzeros of this CTA's run
  RingOf<kFewStages> ring;
  int parity = 0;
  float l1 = 0.0f;  // of this warp's nonzeros

  __device__ __forceinline__ FewCta(const FewArguments& a, const Shared& shared, uint4* stages)
      : a(a),
        shared(shared),
        stages(stages),
        warp(ptx::warp_index()),
        lane(threadIdx.x % 32),
        cta(blockIdx.x),
        vectors(a.k / 8),
        row_bytes(16 * vectors) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) init_barriers();
    ptx::griddepcontrol_wait();
    if (warp == kPlanning) count_rows();
    __syncthreads();
    divide();
    write_empty_rows();
    if (begin == end) return;
    const int first_row = row_at_begin();
    RowSums sums;
    for (uint32_t from = begin; from < end; from += kFewListed) {
      const uint32_t to = min(from + kFewListed, end);
      if (from != begin) __syncthreads();  // the list has been read
      list_nonzeros_of_run(from, to, first_row);
      __syncthreads();
      for (uint32_t at = from, size; at < to; at += size, ring.advance()) {
        const Batch batch = batch_at(at, from, to);
        size = batch.size;
        if (warp == kCopying) {
          copy(batch);
        } else {
          compute(batch, sums);
        }
      }
    }
    if (warp == kCopying) add_l1();
  }

  __device__ __forceinline__ void init_barriers() const {
    for (int s = 0; s < kFewStages; ++s) {
      ptx::mbarrier_init(ptx::smem_address(shared.full + s), 1);
      ptx::mbarrier_init(ptx::smem_address(shared.empty + s), kFewWarps);
    }
    ptx::mbarrier_init(ptx::smem_address(&shared.summed), kFewWarps);
    ptx::fence_mbarrier_init();
  }

  // The planning warp: where each row's nonzeros start among those of all rows. Each lane has four rows.
  __device__ __forceinline__ void count_rows() const {
    constexpr int kRows = kFewTokens / 32;
    uint32_t counts[kRows], all = 0, most = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = kRows * lane + i;
      counts[i] = row < a.m ? a.packed.row_counts[row] : 0;
      all += counts[i];
      most = max(most, counts[i]);
    }
    uint32_t before = exclusive_scan(all, lane);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      shared.starts[kRows * lane + i] = before;
      before += counts[i];
    }
    most = __reduce_max_sync(~0u, most);
    if (lane == 31) shared.starts[kFewTokens] = before;
    if (lane == 0) shared.largest = most;
  }

  // Equal runs, one for each CTA. A nonzero is two weight rows of bf16, and a piece's sum is a row of float32: as many
  // bytes. A row of L nonzeros in runs of R makes a CTA read R nonzeros, and the CTA that adds the pieces read L / R
  // sums: R + L / R is least where R is the root of L. So no run is shorter than the root of the fullest row.
  __device__ __forceinline__ void divide() {
    const uint32_t total = shared.starts[kFewTokens];
    const uint32_t share = max((total + gridDim.x - 1) / gridDim.x, __float2uint_ru(__fsqrt_rn(shared.largest)));
    run_length = max(share, kShortestRun);
    runs = (total + run_length - 1) / run_length;
    begin = min(cta * run_length, total), end = min(begin + run_length, total);
  }

  // Rows without nonzeros are zero, and where there is no nonzero at all, so is l1.
  __device__ __forceinline__ void write_empty_rows() const {
    for (int row = cta; row < a.m; row += gridDim.x) {
      if (shared.starts[row] != shared.starts[row + 1]) continue;
      uint4* y = reinterpret_cast<uint4*>(a.y + static_cast<int64_t>(row) * a.k);
      for (int vector = threadIdx.x; vector < vectors; vector += kFewThreads) y[vector] = make_uint4(0, 0, 0, 0);
    }
    if (shared.starts[kFewTokens] == 0 && cta == 0 && threadIdx.x == 0) *a.l1 = 0.0f;
  }

  // The row of the run's first nonzero: its number is how many rows end before that nonzero.
  __device__ __forceinline__ int row_at_begin() const {
    constexpr int kRows = kFewTokens / 32;
    int row = 0;
#pragma unroll
    for (int i = 1; i <= kRows; ++i) row += shared.starts[kRows * lane + i] <= begin;
    return __reduce_add_sync(~0u, row);
  }

  // Lists nonzeros [from, to) of the run, and the row of each; a warp lists one row at a time.
  __device__ __forceinline__ void list_nonzeros_of_run(uint32_t from, uint32_t to, int first_row) const {
    for (int row = first_row + warp; row < a.m && shared.starts[row] < to; row += kFewThreads / 32) {
      const uint32_t row_begin = shared.starts[row];
      const uint32_t first = max(from, row_begin), stop = min(to, shared.starts[row + 1]);
      if (first >= stop) continue;
      list_nonzeros(a.packed, row, a.n, first - row_begin, stop - row_begin, lane, shared.list + (first - from));
      for (uint32_t i = first + lane; i < stop; i += 32) shared.row_of[i - from] = static_cast<uint8_t>(row);
    }
  }

  // The batch from nonzero `at` on, while nonzeros [from, to) are listed. A batch ends where its row ends.
  __device__ __forceinline__ Batch batch_at(uint32_t at, uint32_t from, uint32_t to) const {
    Batch batch;
    batch.at = at;
    batch.row = shared.row_of[at - from];
    batch.row_begin = shared.starts[batch.row], batch.row_end = shared.starts[batch.row + 1];
    batch.size = min(static_cast<uint32_t>(a.batch), min(batch.row_end, to) - at);
    batch.words = shared.list + (at - from);
    batch.up = stages + static_cast<int>(ring.stage * few_stage_rows(a.batch, kGated)) * vectors;
    batch.down = kGated ? batch.up + a.batch * vectors : batch.up;
    batch.x = batch.down + a.batch * vectors;
    batch.full = ptx::smem_address(shared.full + ring.stage);
    batch.empty = ptx::smem_address(shared.empty + ring.stage);
    return batch;
  }

  // The copying warp: a lane copies the weight rows of one nonzero; the last lane copies the row of x.
  __device__ __forceinline__ void copy(const Batch& batch) const {
    ptx::mbarrier_wait(batch.empty, ring.phase ^ 1);
    if (lane == 0) ptx::mbarrier_arrive_expect_tx(batch.full, few_stage_rows(batch.size, kGated) * row_bytes);
    __syncwarp();
    const auto copy_row = [&](uint4* to_stage, const __nv_bfloat16* rows, int64_t index) {
      ptx::bulk_load(ptx::smem_address(to_stage), rows + index * a.k, row_bytes, batch.full);
    };
    if (kGated && lane == 31) copy_row(batch.x, a.x, batch.row);
    if (lane < batch.size) {
      const int64_t neuron = batch.words[lane] & 0xffff;
      if constexpr (kGated) copy_row(batch.up + lane * vectors, a.w_up, neuron);
      copy_row(batch.down + lane * vectors, a.w_down_t, neuron);
    }
  }

  // The other warps: compute one h each, then all columns of y. At the end of a row, or of the run, they leave the
  // row's sums.
  __device__ __forceinline__ void compute(const Batch& batch, RowSums& sums) {
    ptx::mbarrier_wait(batch.full, ring.phase);
    if (static_cast<uint32_t>(warp) < batch.size) compute_hidden(batch);
    if (batch.at + batch.size == end && lane == 0) {
      shared.l1_of[warp] = l1;
      ptx::mbarrier_arrive(ptx::smem_address(&shared.summed));
    }
    sync_workers();
    add_batch(batch, sums);
    parity ^= 1;  // hidden[parity] is written again two batches on, behind another barrier
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(batch.empty);

    if (batch.at + batch.size != min(batch.row_end, end)) return;
    uint4* y = reinterpret_cast<uint4*>(a.y + batch.row * a.k);
    if (batch.row_begin >= begin && batch.row_end <= end) {  // the row is one piece
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int vector = v * kFewWorkers + threadIdx.x;
        if (vector < vectors) y[vector] = pack(sums[v]);
      }
    } else {
      leave_piece(batch, sums, y);
    }
  }

  static __device__ __forceinline__ void sync_workers() { ptx::bar_sync(kWorkerBarrier, kFewWorkers); }

  __device__ __forceinline__ void compute_hidden(const Batch& batch) {
    const uint32_t word = batch.words[warp];
    float h = gate_of(word);
    if constexpr (kGated) {
      const uint4* mine = batch.up + warp * vectors;
      float four[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
      for (int vector = lane; vector < vectors; vector += 32) {
        float x8[8];
        unpack(batch.x[vector], x8);
        multiply_add(four, mine[vector], x8);
      }
      h = hidden_of(word, warp_sum((four[0] + four[1]) + (four[2] + four[3])));
    }
    l1 += fabsf(h);
    if (lane == 0) shared.hidden[parity][warp] = h;
  }

  // Adds the batch's h times its rows of W_d to `sums`, which begin at zero where the run or the row begins.
  __device__ __forceinline__ void add_batch(const Batch& batch, RowSums& sums) const {
    if (batch.at == begin || batch.at == batch.row_begin) {
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
        if (j < batch.size) rows[j] = batch.down[j * vectors + vector];
      }
#pragma unroll
      for (int j = 0; j < kFewWarps; ++j) {
        if (j < batch.size) scale_add(sums[v], rows[j], shared.hidden[parity][j]);
      }
    }
  }

  // The row has one piece in each CTA from `first` on. In CTA `first` the row is the run's last one, which has the
  // second place of the CTA's partial sums; in the others it is the run's first one. The last CTA to come adds the
  // pieces in order.
  __device__ __forceinline__ void leave_piece(const Batch& batch, const RowSums& sums, uint4* y) const {
    const uint32_t first = batch.row_begin / run_length;
    const uint32_t pieces = (batch.row_end - 1) / run_length - first + 1;
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
    sync_workers();
    if (threadIdx.x == 0) {
      int32_t* ticket = a.tickets + 1 + batch.row;
      shared.last = atomicAdd(ticket, 1) == static_cast<int>(pieces) - 1;
      if (shared.last) *ticket = 0;
    }
    sync_workers();
    if (!shared.last) return;
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

  // The copying warp: leaves this CTA's share of l1; that of the last CTA adds all shares, in order.
  __device__ __forceinline__ void add_l1() const {
    ptx::mbarrier_wait(ptx::smem_address(&shared.summed), 0);
    const float part = warp_sum(lane < kFewWarps ? shared.l1_of[lane] : 0.0f);
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
};

template <int kVectors, bool kGated>
__global__ void __launch_bounds__(kFewThreads, 1) row_few_kernel(const FewArguments a) {
  using Cta = FewCta<kVectors, kGated>;
  extern __shared__ uint4 stages[];
  // One by one, and not as one struct, so that the compiler knows that a store to one changes none of the others.
  __shared__ uint64_t full[kFewStages], empty[kFewStages], summed;
  __shared__ uint32_t starts[kFewTokens + 1], largest;
  __shared__ uint32_t list[kFewListed];
  __shared__ uint8_t row_of[kFewListed];
  __shared__ float hidden[2][kFewWarps], l1_of[kFewWarps];
  __shared__ bool last;
  const typename Cta::Shared shared = {full, empty, summed, starts, largest, list, row_of, hidden, l1_of, last};
  Cta(a, shared, stages).run();
}

}  // namespace sparsellm::row
