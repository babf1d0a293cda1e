// tile_up, tile_gradient: products a w^T where the tile plan's lists have a nonzero (sampled dense-dense products,
// SDDMM), and what is made of them one nonzero after the other: forward u = x w_up^T and h = g u; backward dh = dy
// w_down_t^T, and du and dz from it.
//
// An item is one token tile times up to 256 of its slots. Four warps gather rows with cp.async: tokens, less a half
// that needs none of the slots, and the slots' rows of w. A consumer warpgroup multiplies the blocks that its 64
// tokens need, leaves the product in shared memory, two blocks at a time, and picks up what the list names. The
// consumers also look up the next items and their rows; one of their threads draws them, from the third round on.
//
// Numerics: a product is accumulated in float32 over K and rounded to bf16 once; h = g u rounded to bf16 once; dh + dl1
// sign(h) in float32, times g or u, rounded to bf16 once. l1 is summed in float32 in a fixed order. Deterministic.
#include "common/host.h"
#include "tile/plan.cuh"

namespace sparsellm {
namespace {

constexpr int kGroup = 32;                       // rows of a stage that a warp copies with eight instructions:
constexpr int kTokenGroups = kTileM / kGroup;    // of tokens one for each gather warp,
constexpr int kNeuronGroups = kTileN / kGroup / kGatherWarps;  // of neurons at most two
static_assert(kTokenGroups == kGatherWarps, "each gather warp copies 32 tokens");
constexpr int kRows = kTileM + kTileN;
constexpr int kWarpRows = kRows / kConsumerWarps;  // that a consumer warp looks up
constexpr int kUpStages = 4;
constexpr int kPanels = 2;  // blocks of a product that a half has room for at a time, as bf16 in shared memory

constexpr uint16_t kOne = 0x3f80;                  // bf16

enum Epilogue { kL1 = 0, kUp = 1, kGradient = 2 };

struct Outputs {
  uint32_t* hidden;
  uint16_t* ups;
  float* l1_partials;
  float* l1;
  int32_t* tickets;  // [2] CTAs that are done, items drawn
  Gradient gradient;
};
static_assert(kNextItem == kUpTickets + 1, "tile_up has its tickets side by side among the totals");

struct Shared {
  // The rows of this item's and the next one's stages, in groups of 32; within a group [row % 4][row / 4], so that a
  // thread reads its own ones side by side.
  alignas(16) uint32_t tokens[2][kTileM];
  alignas(16) uint16_t neurons[2][kTileN];
  int4 items[2];  // of this round and the next; later, of the one after
  uint64_t drawn[2];
  uint64_t rows_ready[2];
  uint64_t full[kUpStages];
  uint64_t empty[kUpStages];
  float l1_warps[kThreads / 32];
  bool last;
};

constexpr uint32_t kSharedBytes = kUpStages * kStageBytes + 2 * kPanels * kHalfBytes + sizeof(Shared);
static_assert(kSharedBytes <= kMaxSharedBytes, "stages, products and the row lists share one CTA's memory");

// a w^T for `kBlocks` blocks of a half, kPanels at a time to its panels at `to`, one of kHalfBytes for each block: then
// pick(first block, end), the warpgroup's threads all having written.
template <int kBlocks, class Release, class Ahead, class Pick>
__device__ __forceinline__ void multiply_blocks(RingOf<kUpStages>& ring, int k_blocks, uint32_t stages,
                                                uint32_t b_offset, uint32_t to, uint32_t full, int half, uint32_t row,
                                                uint32_t chunk, Release release, Ahead ahead, Pick pick) {
  uint32_t product[16 * kBlocks];
  {
    float d[32 * kBlocks];
    multiply<kBlocks, 0>(d, ring, k_blocks, stages, b_offset, full, half, release, ahead);
#pragma unroll
    for (int i = 0; i < 16 * kBlocks; ++i) product[i] = ptx::cvt_bf16x2(d[2 * i], d[2 * i + 1]);
  }
#pragma unroll
  for (int first = 0; first < kBlocks; first += kPanels) {
#pragma unroll
    for (int j = 4 * first; j < 4 * (first + kPanels) && j < 4 * kBlocks; ++j) {  // 16 slots
      ptx::stmatrix_x4(to + j / 4 % kPanels * kHalfBytes + swizzle_128(row, j % 4 * 2 + chunk), product[4 * j],
                       product[4 * j + 1], product[4 * j + 2], product[4 * j + 3]);
    }
    ptx::bar_sync(1 + half, 128);
    pick(first, first + kPanels);
    ptx::bar_sync(1 + half, 128);  // the product has been read
  }
}

__device__ __forceinline__ float rounded(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

template <Epilogue kEpilogue>
__global__ void __launch_bounds__(kThreads, 1)
    tile_sddmm_kernel(const __nv_bfloat16* a, const __nv_bfloat16* w, int64_t m, int64_t k, int64_t n,
                      const TilePlan plan, const Outputs out) {
  constexpr bool kMultiply = kEpilogue != kL1;
  constexpr int kWords = kEpilogue == kGradient ? 5 : 6;  // nonzeros of an item that each thread has loaded beforehand
  extern __shared__ __align__(1024) uint8_t raw[];
  const uint32_t stages = ptx::smem_address(raw);
  const uint32_t panels = stages + kUpStages * kStageBytes;  // [half][kPanels]
  Shared& shared = *reinterpret_cast<Shared*>(raw + kSharedBytes - sizeof(Shared));
  const uint32_t full = ptx::smem_address(shared.full);
  const uint32_t empty = ptx::smem_address(shared.empty);
  const uint32_t rows_ready = ptx::smem_address(shared.rows_ready);
  const uint32_t drawn = ptx::smem_address(shared.drawn);
  const int warp = ptx::warp_index();
  const uint32_t lane = threadIdx.x % 32;
  const int column_tiles = static_cast<int>((n + kColumnTile - 1) / kColumnTile);
  const int k_blocks = static_cast<int>((k + kTileK - 1) / kTileK);

  if (threadIdx.x == 0) {
    if (stages % 1024 != 0) __trap();  // what the swizzle is counted from
    for (int s = 0; s < kUpStages; ++s) {
      ptx::mbarrier_init(full + 8 * s, 32 * kGatherWarps);
      ptx::mbarrier_init(empty + 8 * s, kConsumerWarps);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(drawn + 8 * i, 1);
      ptx::mbarrier_init(rows_ready + 8 * i, kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();

  const int items = plan.totals[kItems];
  const auto item_at = [&](int position) { return position < items ? plan.items[position] : no_item(); };

  if (warp < kGatherWarps) {
    if constexpr (kMultiply) {
      ptx::setmaxnreg_dec<kProducerRegisters>();
      const uint32_t chunk = lane % 8;
      const uint32_t place[2] = {swizzle_128(lane / 8, chunk), swizzle_128(lane / 8 + 4, chunk)};
      const int64_t pitch = k * 2;
      const auto copy = [&](uint32_t to, const uint8_t* const (&from)[8], uint32_t bytes) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {  // fours of rows: even ones go to place[0], odd ones to place[1]
          ptx::cp_async_16_or_zeros(to + i / 2 * 1024 + place[i % 2], from[i], bytes);
        }
      };
      RingOf<kUpStages> ring;
      for (int round = 0;; ++round) {
        ptx::mbarrier_wait(rows_ready + 8 * (round & 1), round >> 1 & 1);
        const Item item = item_of(shared.items[round & 1]);
        if (!item.exists()) break;
        int unused;
        const bool tokens = item.tile.needed(warp * kGroup / kHalf, item.first, item.last, unused) != 0;
        const int neurons = (item.slots + kGroup - 1) / kGroup - warp;  // groups from this warp's first on
        const int own = warp * kGroup + static_cast<int>(lane) / 8 * 8;
        const uint8_t* rows[1 + kNeuronGroups][8];  // this thread's chunk of its rows of each group, as k advances
        const auto look_up = [&](int group, const void* base, const uint32_t (&row)[8]) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            rows[group][i] = static_cast<const uint8_t*>(base) + row[i] * pitch + chunk * 16;
          }
        };
        {
          const uint4 four = *reinterpret_cast<const uint4*>(shared.tokens[round & 1] + own);
          const uint4 more = *reinterpret_cast<const uint4*>(shared.tokens[round & 1] + own + 4);
          look_up(0, a, {four.x, four.y, four.z, four.w, more.x, more.y, more.z, more.w});
        }
#pragma unroll
        for (int g = 0; g < kNeuronGroups; ++g) {
          const uint4 eight = *reinterpret_cast<const uint4*>(shared.neurons[round & 1] + own + g * (kGatherWarps * kGroup));
          look_up(g + 1, w, {eight.x & 0xffff, eight.x >> 16, eight.y & 0xffff, eight.y >> 16,
                             eight.z & 0xffff, eight.z >> 16, eight.w & 0xffff, eight.w >> 16});
        }
        for (int kb = 0; kb < k_blocks; ++kb) {
          const uint32_t bytes = kb * kTileK + chunk * 8 < k ? 16 : 0;
          ptx::mbarrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
          const uint32_t to = stages + ring.stage * kStageBytes + warp * (kGroup * 128);
          if (tokens) copy(to, rows[0], bytes);
#pragma unroll
          for (int g = 0; g < kNeuronGroups; ++g) {
            if (neurons > g * kGatherWarps) {
              copy(to + (g + 1) * kGatherWarps * (kGroup * 128), rows[g + 1], bytes);
            }
          }
          ptx::cp_async_mbarrier_arrive(full + 8 * ring.stage);
          ring.advance();
          // All at once, and not one before its copy: a copy reads its address some time after it is issued, and till
          // then nothing may be written there.
#pragma unroll
          for (int g = 0; g < 1 + kNeuronGroups; ++g) {
#pragma unroll
            for (int i = 0; i < 8; ++i) rows[g][i] += kTileK * 2;
          }
        }
      }
    }
  } else {
    if constexpr (kMultiply) ptx::setmaxnreg_inc<kConsumerRegisters>();
    const int consumer = warp - 4, half = consumer / 4;
    const uint32_t row = consumer * 16 % kHalf + (lane & 15);
    const uint32_t own = panels + half * (kPanels * kHalfBytes);  // of this half's product, 64 slots each
    const auto release = [&](uint32_t stage) {
      if (lane == 0) ptx::mbarrier_arrive(empty + 8 * stage);
    };
    // This lane's rows of an item: asked for before the item before it is multiplied, handed over afterwards.
    uint32_t rows[2] = {};
    const auto ask = [&](const Item& item) {
      if (!item.exists()) return;
      const uint16_t* slots = plan.slots + static_cast<int64_t>(item.tile.index) * column_tiles * kColumnTile +
                              item.first * kBlockColumns;
      const int of_item = kTileM + (item.last - item.first) * kBlockColumns;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = consumer * kWarpRows + 32 * i + lane;
        if (i == 1 && lane >= kWarpRows - 32) break;
        rows[i] = 0;
        if (r < kTileM) {  // where there is no token, any will do: what comes of it is never looked at
          const int64_t position = static_cast<int64_t>(item.tile.index) * kTileM + r;
          if (position < m) rows[i] = plan.tokens == nullptr ? position : plan.tokens[position];
        } else if (r < of_item) {
          rows[i] = slots[r - kTileM];
        }
      }
    };
    const auto hand_over = [&](int round) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = consumer * kWarpRows + 32 * i + lane;
        const int at = r / kGroup * kGroup + r % 4 * 8 + r % kGroup / 4;
        if (i == 1 && lane >= kWarpRows - 32) break;
        if (r < kTileM) {
          shared.tokens[round & 1][at] = rows[i];
        } else {
          shared.neurons[round & 1][at - kTileM] = rows[i];
        }
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(rows_ready + 8 * (round & 1));
    };
    RingOf<kUpStages> ring;
    // The first two rounds (without a product all) are dealt, what follows goes to whoever is there: SMs are not
    // equally near to L2. One thread draws, two rounds ahead. It publishes the item once it has the last stage of a
    // round: till then the others may read the item of that round, whose place this one takes.
    const bool draws = threadIdx.x == 128;
    int4 code = item_at(deal(0, blockIdx.x, gridDim.x)), next = item_at(deal(1, blockIdx.x, gridDim.x));
    // Where the nonzeros lie that this half has in an item: block by block, side by side.
    uint32_t bounds_ahead[kItemBlocks + 1];
    const auto ask_bounds = [&](const Item& item) {
      int from;
      const int blocks = item.tile.needed(half, item.first, item.last, from);
      const uint32_t* starts = starts_of(plan, item.tile.index, half, column_tiles) + from;
#pragma unroll
      for (int b = 0; b <= kItemBlocks; ++b) bounds_ahead[b] = blocks == 0 ? 0 : starts[min(b, blocks)];
    };
    if constexpr (kMultiply) {
      if (draws) shared.items[0] = code, shared.items[1] = next;
      ask(item_of(code));
      hand_over(0);
      ask(item_of(next));
    }
    ask_bounds(item_of(code));
    for (int round = 0; item_of(code).exists(); ++round) {
      const Item item = item_of(code);
      code = next;
      if constexpr (kMultiply) hand_over(round + 1);
      int ticket = 0;
      if (kMultiply && draws) ticket = atomicAdd(out.tickets + 1, 1);
      int from;
      const int blocks = item.tile.needed(half, item.first, item.last, from);
      uint32_t bounds[kItemBlocks + 1];
#pragma unroll
      for (int b = 0; b <= kItemBlocks; ++b) bounds[b] = bounds_ahead[b];
      const uint32_t first = bounds[0] + threadIdx.x % 128, end = bounds[kItemBlocks];
      uint32_t words[kWords];
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = first + 128 * i < end ? plan.lists[first + 128 * i] : 0;
      float l1 = 0.0f;
      const float dl1 = kEpilogue == kGradient ? *out.gradient.dl1 : 0.0f;
      // What there is to know of a nonzero, beside its word, for its gradients.
      struct Known {
        uint32_t by_neuron;
        uint16_t place, u;
      };
      const auto known_of = [&](uint32_t at) -> Known {
        const Gradient& to = out.gradient;
        return {to.at[at], to.places[at], to.ups == nullptr ? kOne : static_cast<const uint16_t*>(to.ups)[at]};
      };
      const auto finish = [&](uint32_t word, uint32_t at, const Known& known) {
        const float g = __uint_as_float(word & 0xffff0000);  // non-gated: h
        if constexpr (kEpilogue == kL1) {
          l1 += fabsf(g);
          return;
        }
        const uint32_t panel = ((at >= bounds[1]) + (at >= bounds[2]) + (at >= bounds[3])) % kPanels;
        const uint32_t bits = ptx::ld_shared_u16(own + panel * kHalfBytes + (word & 0xffff) * 2);
        const float product = __uint_as_float(bits << 16);
        if constexpr (kEpilogue == kUp) {
          const float h = rounded(g * product);
          out.hidden[at] = __float_as_uint(h) | (word & 0xffff);
          if (out.ups != nullptr) out.ups[at] = bits;
          l1 += fabsf(h);
        } else {
          const Gradient& to = out.gradient;
          const uint32_t by_neuron = known.by_neuron, place = known.place;
          const bool gated = to.ups != nullptr;
          const float u = __uint_as_float(static_cast<uint32_t>(known.u) << 16);
          const float h = rounded(g * u);
          const float sign = !gated || h > 0.0f ? 1.0f : h < 0.0f ? -1.0f : h;  // of NaN, NaN
          const float dh = product + dl1 * sign;
          const uint32_t dz = __float_as_uint(rounded(dh * u));
          to.dz[at] = dz | (word & 0xffff);
          to.dz_by_neuron[by_neuron] = dz | place;
          to.h_by_neuron[by_neuron] = __float_as_uint(h) | place;
          if (gated) {
            const uint32_t du = __float_as_uint(rounded(dh * g));
            to.du[at] = du | (word & 0xffff);
            to.du_by_neuron[by_neuron] = du | place;
          }
        }
      };
      Known known[kWords];
      const auto publish = [&] {
        if (!draws) return;
        shared.items[round & 1] = item_at(2 * static_cast<int>(gridDim.x) + ticket);
        ptx::mbarrier_arrive(drawn + 8 * (round & 1));
      };
      const auto ahead = [&] {
        publish();
        if constexpr (kEpilogue == kGradient) {
#pragma unroll
          for (int i = 0; i < kWords; ++i) {
            if (first + 128 * i < end) known[i] = known_of(first + 128 * i);
          }
        }
      };
      const auto ask_ahead = [&] {
        if constexpr (kMultiply) {
          ptx::mbarrier_wait(drawn + 8 * (round & 1), round >> 1 & 1);
          next = shared.items[round & 1];
          ask(item_of(next));
        } else {
          next = item_at(deal(round + 2, blockIdx.x, gridDim.x));
        }
        ask_bounds(item_of(code));
      };
      const auto pick = [&](int from_block, int end_block) {
        if (from_block == 0) ask_ahead();
        const uint32_t begin = bounds[from_block], end = bounds[end_block];
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
          const uint32_t at = first + 128 * i;
          if (at >= begin && at < end) finish(words[i], at, known[i]);
        }
        for (uint32_t at = first + 128 * kWords; at < end; at += 128) {
          if (at < begin) continue;
          finish(plan.lists[at], at, kEpilogue == kGradient ? known_of(at) : Known());
        }
      };
      if constexpr (kMultiply) {
        const uint32_t b_offset = (from - item.first) * (kBlockColumns * 128);
        const uint32_t chunk = lane / 16;
        switch (blocks) {
          case 0:
            pass_by(ring, k_blocks, full, release);
            publish();
            ask_ahead();
            break;
          case 1:
            multiply_blocks<1>(ring, k_blocks, stages, b_offset, own, full, half, row, chunk, release, ahead, pick);
            break;
          case 2:
            multiply_blocks<2>(ring, k_blocks, stages, b_offset, own, full, half, row, chunk, release, ahead, pick);
            break;
          case 3:
            multiply_blocks<3>(ring, k_blocks, stages, b_offset, own, full, half, row, chunk, release, ahead, pick);
            break;
          default:
            multiply_blocks<4>(ring, k_blocks, stages, b_offset, own, full, half, row, chunk, release, ahead, pick);
        }
      } else {
        pick(0, kItemBlocks);
      }
      if constexpr (kEpilogue != kGradient) {
        for (int offset = 16; offset > 0; offset /= 2) l1 += __shfl_xor_sync(~0u, l1, offset);
        const int64_t part = static_cast<int64_t>(item.tile.index) * column_tiles + item.index;
        if (lane == 0) out.l1_partials[part * kConsumerWarps + consumer] = l1;
      }
    }
    __threadfence();
  }

  // The last CTA sets the counters back; forward it adds what all have written to l1, always in the same order.
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    shared.last = atomicAdd(out.tickets, 1) == static_cast<int>(gridDim.x) - 1;
    if (shared.last) out.tickets[0] = out.tickets[1] = 0;
  }
  __syncthreads();
  if (kEpilogue == kGradient || !shared.last) return;
  __threadfence();
  float sum = 0.0f;
  const int64_t tiles = (m + kTileM - 1) / kTileM;
  for (int64_t t = threadIdx.x; t < tiles; t += kThreads) {
    const float4* partials = reinterpret_cast<const float4*>(out.l1_partials + t * column_tiles * kConsumerWarps);
    const int of = items_of(plan.tiles[t].y) * (kConsumerWarps / 4);
    for (int i = 0; i < of; ++i) {
      const float4 four = __ldcg(partials + i);
      sum += (four.x + four.y) + (four.z + four.w);
    }
  }
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  if (lane == 0) shared.l1_warps[warp] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    float all = 0.0f;
    for (int w = 0; w < kThreads / 32; ++w) all += shared.l1_warps[w];
    *out.l1 = all;
  }
}

cudaError_t run(void (*kernel)(const __nv_bfloat16*, const __nv_bfloat16*, int64_t, int64_t, int64_t, TilePlan, Outputs),
                const void* a, const void* w, int64_t m, int64_t k, int64_t n, const TilePlan& plan,
                const Outputs& out, cudaStream_t stream) {
  int count = 0;
  const cudaError_t error = multiprocessors(&count);
  if (error != cudaSuccess) return error;
  return launch_early(kernel, count, kThreads, kSharedBytes, 1, stream, static_cast<const __nv_bfloat16*>(a),
                      static_cast<const __nv_bfloat16*>(w), m, k, n, plan, out);
}

}  // namespace

cudaError_t tile_up(const void* x, const void* w_up, int64_t m, int64_t k, int64_t n, const TilePlan& plan,
                    uint32_t* hidden, void* ups, float* l1_partials, float* l1, cudaStream_t stream) {
  const Outputs out = {hidden, static_cast<uint16_t*>(ups), l1_partials, l1, plan.totals + kUpTickets, {}};
  return run(w_up != nullptr ? tile_sddmm_kernel<kUp> : tile_sddmm_kernel<kL1>, x, w_up, m, k, n, plan, out, stream);
}

cudaError_t tile_gradient(const void* dy, const void* w_down_t, int64_t m, int64_t k, int64_t n, const TilePlan& plan,
                          const Gradient& gradient, cudaStream_t stream) {
  return run(tile_sddmm_kernel<kGradient>, dy, w_down_t, m, k, n, plan,
             {nullptr, nullptr, nullptr, nullptr, gradient.tickets, gradient}, stream);
}

}  // namespace sparsellm
