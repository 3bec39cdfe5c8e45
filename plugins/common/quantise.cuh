// The arithmetic of quantising to INT8.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/arithmetic.cuh"

namespace trtconvert {

constexpr float kRoundMagic = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer (ties to even) in the low bits

__device__ __forceinline__ float nan_max(float a, float b) {  // fmaxf would drop a NaN, which must reach its row's scale
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Maximum over the Lanes threads that share a row.
template <int Lanes>
__device__ __forceinline__ float row_max(float x) {
#pragma unroll
  for (int offset = Lanes / 2; offset > 0; offset /= 2) x = nan_max(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

// 0, or NaN if the magnitude is NaN or infinite. The sum with a scale marks the row of this largest magnitude.
__device__ __forceinline__ float broken_mark(float magnitude) { return magnitude - magnitude; }

// rne(x * factor + addend) in the low byte, clamped to +-127 where the scale does not come from the data itself.
template <bool kClamp>
__device__ __forceinline__ uint32_t quantise(float x, float factor, float addend = kRoundMagic) {
  float rounded = fmaf(x, factor, addend);
  if (kClamp) rounded = fminf(fmaxf(rounded, kRoundMagic - 127.f), kRoundMagic + 127.f);
  return __float_as_uint(rounded);
}

// rne(x / scale) likewise, with the FP32 quotient, so that results equal those of any implementation. `inverse` is the scale's
// reciprocal, rounded once; one Newton step makes the product the quotient (Markstein 1990). A division for each element would take
// longer than its load and store.
template <bool kClamp>
__device__ __forceinline__ uint32_t quantise_quotient(float x, float scale, float inverse) {
  const float nearly = x * inverse;
  float quotient = fmaf(fmaf(-nearly, scale, x), inverse, nearly);
  if (kClamp) quotient = fminf(fmaxf(isinf(nearly) ? nearly : quotient, -127.f), 127.f);
  return __float_as_uint(quotient + kRoundMagic);
}

template <bool kClamp>
__device__ __forceinline__ uint2 quantise8_quotients(const float (&x)[8], float scale, float inverse) {
  uint32_t q[8];
#pragma unroll
  for (int c = 0; c < 8; ++c) q[c] = quantise_quotient<kClamp>(x[c], scale, inverse);
  return make_uint2(pack4(q[0], q[1], q[2], q[3]), pack4(q[4], q[5], q[6], q[7]));
}

template <bool kClamp>
__device__ __forceinline__ uint2 quantise8(const float (&x)[8], float factor) {
  uint32_t q[8];
#pragma unroll
  for (int c = 0; c < 8; ++c) q[c] = quantise<kClamp>(x[c], factor);
  return make_uint2(pack4(q[0], q[1], q[2], q[3]), pack4(q[4], q[5], q[6], q[7]));
}

__device__ __forceinline__ bool usable_scale(float s) { return isfinite(s) && s > 0.f; }

}  // namespace trtconvert
