// The matrix product x w^T or x w in gate_pack, dense_hidden and dense_gradient. A CTA multiplies one tile after
// another, and finishes each tile while the next one is multiplied.
//
// There is one persistent CTA per SM, in clusters of two. A cluster computes a pair of output tiles: the same 256
// columns for two neighbouring token tiles. Each of its CTAs fetches one half of the tile of w and multicasts it to
// both CTAs. Roles:
//
//   producer         warp 0: TMA
//   finishing warps  warps 1-3 turn a finished tile, bf16 in shared memory, into the kernel's results while the next
//                    tile is multiplied. The first thread of warp 1 claims the pairs: the first two rounds of pairs are
//                    dealt by a fixed rule, and every later pair goes to the first cluster that is free.
//   consumers        warps 4-11
#pragma once

#include "common/host.h"
#include "common/twell.cuh"
#include "common/wgmma.cuh"

namespace sparsellm {

constexpr int kFinishWarps = 3;
constexpr int kFinishBarrier = 1;  // the named barrier of the finishing warps; __syncthreads uses 0
constexpr int kDealtRounds = 2;
// Number of rounds whose pairs are kept in shared memory. While the second CTA of a cluster finishes the tile of round
// p, it knows the pairs of rounds up to p + 2. So the first CTA is in round p + 3 at most, and during that round it
// claims the pair of round p + 5. The pairs of rounds p to p + 5 can therefore be in use at once, which are six. If the
// kernel does not count fired neurons, the finishing warps do not wait for one another, so one of them may be a round
// ahead of the others: then seven pairs are in use.
constexpr int kRounds = 8;

using PairPipeline = Pipeline<kStages, 2>;

struct PairShared {
  PairPipeline::Storage pipeline;
  uint64_t tile_full;
  uint64_t tile_free;
  uint64_t drawn[kRounds];
  uint32_t pairs[kRounds];  // [r % kRounds] the pair of round r; after the last pair, a number >= the number of pairs
  uint32_t fired[2][8];     // [tile parity] one bit per neuron that fires for some token of the tile
};

constexpr uint32_t kPairBytes = 1024 + kStages * kStageBytes + kTileBytes + sizeof(PairShared);  // plus one bit per
                                                                                                 // neuron
static_assert(kPairBytes + 65536 / 8 <= kMaxSharedBytes, "all of it must fit in one CTA's shared memory");

// Order of the pairs: all column tiles of one pair of token tiles, then all column tiles of the next pair of token
// tiles. So the pairs in flight need few rows of x, and w, which they all read, stays in L2. If w is too large for L2,
// its columns are processed in bands of at most kBandBytes, one band after another.
constexpr int64_t kBandBytes = 24 << 20;

// The shape of a product: m tokens by column tiles of 256.
struct PairProduct {
  int64_t m;
  int column_tiles, k_blocks, band_tiles;

  __host__ __device__ uint32_t row_pairs() const { return static_cast<uint32_t>((m + 2 * kTileM - 1) / (2 * kTileM)); }
};

// The product of tokens [m, k] with `column_tiles` column tiles.
inline PairProduct pair_product_of(int64_t m, int64_t k, int64_t column_tiles) {
  const int64_t in_band = max(int64_t{1}, kBandBytes / (kTileN * k * 2));  // column tiles that fit in a band
  const int64_t band_tiles = ceil_div(column_tiles, ceil_div(column_tiles, in_band));
  return {m, static_cast<int>(column_tiles), static_cast<int>(ceil_div(k, kTileK)), static_cast<int>(band_tiles)};
}

// Launches a pair kernel early. The kernel before it in the stream must be `clear`, launched with early = false.
// neurons: neurons per column tile, or 0 if the kernel does not count which neurons fire.
template <class Kernel, class... Arguments>
cudaError_t launch_pairs(Kernel kernel, const PairProduct& product, int neurons, cudaStream_t stream,
                         Arguments&&... arguments) {
  int count = 0;
  const cudaError_t error = multiprocessors(&count);
  if (error != cudaSuccess) return error;
  const int64_t pairs = static_cast<int64_t>(product.row_pairs()) * product.column_tiles;
  const int64_t grid = 2 * (pairs < count / 2 ? pairs : count / 2);
  const uint32_t bytes = kPairBytes + static_cast<uint32_t>(product.column_tiles) * (neurons / 8);
  return launch_early(kernel, grid, kThreads, bytes, 2, stream, arguments...);
}

// Byte offset in the finished tile: rows have 512 bytes, and 16-byte chunk c of row r is at chunk c ^ (r & 7).
__device__ __forceinline__ uint32_t tile_offset(uint32_t row, uint32_t chunk) {
  return row * 512 + ((chunk ^ (row & 7)) << 4);
}

struct PairMemory {
  uint32_t stages, tile;
  PairShared* shared;
  uint32_t* fired;  // [column tiles, kWords] the neurons that this CTA has already reported as firing

  __device__ __forceinline__ explicit PairMemory(uint8_t* raw)
      : stages((ptx::smem_address(raw) + 1023) & ~1023u),
        tile(stages + kStages * kStageBytes),
        shared(reinterpret_cast<PairShared*>(raw + (tile + kTileBytes - ptx::smem_address(raw)))),
        fired(reinterpret_cast<uint32_t*>(shared + 1)) {}
};

// The finished tile that the finishing warps read.
struct FinishedTile {
  int64_t token_tile;
  int column_tile, rows;  // rows: number of rows that are tokens; <= 0 if the tile is beyond the last token
  uint32_t parity;        // parity of the round, which alternates from tile to tile

  __device__ __forceinline__ int64_t row0() const { return token_tile * kTileM; }
};

// A CTA's barriers, as shared addresses, and the pairs of its rounds.
struct PairCta {
  const PairMemory& memory;
  const PairProduct& product;
  PairShared& shared;
  PairPipeline pipeline;
  Scheduler<kRounds> scheduler;
  uint32_t tile_full, tile_free;
  int warp;
  uint32_t lane, rank;
  uint32_t row_pairs, pairs;

  __device__ __forceinline__ PairCta(const PairMemory& memory, const PairProduct& product)
      : memory(memory),
        product(product),
        shared(*memory.shared),
        pipeline(shared.pipeline),
        scheduler(shared.drawn),
        tile_full(ptx::smem_address(&shared.tile_full)),
        tile_free(ptx::smem_address(&shared.tile_free)),
        warp(ptx::warp_index()),
        lane(threadIdx.x % 32),
        rank(ptx::cluster_rank()),
        row_pairs(product.row_pairs()),
        pairs(row_pairs * product.column_tiles) {}

  // Called by one thread.
  __device__ __forceinline__ void init_barriers() const {
    // The consumers of both CTAs release a stage, because this CTA's producer also writes to the other CTA's stages.
    for (int s = 0; s < kStages; ++s) pipeline.init(s, 1, 2 * kConsumerWarps);
    ptx::mbarrier_init(tile_full, kConsumerWarps);
    ptx::mbarrier_init(tile_free, kFinishWarps);
    for (int r = 0; r < kRounds; ++r) ptx::mbarrier_init(scheduler.barrier(r), 1);
    for (int r = 0; r < kDealtRounds; ++r) {
      shared.pairs[r] = (r * gridDim.x + blockIdx.x) / 2;
      ptx::mbarrier_arrive(scheduler.barrier(r));
    }
    ptx::fence_mbarrier_init();
  }

  // Waits until the pair of a round is known, and returns its number. A number >= `pairs` means that there are no more
  // pairs.
  __device__ __forceinline__ uint32_t pair_in(uint32_t round) const {
    scheduler.wait(round);
    return shared.pairs[round % kRounds];
  }

  // The tile of a pair that this CTA computes. An example with 3 pairs of token tiles and 5 column tiles in bands of 2:
  // pairs 0 and 1 are column tiles 0 and 1 of the first pair of token tiles, pairs 2 and 3 those of the second, pairs 4
  // and 5 those of the third; then come column tiles 2 and 3: pairs 6 and 7 are those of the first pair of token tiles.
  __device__ __forceinline__ FinishedTile tile_of_pair(uint32_t pair, uint32_t round) const {
    const uint32_t band_pairs = row_pairs * product.band_tiles;
    const uint32_t band = pair / band_pairs, within = pair - band * band_pairs;
    const int first = band * product.band_tiles, width = min(product.band_tiles, product.column_tiles - first);
    const int64_t token_tile = static_cast<int64_t>(within / width) * 2 + rank;
    const int64_t rows = min(static_cast<int64_t>(kTileM), product.m - token_tile * kTileM);
    return {token_tile, static_cast<int>(first + within % width), static_cast<int>(rows), round & 1};
  }

  // Called by one thread of each CTA: gets the pair of the round that is kDealtRounds after `round`. The first CTA of
  // the cluster claims the pair and sends the pair's number to both CTAs.
  __device__ __forceinline__ void draw(uint32_t round, unsigned long long* counters) const {
    const uint32_t slot = (round + kDealtRounds) % kRounds, barrier = scheduler.barrier(slot);
    ptx::mbarrier_arrive_expect_tx(barrier, sizeof(uint32_t));
    if (rank != 0) return;
    const uint32_t next = kDealtRounds * gridDim.x / 2 + static_cast<uint32_t>(atomicAdd(counters + kDrawn, 1));
    const uint32_t to = ptx::smem_address(shared.pairs + slot);
    for (uint32_t r = 0; r < 2; ++r) ptx::st_async_cluster(to, r, next, barrier);
  }
};

// The producer, which is one thread: copies this CTA's tile of x to the stages and, by calling `fetch`, its half of w.
template <class Fetch>
__device__ __forceinline__ void produce_pairs(const PairCta& cta, const CUtensorMap& x_map, const CUtensorMap& w_map,
                                              Fetch fetch) {
  ptx::tma_prefetch_descriptor(&x_map);
  ptx::tma_prefetch_descriptor(&w_map);
  PairPipeline::State state;
  uint32_t pair;
  for (uint32_t round = 0; (pair = cta.pair_in(round)) < cta.pairs; ++round) {
    const FinishedTile of = cta.tile_of_pair(pair, round);
    const int row = static_cast<int>(of.row0());
    for (int kb = 0; kb < cta.product.k_blocks; ++kb) {
      cta.pipeline.producer_acquire(state);
      const uint32_t a = cta.memory.stages + state.stage * kStageBytes;
      const uint32_t full = cta.pipeline.producer_barrier(state.stage);
      ptx::mbarrier_arrive_expect_tx(full, kStageBytes);
      ptx::tma_load_2d(a, &x_map, kb * kTileK, row, full);
      fetch(of.column_tile, cta.rank, kb, a + kABytes, full);
      state.advance();
    }
  }
}

// Reports which neurons fire in a tile; the finishing warps have set a bit for each of them. Passes all bits to `tell`,
// and writes 1 to `said` for the neurons that this CTA has not reported before. Called by one warp, in which lanes 4 w
// .. 4 w + 3 have word w of the bits. Returns the number of neurons that fire.
template <int kWords, class Tell>
__device__ __forceinline__ int tell_fired(const PairCta& cta, const FinishedTile& of, uint8_t* said, Tell tell) {
  constexpr uint32_t kActive = kWords == 8 ? ~0u : (1u << 4 * kWords) - 1;
  const uint32_t lane = cta.lane;
  const uint32_t word = cta.shared.fired[of.parity][lane / 4];
  const uint32_t known = cta.memory.fired[of.column_tile * kWords + lane / 4];
  int in_union = 0;
  __syncwarp(kActive);
  if (lane % 4 == 0) {
    cta.shared.fired[of.parity][lane / 4] = 0;  // these bits are set again two tiles later, after another barrier
    cta.memory.fired[of.column_tile * kWords + lane / 4] = known | word;
    tell(of, lane, word);
    in_union = __popc(word);
  }
  for (uint32_t rest = (word & ~known) >> (lane % 4 * 8) & 0xff; rest != 0; rest &= rest - 1) {
    said[of.column_tile * (32 * kWords) + 8 * lane + __ffs(rest) - 1] = 1;
  }
  return in_union;
}

// The role of the three finishing warps.
template <int kWords, class Take, class Tell, class End>
__device__ __forceinline__ void finish_pairs(const PairCta& cta, unsigned long long* counters, uint8_t* said, Take take,
                                             Tell tell, End end) {
  const int finisher = cta.warp - 1;
  ptx::griddepcontrol_wait();  // wait until `clear` has zeroed the counters
  unsigned long long in_union = 0;
  uint32_t round = 0, pair;
  for (; (pair = cta.pair_in(round)) < cta.pairs; ++round) {
    if (finisher == 0 && cta.lane == 0) cta.draw(round, counters);
    const FinishedTile of = cta.tile_of_pair(pair, round);
    ptx::mbarrier_wait(cta.tile_full, of.parity);
    take(of, finisher, cta.shared.fired[of.parity]);
    if (cta.lane == 0) ptx::mbarrier_arrive(cta.tile_free);
    if constexpr (kWords != 0) {
      ptx::bar_sync(kFinishBarrier, 32 * kFinishWarps);
      if (finisher == 0 && of.rows > 0 && cta.lane < 4 * kWords) in_union += tell_fired<kWords>(cta, of, said, tell);
    }
  }
  cta.pair_in(round + kDealtRounds - 1);  // wait, because the last pair must not arrive after this CTA has ended
  end(finisher);
  if (in_union != 0) atomicAdd(counters + kUnion, in_union);
}

// The default for multiply_pairs's `scales`: the operands are bf16, without scales.
struct Unscaled {
  static constexpr bool kFloat8 = false;
};

// The role of a consumer warp: multiplies one tile after another, and writes each tile as bf16 to shared memory.
template <int kMajorMN, class Bf16, class Scales>
__device__ __forceinline__ void consume_pairs(const PairCta& cta, Bf16 bf16, Scales scales) {
  const uint32_t lane = cta.lane;
  const int warpgroup = cta.warp / 4 - 1;
  const uint32_t row = (cta.warp - 4) * 16 + (lane & 15);  // the row whose address this lane passes to stmatrix
  PairPipeline::State state;
  bool more = true;
  for (uint32_t round = 0; more; ++round) {
    float d[128];
    const auto ahead = [&] {
      more = cta.pair_in(round + 1) < cta.pairs;
      if constexpr (Scales::kFloat8) {
        scales.read(cta.tile_of_pair(cta.pair_in(round), round), (cta.warp - 4) * 16 + lane / 4, lane);
      }
    };
    multiply<4, kMajorMN, false, Scales::kFloat8>(d, cta.pipeline, state, cta.product.k_blocks, cta.memory.stages, 0,
                                                  warpgroup, ahead);
    if constexpr (Scales::kFloat8) scales.apply(d, lane);
    ptx::mbarrier_wait(cta.tile_free, round & 1 ^ 1);
#pragma unroll
    for (int j = 0; j < 16; ++j) {  // each j stores 16 columns: two 8-column blocks, rows 0-7 and 8-15
      ptx::stmatrix_x4(cta.memory.tile + tile_offset(row, 2 * j + lane / 16), bf16(j, d[8 * j], d[8 * j + 1]),
                       bf16(j, d[8 * j + 2], d[8 * j + 3]), bf16(j, d[8 * j + 4], d[8 * j + 5]),
                       bf16(j, d[8 * j + 6], d[8 * j + 7]));
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(cta.tile_full);
  }
}

// The body of a pair kernel. Parameters:
//   kWords                    words of 32 neurons per column tile; 0 if the kernel does not count which neurons fire
//   kMajorMN                  1 if w is MN-major, as in multiply
//   kFinishRegisters          registers per finishing thread; consumers get fewer registers if this is larger
//   counters                  kDrawn and kUnion are counted here
//   said                      uint8 [neurons]: set to 1 for each neuron that fires
//   fetch(column_tile, rank, kb, b, full)  starts the copy of CTA `rank`'s half of w to B of the stage in both CTAs
//   bf16(j, low, high)        rounds two sums of the tile's columns 16 j .. 16 j + 15 to bf16
//   take(tile, warp, fired)   called by finishing warp 0, 1 or 2: processes a finished tile, and sets the bits of the
//                             neurons that fire in `fired`
//   tell(tile, lane, word)    called by lanes 4 w of one warp after all three warps have taken the tile; `word` is word
//                             w of `fired`
//   end(warp)                 called by the finishing warps after the last tile
//   scales                    Unscaled, or what multiplies the sums of e4m3 operands before bf16 rounds them:
//                             read(tile, row, lane) while the tile's last stage is multiplied, then apply(sums, lane)
template <int kWords, int kMajorMN, int kFinishRegisters = kProducerRegisters, class Fetch, class Bf16, class Take,
          class Tell, class End, class Scales = Unscaled>
__device__ __forceinline__ void multiply_pairs(const PairMemory& memory, const PairProduct& product,
                                               const CUtensorMap& x_map, const CUtensorMap& w_map,
                                               unsigned long long* counters, uint8_t* said, Fetch fetch, Bf16 bf16,
                                               Take take, Tell tell, End end, Scales scales = {}) {
  constexpr int kMultiplyRegisters = kConsumerRegisters - (kFinishRegisters - kProducerRegisters) / 2;
  static_assert(kFinishRegisters % 16 == kProducerRegisters % 16, "setmaxnreg moves registers in multiples of eight");
  enum Warp { kProducer = 0, kFirstConsumer = 4 };  // warps 1 to 3 finish tiles
  const PairCta cta(memory, product);
  if (threadIdx.x == 0) cta.init_barriers();
  if (threadIdx.x < 16) cta.shared.fired[threadIdx.x / 8][threadIdx.x % 8] = 0;
  for (int i = threadIdx.x; i < product.column_tiles * kWords; i += kThreads) memory.fired[i] = 0;
  __syncthreads();
  ptx::cluster_sync();
  ptx::griddepcontrol_launch_dependents();

  if (cta.warp < kFirstConsumer) {
    ptx::setmaxnreg_dec<kFinishRegisters>();
    if (cta.warp == kProducer) {
      if (cta.lane == 0) produce_pairs(cta, x_map, w_map, fetch);
    } else {
      finish_pairs<kWords>(cta, counters, said, take, tell, end);
    }
  } else {
    ptx::setmaxnreg_inc<kMultiplyRegisters>();
    consume_pairs<kMajorMN>(cta, bf16, scales);
  }
  ptx::cluster_sync();  // wait, because the other CTA may still write to this CTA's shared memory
}

}  // namespace sparsellm
