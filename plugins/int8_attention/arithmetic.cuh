// Arithmetic of the attention kernels beyond the common arithmetic.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/arithmetic.cuh"

namespace trtconvert::attention {

__device__ __forceinline__ float log2_approx(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 1 / x, correctly rounded, for normal numbers far from the ends of their range.
__device__ __forceinline__ float refined_reciprocal(float x) {
  const float inverse = reciprocal(x);
  return fmaf(fmaf(-x, inverse, 1.f), inverse, inverse);
}

// x / divisor, correctly rounded, for normal quotients, infinity and NaN; `inverse` is the divisor's refined_reciprocal
// (Markstein). The compiler makes a plain division a call, and reserves registers for the call.
__device__ __forceinline__ float quotient(float x, float divisor, float inverse) {
  const float nearly = x * inverse;
  return isinf(nearly) ? nearly : fmaf(fmaf(-nearly, divisor, x), inverse, nearly);
}

}  // namespace trtconvert::attention
