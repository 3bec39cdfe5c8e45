// Shared parts of the kernels with mma.sync: instructions, and softmax on fragments.
//
// Names: g is a lane's row in a fragment (g + 8 its second one), t its place in the quad that shares these rows; s_ is an
// address in shared memory; c counts the four values that a lane holds of a fragment: row c / 2, column 2 t + c % 2.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "arithmetic.cuh"
#include "common/mma.cuh"
#include "common/quantise.cuh"

namespace trtconvert::attention::mma {

// An INT32 accumulator that starts here is, read as FP32, 1.5 * 2^23 + the sum, exact while |sum| < 2^22: 127 * 127 * 256
// for a dot product, 255 * 127 * 128 for a tile of the second product. One subtraction replaces the conversion.
constexpr int32_t kMagicBits = 0x4B400000;
constexpr float kMagic = 12582912.f;
// Adding 2^23 to 0 <= x <= 255 leaves x, rounded to nearest even, in the low byte.
constexpr float kRoundToByte = 8388608.f;

constexpr int kRowsPerWarp = 16;

// ---- PTX ----

using ::trtconvert::load_matrices;
using ::trtconvert::multiply_16bit;
using ::trtconvert::multiply_s8;

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t s_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(s_row)
               : "memory");
}

__device__ __forceinline__ void load_shared(float (&x)[4], uint32_t s_address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "r"(s_address)
               : "memory");
}

// d = a * b + c, 16 x 8 x 32 bytes.
__device__ __forceinline__ void multiply_u8s8(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                              const int32_t (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

// ---- Softmax ----

// Maximum of a row over the quad that shares it; NaN if one of its logits is NaN, so that sums of rounded weights are NaN too.
__device__ __forceinline__ float quad_max(float x) {
  x = nan_max(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return nan_max(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

template <int kFragments>
__device__ __forceinline__ void row_maxima(float (&maximum)[2], const float (&z)[kFragments][4]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float m = nan_max(z[0][2 * r], z[0][2 * r + 1]);
#pragma unroll
    for (int n = 1; n < kFragments; ++n) m = nan_max(m, nan_max(z[n][2 * r], z[n][2 * r + 1]));
    maximum[r] = quad_max(m);
  }
}

// A maximum that can be subtracted: minus infinity, the maximum of a row without a visible key so far, would make its weights NaN.
__device__ __forceinline__ float finite_or_zero(float maximum) { return maximum == -INFINITY ? 0.f : maximum; }

// 1 / sum of a row; NaN where the pre-pass found the row or its tables unusable, 0 where no key is visible.
__device__ __forceinline__ float inverse_sum(float sum, float row_scale) {
  if (isnan(row_scale)) return row_scale;
  return sum == 0.f ? 0.f : 1.f / sum;
}

}  // namespace trtconvert::attention::mma
