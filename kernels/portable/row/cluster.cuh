// The row engine for fewer than 1,536 tokens: a cluster of eight CTAs computes each row, or a cluster of four CTAs if
// there are too many rows for all to have eight CTAs at once. For few tokens (decoding), only latency matters.
//
// A row's nonzeros are dealt to warps in chunks of eight. Warps with the same index in the eight CTAs of the cluster
// get the same chunk: warp 0 of each CTA has nonzeros 0..7, warp 1 nonzeros 8..15, and warp 0 again nonzeros 64..71.
// For a chunk, each of the eight warps computes h of one nonzero, from a whole row of W_u, and sends it to the other
// seven. Then each warp multiplies all eight h by its CTA's eighth of the columns of W_d. So CTAs exchange only one
// number per nonzero, through shared memory, and y is the sum over the warps of a single CTA. Weights are loaded to
// registers: while the CTAs exchange h, a warp loads the rows of W_d for this chunk and the row of W_u for its next
// chunk. All these rows were prefetched to L2 one chunk earlier. In a cluster of four CTAs, a chunk is four nonzeros,
// and a CTA has a quarter of the columns.
//
// If there are more rows than clusters, a cluster computes several rows in turn, and fetches the next row's list and x
// while it computes the current row. The first row of cluster i is row i. The longer a cluster's first row is, the
// shorter are the rows that it computes afterwards.
//
// A row with very many nonzeros is cut into pieces, and a cluster computes a piece like a row. Each piece's float32
// sums are written to global memory, and for each CTA's columns, the CTA that finishes last adds the pieces' sums in
// order. No cluster waits for another, so clusters need not all be resident at once.
//
// More than 64 tokens are divided into runs. The cost of a row is its number of nonzeros plus kRowCost. The costs of
// all rows, one row after another, are cut into runs of equal cost, one for each cluster. A cluster computes the rows
// that begin in its run, also beyond the end of the run. Only rows of more than kWhole nonzeros are cut where a run
// ends, rounded to whole rounds of nonzeros. So all clusters have about equal work even if rows are very unequal, and a
// cluster writes pieces of at most two rows. An example with runs of 100 and rows that begin at 0, 60 and 110: the
// first cluster computes rows 0 and 1, the second cluster row 2. If row 1 had more than kWhole nonzeros, it would be
// cut at 100. From kLongRunTokens on, CTAs have four warps instead of eight, and there are twice as many CTAs: then
// fewer warps wait for one another at the end of a row, and fewer warps have no nonzero in the last round of a row.
#pragma once

#include <type_traits>

#include "row/counts.cuh"

namespace sparsellm::row {

constexpr int kClusterWarps = 8;                // warps per CTA
constexpr int kRunWarps = 4;                    // warps per CTA if runs are long; then there are twice as many CTAs
constexpr int kLongRunTokens = 512;             // smallest M for which runs are long
constexpr int kClusterTokens = kCountedTokens;  // largest M for which rows are dealt
constexpr int kRunTokens = kManyTokens;         // size of the arrays for rows in runs; M is smaller
constexpr int kRowCost = 16;                    // cost of a row in addition to its nonzeros, in nonzeros
constexpr int kClusterMaxWidth = 4096;          // largest K
constexpr int kClusterListed = 320;             // nonzeros of a row or piece that are listed at a time
constexpr int kNextEarlyAbove = 16;             // for more tokens than this, the next kernel may start as CTAs end

// The largest number of clusters of `cluster` CTAs that have `warps` warps each. There is a limit because one warp adds
// the l1 of all clusters, and because every CTA needs a ticket.
constexpr int max_clusters(int cluster, int warps) { return 2048 / warps / cluster; }
constexpr int kMaxClusters = max_clusters(4, kRunWarps);
static_assert(5 * kMaxClusters <= kRowTickets, "each cluster, and each CTA of a cut row, needs a ticket");

// tickets: first [max_clusters] the l1 of each cluster, a float32 whose sign bit is set once it has been written (the
// bit is free, because a sum of |h| is never negative). Then [max_clusters, CTAs]: for each cut row and each CTA's
// columns, how many pieces are done. If rows are dealt, the row's index in this array is cuts[row] (see Shared), which
// is the index of its second piece among the second and later pieces of all rows. With runs, the index is the cluster
// in whose run the row begins.
struct ClusterArguments : RowArguments {
  float* partials;  // the pieces' sums. Rows dealt: [m + clusters, k], the rows' first pieces, then all other pieces.
                    // With runs: [clusters, 2, k], for each run the piece of its first row, if that row began in an
                    // earlier run, and the piece of its last row, if that row continues in the next run
  const float* scales;  // kFloat8 and gated: [N] each neuron's scale (engines.h: Float8Scales)
};

// One CTA in a cluster of kCluster CTAs; a chunk is kCluster nonzeros. kFull: k is 256 kVectors, the largest k that
// fits. kDealt: for few tokens; rows are dealt to the clusters by their lengths, long rows are cut, and this kernel
// computes the counts. kFloat8: weights are e4m3. All threads of the CTA call all methods, unless a method's comment
// says otherwise. Arrays in registers are locals, passed by reference: if they were members, the members next to them
// would stay in local memory until loops are unrolled.
template <int kCluster, int kWarps, int kVectors, bool kFull, bool kGated, bool kDealt, bool kFloat8>
struct ClusterCta {
  using Eight = std::conditional_t<kFloat8, uint2, uint4>;  // a vector of weights
  static constexpr uint32_t kEightBytes = sizeof(Eight);
  static constexpr int kSlices = kVectors / kCluster;    // vectors of eight columns of y per lane
  static constexpr uint32_t kRound = kWarps * kCluster;  // nonzeros of a row that a CTA's warps process at once, one
                                                         // chunk each
  // A row with at most this many nonzeros, or at most a cluster's share of all nonzeros, is not cut.
  static constexpr uint32_t kWhole = 4 * kRound;
  static constexpr uint32_t kHiddenBytes = sizeof(float) * kCluster;
  static constexpr int kAdders = 64 * kSlices;  // threads that add the warps' sums, half a vector per thread
  static constexpr int kAdderBarrier = 1;       // named barrier of the adders; barrier 0 is __syncthreads
  static_assert(kClusterListed % kRound == 0, "a list must end where a chunk ends");
  using Up = Eight[kVectors];             // this lane's vectors of a row of W_u
  using Down = Eight[kCluster][kSlices];  // this lane's vectors, in the CTA's columns, of the W_d rows of a chunk
  using UnitSums = float[kSlices][8];     // this lane's sums of y, in the CTA's columns

  // Warps with a task in addition to their nonzeros. The last warps have the fewest nonzeros, so they fetch the next
  // row's x and list.
  enum Warp { kPlanning = 0, kCounting = 1, kCopyingX = kWarps - 2, kListing = kWarps - 1 };

  // References to the kernel's shared variables, which are declared one by one rather than in a struct, so that the
  // compiler knows that a store to one of them does not change the others; with a struct, the loops were compiled to
  // other registers. Arrays of [2] are double buffers: of rows, of parts of lists, or of chunks.
  struct Shared {
    uint4 (&x)[2][kGated ? 32 * kVectors : 1];
    float4 (&sums_of)[kWarps][kSlices][2][32];
    uint32_t (&list)[2][kClusterListed];
    float (&hidden)[2][kWarps][kCluster];
    uint64_t (&received)[2][kWarps];                  // barrier: all h of a chunk have arrived
    uint64_t (&x_full)[2];                            // barrier: x of a row has arrived
    uint32_t (&starts)[kDealt ? 1 : kRunTokens + 1];  // total cost of all earlier rows; last entry: of all rows
    uint32_t (&counts)[kClusterTokens];  // nonzeros of each row; `counts` to `row_of` are for kDealt
    uint32_t (&keys)[kClusterTokens];
    // Number of second and later pieces of all earlier rows; last entry: of all rows. If rows 0 to 3 are cut into 1, 3,
    // 1 and 2 pieces, the entries are 0, 0, 2, 2, and the last entry is 3.
    uint32_t (&cuts)[kClusterTokens + 1];
    uint32_t& piece;                // nonzeros per piece of a row that is cut
    int (&row_of)[kClusterTokens];  // the row of each unit that is a row, or the first piece of one
    int& place_of_next;             // index of this cluster in the order in which clusters get their second and later
                                    // units
    float (&l1_of)[kWarps];
    bool& last;
  };

  // A row's nonzeros [begin, end): all nonzeros of the row, or those of a piece. If rows are dealt, units 0 .. m - 1
  // are the rows or their first pieces, and the following units are all other pieces, row by row.
  struct Unit {
    int row;
    uint32_t begin, end;
  };
  // The nonzeros of a unit that are listed at a time.
  struct List {
    const uint32_t* words;
    uint32_t size;
  };

  const ClusterArguments& a;
  const Shared& shared;
  int warp;
  uint32_t lane, rank;
  int cluster, clusters;
  int vectors;         // number of vectors of eight columns per row
  int slice;           // number of vectors per CTA; this CTA's first vector is slice * rank
  int units = 0;       // number of units; with runs, this is the number of rows
  uint32_t share = 0;  // the length of a run
  uint32_t turn = 0, exchanges = 0;
  uint32_t listed = 0;  // which of the two lists is current: 0 or 1
  float l1 = 0.0f;      // sum over this warp's nonzeros

  __device__ __forceinline__ ClusterCta(const ClusterArguments& a, const Shared& shared)
      : a(a),
        shared(shared),
        warp(ptx::warp_index()),
        lane(threadIdx.x % 32),
        rank(ptx::cluster_rank()),
        cluster(blockIdx.x / kCluster),
        clusters(gridDim.x / kCluster),
        vectors(kFull ? 32 * kVectors : a.k / 8),
        slice((vectors + kCluster - 1) / kCluster) {}

  __device__ __forceinline__ int vector_of(int s) const {
    return slice * static_cast<int>(rank) + 32 * s + static_cast<int>(lane);
  }
  __device__ __forceinline__ bool is_mine(int s) const {
    return kFull || (32 * s + static_cast<int>(lane) < slice && vector_of(s) < vectors);
  }

  __device__ __forceinline__ void run() {
    init_barriers();
    if constexpr (kGated) ptx::cluster_sync();  // all barriers must be initialized before any CTA sends
    ptx::griddepcontrol_wait();
    // If the next kernel is gate_pack, an early start makes it a microsecond faster for 17 or more tokens, but 0.4
    // microseconds slower for fewer tokens. For one token, see multiply_list.
    if (a.m > kNextEarlyAbove) ptx::griddepcontrol_launch_dependents();

    if constexpr (kDealt) {
      // Fetch the first row's x and list before the planning warp knows which rows are cut.
      if (cluster < a.m) {
        copy_x(cluster, 0);
        list_part(cluster, 0, 0);
      }
      if (warp == kCounting && blockIdx.x == gridDim.x - 1) count_all(a.packed, a.m, a.n, lane);
      if (warp == kPlanning) deal_rows();
      __syncthreads();
      units = a.m + shared.cuts[kClusterTokens];
    } else {
      divide();
      units = a.m;
    }
    int unit = first_unit();
    if ((!kDealt || cluster >= a.m) && unit < units) {  // if rows are dealt, a second or later piece
      const Unit u = unit_at(unit);
      copy_x(u.row, 0);
      list_part(u.row, u.begin, 0);
      __syncthreads();
    }

    for (; unit < units; unit = unit_after(unit), ++turn) {
      const int next = unit_after(unit);
      if (next < units) copy_x(unit_at(next).row, turn % 2 ^ 1);
      const Unit u = unit_at(unit);
      UnitSums sums;
      multiply_unit(u, unit, sums);
      add_warps(u, unit, sums);
    }
    if (rank == 0 && warp == kListing && cluster < used()) add_l1();
  }

  __device__ __forceinline__ void init_barriers() const {
    if (kGated && lane == 0) {
      for (int b = 0; b < 2; ++b) {
        if (warp == 0) ptx::mbarrier_init(ptx::smem_address(&shared.x_full[b]), 1);
        ptx::mbarrier_init(ptx::smem_address(&shared.received[b][warp]), 1);
      }
      ptx::fence_mbarrier_init();
      for (int b = 0; b < 2; ++b) {
        ptx::mbarrier_arrive_expect_tx(ptx::smem_address(&shared.received[b][warp]), kHiddenBytes);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void list_part(int row, uint32_t first, uint32_t place) const {
    if (warp != kListing) return;
    list_at_once(a.packed, row, a.n, first, first + kClusterListed, lane, shared.list[place]);
  }

  __device__ __forceinline__ void copy_x(int row, uint32_t place) const {
    if (!kGated || warp != kCopyingX || lane != 0) return;
    const uint32_t barrier = ptx::smem_address(&shared.x_full[place]);
    ptx::mbarrier_arrive_expect_tx(barrier, 16 * vectors);
    ptx::bulk_load(ptx::smem_address(shared.x[place]), a.x + static_cast<int64_t>(row) * a.k, 16 * vectors, barrier);
  }

  // With runs: computes the cost at which each row begins, and the length of a run.
  __device__ __forceinline__ void divide() {
    constexpr int kRows = kRunTokens / (32 * kWarps);  // rows per thread
    uint32_t cost[kRows], mine = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = kRows * static_cast<int>(threadIdx.x) + i;
      cost[i] = row < a.m ? a.packed.row_counts[row] + kRowCost : 0;
      mine += cost[i];
    }
    uint32_t before = exclusive_scan(mine, lane);
    if (lane == 31) shared.counts[warp] = before + mine;
    if (threadIdx.x < kWarps) shared.l1_of[threadIdx.x] = 0.0f;  // read by a cluster in whose run no row begins
    __syncthreads();
    uint32_t all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += shared.counts[w];
      all += shared.counts[w];
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      shared.starts[kRows * threadIdx.x + i] = before;
      before += cost[i];
    }
    if (threadIdx.x == 0) shared.starts[kRunTokens] = all;
    share = (all + clusters - 1) / clusters;
    __syncthreads();
  }

  // The role of the planning warp, if rows are dealt: decides which rows are cut, and which rows each cluster computes
  // after its first row. Each lane plans two rows.
  __device__ __forceinline__ void deal_rows() const {
    constexpr int kRows = kClusterTokens / 32;
    uint32_t count[kRows] = {}, more[kRows] = {}, all = 0, most = 0;
    count_rows(a.packed, a.m, a.n, lane, count);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      shared.counts[kRows * lane + i] = count[i];
      all += count[i];
      most = max(most, count[i]);
    }
    // The size of a piece is a cluster's share of all nonzeros, rounded up to whole rounds. So there are fewer second
    // and later pieces than clusters. For example, with 8 clusters and rows of 2,000 and 48 nonzeros, a share is 256
    // nonzeros, and the first row is cut into eight pieces.
    uint32_t length = 0, before = 0;
    if (__any_sync(~0u, most > kWhole)) {
      const uint32_t share = (__reduce_add_sync(~0u, all) + clusters - 1) / clusters;
      length = (share + kRound - 1) / kRound * kRound;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        more[i] = count[i] > max(length, kWhole) ? (count[i] - 1) / length : 0;
        before += more[i];
      }
      before = exclusive_scan(before, lane);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      shared.cuts[kRows * lane + i] = before;
      before += more[i];
    }
    if (lane == 31) shared.cuts[kClusterTokens] = before;
    if (lane == 0) shared.piece = length;
    rank_rows(count, length != 0);
  }

  // The first row of cluster i is row i. The longest of the remaining rows goes to the cluster whose first row is the
  // shortest, and so on. To find both orders, rows are ranked by a key in which first rows are above all remaining
  // rows, and longer rows above shorter rows.
  template <int kRows>
  __device__ __forceinline__ void rank_rows(const uint32_t (&count)[kRows], bool cut) const {
    const bool ranked = a.m > clusters || (a.m == clusters && cut);
    uint32_t key[kRows];  // rows from m on get the lowest keys: their count is 0, their numbers are the highest
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = kRows * lane + i;
      key[i] = (row < clusters ? 1u << 31 : 0) + count[i] * kClusterTokens + kClusterTokens - 1 - row;
      shared.keys[row] = key[i];
      if (row < clusters) shared.row_of[row] = row;
    }
    __syncwarp();
    const auto rank_of = [&](int row) {
      const uint32_t of_row = shared.keys[row];
      int greater = 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) greater += __popc(__ballot_sync(~0u, key[i] > of_row));
      return greater;
    };
    for (int row = clusters; row < a.m; ++row) {
      const int place = rank_of(row);
      if (lane == 0) shared.row_of[place] = row;
    }
    const int place = ranked ? clusters - 1 - rank_of(cluster) : cluster;
    if (lane == 0) shared.place_of_next = place;
  }

  __device__ __forceinline__ uint32_t pieces_of(int row) const {
    if constexpr (kDealt) return shared.cuts[row + 1] - shared.cuts[row] + 1;
    if (count_of(row) <= kWhole) return 1;
    return (shared.starts[row + 1] - 1) / share - shared.starts[row] / share + 1;
  }

  // With runs: count_of is the row's number of nonzeros; nonzeros_before is how many of them come before the total cost
  // `cost`, rounded up to whole rounds.
  __device__ __forceinline__ uint32_t count_of(int row) const {
    return shared.starts[row + 1] - shared.starts[row] - kRowCost;
  }
  __device__ __forceinline__ uint32_t nonzeros_before(uint32_t cost, int row) const {
    const int after = static_cast<int>(cost - shared.starts[row]) - kRowCost;
    return after <= 0 ? 0 : min((after + kRound - 1) / kRound * kRound, count_of(row));
  }

  __device__ __forceinline__ Unit unit_at(int unit) const {
    Unit u = {};
    if constexpr (!kDealt) {
      u.row = unit;
      u.end = count_of(unit);
      if (u.end > kWhole) {
        u.begin = nonzeros_before(cluster * share, unit);
        u.end = nonzeros_before((cluster + 1) * share, unit);
      }
      return u;
    }
    if (unit < a.m) {
      u.row = shared.row_of[unit];
    } else {
      const uint32_t cut = unit - a.m;
      while (shared.cuts[u.row + 1] <= cut) ++u.row;
      u.begin = (cut - shared.cuts[u.row] + 1) * shared.piece;
    }
    u.end = pieces_of(u.row) == 1 ? shared.counts[u.row] : min(u.begin + shared.piece, shared.counts[u.row]);
    return u;
  }

  // The first unit that this cluster computes. With runs, units have the numbers of their rows.
  __device__ __forceinline__ int first_unit() const {
    if constexpr (kDealt) return cluster;
    const uint32_t begin = cluster * share;
    int row = 0, end = a.m;  // `row` becomes the first row that begins in the run or after it
    while (row < end) {
      const int middle = (row + end) / 2;
      if (shared.starts[middle] < begin) {
        row = middle + 1;
      } else {
        end = middle;
      }
    }
    if (row > 0 && shared.starts[row] > begin && count_of(row - 1) > kWhole) return row - 1;
    return begins_here(row) ? row : units;
  }
  __device__ __forceinline__ bool begins_here(int row) const {
    return row < a.m && shared.starts[row] < (cluster + 1) * share;
  }

  // The number of clusters that have a run or, if rows are dealt, a unit.
  __device__ __forceinline__ int used() const {
    if constexpr (kDealt) return min(clusters, units);
    return static_cast<int>((shared.starts[kRunTokens] + share - 1) / share);
  }

  // The unit that this cluster computes after unit `unit`; a number >= `units` means that there are no more units.
  __device__ __forceinline__ int unit_after(int unit) const {
    if constexpr (kDealt) return static_cast<int>(turn + 1) * clusters + shared.place_of_next;
    return begins_here(unit + 1) ? unit + 1 : units;
  }

  // The address of vector `vector` in the weight row of a packed word's neuron.
  __device__ __forceinline__ const Eight* weights_of(const void* weights, uint32_t word, uint32_t vector) const {
    // The offset in bytes is less than 2^30.
    const uint32_t at = (word & 0xffff) * (kEightBytes * vectors) + kEightBytes * vector;
    return reinterpret_cast<const Eight*>(static_cast<const char*>(weights) + at);
  }

  // Loads the row of W_u for this CTA's nonzero in the chunk that starts at index `at` of the list, and its scale.
  __device__ __forceinline__ void load_up(Up& up, float& scale, const List& list, uint32_t at) const {
    if (at + rank >= list.size) return;
    const uint32_t word = list.words[at + rank];
    const Eight* weights = weights_of(a.w_up, word, lane);
    if constexpr (kFloat8) scale = __ldg(a.scales + (word & 0xffff));
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (kFull || 32 * v + static_cast<int>(lane) < vectors) up[v] = __ldg(weights + 32 * v);
    }
  }

  // Loads the rows of W_d for all nonzeros of the chunk, in this CTA's columns.
  __device__ __forceinline__ void load_down(Down& down, const List& list, uint32_t at) const {
    if (at >= list.size) return;
    uint32_t word_of[kCluster];
#pragma unroll
    for (int j = 0; j < kCluster; j += 4) {
      const uint4 p = *reinterpret_cast<const uint4*>(list.words + at + j);
      word_of[j] = p.x, word_of[j + 1] = p.y, word_of[j + 2] = p.z, word_of[j + 3] = p.w;
    }
#pragma unroll
    for (int j = 0; j < kCluster; ++j) {
      const Eight* weights = weights_of(a.w_down_t, word_of[j], vector_of(0));
#pragma unroll
      for (int s = 0; s < kSlices; ++s) {
        down[j][s] = Eight{};  // if there is no nonzero, its h is 0, and 0 * undefined may be NaN
        if (at + j < list.size && is_mine(s)) down[j][s] = __ldg(weights + 32 * s);
      }
    }
  }

  // Prefetches to L2 what load_down and, if with_up is true, load_up will load for the chunk at `at`. A lane prefetches
  // 128 bytes at a time. For W_d, 32 / kCluster lanes share one nonzero.
  __device__ __forceinline__ void prefetch(const List& list, uint32_t at, bool with_up) const {
    constexpr int kLanes = 32 / kCluster, kStep = 128 / kEightBytes;
    const int first = slice * static_cast<int>(rank), own = kFull ? slice : min(slice, vectors - first);
    if (const uint32_t j = at + lane / kLanes; j < list.size) {
      for (int v = lane % kLanes * kStep; v < own; v += kLanes * kStep) {
        ptx::prefetch_l2(weights_of(a.w_down_t, list.words[j], first + v));
      }
    }
    if (with_up && at + rank < list.size) {
      for (int v = lane * kStep; v < vectors; v += 32 * kStep) {
        ptx::prefetch_l2(weights_of(a.w_up, list.words[at + rank], v));
      }
    }
  }

  // Computes `sums` = h W_d over the nonzeros of the unit, in this CTA's columns; each warp sums over its own chunks.
  __device__ __forceinline__ void multiply_unit(const Unit& u, int unit, UnitSums& sums) {
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[s][i] = 0.0f;
    }
    for (uint32_t from = u.begin;; from += kClusterListed) {
      const bool ends = u.end - from <= kClusterListed;
      multiply_list(u, unit, from, ends, sums);
      listed ^= 1;
      if (ends) break;
      __syncthreads();  // wait until all warps have read this list and the next list has been written
    }
  }

  __device__ __forceinline__ void multiply_list(const Unit& u, int unit, uint32_t from, bool ends, UnitSums& sums) {
    const List list = {shared.list[listed], min(u.end - from, static_cast<uint32_t>(kClusterListed))};
    Up up;
    float scale = 1.0f;
    Down down;
    uint32_t at = kCluster * warp;
    if constexpr (kGated) {
      load_up(up, scale, list, at);
      prefetch(list, at, false);
    } else {
      load_down(down, list, at);
    }
    prefetch(list, at + kRound, kGated);
    // For one token, let the next kernel start now. In a decoder, the next kernel is a matrix-vector product. If that
    // kernel started earlier, its weight loads would precede the loads above; now its loads queue behind them.
    if (kDealt && a.m == 1) ptx::griddepcontrol_launch_dependents();
    // The listing warp looks up the next unit only after it has issued its loads, because no other warp waits for the
    // result.
    if (warp == kListing && (!ends || unit_after(unit) < units)) {
      const Unit then = ends ? unit_at(unit_after(unit)) : Unit{u.row, from + kClusterListed};
      list_part(then.row, then.begin, listed ^ 1);
    }
    if constexpr (kGated) ptx::mbarrier_wait(ptx::smem_address(&shared.x_full[turn % 2]), turn / 2 % 2);
    for (; at < list.size; at += kRound) {
      float h[kCluster];
      if constexpr (kGated) {
        exchange_hidden(list, at, up, scale, down, h);
      } else {
#pragma unroll
        for (int j = 0; j < kCluster; ++j) h[j] = at + j < list.size ? gate_of(list.words[at + j]) : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < kCluster; ++j) {
        l1 += fabsf(h[j]);
#pragma unroll
        for (int s = 0; s < kSlices; ++s) scale_add(sums[s], down[j][s], h[j]);
      }
      if constexpr (!kGated) {
        load_down(down, list, at + kRound);
        prefetch(list, at + 2 * kRound, false);
      }
    }
  }

  // Computes and exchanges the h of the chunk that starts at `at`: sends this CTA's h to the warp with the same index
  // in all CTAs, and receives theirs. Meanwhile, loads the chunk's rows of W_d and the next chunk's row of W_u.
  __device__ __forceinline__ void exchange_hidden(const List& list, uint32_t at, Up& up, float& scale, Down& down,
                                                  float (&h)[kCluster]) {
    float mine = at + rank < list.size ? dot_x(up) : 0.0f;
    load_down(down, list, at);
    mine = warp_sum(mine);
    if constexpr (kFloat8) mine *= scale;
    if (at + rank < list.size) mine = hidden_of(list.words[at + rank], mine);
    // Two buffers, b = 0, 1, 0, ..., are enough, and a CTA needs no barrier before it sends: a CTA sends to this warp's
    // buffer b again only after it has received what this warp sent to buffer b ^ 1, which this warp sent only after
    // reading buffer b.
    const uint32_t b = exchanges % 2;
    const uint32_t barrier = ptx::smem_address(&shared.received[b][warp]);
    if (lane < kCluster) {
      const uint32_t to = ptx::smem_address(&shared.hidden[b][warp][rank]);
      ptx::st_async_cluster(to, lane, __float_as_uint(mine), barrier);
    }
    load_up(up, scale, list, at + kRound);
    prefetch(list, at + 2 * kRound, true);
    ptx::mbarrier_wait(barrier, exchanges / 2 % 2);
#pragma unroll
    for (int j = 0; j < kCluster; j += 4) {
      const float4 p = *reinterpret_cast<const float4*>(shared.hidden[b][warp] + j);
      h[j] = p.x, h[j + 1] = p.y, h[j + 2] = p.z, h[j + 3] = p.w;
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive_expect_tx(barrier, kHiddenBytes);
    ++exchanges;
  }

  // This lane's part of the dot product of x and a row of W_u.
  __device__ __forceinline__ float dot_x(const Up& up) const {
    float four[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int vector = 32 * v + lane;
      if (vector >= vectors) break;
      float x8[8];
      unpack(shared.x[turn % 2][vector], x8);
      multiply_add(four, up[v], x8);
    }
    return (four[0] + four[1]) + (four[2] + four[3]);
  }

  // Adds the warps' sums in order; each thread adds half a vector. If the row is cut, the last CTA also adds the sums
  // of all pieces. Stores y.
  __device__ __forceinline__ void add_warps(const Unit& u, int unit, const UnitSums& sums) const {
    if (turn > 0) __syncthreads();  // wait until all threads have read the sums of the previous unit
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      shared.sums_of[warp][s][0][lane] = make_float4(sums[s][0], sums[s][1], sums[s][2], sums[s][3]);
      shared.sums_of[warp][s][1][lane] = make_float4(sums[s][4], sums[s][5], sums[s][6], sums[s][7]);
    }
    if (lane == 0) shared.l1_of[warp] = l1;
    __syncthreads();  // wait until all warps have written their sums, read x and the list, and written the next list
    if (threadIdx.x >= kAdders) return;
    const int s = threadIdx.x / 64, half = threadIdx.x / 32 % 2;
    const int vector = vector_of(s);
    const bool some = is_mine(s);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) add(sum, shared.sums_of[w][s][half][lane]);
    const uint32_t pieces = pieces_of(u.row);
    bool done = pieces == 1;
    if (!done) done = add_pieces(u.row, unit, pieces, 2 * vector + half, some, sum);
    if (done && some) {
      uint2* y = reinterpret_cast<uint2*>(a.y + static_cast<int64_t>(u.row) * a.k);
      y[2 * vector + half] = make_uint2(ptx::cvt_bf16x2(sum.x, sum.y), ptx::cvt_bf16x2(sum.z, sum.w));
    }
  }

  static __device__ __forceinline__ void add(float4& sum, const float4& p) {
    sum.x += p.x, sum.y += p.y, sum.z += p.z, sum.w += p.w;
  }

  // Called by the threads that add: writes a piece's sum to global memory. Returns true in the last CTA that does so
  // for this row and these columns; there, `sum` becomes the sum of all pieces, added in order.
  __device__ __forceinline__ bool add_pieces(int row, int unit, uint32_t pieces, int quad, bool some,
                                             float4& sum) const {
    const uint32_t first = kDealt ? shared.cuts[row] : shared.starts[row] / share;
    const auto place = [&](int64_t at) { return reinterpret_cast<float4*>(a.partials + at * a.k) + quad; };
    // With runs, a cut row is the last row of cluster `first`, and the first row of the other clusters that compute it.
    const auto place_in_run = [&](uint32_t c) { return place(2 * c + (c == first)); };
    if (some) *(kDealt ? place(unit < a.m ? row : unit) : place_in_run(cluster)) = sum;
    __threadfence();
    ptx::bar_sync(kAdderBarrier, kAdders);
    if (threadIdx.x == 0) {
      int32_t* ticket = a.tickets + max_clusters(kCluster, kWarps) + first * kCluster + rank;
      shared.last = atomicAdd(ticket, 1) == static_cast<int>(pieces) - 1;
      if (shared.last) *ticket = 0;
    }
    ptx::bar_sync(kAdderBarrier, kAdders);
    const bool done = shared.last;
    if (done) {
      __threadfence();
      sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
      for (uint32_t i = 0; some && i < pieces; ++i) {
        add(sum, __ldcg(kDealt ? place(i == 0 ? row : a.m + first + i - 1) : place_in_run(first + i)));
      }
    }
    return done;
  }

  // Called by one warp of each cluster: writes the cluster's l1. If the warp then finds that the l1 of all clusters
  // have been written, it adds them in order. Two warps may both find this; then both write the same sum.
  __device__ __forceinline__ void add_l1() const {
    const int with_l1 = used();
    float sum = warp_sum(static_cast<int>(lane) < kWarps ? shared.l1_of[lane] : 0.0f);
    if (with_l1 > 1) {
      volatile uint32_t* parts = reinterpret_cast<uint32_t*>(a.tickets);
      constexpr uint32_t kThere = 1u << 31;
      if (lane == 0) parts[cluster] = __float_as_uint(sum) | kThere;
      __syncwarp();
      __threadfence();
      uint32_t all = kThere;
      sum = 0.0f;
#pragma unroll
      for (int i = lane; i < max_clusters(kCluster, kWarps); i += 32) {
        const uint32_t part = i < with_l1 ? parts[i] : kThere;
        all &= part;
        sum += __uint_as_float(part & ~kThere);
      }
      if (!__all_sync(~0u, all != 0)) return;
      sum = warp_sum(sum);
      __syncwarp();
      for (int i = lane; i < with_l1; i += 32) parts[i] = 0;
    }
    if (lane == 0) *a.l1 = sum;
  }
};

// If kFull, two CTAs of eight warps (or four CTAs of four) share an SM. On an H100 or H200, 15 clusters of eight CTAs
// can be resident if each CTA has an SM of its own, and at least 30 if CTAs share SMs; of clusters of four CTAs that
// share SMs, 60 can be resident.
template <int kCluster, int kWarps, int kVectors, bool kFull, bool kGated, bool kDealt, bool kFloat8>
__global__ void __launch_bounds__(32 * kWarps, kFull ? 16 / kWarps : 1) row_cluster_kernel(const ClusterArguments a) {
  using Cta = ClusterCta<kCluster, kWarps, kVectors, kFull, kGated, kDealt, kFloat8>;
  __shared__ uint4 x[2][kGated ? 32 * kVectors : 1];
  __shared__ float4 sums_of[kWarps][Cta::kSlices][2][32];
  __shared__ alignas(16) uint32_t list[2][kClusterListed];
  __shared__ alignas(16) float hidden[2][kWarps][kCluster];
  __shared__ uint64_t received[2][kWarps], x_full[2];
  __shared__ uint32_t starts[kDealt ? 1 : kRunTokens + 1];
  __shared__ uint32_t counts[kClusterTokens];
  __shared__ uint32_t keys[kClusterTokens];
  __shared__ uint32_t cuts[kClusterTokens + 1];
  __shared__ uint32_t piece;
  __shared__ int row_of[kClusterTokens];
  __shared__ int place_of_next;
  __shared__ float l1_of[kWarps];
  __shared__ bool last;
  const typename Cta::Shared shared = {x,    sums_of, list,  hidden, received,      x_full, starts, counts,
                                       keys, cuts,    piece, row_of, place_of_next, l1_of,  last};
  Cta(a, shared).run();
}

}  // namespace sparsellm::row
