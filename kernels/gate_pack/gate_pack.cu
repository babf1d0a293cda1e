// gate_pack: relu(x w^T) in the packed form, without ever writing it dense.
//
// One persistent CTA per SM, in clusters of two: the pair computes the same 256 columns for two neighbouring token
// tiles, and each CTA fetches half of the weight tile for both. The consumers leave a finished tile as bf16 in shared
// memory; three otherwise idle warps pack it, four rows at a time, while the next tile is multiplied. The first two
// rounds of pairs are dealt; what follows goes to the cluster that is there first.
//
// Numerics: z is accumulated in float32 over K and rounded to bf16 once, after the ReLU; a neuron is active where that
// is not zero (NaN is active). Deterministic: words, counts, masks do not depend on timing.
#include <algorithm>

#include "common/host.h"
#include "common/tile.cuh"
#include "common/twell.cuh"
#include "gate_pack/fewest.cuh"
#include "gate_pack/small.cuh"

namespace sparsellm {
namespace {

static_assert(!row_ffn_counts(kSmallTokens + 1, 1), "whoever counts nothing is one of the kernels for few tokens");

constexpr int kPackWarps = 3;
constexpr int kDealtRounds = 2;
// Rounds whose pairs are kept. While the second CTA packs round p it knows the pairs up to p + 2 and no more, so the first
// one begins p + 3 at most, and draws p + 5: six at a time.
constexpr int kRounds = 8;

struct Shared {
  uint64_t full[kStages];
  uint64_t empty[kStages];
  uint64_t tile_full;
  uint64_t tile_free;
  uint64_t drawn[kRounds];
  uint32_t pairs[kRounds];  // of round r, at r % kRounds: what the cluster multiplies; one behind the last: nothing
  uint32_t fired[2][8];     // bits of the columns that fire for some token of the tile; two tiles in flight
};

constexpr uint32_t kSharedBytes = 1024 + kStages * kStageBytes + kTileBytes + sizeof(Shared);  // and a bit per column
static_assert(kSharedBytes + 65536 / 8 <= kMaxSharedBytes, "stages, the finished tile and all else in one CTA's memory");

// Pairs are visited column by column, and then the next rows: what is in flight shares few rows of x, and all of w
// stays in L2. Where w is too large for that, band by band of its columns.
constexpr int64_t kBandBytes = 24 << 20;

struct Place {
  uint32_t row_pair;
  int column_tile;
};

__device__ __forceinline__ Place place_of(uint32_t pair, uint32_t row_pairs, int column_tiles, int band_tiles) {
  const uint32_t band = pair / (row_pairs * band_tiles), within = pair - band * (row_pairs * band_tiles);
  const int first = band * band_tiles, width = min(band_tiles, column_tiles - first);
  return {within / width, static_cast<int>(first + within % width)};
}

// The finished tile: rows of 512 bytes, 16-byte chunk c of row r at chunk c ^ (r & 7).
__device__ __forceinline__ uint32_t tile_offset(uint32_t row, uint32_t chunk) {
  return row * 512 + ((chunk ^ (row & 7)) << 4);
}

__global__ void __launch_bounds__(kThreads, 1)
    gate_pack_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, int64_t m,
                     int64_t n, int k_blocks, int band_tiles, int words_per_tile, const Packed out) {
  extern __shared__ uint8_t raw[];
  const uint32_t stages = (ptx::smem_address(raw) + 1023) & ~1023u;
  const uint32_t tile = stages + kStages * kStageBytes;
  Shared& shared = *reinterpret_cast<Shared*>(raw + (tile + kTileBytes - ptx::smem_address(raw)));
  uint32_t* fired = reinterpret_cast<uint32_t*>(&shared + 1);  // [column_tiles * 8] what this CTA has said in out.fired
  const uint32_t full = ptx::smem_address(shared.full);
  const uint32_t empty = ptx::smem_address(shared.empty);
  const uint32_t tile_full = ptx::smem_address(&shared.tile_full);
  const uint32_t tile_free = ptx::smem_address(&shared.tile_free);

  const int warp = ptx::warp_index();
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t rank = ptx::cluster_rank();
  const int column_tiles = static_cast<int>((n + kTileN - 1) / kTileN);
  const uint32_t row_pairs = static_cast<uint32_t>((m + 2 * kTileM - 1) / (2 * kTileM));
  const uint32_t pairs = row_pairs * column_tiles;
  const uint32_t drawn = ptx::smem_address(shared.drawn);
  const auto pair_in = [&](uint32_t round) {
    ptx::mbarrier_wait(drawn + 8 * (round % kRounds), round / kRounds & 1);
    return shared.pairs[round % kRounds];
  };

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(full + 8 * s, 1);
      ptx::mbarrier_init(empty + 8 * s, 2 * kConsumerWarps);  // of both CTAs: half of each stage comes from the other
    }
    ptx::mbarrier_init(tile_full, kConsumerWarps);
    ptx::mbarrier_init(tile_free, kPackWarps);
    for (int r = 0; r < kRounds; ++r) ptx::mbarrier_init(drawn + 8 * r, 1);
    for (int r = 0; r < kDealtRounds; ++r) {
      shared.pairs[r] = (r * gridDim.x + blockIdx.x) / 2;
      ptx::mbarrier_arrive(drawn + 8 * r);
    }
    ptx::fence_mbarrier_init();
  }
  if (threadIdx.x < 16) shared.fired[threadIdx.x / 8][threadIdx.x % 8] = 0;
  for (int i = threadIdx.x; i < column_tiles * 8; i += kThreads) fired[i] = 0;
  __syncthreads();
  ptx::cluster_sync();
  ptx::griddepcontrol_launch_dependents();

  if (warp < 4) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0) {
      if (lane == 0) {
        ptx::tma_prefetch_descriptor(&x_map);
        ptx::tma_prefetch_descriptor(&w_map);
        Ring ring;
        uint32_t pair;
        for (uint32_t round = 0; (pair = pair_in(round)) < pairs; ++round) {
          const Place place = place_of(pair, row_pairs, column_tiles, band_tiles);
          const int row = static_cast<int>(place.row_pair * 2 + rank) * kTileM;
          const int column = place.column_tile * kTileN;
          for (int kb = 0; kb < k_blocks; ++kb) {
            ptx::mbarrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
            const uint32_t a = stages + ring.stage * kStageBytes;
            const uint32_t b = a + kABytes + rank * (kBBytes / 2);
            ptx::mbarrier_arrive_expect_tx(full + 8 * ring.stage, kStageBytes);
            ptx::tma_load_2d(a, &x_map, kb * kTileK, row, full + 8 * ring.stage);
            ptx::tma_load_2d_multicast(b, &w_map, kb * kTileK, column + rank * (kTileN / 2), full + 8 * ring.stage, 3);
            ring.advance();
          }
        }
      }
    } else {
      ptx::griddepcontrol_wait();  // for clear_kernel
      auto counters = reinterpret_cast<unsigned long long*>(out.counters);
      unsigned long long nonzeros = 0, overflow = 0, in_union = 0;
      // The pair of two rounds on: the first CTA draws it, for both.
      const auto draw = [&](uint32_t round) {
        const uint32_t slot = (round + kDealtRounds) % kRounds, barrier = drawn + 8 * slot;
        ptx::mbarrier_arrive_expect_tx(barrier, sizeof(uint32_t));
        if (rank != 0) return;
        const uint32_t next = kDealtRounds * gridDim.x / 2 + static_cast<uint32_t>(atomicAdd(counters + kDrawn, 1));
        const uint32_t to = ptx::smem_address(shared.pairs + slot);
        for (uint32_t r = 0; r < 2; ++r) ptx::st_async_cluster(to, r, next, barrier);
      };
      uint32_t round = 0, pair;
      for (; (pair = pair_in(round)) < pairs; ++round) {
        if (warp == 1 && lane == 0) draw(round);
        const uint32_t parity = round & 1;
        const Place place = place_of(pair, row_pairs, column_tiles, band_tiles);
        const int64_t token_tile = static_cast<int64_t>(place.row_pair) * 2 + rank;
        const int64_t row0 = token_tile * kTileM;
        const int column_tile = place.column_tile;
        const uint32_t column = column_tile * kTileN;
        ptx::mbarrier_wait(tile_full, parity);
        uint32_t seen = 0;
        const int rows = static_cast<int>(min(static_cast<int64_t>(kTileM), m - row0));  // <= 0 beyond the last tile
        uint32_t* words = segment_of(out, row0, column_tile, column_tiles, words_per_tile);
        __nv_bfloat16* wide = static_cast<__nv_bfloat16*>(out.wide) + row0 * n + column;
        const int row_words = column_tiles * words_per_tile;
#pragma unroll 1
        for (int step = 4 * (warp - 1); step < rows; step += 4 * kPackWarps) {
          const int row = step + lane / 8;
          const uint32_t count = pack_four_rows(tile + tile_offset(row, lane % 8), row < rows, lane, column, n,
                                                column_tiles, words_per_tile, words + static_cast<int64_t>(row) * row_words,
                                                wide + row * n, seen);
          if (lane % 8 == 0 && row < rows) {
            words[static_cast<int64_t>(row) * row_words] = count;
            if (count != 0) atomicAdd(out.row_counts + row0 + row, static_cast<int>(count));
            nonzeros += count;
            overflow += count >= static_cast<uint32_t>(words_per_tile);
          }
        }
        add_fired(shared.fired[parity], seen, lane);
        if (lane == 0) ptx::mbarrier_arrive(tile_free);
        ptx::bar_sync(1, 32 * kPackWarps);
        if (warp == 1 && rows > 0) {
          const uint32_t word = shared.fired[parity][lane / 4];
          const uint32_t known = fired[column_tile * 8 + lane / 4];
          __syncwarp();
          if (lane % 4 == 0) {
            shared.fired[parity][lane / 4] = 0;  // read again two tiles on, behind another barrier
            fired[column_tile * 8 + lane / 4] = known | word;
            out.mask[(token_tile * column_tiles + column_tile) * 8 + lane / 4] = word;
            in_union += __popc(word);
          }
          for (uint32_t rest = (word & ~known) >> (lane % 4 * 8) & 0xff; rest != 0; rest &= rest - 1) {
            out.fired[column + 8 * lane + __ffs(rest) - 1] = 1;
          }
        }
      }
      pair_in(round + kDealtRounds - 1);  // drawn for no one, but it must have come before this CTA ends
      if (nonzeros != 0) atomicAdd(counters + kNonzeros, nonzeros);
      if (overflow != 0) atomicAdd(counters + kOverflow, overflow);
      if (in_union != 0) atomicAdd(counters + kUnion, in_union);
    }
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    const int warpgroup = warp / 4 - 1;
    const uint32_t row = (warp - 4) * 16 + (lane & 15);  // of the tile: the row whose address this lane gives
    Ring ring;
    bool more = true;
    for (uint32_t round = 0; more; ++round) {
      float d[128];
      const auto release = [&](uint32_t stage) {
        if (lane < 2) ptx::mbarrier_arrive_cluster(empty + 8 * stage, lane);
      };
      const auto ahead = [&] { more = pair_in(round + 1) < pairs; };
      multiply<4, 0, false>(d, ring, k_blocks, stages, 0, full, warpgroup, release, ahead);
      ptx::mbarrier_wait(tile_free, round & 1 ^ 1);
#pragma unroll
      for (int j = 0; j < 16; ++j) {  // 16 columns: two 8-column blocks of both row halves
        ptx::stmatrix_x4(tile + tile_offset(row, 2 * j + lane / 16), ptx::cvt_relu_bf16x2(d[8 * j], d[8 * j + 1]),
                         ptx::cvt_relu_bf16x2(d[8 * j + 2], d[8 * j + 3]),
                         ptx::cvt_relu_bf16x2(d[8 * j + 4], d[8 * j + 5]),
                         ptx::cvt_relu_bf16x2(d[8 * j + 6], d[8 * j + 7]));
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(tile_full);
    }
  }
  ptx::cluster_sync();  // the other CTA may still write to this one's shared memory
}

// Zeroes what the next kernel adds to, and lets that one start meanwhile. This one starts as any kernel does, when all
// before it is done: x and w are complete, and only what writes to global memory waits for this one. With few tokens it
// starts early itself, if there is need of it: the next one reads and writes only when whatever precedes it, this one or
// another, and so all before that, is done.
__global__ void clear_kernel(const Packed out, int64_t rows, int64_t fired_octets, int64_t counters) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < rows) out.row_counts[i] = 0;
  if (i < fired_octets) reinterpret_cast<uint64_t*>(out.fired)[i] = 0;
  if (i < counters) out.counters[i] = 0;
}

}  // namespace

cudaError_t gate_pack(const void* x, const void* w, int64_t m, int64_t k, int64_t n, int words_per_tile,
                      const Packed& out, int64_t zeroed, bool for_row, cudaStream_t stream) {
  const bool are_few = m <= kSmallTokens, counts = !(for_row && row_ffn_counts(m, k));
  if (counts) {
    const int64_t fired_octets = are_few ? 0 : n / 8;  // the kernels for few tokens write all of `fired`
    const int64_t words = std::max({m, fired_octets, zeroed});
    const cudaError_t error =
        launch_with(are_few, clear_kernel, ceil_div(words, 256), 256, 0, 1, stream, out, m, fired_octets, zeroed);
    if (error != cudaSuccess) return error;
  }
  if (are_few) {
    const auto product = m <= kFewestTokens ? gate_pack_fewest : gate_pack_small;
    return product(x, w, m, k, n, words_per_tile, out, counts ? 0 : zeroed, stream);
  }
  int count = 0;
  cudaError_t error = multiprocessors(&count);
  if (error != cudaSuccess) return error;
  CUtensorMap x_map, w_map;
  if ((error = tensor_map(&x_map, x, m, k, kTileM)) != cudaSuccess) return error;
  if ((error = tensor_map(&w_map, w, n, k, kTileN / 2)) != cudaSuccess) return error;
  const int64_t pairs = ceil_div(m, 2 * kTileM) * ceil_div(n, kTileN);
  const int64_t grid = 2 * (pairs < count / 2 ? pairs : count / 2);
  const int64_t column_tiles = ceil_div(n, kTileN);
  const int64_t in_band = std::max<int64_t>(1, kBandBytes / (kTileN * k * 2));  // at most
  const int band_tiles = static_cast<int>(ceil_div(column_tiles, ceil_div(column_tiles, in_band)));
  const uint32_t shared_bytes = kSharedBytes + static_cast<uint32_t>(column_tiles) * (kTileN / 8);
  return launch_early(gate_pack_kernel, grid, kThreads, shared_bytes, 2, stream, x_map, w_map, m, n,
                      static_cast<int>(ceil_div(k, kTileK)), band_tiles, words_per_tile, out);
}

}  // namespace sparsellm
