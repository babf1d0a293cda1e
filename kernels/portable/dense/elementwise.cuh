// The arithmetic of the dense engine between its matrix products, on pairs of bf16 values. Used by separate kernels
// (pointwise.cu) and by the products' epilogues (hidden.cu, gradient.cu).
//
// Numerics: h = g u is rounded to bf16 once. dh + dl1 sign(h) is computed in float32, multiplied by g or u, and rounded
// to bf16 once.
#pragma once

#include "common/ptx.cuh"

namespace sparsellm::dense {

__device__ __forceinline__ uint4 relu(const uint4& z) {
  const auto of_two = [](uint32_t pair) {
    const __nv_bfloat162 g = __hmax2_nan(reinterpret_cast<const __nv_bfloat162&>(pair), __nv_bfloat162(0.0f, 0.0f));
    return reinterpret_cast<const uint32_t&>(g);
  };
  return make_uint4(of_two(z.x), of_two(z.y), of_two(z.z), of_two(z.w));
}

__device__ __forceinline__ uint32_t product(uint32_t g, uint32_t u) {
  const __nv_bfloat162 h =
      __hmul2_rn(reinterpret_cast<const __nv_bfloat162&>(g), reinterpret_cast<const __nv_bfloat162&>(u));
  return reinterpret_cast<const uint32_t&>(h);
}

__device__ __forceinline__ uint4 product(const uint4& g, const uint4& u) {
  return make_uint4(product(g.x, u.x), product(g.y, u.y), product(g.z, u.z), product(g.w, u.w));
}

// The sum of the absolute values of eight bf16 values.
__device__ __forceinline__ float magnitudes(const uint4& h) {
  const auto of_two = [](uint32_t pair) {
    return fabsf(__uint_as_float(pair << 16)) + fabsf(__uint_as_float(pair & 0xffff0000));
  };
  return (of_two(h.x) + of_two(h.y)) + (of_two(h.z) + of_two(h.w));
}

// dz, du and h of eight entries (DESIGN.md §2). Non-gated: u is not read, and du is undefined.
struct Gradients {
  uint4 dz, du, h;
};

template <bool kGated>
__device__ __forceinline__ Gradients gradients(const uint4& g8, const uint4& u8, const uint4& dh8, float dl1) {
  const uint4 h8 = kGated ? product(g8, u8) : g8;
  const uint32_t gs[4] = {g8.x, g8.y, g8.z, g8.w}, us[4] = {u8.x, u8.y, u8.z, u8.w};
  const uint32_t hs[4] = {h8.x, h8.y, h8.z, h8.w}, dhs[4] = {dh8.x, dh8.y, dh8.z, dh8.w};
  uint32_t dz[4], du[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float dz2[2], du2[2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const auto value = [&](uint32_t pair) { return __uint_as_float(side == 0 ? pair << 16 : pair & 0xffff0000); };
      const float g = value(gs[i]), h = value(hs[i]), u = kGated ? value(us[i]) : 1.0f;
      const float sign = !kGated || h > 0.0f ? 1.0f : h < 0.0f ? -1.0f : h;  // sign(NaN) is NaN
      const float total = value(dhs[i]) + dl1 * sign;
      dz2[side] = g != 0.0f ? total * u : 0.0f;
      du2[side] = total * g;
    }
    dz[i] = ptx::cvt_bf16x2(dz2[0], dz2[1]);
    du[i] = ptx::cvt_bf16x2(du2[0], du2[1]);
  }
  return {make_uint4(dz[0], dz[1], dz[2], dz[3]), make_uint4(du[0], du[1], du[2], du[3]), h8};
}

}  // namespace sparsellm::dense
