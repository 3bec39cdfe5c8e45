// Eight neighbouring channels of 16 bits: loaded and stored as 16 bytes, computed in FP32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace trtconvert {

constexpr int kVector = 8;  // channels of 16 bytes

template <typename T>
struct Pair;
template <>
struct Pair<__half> {
  using Type = __half2;
  static __device__ __forceinline__ float2 widen(Type pair) { return __half22float2(pair); }
  static __device__ __forceinline__ Type round(float a, float b) { return __floats2half2_rn(a, b); }
};
template <>
struct Pair<__nv_bfloat16> {
  using Type = __nv_bfloat162;
  static __device__ __forceinline__ float2 widen(Type pair) { return __bfloat1622float2(pair); }
  static __device__ __forceinline__ Type round(float a, float b) { return __floats2bfloat162_rn(a, b); }
};

template <typename T>
union Vector {
  uint4 words;
  typename Pair<T>::Type pairs[kVector / 2];
};

// Rounded once.
template <typename T>
__device__ __forceinline__ typename Pair<T>::Type sum_of(typename Pair<T>::Type a, typename Pair<T>::Type b) {
  return __hadd2(a, b);
}

}  // namespace trtconvert
