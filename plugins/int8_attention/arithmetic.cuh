// Arithmetic that the kernels of attention use beside what all kernels have.
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

// 1 / x to the nearest, of normal numbers far from the ends of their range.
__device__ __forceinline__ float refined_reciprocal(float x) {
  const float inverse = reciprocal(x);
  return fmaf(fmaf(-x, inverse, 1.f), inverse, inverse);
}

// x / divisor to the nearest, of numbers whose quotient is normal, and of infinity and NaN, with `inverse` the divisor's
// refined_reciprocal (Markstein). A plain division is a call, for which the compiler keeps registers.
__device__ __forceinline__ float quotient(float x, float divisor, float inverse) {
  const float nearly = x * inverse;
  return isinf(nearly) ? nearly : fmaf(fmaf(-nearly, divisor, x), inverse, nearly);
}

// The low bytes of four words, the first lowest.
__device__ __forceinline__ uint32_t pack4(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

}  // namespace trtconvert::attention
