// PTX that sm_90a, sm_100a and sm_120a have in common: one instruction (or one idiom) per function, no policy. Names
// follow the PTX ISA.
//
// Shared memory is written through two proxies: ordinary stores and cp.async use the generic proxy, TMA uses the async
// proxy. WGMMA and bulk copies read through the async proxy, so without a fence_proxy_async() they may read stale data
// where the generic proxy has written. For ordinary stores, the writing thread executes the fence before it arrives at
// the barrier that hands the data over. Data of cp.async have been written only when their barrier completes, so for
// those the reading thread executes the fence, after it has waited for that barrier.
#pragma once

#include <cstdint>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace sparsellm::ptx {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- mbarrier: 64-bit words in shared memory, addressed by their 32-bit shared address ---

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives at the barrier that has this shared address in CTA `rank` of the cluster. Used by consumers to release a
// stage: the arrival says that the stage has been read, and publishes no data.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n .reg .b32 remote;\n mapa.shared::cluster.u32 remote, %0, %1;\n"
      " mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Returns once the phase of this parity has completed. Phases are numbered from 0, and the parity of even ones is 0.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n .reg .pred done;\n WAIT:\n"
      " mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
      " @!done bra WAIT;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Stores four bytes at the shared address `address` of CTA `rank` of the cluster, and completes them on the barrier at
// the shared address `barrier` there.
__device__ __forceinline__ void st_async_cluster(uint32_t address, uint32_t rank, uint32_t value, uint32_t barrier) {
  asm volatile(
      "{\n .reg .b32 remote, remote_barrier;\n mapa.shared::cluster.u32 remote, %0, %2;\n"
      " mapa.shared::cluster.u32 remote_barrier, %1, %2;\n"
      " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [remote], %3, [remote_barrier];\n}" ::"r"(
          address),
      "r"(barrier), "r"(rank), "r"(value)
      : "memory");
}

// Like st_async_cluster above, but stores 16 bytes.
__device__ __forceinline__ void st_async_cluster(uint32_t address, uint32_t rank, uint4 v, uint32_t barrier) {
  asm volatile(
      "{\n .reg .b32 remote, remote_barrier;\n mapa.shared::cluster.u32 remote, %0, %2;\n"
      " mapa.shared::cluster.u32 remote_barrier, %1, %2;\n"
      " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [remote], {%3, %4, %5, %6},"
      " [remote_barrier];\n}" ::"r"(address),
      "r"(barrier), "r"(rank), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
}

// --- fences, barriers of a CTA or a cluster, registers ---

__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barrier `id` (1..15; 0 is __syncthreads) among `threads` threads.
__device__ __forceinline__ void bar_sync(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Like cluster_arrive, but does not wait for the thread's earlier memory accesses. Used if the arrival publishes no
// data, or only barriers for which fence_mbarrier_init has been called.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Programmatic dependent launch: griddepcontrol_wait waits for the previous kernel in the stream, and
// griddepcontrol_launch_dependents lets the next kernel start. After the wait, a kernel must read with ordinary loads:
// __ldg promises that data never change, so the compiler may move it before the wait.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// The warp's index in its CTA, in a uniform register. The compiler does not know that threadIdx.x / 32 is equal in all
// lanes, but does know that a shuffle from lane 0 is. So the compiler computes values that depend on the index once per
// warp.
__device__ __forceinline__ int warp_index() { return __shfl_sync(~0u, threadIdx.x / 32, 0); }

// One bit for each lane up to this one: 0b111 for lane 2.
__device__ __forceinline__ uint32_t lanes_up_to() {
  uint32_t lanes;
  asm("mov.u32 %0, %%lanemask_le;" : "=r"(lanes));
  return lanes;
}

// Adds to a word of global memory, with release semantics. A thread that reads the sum and then passes a fence sees
// what this thread wrote before, and what other threads wrote before they met this thread at a barrier. A fence in this
// thread would have the same effect, but would also invalidate L1.
__device__ __forceinline__ void add_release(int* address, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Reads a word of global memory that another CTA writes. If that CTA wrote other data, passed a fence, and then wrote
// this word, the data are visible after this read.
__device__ __forceinline__ uint32_t ld_acquire(const uint32_t* address) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}

// --- copies ---

// Copies 16 bytes of row `row` from global to shared memory; rows start at `base`, `pitch` bytes apart. If `bytes` is
// 0, nothing is read, and zeros are written. The address is computed within the asm statement, because the compiler
// would otherwise compute the products of all rows of a loop in advance, which would fill the registers.
__device__ __forceinline__ void cp_async_row_16(uint32_t destination, const void* base, uint32_t row, uint32_t pitch,
                                                uint32_t bytes) {
  asm volatile(
      "{\n .reg .b64 source;\n mad.wide.u32 source, %2, %3, %1;\n"
      " cp.async.cg.shared.global.L2::256B [%0], [source], 16, %4;\n}" ::"r"(destination),
      "l"(base), "r"(row), "r"(pitch), "r"(bytes)
      : "memory");
}

// Like cp_async_row_16, but the caller passes the source address instead of a row.
__device__ __forceinline__ void cp_async_16_or_zeros(uint32_t destination, const void* source, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes)
               : "memory");
}

// Copies 16 bytes from global to shared memory. Both addresses must be 16-byte aligned.
__device__ __forceinline__ void cp_async_16(uint32_t destination, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(source) : "memory");
}

// Arrives at the barrier once all cp.async that this thread has issued have written. The barrier's initial count
// includes this arrival (noinc).
__device__ __forceinline__ void cp_async_mbarrier_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// A thread's own groups of cp.async: commit ends a group; wait returns when all except the thread's last kPending
// groups have written.
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Stores 16 bytes at an aligned global address, with one store. A plain assignment may become four stores if the
// compiler does not see the alignment, for example through a pointer to bf16.
__device__ __forceinline__ void st_global_v4(void* destination, uint4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(destination), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// Prefetches the line around a global address to L2. Measured by the cost of later loads, the line is 128 bytes.
__device__ __forceinline__ void prefetch_l2(const void* source) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(source));
}

// Copies `bytes` of shared memory to the shared address `destination` of CTA `rank`, and completes them on the barrier
// at the shared address `barrier` there. bytes, source and destination must be multiples of 16.
__device__ __forceinline__ void bulk_copy_cluster(uint32_t destination, uint32_t rank, uint32_t source, uint32_t bytes,
                                                  uint32_t barrier) {
  asm volatile(
      "{\n .reg .b32 remote, remote_barrier;\n mapa.shared::cluster.u32 remote, %0, %1;\n"
      " mapa.shared::cluster.u32 remote_barrier, %4, %1;\n"
      " cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [remote], [%2], %3,"
      " [remote_barrier];\n}" ::"r"(destination),
      "r"(rank), "r"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Copies `bytes` from global to shared memory, and completes them on `barrier`. bytes, source and destination must
// be multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Like bulk_load, but copies to every CTA of the cluster whose bit is set in `ctas`, at the same shared addresses in
// each.
__device__ __forceinline__ void bulk_load_multicast(uint32_t destination, const void* source, uint32_t bytes,
                                                    uint32_t barrier, uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1], %2, [%3], %4;" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier), "h"(ctas)
      : "memory");
}

// If `some` is true, arrives at the barrier, adds `bytes` to its expected transaction count, and issues the bulk copy.
// The instructions are predicated, because the compiler would serialize WGMMAs around a branch.
__device__ __forceinline__ void bulk_load_if(bool some, uint32_t destination, const void* source, uint32_t bytes,
                                             uint32_t barrier) {
  asm volatile(
      "{\n .reg .pred some;\n setp.ne.b32 some, %4, 0;\n"
      " @some mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%3], %2;\n"
      " @some cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n}" ::"r"(
          destination),
      "l"(source), "r"(bytes), "r"(barrier), "r"(static_cast<int>(some))
      : "memory");
}

// Copies `bytes` (a multiple of 16) from shared to global memory, as part of this thread's current bulk group. Source
// and destination must be 16-byte aligned.
__device__ __forceinline__ void bulk_store(void* destination, uint32_t source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits for this thread's groups of bulk_store: bulk_wait_read until all except the last kPending have read shared
// memory, which may then be written again; bulk_wait until all have written global memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

__device__ __forceinline__ void tma_prefetch_descriptor(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies a box of a 2-D tensor, whose first element is at (column, row), to shared memory, and completes its bytes on
// `barrier`.
__device__ __forceinline__ void tma_load_2d(uint32_t destination, const CUtensorMap* map, int column, int row,
                                            uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          destination),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// Like tma_load_2d, but copies to every CTA of the cluster whose bit is set in `ctas`, at the same shared addresses in
// each.
__device__ __forceinline__ void tma_load_2d_multicast(uint32_t destination, const CUtensorMap* map, int column, int row,
                                                      uint32_t barrier, uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(ctas)
      : "memory");
}

// --- 8x8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8 ---

__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}

// d += a b: bf16 a [16, 16] and b [16, 8], float32 d [16, 8], spread over a warp.
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
      " {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- ordinary shared memory by address ---

__device__ __forceinline__ uint4 ld_shared_v4(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void st_shared_v4(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ uint2 ld_shared_v2(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ uint16_t ld_shared_u16(uint32_t address) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ void st_shared_u16(uint32_t address, uint16_t v) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(v) : "memory");
}

// Like st_shared_u16, but stores only if index < limit, by a predicated instruction instead of a branch.
__device__ __forceinline__ void st_shared_u16_below(uint32_t index, uint32_t limit, uint32_t address, uint16_t v) {
  asm volatile("{\n .reg .pred p;\n setp.lt.u32 p, %0, %1;\n @p st.shared.u16 [%2], %3;\n}" ::"r"(index), "r"(limit),
               "r"(address), "h"(v)
               : "memory");
}

// --- conversion: two floats to bf16 pairs, `low` in the low half; round to nearest even ---

__device__ __forceinline__ uint32_t cvt_bf16x2(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// Two e4m3 values, `low` in the low byte; magnitudes above 448 become 448, NaN stays NaN.
__device__ __forceinline__ uint16_t cvt_e4m3x2(float low, float high) {
  uint16_t r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}

// The four e4m3 values of a word, as pairs of floats or of bf16 values; both hold them exactly.
__device__ __forceinline__ void unpack_e4m3x4(uint32_t four, float2& low, float2& high) {
  uint32_t of_low, of_high;
  asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %2;\n"
      " cvt.rn.f16x2.e4m3x2 %0, low;\n cvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(of_low), "=r"(of_high)
      : "r"(four));
  low = __half22float2(reinterpret_cast<const __half2&>(of_low));
  high = __half22float2(reinterpret_cast<const __half2&>(of_high));
}
__device__ __forceinline__ uint2 bf16x4_of_e4m3x4(uint32_t four) {
  float2 low, high;
  unpack_e4m3x4(four, low, high);
  return {cvt_bf16x2(low.x, low.y), cvt_bf16x2(high.x, high.y)};
}

// Like cvt_bf16x2 of max(low, 0) and max(high, 0); NaN stays NaN.
__device__ __forceinline__ uint32_t cvt_relu_bf16x2(float low, float high) {
  uint32_t r;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

}  // namespace sparsellm::ptx
