// Definitions that the kernels of the row engine share: a row's nonzeros as a list, arithmetic on eight values, sums.
#pragma once

#include "common/ordered_sum.cuh"
#include "common/twell.cuh"

namespace sparsellm::row {

// The arguments that all kernels of the row engine take.
struct RowArguments {
  const __nv_bfloat16* x;
  const void* w_up;      // bf16; e4m3 if kFloat8
  const void* w_down_t;  // likewise
  Packed packed;
  int64_t n;
  int m, k;
  int32_t* tickets;  // words by which CTAs synchronize, as many as the kernel needs; zero between calls
  float* l1;
  __nv_bfloat16* y;
};

constexpr int kMaxGrid = 144;  // maximum number of CTAs, because no sm_90 device has more SMs

// Lists the nonzeros of a wide segment that are among nonzeros first .. first + size - 1 of the row: nonzero first + i
// goes to list[i], as a packed word. The segment is that of column tile `tile`, and the row has `before` nonzeros in
// earlier column tiles. Called by all lanes of a warp.
__device__ __forceinline__ void list_wide(const Packed& packed, int64_t row, int tiles, int tile, uint32_t before,
                                          uint32_t first, uint32_t size, uint32_t lane, uint32_t* list) {
  const uint32_t* words = segment_of(packed, row, tile, tiles);
  const uint32_t bits = reinterpret_cast<const uint8_t*>(words + word_offset(kSectorWords, tiles))[lane];
  const uint32_t nth = exclusive_scan(__popc(bits), lane);
  const uint16_t* value = static_cast<const uint16_t*>(packed.wide) + 8 * static_cast<int64_t>(words[1]) + nth;
  uint32_t at = before + nth - first;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if ((bits >> i & 1) == 0) continue;
    if (at < size) list[at] = pack_word(*value, tile * kColumnTile + 8 * lane + i);
    ++at, ++value;
  }
}

// Writes nonzeros first .. last - 1 of the row to list[0..] as packed words, columns ascending. Called by all lanes of
// a warp; the list may be read after a __syncwarp. Two lanes together read the first 32 bytes of a segment, which
// usually contain all its nonzeros.
__device__ __forceinline__ void list_nonzeros(const Packed& packed, int64_t row, int64_t n, uint32_t first,
                                              uint32_t last, uint32_t lane, uint32_t* list) {
  constexpr int kBatch = 4;  // loads in flight per lane
  const int tiles = static_cast<int>((n + kColumnTile - 1) / kColumnTile);
  const uint32_t size = last - first;
  uint32_t seen = 0;  // nonzeros in earlier column tiles
  for (int start = 0; start < tiles && seen < last; start += 16 * kBatch) {
    uint4 v[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int tile = start + 16 * b + lane / 2;
      v[b] = make_uint4(0, 0, 0, 0);
      if (tile < tiles) {
        v[b] = reinterpret_cast<const uint4*>(segment_of(packed, row, tile, tiles))[lane % 2];
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (start + 16 * b >= tiles) break;
      const int tile = start + 16 * b + lane / 2;
      const uint32_t count = __shfl_sync(~0u, v[b].x, lane & ~1u);
      const uint32_t mine = lane % 2 == 0 ? count : 0;
      const uint32_t before = exclusive_scan(mine, lane);
      const uint32_t base = seen + before - (lane % 2 == 0 ? 0 : count);  // number of the row's nonzeros before this
                                                                          // column tile
      seen += __shfl_sync(~0u, before + mine, 31);
      const bool wanted = count != 0 && base < last && base + count > first;
      const bool fits = count < kTileWords;
      if (wanted && fits) {
        uint4 four = v[b];
        const uint32_t* sector = segment_of(packed, row, tile, tiles);
        for (uint32_t index = 4 * (lane % 2); index <= count; index += 8) {
          if (index >= 8) {
            sector += word_offset(kSectorWords, tiles);
            four = reinterpret_cast<const uint4*>(sector)[lane % 2];
          }
          const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const uint32_t at =
                index + i - 1;  // index among the column tile's nonzeros; wraps around for word 0, the count
            if (at < count && base + at - first < size) list[base + at - first] = words[i];
          }
        }
      }
      for (uint32_t rest = __ballot_sync(~0u, wanted && !fits && lane % 2 == 0); rest != 0; rest &= rest - 1) {
        const int source = __ffs(rest) - 1;
        const uint32_t of_source = __shfl_sync(~0u, base, source);
        list_wide(packed, row, tiles, start + 16 * b + source / 2, of_source, first, size, lane, list);
      }
    }
  }
}

__device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000); }

__device__ __forceinline__ void unpack(const uint4& v, float (&to)[8]) {
  to[0] = low(v.x), to[1] = high(v.x), to[2] = low(v.y), to[3] = high(v.y);
  to[4] = low(v.z), to[5] = high(v.z), to[6] = low(v.w), to[7] = high(v.w);
}

__device__ __forceinline__ uint4 pack(const float (&v)[8]) {
  return make_uint4(ptx::cvt_bf16x2(v[0], v[1]), ptx::cvt_bf16x2(v[2], v[3]), ptx::cvt_bf16x2(v[4], v[5]),
                    ptx::cvt_bf16x2(v[6], v[7]));
}

__device__ __forceinline__ void unpack(const uint2& v, float (&to)[8]) {  // of e4m3
  float2 pairs[4];
  ptx::unpack_e4m3x4(v.x, pairs[0], pairs[1]);
  ptx::unpack_e4m3x4(v.y, pairs[2], pairs[3]);
#pragma unroll
  for (int i = 0; i < 4; ++i) to[2 * i] = pairs[i].x, to[2 * i + 1] = pairs[i].y;
}

// Eight weights of a row: uint4 of bf16, uint2 of e4m3.
//
// Adds w x to four independent sums, because dependent additions would have to wait for one another.
template <class Eight>
__device__ __forceinline__ void multiply_add(float (&sums)[4], const Eight& w, const float (&x)[8]) {
  float v[8];
  unpack(w, v);
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[i % 4] = fmaf(v[i], x[i], sums[i % 4]);
}

// Adds h w to eight sums.
template <class Eight>
__device__ __forceinline__ void scale_add(float (&sums)[8], const Eight& w, float h) {
  float v[8];
  unpack(w, v);
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[i] = fmaf(v[i], h, sums[i]);
}

// sums = from + sums. The loads bypass L1, because another CTA of this kernel may have written `from`.
__device__ __forceinline__ void add_eight(const float4* from, float (&sums)[8]) {
  const float4 p = __ldcg(from), q = __ldcg(from + 1);
  sums[0] = p.x + sums[0], sums[1] = p.y + sums[1], sums[2] = p.z + sums[2], sums[3] = p.w + sums[3];
  sums[4] = q.x + sums[4], sums[5] = q.y + sums[5], sums[6] = q.z + sums[6], sums[7] = q.w + sums[7];
}

// gate_of returns g of a packed word. hidden_of returns h = g u, where u and the product are each rounded to bf16 once
// (the float32 product of two bf16 values is exact).
__device__ __forceinline__ float gate_of(uint32_t word) { return high(word); }
__device__ __forceinline__ float hidden_of(uint32_t word, float u) {
  const float rounded = __bfloat162float(__float2bfloat16_rn(u));
  return __bfloat162float(__float2bfloat16_rn(gate_of(word) * rounded));
}

}  // namespace sparsellm::row
