// The row engine for few tokens (decoding), where latency is all: a cluster of eight CTAs for each row; of four, where
// rows are too many for all to have eight at once.
//
// A row's nonzeros are dealt eight at a time to the warps of a CTA, and to the same warps of all eight. Of such a chunk
// each CTA computes one h, from a whole row of W_u, and sends it to the same warp of the others; each then multiplies
// all eight by its own eighth of the columns of W_d. So nothing but one number per nonzero passes between CTAs, through
// shared memory, and what is left to add are the sums of a CTA's own warps. Weights go to registers, W_u of the next
// chunk and W_d of this one while h is exchanged; all are fetched to L2 beforehand, a chunk ahead of that. With four CTAs
// a chunk is four nonzeros, and a CTA's columns a quarter.
//
// Where there are more rows than clusters, a cluster does several in turn, and fetches the next one's list and x under
// the one before. The first is the row of its number; the longer it is, the shorter those after it.
//
// A row of very many nonzeros is cut into pieces, each of which a cluster does as if it were a row. They leave float32
// sums in global memory, and of the CTAs that have the same columns the last to come adds them in order. No cluster
// waits for another: they need not all be on the device at once.
#pragma once

#include "row/common.cuh"

namespace sparsellm::row {

constexpr int kClusterWarps = 8;        // of a CTA
constexpr int kClusterTokens = kCountedTokens;  // M and
constexpr int kClusterMaxWidth = 4096;          // K at most
constexpr int kClusterListed = 320;     // nonzeros of a row or piece that are listed at a time
constexpr int kNextEarlyAbove = 16;     // tokens: with more, what comes next may start as CTAs end

// Clusters of so many CTAs, at most: one warp adds their l1.
constexpr int max_clusters(int cluster) { return 256 / cluster; }
constexpr int kMaxClusters = max_clusters(4);
static_assert(kMaxClusters + 256 <= kRowTickets, "a cluster, and a CTA of a cut row, has one");

// tickets: [clusters at most] l1 of each, its sign set where it is there; then [clusters at most, CTAs of each] pieces
// done of each row that is cut: its place is that of its second piece among all pieces that are not first.
struct ClusterArguments : RowArguments {
  float* partials;  // [m + clusters, k] the pieces' sums: first the first ones of each row
};

// Nonzeros first..last - 1 (of the row, columns ascending) to list[0..], as list_nonzeros does, in less time where one
// warp does it alone: a lane for each tile, a scan for 32.
__device__ __forceinline__ void list_at_once(const Packed& packed, int64_t row, int64_t n, int words_per_tile,
                                             uint32_t first, uint32_t last, uint32_t lane, uint32_t* list) {
  const int tiles = static_cast<int>((n + kColumnTile - 1) / kColumnTile);
  const uint32_t size = last - first;
  uint32_t seen = 0;  // nonzeros in the tiles before
  for (int start = 0; start < tiles && seen < last; start += 32) {
    const uint32_t* words = segment_of(packed, row, start + lane, tiles, words_per_tile);
    uint4 v[4];  // no tile has less words
    v[0].x = 0;
    if (start + static_cast<int>(lane) < tiles) {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = *reinterpret_cast<const uint4*>(words + word_offset(4 * i, tiles));
    }
    const uint32_t count = v[0].x;
    const uint32_t base = seen + exclusive_scan(count, lane);  // rank of the tile's first nonzero
    seen = __shfl_sync(~0u, base + count, 31);
    const bool wanted = count != 0 && base < last && base + count > first;
    const bool fits = count < static_cast<uint32_t>(words_per_tile);
    if (wanted && fits) {
      const auto put = [&](uint32_t index, const uint4& four) {  // word 0 is the count, and wraps around
        const uint32_t of_four[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t at = index + i - 1;
          if (at < count && base + at - first < size) list[base + at - first] = of_four[i];
        }
      };
      put(0, v[0]), put(4, v[1]);
      if (count >= 8) put(8, v[2]), put(12, v[3]);
      for (uint32_t index = 16; index <= count; index += 4) {
        put(index, *reinterpret_cast<const uint4*>(words + word_offset(index, tiles)));
      }
    }
    for (uint32_t rest = __ballot_sync(~0u, wanted && !fits); rest != 0; rest &= rest - 1) {
      const int source = __ffs(rest) - 1;
      list_wide(packed, row, n, start + source, __shfl_sync(~0u, base, source), first, size, lane, list);
    }
  }
}

// How many nonzeros rows 2 lane and 2 lane + 1 have, from the tiles' counts; none from row m on.
__device__ __forceinline__ void count_rows(const Packed& packed, int m, int64_t n, uint32_t lane,
                                           uint32_t (&count)[2]) {
  const int tiles = static_cast<int>((n + kColumnTile - 1) / kColumnTile);
  // Lanes 8 t + s: rows 8 s .. 8 s + 7 of every fourth tile, two to a word, which carry nothing over: of 256 tiles at
  // most two lanes' have 32,768; all four's need not fit.
  uint32_t pairs[4] = {};
  const uint4* eight = reinterpret_cast<const uint4*>(tile_counts(packed)) + lane;
  for (int first = 0; first < tiles; first += 32) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint4 v = first + 4 * i + static_cast<int>(lane / 8) < tiles ? eight[32 * (first / 4 + i)] : uint4{};
      pairs[0] += v.x, pairs[1] += v.y, pairs[2] += v.z, pairs[3] += v.w;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] += __shfl_xor_sync(~0u, pairs[i], 8);
    const uint32_t p = __shfl_sync(~0u, pairs[i], lane / 4), q = __shfl_sync(~0u, pairs[i], lane / 4 + 16);
    if (static_cast<int>(lane % 4) == i) {
      count[0] = (p & 0xffff) + (q & 0xffff);
      count[1] = (p >> 16) + (q >> 16);
    }
  }
  const int rows = m - 2 * static_cast<int>(lane);
  if (rows < 1) count[0] = 0;
  if (rows < 2) count[1] = 0;
}

// The counters, from the tiles' counts and masks; a warp together.
__device__ __forceinline__ void count_all(const Packed& packed, int m, int64_t n, uint32_t words_per_tile,
                                          uint32_t lane) {
  const int tiles = static_cast<int>((n + kColumnTile - 1) / kColumnTile);
  uint32_t nonzeros = 0, overflow = 0, in_union = 0;
  const uint32_t* pairs = reinterpret_cast<const uint32_t*>(tile_counts(packed)) + lane;  // rows 2 lane, 2 lane + 1
  const int rows = m - 2 * static_cast<int>(lane);
#pragma unroll 8
  for (int tile = 0; tile < tiles; ++tile) {
    const uint32_t pair = rows > 0 ? pairs[tile * (kCountedTokens / 2)] : 0;
    const uint32_t even = pair & 0xffff, odd = rows > 1 ? pair >> 16 : 0;
    nonzeros += even + odd;
    overflow += (even >= words_per_tile) + (odd >= words_per_tile);
  }
  for (int i = lane; i < 2 * tiles; i += 32) {
    const uint4 mask = reinterpret_cast<const uint4*>(packed.mask)[i];
    in_union += __popc(mask.x) + __popc(mask.y) + __popc(mask.z) + __popc(mask.w);
  }
  nonzeros = __reduce_add_sync(~0u, nonzeros);
  overflow = __reduce_add_sync(~0u, overflow);
  in_union = __reduce_add_sync(~0u, in_union);
  if (lane == 0) {
    packed.counters[kNonzeros] = nonzeros;
    packed.counters[kOverflow] = overflow;
    packed.counters[kUnion] = in_union;
  }
}

// kCluster: CTAs; nonzeros of a chunk. kFull: k is 256 kVectors, the most there is room for. Then two CTAs share an SM:
// of clusters of eight that have theirs alone, 15 fit an H100 or H200, of such at least 30; of four 60.
template <int kCluster, int kVectors, bool kFull, bool kGated>
__global__ void __launch_bounds__(32 * kClusterWarps, kFull ? 2 : 1) row_cluster_kernel(const ClusterArguments a) {
  constexpr int kWarps = kClusterWarps;
  constexpr int kSlices = kVectors / kCluster;    // vectors of y in a lane
  constexpr uint32_t kRound = kWarps * kCluster;  // nonzeros that the warps have at a time
  constexpr uint32_t kWhole = 4 * kRound;  // a row of no more nonzeros, or no more than a cluster's share, is not cut
  static_assert(kClusterListed % kRound == 0, "chunks end where a list ends");
  __shared__ uint4 x[2][kGated ? 32 * kVectors : 1];  // two rows take turns, and
  __shared__ float4 sums_of[kWarps][kSlices][2][32];
  __shared__ alignas(16) uint32_t list[2][kClusterListed];  // two parts of their lists
  __shared__ alignas(16) float hidden[2][kWarps][kCluster];
  __shared__ uint64_t received[2][kWarps], x_full[2];
  __shared__ uint32_t counts[kClusterTokens];
  __shared__ uint32_t keys[kClusterTokens];
  __shared__ uint32_t cuts[kClusterTokens + 1];  // pieces but the first of the rows before; behind the last row, all
  __shared__ uint32_t piece;                     // nonzeros of a piece of a row that is cut
  __shared__ int row_of[kClusterTokens];         // of a unit that is a row or its first piece
  __shared__ int place_of_next;                  // among the clusters, this one's from its second unit on
  __shared__ float l1_of[kWarps];
  __shared__ bool last;
  const int warp = ptx::warp_index();
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t rank = ptx::cluster_rank();
  const int cluster = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;
  const int vectors = kFull ? 32 * kVectors : a.k / 8;  // of 16 bytes, in a row
  const int slice = (vectors + kCluster - 1) / kCluster;  // of those, this CTA's from slice * rank on
  const auto vector_of = [&](int s) { return slice * static_cast<int>(rank) + 32 * s + static_cast<int>(lane); };
  const auto is_mine = [&](int s) {
    return kFull || (32 * s + static_cast<int>(lane) < slice && vector_of(s) < vectors);
  };
  constexpr uint32_t kHiddenBytes = sizeof(float) * kCluster;

  if (kGated && lane == 0) {
    for (int b = 0; b < 2; ++b) {
      if (warp == 0) ptx::mbarrier_init(ptx::smem_address(&x_full[b]), 1);
      ptx::mbarrier_init(ptx::smem_address(&received[b][warp]), 1);
    }
    ptx::fence_mbarrier_init();
    for (int b = 0; b < 2; ++b) ptx::mbarrier_arrive_expect_tx(ptx::smem_address(&received[b][warp]), kHiddenBytes);
  }
  __syncwarp();
  if constexpr (kGated) ptx::cluster_sync();  // all barriers are there
  ptx::griddepcontrol_wait();
  // gate_pack of 17 tokens and more, where it comes next, gains a microsecond by that; of fewer it took 0.4 longer.
  if (a.m > kNextEarlyAbove) ptx::griddepcontrol_launch_dependents();

  // The last warps, which have the least to compute, also fetch what comes next.
  const auto list_part = [&](int row, uint32_t first, uint32_t place) {
    if (warp != kWarps - 1) return;
    list_at_once(a.packed, row, a.n, a.words_per_tile, first, first + kClusterListed, lane, list[place]);
  };
  const auto copy_x = [&](int row, uint32_t place) {
    if (!kGated || warp != kWarps - 2 || lane != 0) return;
    const uint32_t barrier = ptx::smem_address(&x_full[place]);
    ptx::mbarrier_arrive_expect_tx(barrier, 16 * vectors);
    ptx::bulk_load(ptx::smem_address(x[place]), a.x + static_cast<int64_t>(row) * a.k, 16 * vectors, barrier);
  };

  // The first row is begun before it is known which are cut.
  if (cluster < a.m) {
    copy_x(cluster, 0);
    list_part(cluster, 0, 0);
  }
  if (warp == 1 && blockIdx.x == gridDim.x - 1) count_all(a.packed, a.m, a.n, a.words_per_tile, lane);
  if (warp == 0) {
    constexpr int kRows = kClusterTokens / 32;  // of a lane
    uint32_t count[kRows] = {}, more[kRows] = {}, all = 0, most = 0;
    count_rows(a.packed, a.m, a.n, lane, count);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = kRows * lane + i;
      counts[row] = count[i];
      all += count[i];
      most = max(most, count[i]);
    }
    uint32_t length = 0, before = 0;
    if (__any_sync(~0u, most > kWhole)) {
      const uint32_t share = (__reduce_add_sync(~0u, all) + clusters - 1) / clusters;
      length = (share + kRound - 1) / kRound * kRound;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        more[i] = count[i] > max(length, kWhole) ? (count[i] - 1) / length : 0;  // less than `clusters` in all
        before += more[i];
      }
      before = exclusive_scan(before, lane);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      cuts[kRows * lane + i] = before;
      before += more[i];
    }
    if (lane == 31) cuts[kClusterTokens] = before;
    if (lane == 0) piece = length;

    // Rows beyond the first of each cluster: the longest goes where the first is shortest.
    const bool ranked = a.m > clusters || (a.m == clusters && length != 0);
    uint32_t key[kRows];  // of rows from m on the least
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = kRows * lane + i;
      key[i] = (row < clusters ? 1u << 31 : 0) + count[i] * kClusterTokens + kClusterTokens - 1 - row;
      keys[row] = key[i];
      if (row < clusters) row_of[row] = row;
    }
    __syncwarp();
    const auto rank_of = [&](int row) {  // among all
      const uint32_t of_row = keys[row];
      int greater = 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) greater += __popc(__ballot_sync(~0u, key[i] > of_row));
      return greater;
    };
    for (int row = clusters; row < a.m; ++row) {
      const int place = rank_of(row);
      if (lane == 0) row_of[place] = row;
    }
    const int place = ranked ? clusters - 1 - rank_of(cluster) : cluster;
    if (lane == 0) place_of_next = place;
  }
  __syncthreads();

  struct Unit {  // a row, or a piece of one
    int row;
    uint32_t begin, end;
  };
  const int units = a.m + cuts[kClusterTokens];  // first the first pieces of all rows, which mostly are all of them
  const auto pieces_of = [&](int row) { return cuts[row + 1] - cuts[row] + 1; };
  const auto unit_at = [&](int unit) {
    Unit u = {};
    if (unit < a.m) {
      u.row = row_of[unit];
    } else {
      const uint32_t cut = unit - a.m;
      while (cuts[u.row + 1] <= cut) ++u.row;
      u.begin = (cut - cuts[u.row] + 1) * piece;
    }
    u.end = pieces_of(u.row) == 1 ? counts[u.row] : min(u.begin + piece, counts[u.row]);
    return u;
  };
  if (cluster >= a.m && cluster < units) {
    const Unit u = unit_at(cluster);
    copy_x(u.row, 0);
    list_part(u.row, u.begin, 0);
    __syncthreads();
  }

  uint32_t exchanges = 0, turn = 0;
  uint32_t listed = 0;  // the list's place
  float l1 = 0.0f;      // of this warp's nonzeros
  for (int unit = cluster; unit < units; unit = ++turn * clusters + place_of_next) {
    const Unit u = unit_at(unit);
    const uint32_t here = turn % 2;
    const auto next = [&] { return (turn + 1) * clusters + place_of_next; };
    if (next() < units) copy_x(unit_at(next()).row, here ^ 1);

    float sums[kSlices][8];
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[s][i] = 0.0f;
    }
    for (uint32_t from = u.begin;; from += kClusterListed) {
      const bool ends = u.end - from <= kClusterListed;
      const uint32_t* words = list[listed];
      const uint32_t size = min(u.end - from, static_cast<uint32_t>(kClusterListed));

      uint4 up[kVectors], down[kCluster][kSlices];
      const auto weights_of = [&](const __nv_bfloat16* weights, uint32_t word, uint32_t vector) {
        const uint32_t at = (word & 0xffff) * (16 * vectors) + 16 * vector;  // bytes, less than 2^30
        return reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(weights) + at);
      };
      const auto load_up = [&](uint32_t at) {  // of the chunk from `at` on, this CTA's nonzero
        if (at + rank >= size) return;
        const uint4* weights = weights_of(a.w_up, words[at + rank], lane);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          if (kFull || 32 * v + static_cast<int>(lane) < vectors) up[v] = __ldg(weights + 32 * v);
        }
      };
      const auto load_down = [&](uint32_t at) {
        if (at >= size) return;
        uint32_t word_of[kCluster];
#pragma unroll
        for (int j = 0; j < kCluster; j += 4) {
          const uint4 p = *reinterpret_cast<const uint4*>(words + at + j);
          word_of[j] = p.x, word_of[j + 1] = p.y, word_of[j + 2] = p.z, word_of[j + 3] = p.w;
        }
#pragma unroll
        for (int j = 0; j < kCluster; ++j) {
          const uint4* weights = weights_of(a.w_down_t, word_of[j], vector_of(0));
#pragma unroll
          for (int s = 0; s < kSlices; ++s) {
            down[j][s] = make_uint4(0, 0, 0, 0);  // where there is none, its h is zero too
            if (at + j < size && is_mine(s)) down[j][s] = __ldg(weights + 32 * s);
          }
        }
      };

      // What the two will load, to L2, 128 bytes a lane: of W_d 32 / kCluster lanes have a nonzero.
      const auto prefetch = [&](uint32_t at, bool with_up) {
        constexpr int kLanes = 32 / kCluster, kStep = 8;
        const int first = slice * static_cast<int>(rank), own = kFull ? slice : min(slice, vectors - first);
        if (const uint32_t j = at + lane / kLanes; j < size) {
          for (int v = lane % kLanes * kStep; v < own; v += kLanes * kStep) {
            ptx::prefetch_l2(weights_of(a.w_down_t, words[j], first + v));
          }
        }
        if (with_up && at + rank < size) {
          for (int v = lane * kStep; v < vectors; v += 32 * kStep) {
            ptx::prefetch_l2(weights_of(a.w_up, words[at + rank], v));
          }
        }
      };

      uint32_t at = kCluster * warp;
      if constexpr (kGated) {
        load_up(at);
        prefetch(at, false);
      } else {
        load_down(at);
      }
      prefetch(at + kRound, kGated);
      if (warp == kWarps - 1 && (!ends || next() < units)) {  // behind the loads: the others do not wait to know which
        const Unit then = ends ? unit_at(next()) : Unit{u.row, from + kClusterListed};
        list_part(then.row, then.begin, listed ^ 1);
      }
      if constexpr (kGated) ptx::mbarrier_wait(ptx::smem_address(&x_full[here]), turn / 2 % 2);
      for (; at < size; at += kRound) {
        float h[kCluster];
        if constexpr (kGated) {
          float mine = 0.0f;
          if (at + rank < size) {
            float four[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
              const int vector = 32 * v + lane;
              if (vector >= vectors) break;
              float x8[8];
              unpack(x[here][vector], x8);
              multiply_add(four, up[v], x8);
            }
            mine = (four[0] + four[1]) + (four[2] + four[3]);
          }
          load_down(at);
          mine = warp_sum(mine);
          if (at + rank < size) mine = hidden_of(words[at + rank], mine);
          // Two places take turns: whoever sends to this one again has what this warp sends after it has read it.
          const uint32_t b = exchanges % 2;
          const uint32_t barrier = ptx::smem_address(&received[b][warp]);
          if (lane < kCluster) {
            const uint32_t to = ptx::smem_address(&hidden[b][warp][rank]);
            ptx::st_async_cluster(to, lane, __float_as_uint(mine), barrier);
          }
          load_up(at + kRound);
          prefetch(at + 2 * kRound, true);
          ptx::mbarrier_wait(barrier, exchanges / 2 % 2);
#pragma unroll
          for (int j = 0; j < kCluster; j += 4) {
            const float4 p = *reinterpret_cast<const float4*>(hidden[b][warp] + j);
            h[j] = p.x, h[j + 1] = p.y, h[j + 2] = p.z, h[j + 3] = p.w;
          }
          __syncwarp();
          if (lane == 0) ptx::mbarrier_arrive_expect_tx(barrier, kHiddenBytes);
          ++exchanges;
        } else {
#pragma unroll
          for (int j = 0; j < kCluster; ++j) h[j] = at + j < size ? gate_of(words[at + j]) : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < kCluster; ++j) {
          l1 += fabsf(h[j]);
#pragma unroll
          for (int s = 0; s < kSlices; ++s) scale_add(sums[s], down[j][s], h[j]);
        }
        if constexpr (!kGated) {
          load_down(at + kRound);
          prefetch(at + 2 * kRound, false);
        }
      }
      listed ^= 1;
      if (ends) break;
      __syncthreads();  // this list has been read, the next is there
    }

    // The warps' sums, in order: half a vector to a thread.
    if (turn > 0) __syncthreads();  // those of the unit before have been added
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      sums_of[warp][s][0][lane] = make_float4(sums[s][0], sums[s][1], sums[s][2], sums[s][3]);
      sums_of[warp][s][1][lane] = make_float4(sums[s][4], sums[s][5], sums[s][6], sums[s][7]);
    }
    if (lane == 0) l1_of[warp] = l1;
    __syncthreads();  // and x and the list have been read, the next list is there
    constexpr int kAdders = 64 * kSlices;
    if (threadIdx.x < kAdders) {
      const int s = threadIdx.x / 64, half = threadIdx.x / 32 % 2;
      const int vector = vector_of(s);
      const bool some = is_mine(s);
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      const auto add = [&](const float4& p) { sum.x += p.x, sum.y += p.y, sum.z += p.z, sum.w += p.w; };
#pragma unroll
      for (int w = 0; w < kWarps; ++w) add(sums_of[w][s][half][lane]);
      const uint32_t pieces = pieces_of(u.row);
      bool done = pieces == 1;
      if (!done) {
        const auto place = [&](int64_t at) {
          return reinterpret_cast<float4*>(a.partials + at * a.k) + 2 * vector + half;
        };
        if (some) *place(unit < a.m ? u.row : unit) = sum;
        __threadfence();
        ptx::bar_sync(1, kAdders);
        if (threadIdx.x == 0) {
          int32_t* ticket = a.tickets + max_clusters(kCluster) + cuts[u.row] * kCluster + rank;
          last = atomicAdd(ticket, 1) == static_cast<int>(pieces) - 1;
          if (last) *ticket = 0;
        }
        ptx::bar_sync(1, kAdders);
        done = last;
        if (done) {
          __threadfence();
          sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
          for (uint32_t i = 0; some && i < pieces; ++i) add(__ldcg(place(i == 0 ? u.row : a.m + cuts[u.row] + i - 1)));
        }
      }
      if (done && some) {
        uint2* y = reinterpret_cast<uint2*>(a.y + static_cast<int64_t>(u.row) * a.k);
        y[2 * vector + half] = make_uint2(ptx::cvt_bf16x2(sum.x, sum.y), ptx::cvt_bf16x2(sum.z, sum.w));
      }
    }
  }

  // l1: each cluster's, and whoever finds all of them there adds them in order. If two do, they write the same.
  if (rank != 0 || warp != kWarps - 1 || cluster >= units) return;
  const int used = min(clusters, units);
  float sum = warp_sum(static_cast<int>(lane) < kWarps ? l1_of[lane] : 0.0f);
  if (used > 1) {
    volatile uint32_t* parts = reinterpret_cast<uint32_t*>(a.tickets);
    constexpr uint32_t kThere = 1u << 31;
    if (lane == 0) parts[cluster] = __float_as_uint(sum) | kThere;
    __syncwarp();
    __threadfence();
    uint32_t all = kThere;
    sum = 0.0f;
#pragma unroll
    for (int i = lane; i < max_clusters(kCluster); i += 32) {
      const uint32_t part = i < used ? parts[i] : kThere;
      all &= part;
      sum += __uint_as_float(part & ~kThere);
    }
    if (!__all_sync(~0u, all != 0)) return;
    sum = warp_sum(sum);
    __syncwarp();
    for (int i = lane; i < used; i += 32) parts[i] = 0;
  }
  if (lane == 0) *a.l1 = sum;
}

}  // namespace sparsellm::row
