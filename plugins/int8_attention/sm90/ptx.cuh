// Thin wrappers of the sm_90a instructions that only this kernel uses. Names follow the PTX manual.
#pragma once

#include <cstdint>

#include "arithmetic.cuh"
#include "common/sm90/ptx.cuh"

namespace trtconvert::attention::sm90 {

using namespace ::trtconvert::sm90;

__device__ __forceinline__ float load_shared(uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

// Loaded here, and kept: the compiler must not recompute the value at its uses.
__device__ __forceinline__ uint32_t keep_shared(uint32_t address) {
  uint32_t x;
  asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

// ---- Arithmetic ----

// x of lane (this lane xor kMask), for two values side by side.
template <int kMask>
__device__ __forceinline__ void shuffle_xor(const float (&x)[2], float (&other)[2]) {
  asm volatile(
      "shfl.sync.bfly.b32 %0, %2, %4, 0x1f, 0xffffffff;\n"
      "shfl.sync.bfly.b32 %1, %3, %4, 0x1f, 0xffffffff;\n"
      : "=&f"(other[0]), "=f"(other[1])
      : "f"(x[0]), "f"(x[1]), "n"(kMask));
}

// rne(e) of four values in [0, 255] as the bytes of a word, the first lowest. A conversion to s32 with an immediate pack is one
// instruction (F2IP.U8.F32) for two values; alone, the conversion would use the exponential unit's pipe.
__device__ __forceinline__ uint32_t pack_u8(float a, float b, float c, float d) {
  uint32_t high, result;
  asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(high) : "r"(__float2int_rn(d)), "r"(__float2int_rn(c)), "r"(0));
  asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;"
      : "=r"(result)
      : "r"(__float2int_rn(b)), "r"(__float2int_rn(a)), "r"(high));
  return result;
}

// Four values in FP8 (E4M3, to the nearest, at most 448), the first lowest.
__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
  uint32_t result;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(result)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return result;
}

// ---- wgmma ----

// d[64 x N] (+)= a[64 x 32] * b[N x 32]^T, u8 in registers times s8.
template <int N>
__device__ __forceinline__ void wgmma_u8s8(int32_t (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int use_d) {
  static_assert(N == 48 || N == 64 || N == 80 || N == 96 || N == 128);
  if constexpr (N == 48) TRT_WGMMA_RS("m64n48k32.s32.u8.s8", "+r", 24, "%24", "%25", "%26", "%27", "%28", "%29", "");
  if constexpr (N == 64) TRT_WGMMA_RS("m64n64k32.s32.u8.s8", "+r", 32, "%32", "%33", "%34", "%35", "%36", "%37", "");
  if constexpr (N == 80) TRT_WGMMA_RS("m64n80k32.s32.u8.s8", "+r", 40, "%40", "%41", "%42", "%43", "%44", "%45", "");
  if constexpr (N == 96) TRT_WGMMA_RS("m64n96k32.s32.u8.s8", "+r", 48, "%48", "%49", "%50", "%51", "%52", "%53", "");
  if constexpr (N == 128) TRT_WGMMA_RS("m64n128k32.s32.u8.s8", "+r", 64, "%64", "%65", "%66", "%67", "%68", "%69", "");
}

// d[64 x N] += a[64 x 32] * b[N x 32]^T in FP8 (E4M3), A in registers. The tensor cores add with some 13 bits below the largest
// exponent of the sum, so long sums of one sign lose the last terms.
template <int N>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {
  constexpr int use_d = 1;
  static_assert(N == 56 || N == 72 || N == 88 || N == 104 || N == 136);
#define TRT_WGMMA_E4M3(N, R, A0, A1, A2, A3, DESC_B, PRED) \
  TRT_WGMMA_RS("m64n" #N "k32.f32.e4m3.e4m3", "+f", R, A0, A1, A2, A3, DESC_B, PRED, ", 1, 1")
  if constexpr (N == 56) TRT_WGMMA_E4M3(56, 28, "%28", "%29", "%30", "%31", "%32", "%33");
  if constexpr (N == 72) TRT_WGMMA_E4M3(72, 36, "%36", "%37", "%38", "%39", "%40", "%41");
  if constexpr (N == 88) TRT_WGMMA_E4M3(88, 44, "%44", "%45", "%46", "%47", "%48", "%49");
  if constexpr (N == 104) TRT_WGMMA_E4M3(104, 52, "%52", "%53", "%54", "%55", "%56", "%57");
  if constexpr (N == 136) TRT_WGMMA_E4M3(136, 68, "%68", "%69", "%70", "%71", "%72", "%73");
#undef TRT_WGMMA_E4M3
}

// clang-format off
#define TRT_WGMMA_PV(N, R, A0, A1, A2, A3, DESC_B, PRED)                                                          \
  if constexpr (kBf16) {                                                                                          \
    TRT_WGMMA_RS("m64n" #N "k16.f32.bf16.bf16", "+f", R, A0, A1, A2, A3, DESC_B, PRED, ", 1, 1, 1");              \
  } else {                                                                                                        \
    TRT_WGMMA_RS("m64n" #N "k16.f32.f16.f16", "+f", R, A0, A1, A2, A3, DESC_B, PRED, ", 1, 1, 1");                \
  }
// clang-format on

// d[64 x N] (+)= a[64 x 16] * b[16 x N] in 16 bits, A in registers, B with its columns contiguous (MN-major).
template <bool kBf16, int N>
__device__ __forceinline__ void wgmma_16bit_pv(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int use_d) {
  static_assert(N == 128 || (N <= 104 && N % 8 == 0));
  if constexpr (N == 48) { TRT_WGMMA_PV(48, 24, "%24", "%25", "%26", "%27", "%28", "%29") }
  if constexpr (N == 64) { TRT_WGMMA_PV(64, 32, "%32", "%33", "%34", "%35", "%36", "%37") }
  if constexpr (N == 80) { TRT_WGMMA_PV(80, 40, "%40", "%41", "%42", "%43", "%44", "%45") }
  if constexpr (N == 96) { TRT_WGMMA_PV(96, 48, "%48", "%49", "%50", "%51", "%52", "%53") }
  if constexpr (N == 128) { TRT_WGMMA_PV(128, 64, "%64", "%65", "%66", "%67", "%68", "%69") }
  if constexpr (N == 56) { TRT_WGMMA_PV(56, 28, "%28", "%29", "%30", "%31", "%32", "%33") }
  if constexpr (N == 72) { TRT_WGMMA_PV(72, 36, "%36", "%37", "%38", "%39", "%40", "%41") }
  if constexpr (N == 88) { TRT_WGMMA_PV(88, 44, "%44", "%45", "%46", "%47", "%48", "%49") }
  if constexpr (N == 104) { TRT_WGMMA_PV(104, 52, "%52", "%53", "%54", "%55", "%56", "%57") }
}

#undef TRT_WGMMA_PV

}  // namespace trtconvert::attention::sm90
