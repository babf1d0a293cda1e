// WGMMA: D [64, n] = A [64, 16] B [16, n], bf16 operands, float32 accumulators, n = 64 kBlocks. One warpgroup executes
// it; both operands are in shared memory.
//
// A and B are K-major (stored as rows that run along k) or MN-major (stored as k rows that run along the other
// dimension). They are stored in panels of 128-byte rows with the 128-byte swizzle: 16-byte chunk c of row r is at
// chunk c ^ (r & 7). Panels are aligned to 1,024 bytes. In accumulator registers, j counts groups of 8 columns: d[4 j]
// and d[4 j + 1] are row lane / 4 of the warp's 16 rows, columns 8 j + 2 (lane % 4) and the next one; d[4 j + 2] and
// d[4 j + 3] are the same columns of row lane / 4 + 8.
#pragma once

#include "common/tile.cuh"

namespace sparsellm::ptx {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Makes a matrix descriptor; leading and stride are in bytes. K-major: `stride` is the distance between groups of 8
// rows (1,024), and `leading` is unused. MN-major: `leading` is the distance between panels of 64 elements along MN,
// and `stride` the distance between groups of 8 rows of k.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  constexpr uint64_t kSwizzle128B = 1ull << 62;
  return kSwizzle128B | static_cast<uint64_t>(stride >> 4) << 32 | static_cast<uint64_t>(leading >> 4) << 16 |
         ((address & 0x3ffff) >> 4);
}

// The same descriptor for data that lie `bytes` (a multiple of 16) further on in shared memory.
__device__ __forceinline__ uint64_t advanced(uint64_t descriptor, uint32_t bytes) {
  return (descriptor & ~0xffffffffull) | (static_cast<uint32_t>(descriptor) + (bytes >> 4));
}

// The operands d[i] to d[i + 31] of an instruction, and the names of operands 0 to 31, 32 to 63, 64 to 95, 96 to 127.
#define SPARSELLM_D8(i)                                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define SPARSELLM_D32(i) SPARSELLM_D8(i), SPARSELLM_D8(i + 8), SPARSELLM_D8(i + 16), SPARSELLM_D8(i + 24)
#define SPARSELLM_NAMES_0 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SPARSELLM_NAMES_1 \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SPARSELLM_NAMES_2 \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define SPARSELLM_NAMES_3 \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define SPARSELLM_NAMES_ALL \
  SPARSELLM_NAMES_0 ", " SPARSELLM_NAMES_1 ", " SPARSELLM_NAMES_2 ", " SPARSELLM_NAMES_3
// An instruction with a predicate, which is operand `accumulate`. ab: its operands between d and the predicate; flags:
// those after it.
#define SPARSELLM_WGMMA(shape, d, ab, accumulate, flags)       \
  "{\n .reg .pred p;\n setp.ne.b32 p, %" accumulate ", 0;\n" \
  "wgmma.mma_async.sync.aligned." shape " {" d "}, " ab ", p, 1, 1" flags ";\n}"

// d = (accumulate ? d : 0) + A B. kBMajorMN: 0 for a K-major B, 1 for an MN-major one. kAMajorMN: the same for A.
template <int kBlocks, int kBMajorMN, int kAMajorMN = 0>
__device__ __forceinline__ void wgmma(float (&d)[32 * kBlocks], uint64_t a, uint64_t b, int accumulate) {
  static_assert(kBlocks >= 1 && kBlocks <= 4, "n is 64, 128, 192 or 256");
#define SPARSELLM_INPUTS "l"(a), "l"(b), "r"(accumulate), "n"(kAMajorMN), "n"(kBMajorMN)
  if constexpr (kBlocks == 1) {
    asm volatile(SPARSELLM_WGMMA("m64n64k16.f32.bf16.bf16", SPARSELLM_NAMES_0, "%32, %33", "34", ", %35, %36")
                 : SPARSELLM_D32(0)
                 : SPARSELLM_INPUTS);
  } else if constexpr (kBlocks == 2) {
    asm volatile(SPARSELLM_WGMMA("m64n128k16.f32.bf16.bf16", SPARSELLM_NAMES_0 ", " SPARSELLM_NAMES_1, "%64, %65", "66",
                                 ", %67, %68")
                 : SPARSELLM_D32(0), SPARSELLM_D32(32)
                 : SPARSELLM_INPUTS);
  } else if constexpr (kBlocks == 3) {
    asm volatile(SPARSELLM_WGMMA("m64n192k16.f32.bf16.bf16",
                                 SPARSELLM_NAMES_0 ", " SPARSELLM_NAMES_1 ", " SPARSELLM_NAMES_2, "%96, %97", "98",
                                 ", %99, %100")
                 : SPARSELLM_D32(0), SPARSELLM_D32(32), SPARSELLM_D32(64)
                 : SPARSELLM_INPUTS);
  } else {
    asm volatile(SPARSELLM_WGMMA("m64n256k16.f32.bf16.bf16", SPARSELLM_NAMES_ALL, "%128, %129", "130", ", %131, %132")
                 : SPARSELLM_D32(0), SPARSELLM_D32(32), SPARSELLM_D32(64), SPARSELLM_D32(96)
                 : SPARSELLM_INPUTS);
  }
#undef SPARSELLM_INPUTS
}

// The same for n = 64 and a K-major B, with A in registers: each warp's 16 rows are spread over its lanes as the
// operand `a` of mma_16x8x16.
__device__ __forceinline__ void wgmma_in_registers(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  asm volatile(SPARSELLM_WGMMA("m64n64k16.f32.bf16.bf16", SPARSELLM_NAMES_0, "{%32, %33, %34, %35}, %36", "37", ", 0")
               : SPARSELLM_D32(0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

// The same for e4m3 operands, of which 32 along k are 32 bytes: D [64, 256] = A [64, 32] B [32, 256], both K-major.
__device__ __forceinline__ void wgmma_e4m3(float (&d)[128], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(SPARSELLM_WGMMA("m64n256k32.f32.e4m3.e4m3", SPARSELLM_NAMES_ALL, "%128, %129", "130", "")
               : SPARSELLM_D32(0), SPARSELLM_D32(32), SPARSELLM_D32(64), SPARSELLM_D32(96)
               : "l"(a), "l"(b), "r"(accumulate));
}

#undef SPARSELLM_WGMMA
#undef SPARSELLM_NAMES_ALL
#undef SPARSELLM_NAMES_3
#undef SPARSELLM_NAMES_2
#undef SPARSELLM_NAMES_1
#undef SPARSELLM_NAMES_0
#undef SPARSELLM_D32
#undef SPARSELLM_D8

}  // namespace sparsellm::ptx

namespace sparsellm {

// Computes d = A B over the next `count` >= 1 stages, which it releases. Called by one consumer warpgroup. ahead() runs
// while the last stage is multiplied. stages: the address of stage 0. b_offset: the distance in bytes from a stage's B
// to the part of B that this warpgroup multiplies.
// kCopied: true if cp.async wrote the stages or parts of them. Such kernels are memory-bound, so a stage is released as
// early as possible: the warpgroup waits until its product has ended and releases the stage before it issues the next
// product; the other warpgroup's product keeps the tensor cores busy meanwhile. If kCopied is false, the next product
// is issued first.
// B is K-major [64 kBlocks, 64], or MN-major [64, 64 kBlocks] in panels of 64 columns.
// kFloat8: the operands are e4m3, so a stage's 128-byte rows hold 128 values along k.
template <int kBlocks, int kBMajorMN, bool kCopied = true, bool kFloat8 = false, int kCount, int kCtas, class Ahead>
__device__ __forceinline__ void multiply(float (&d)[32 * kBlocks], const Pipeline<kCount, kCtas>& pipeline,
                                         PipelineState<kCount>& state, int count, uint32_t stages, uint32_t b_offset,
                                         int warpgroup, Ahead ahead) {
  constexpr uint32_t kStepA = 32;
  constexpr uint32_t kStepB = kBMajorMN ? 16 * 128 : 32;
  constexpr uint32_t kPanel = kTileK * 128;  // bytes of an MN-major panel: 64 rows of k, 64 columns each
  const uint64_t first_a = ptx::wgmma_descriptor(stages + warpgroup * (kABytes / 2), 16, 1024);
  const uint64_t first_b = ptx::wgmma_descriptor(stages + kABytes + b_offset, kBMajorMN ? kPanel : 16, 1024);
  const auto issue = [&](bool first) {
    pipeline.consumer_wait(state);
    if constexpr (kCopied) ptx::fence_proxy_async();
    const uint64_t a = ptx::advanced(first_a, state.stage * kStageBytes);
    const uint64_t b = ptx::advanced(first_b, state.stage * kStageBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTileK / 16; ++step) {
      const uint64_t a_step = ptx::advanced(a, step * kStepA), b_step = ptx::advanced(b, step * kStepB);
      if constexpr (kFloat8) {
        ptx::wgmma_e4m3(d, a_step, b_step, !first || step != 0);
      } else {
        ptx::wgmma<kBlocks, kBMajorMN>(d, a_step, b_step, !first || step != 0);
      }
    }
    ptx::wgmma_commit_group();
  };
  issue(true);
  uint32_t previous = state.stage;
  state.advance();
  for (int kb = 1; kb < count; ++kb) {
    if constexpr (kCopied) {
      ptx::wgmma_wait_group<0>();
      pipeline.consumer_release(previous);
    }
    issue(false);
    if constexpr (!kCopied) {
      ptx::wgmma_wait_group<1>();
      pipeline.consumer_release(previous);
    }
    previous = state.stage;
    state.advance();
  }
  ahead();
  ptx::wgmma_wait_group<0>();
  pipeline.consumer_release(previous);
}

}  // namespace sparsellm
