// Pairs of 16-bit numbers, the first lowest.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace trtconvert::linear {

template <bool kBf16>
__device__ __forceinline__ float2 widen(uint32_t pair) {
  if constexpr (kBf16) {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
  } else {
    return __half22float2(reinterpret_cast<const __half2&>(pair));
  }
}

template <bool kBf16>
__device__ __forceinline__ uint32_t pack(float a, float b) {
  uint32_t result;
  if constexpr (kBf16) {
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(result) : "f"(a), "f"(b));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(result) : "f"(a), "f"(b));
  }
  return result;
}

}  // namespace trtconvert::linear
