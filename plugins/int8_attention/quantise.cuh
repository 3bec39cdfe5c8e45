// The arithmetic of quantising for the pre-pass and the kernel of one tile.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "arithmetic.cuh"
#include "common/quantise.cuh"
#include "element.cuh"

namespace trtconvert::attention {

constexpr float kScaleFloor = 0x1p-50f;        // an all-zero row or tile; the product of two still is a normal number
constexpr float kProductFloor = kScaleFloor * kScaleFloor;  // the smallest product of a row's and a tile's scale
constexpr float kZeroRowScale = 0x1p-6f;
constexpr float kTokenScaleFloor = 0x1p-20f;   // the smallest sv, part of the numerics
constexpr float kSmallToken = 0x1p-3f;         // mode 3: tokens of a tile have scales if one is smaller, part of the numerics

__device__ __forceinline__ __half low_of(const __half2& x) { return __low2half(x); }
__device__ __forceinline__ __half high_of(const __half2& x) { return __high2half(x); }
__device__ __forceinline__ __nv_bfloat16 low_of(const __nv_bfloat162& x) { return __low2bfloat16(x); }
__device__ __forceinline__ __nv_bfloat16 high_of(const __nv_bfloat162& x) { return __high2bfloat16(x); }
__device__ __forceinline__ float2 to_float2(const __half2& x) { return __half22float2(x); }
__device__ __forceinline__ float2 to_float2(const __nv_bfloat162& x) { return __bfloat1622float2(x); }

template <typename T>
using PairOf = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

template <typename T>
__device__ __forceinline__ const PairOf<T>& pair(const uint4& packed, int i) {
  return reinterpret_cast<const PairOf<T>*>(&packed)[i];
}

template <typename T>
__device__ __forceinline__ void unpack8(const uint4& packed, float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = to_float2(pair<T>(packed, i));
    x[2 * i] = two.x;
    x[2 * i + 1] = two.y;
  }
}

template <typename T>
__device__ __forceinline__ uint4 pack8(const float (&x)[8]) {
  uint4 packed;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    PairOf<T>& two = reinterpret_cast<PairOf<T>*>(&packed)[i];
    if constexpr (std::is_same_v<T, __half>) {
      two = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
    } else {
      two = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
    }
  }
  return packed;
}

// Largest magnitude of eight packed values, NaN if one is.
template <typename T>
__device__ __forceinline__ T largest8(const uint4& packed) {
  const PairOf<T> m = __hmax2_nan(__hmax2_nan(__habs2(pair<T>(packed, 0)), __habs2(pair<T>(packed, 1))),
                                  __hmax2_nan(__habs2(pair<T>(packed, 2)), __habs2(pair<T>(packed, 3))));
  return __hmax_nan(low_of(m), high_of(m));
}

// True if 16-bit numbers are finite: each times zero is zero then.
template <typename T>
class FiniteCheck {
 public:
  __device__ __forceinline__ void take(const uint4& packed) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum_ = __hfma2(pair<T>(packed, i), zero(), sum_);
  }
  __device__ __forceinline__ bool passed() const {
    const float2 sum = to_float2(sum_);
    return sum.x + sum.y == 0.f;
  }

 private:
  static __device__ __forceinline__ PairOf<T> zero() {
    const uint32_t bits = 0;
    return reinterpret_cast<const PairOf<T>&>(bits);
  }

  PairOf<T> sum_ = zero();
};

// FP8 (E4M3) in the low byte: to the nearest, +-448 at most.
constexpr uint32_t kFourOnes = 0x38383838;
__device__ __forceinline__ uint32_t quantise_e4m3(float x) {
  uint16_t pair = 0;
#if __CUDA_ARCH__ >= 890  // other architectures have no mode 4: Params::fp8_values
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.f), "f"(x));
#endif
  return pair;
}

// Maximum over the thread block, in every thread.
template <int kWarps>
__device__ __forceinline__ float block_max(float x, float (&warp_values)[kWarps]) {
  x = row_max<32>(x);
  if (threadIdx.x % 32 == 0) warp_values[threadIdx.x / 32] = x;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) x = nan_max(x, warp_values[w]);
  return x;
}

// Scale of a value token. Each of Lanes threads has eight of the token's equalised channels. The scale is NaN if a channel is not
// finite.
template <int Lanes>
__device__ __forceinline__ float token_scale(const float (&x)[8]) {
  float amax = 0.f;
#pragma unroll
  for (int c = 0; c < 8; ++c) amax = nan_max(amax, fabsf(x[c]));
  amax = row_max<Lanes>(amax);
  return nan_max(amax, 127.f * kTokenScaleFloor) * (1.f / 127.f) + broken_mark(amax);
}

// True if a value token is small, in all Lanes threads that have eight of its channels each. Offsets are not subtracted: a sink is
// small itself, not near the offsets. Called by whole warps.
template <int Lanes>
__device__ __forceinline__ bool is_small_token(const float (&v)[8], const float (&factor)[8]) {
  bool large = false;
#pragma unroll
  for (int c = 0; c < 8; ++c) large |= !(fabsf(v[c] * factor[c]) < 127.f * kSmallToken);
  const unsigned lanes = __ballot_sync(0xffffffffu, large) >> (threadIdx.x % 32 / Lanes * Lanes);
  return (lanes & (Lanes == 32 ? 0xffffffffu : (1u << Lanes % 32) - 1)) == 0;
}

// Scale of a query token from its largest magnitude, NaN if the magnitude is not finite. Any scale serves a row of zeros; an
// ordinary scale keeps the attention kernels on their fast path.
__device__ __forceinline__ float query_scale(float amax) {
  return amax == 0.f ? kZeroRowScale : nan_max(amax * (1.f / 127.f), kScaleFloor) + broken_mark(amax);
}

// This thread's eight entries of a table of a row per channel; zeros beyond head_dim.
__device__ __forceinline__ void load_channels(float (&x)[8], const float* table, int64_t first, bool has_channels) {
  float4 low = make_float4(0.f, 0.f, 0.f, 0.f), high = low;
  if (has_channels) {
    low = __ldg(reinterpret_cast<const float4*>(table + first));
    high = __ldg(reinterpret_cast<const float4*>(table + first + 4));
  }
  x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
  x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

// True if every table entry that this head's mode reads is usable. Called by the whole thread block.
__device__ inline bool tables_usable(const Params& p, const Element& e, int head) {
  const int kv_head = head / p.group;
  bool bad = false;
  if (e.mode == 3 || (e.mode != 0 && !p.dynamic))
    bad = !usable_scale(p.q_scale[int64_t(e.bin) * p.heads + head]) ||
          !usable_scale(p.k_scale[int64_t(e.bin) * p.kv_heads + kv_head]);
  const int64_t row = (int64_t(e.bin) * p.kv_heads + kv_head) * p.head_dim;
  for (int d = threadIdx.x; d < p.head_dim; d += blockDim.x) {
    if (e.mode != 0 && p.smooth_k) bad |= !isfinite(p.k_offset[row + d]);
    if (e.mode >= 2) bad |= !isfinite(p.v_offset[row + d]) || !usable_scale(p.v_scale[row + d]);
  }
  return !__syncthreads_or(bad);
}

}  // namespace trtconvert::attention
