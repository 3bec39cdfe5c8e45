// What epilogues do with sums before they are written: 16-bit numbers, GELU, boxes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/arithmetic.cuh"
#include "common/sm90/ptx.cuh"
#include "linear/sm90/launch.h"

namespace trtconvert::linear {

constexpr int kBoxBytes = kBlockRows * kStoreColumns * 2;  // of y

template <bool kBf16>
__device__ __forceinline__ float2 widen(uint32_t pair) {
  if constexpr (kBf16) {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
  } else {
    return __half22float2(reinterpret_cast<const __half2&>(pair));
  }
}

// Two numbers as 16-bit ones, the first lowest.
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

// x * Phi(x). Phi is off by at most 7.5e-8 (Abramowitz and Stegun 1964, 7.1.26).
__device__ __forceinline__ float gelu(float x) {
  constexpr float kHalfOfLog2E = 0.7213475204f, kP = 0.2316418883f;  // 0.3275911 / sqrt(2)
  const float size = fminf(fabsf(x), 64.f);  // infinity times 0 would be no number
  const float t = reciprocal(fmaf(kP, size, 1.f)), power = exp2_approx(-kHalfOfLog2E * size * size);
  const float tail = t * (0.127414796f + t * (-0.142248368f + t * (0.7107068705f + t * (-0.7265760135f + t * 0.5307027145f)))) * power;
  return 0.5f * (x + fabsf(x)) - size * tail;  // no maximum, which would lose a NaN
}

// x * sigmoid(2 u) = x / 2 * (1 + tanh(u)), u = sqrt(2 / pi) * (x + 0.044715 x^3).
__device__ __forceinline__ float gelu_tanh(float x) {
  constexpr float kOfX = -2.f * 0.7978845608f * kLog2e, kOfCube = kOfX * 0.044715f, kMost = 126.f;
  return x * reciprocal(1.f + exp2_approx(fminf(x * fmaf(kOfCube, x * x, kOfX), kMost)));
}

// Where a thread's share of 64 rows by 16 columns goes: each thread gives the address of a row of one of four matrices of 8 by 8.
struct MatrixRow {
  int matrix, row;
};

__device__ __forceinline__ MatrixRow matrix_row() {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const int matrix = lane / 8, row = warp * 16 + matrix % 2 * 8 + lane % 8;
  return {matrix, row};
}

// Sixteen columns of 64 rows of y, from a warpgroup's sums, to boxes of 32 columns one behind the other: rows of 64 bytes with the
// 64-byte swizzle, so that eight rows of a chunk of 16 bytes lie in eight different groups of banks.
__device__ __forceinline__ void store_in_boxes(uint32_t boxes, int sixteen, MatrixRow at, const uint32_t (&pairs)[4]) {
  const int chunk = 2 * sixteen + at.matrix / 2;
  const uint32_t box = boxes + chunk / 4 * kBoxBytes;
  sm90::stmatrix(box + at.row * (kStoreColumns * 2) + (chunk % 4 ^ at.row / 2 % 4) * 16, pairs[0], pairs[1], pairs[2], pairs[3]);
}

}  // namespace trtconvert::linear
