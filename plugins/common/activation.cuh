// Activations behind a linear layer.
#pragma once

#include "common/arithmetic.cuh"
#include "trtconvert/activation.h"

namespace trtconvert {

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

// The activation of a single layer; GEGLU combines two layers.
__device__ __forceinline__ float activated(TrtConvertActivation activation, float x) {
  return activation == TRTCONVERT_GELU ? gelu(x) : activation == TRTCONVERT_GELU_TANH ? gelu_tanh(x) : x;
}

}  // namespace trtconvert
