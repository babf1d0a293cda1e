// How the warps of a persistent kernel work together: producers pass stages of shared memory to consumers through a
// Pipeline, and one thread tells the other warps through a Scheduler which unit of work is next.
#pragma once

#include "common/ptx.cuh"

namespace sparsellm {

// A position in a ring of stages. Producers and consumers advance in the same way: with three stages, step k is in
// stage k % 3, and its phase is the parity of k / 3.
template <int kStages>
struct PipelineState {
  uint32_t stage = 0, phase = 0;

  // stages: the number of stages that are used.
  __device__ __forceinline__ void advance(uint32_t stages = kStages) {
    if (++stage != stages) return;
    stage = 0;
    phase ^= 1;
  }
};

// Each stage has two mbarriers: `full` completes when the producers have filled the stage, and `empty` when all
// consumer warps have released it. kCtas: number of CTAs in the cluster if producers fill stages of all these CTAs;
// consumers then release a stage to all of them.
template <int kStages, int kCtas = 1>
struct Pipeline {
  using State = PipelineState<kStages>;
  struct Storage {
    uint64_t full[kStages], empty[kStages];
  };
  uint32_t full, empty;  // shared addresses

  __device__ __forceinline__ explicit Pipeline(const Storage& storage)
      : full(ptx::smem_address(storage.full)), empty(ptx::smem_address(storage.empty)) {}

  // Called by one thread per stage. producers, consumers: numbers of arrivals that complete `full` and `empty`.
  __device__ __forceinline__ void init(uint32_t stage, uint32_t producers, uint32_t consumers) const {
    ptx::mbarrier_init(full + 8 * stage, producers);
    ptx::mbarrier_init(empty + 8 * stage, consumers);
  }

  __device__ __forceinline__ void producer_acquire(const State& state) const {
    ptx::mbarrier_wait(empty + 8 * state.stage, state.phase ^ 1);
  }
  // The barrier at which producers arrive, or on which their copies complete.
  __device__ __forceinline__ uint32_t producer_barrier(uint32_t stage) const { return full + 8 * stage; }

  __device__ __forceinline__ void consumer_wait(const State& state) const {
    ptx::mbarrier_wait(full + 8 * state.stage, state.phase);
  }
  // Called by a whole warp.
  __device__ __forceinline__ void consumer_release(uint32_t stage) const {
    const uint32_t lane = threadIdx.x % 32;
    if constexpr (kCtas == 1) {
      if (lane == 0) ptx::mbarrier_arrive(empty + 8 * stage);
    } else {
      if (lane < kCtas) ptx::mbarrier_arrive_cluster(empty + 8 * stage, lane);
    }
  }
  // Waits for each of the next `count` stages, and releases it unread. With a closure instead of a plain loop, nvcc
  // unrolls the loop of tile_weights better.
  __device__ __forceinline__ void consumer_skip(State& state, int count) const {
    const auto repeat = [&](auto skip) {
      for (int i = 0; i < count; ++i) skip();
    };
    repeat([&] {
      consumer_wait(state);
      consumer_release(state.stage);
      state.advance();
    });
  }
};

// One thread claims a unit of work in each round and writes the unit to slot `round % kSlots` of an array in shared
// memory. Other warps read the unit after they have waited for the slot's barrier. The Scheduler does not know when a
// slot may be overwritten: each kernel ensures that all warps have read the slot before.
template <int kSlots>
struct Scheduler {
  uint32_t barriers;  // shared address

  __device__ __forceinline__ explicit Scheduler(const uint64_t (&storage)[kSlots])
      : barriers(ptx::smem_address(storage)) {}

  __device__ __forceinline__ uint32_t barrier(uint32_t round) const { return barriers + 8 * (round % kSlots); }
  __device__ __forceinline__ void wait(uint32_t round) const { ptx::mbarrier_wait(barrier(round), round / kSlots & 1); }
};

// Units that no thread claims are dealt to CTAs in rounds. Returns the unit of this CTA in a round. Units are sorted by
// size, and every other round is dealt in reverse order, so that no CTA always gets the larger units: of 3 CTAs, the
// first gets units 0, 5, 6, and the second 1, 4, 7.
__device__ __forceinline__ int dealt_unit(int round) {
  const int ctas = gridDim.x, cta = blockIdx.x;
  return round * ctas + (round & 1 ? ctas - 1 - cta : cta);
}

}  // namespace sparsellm
