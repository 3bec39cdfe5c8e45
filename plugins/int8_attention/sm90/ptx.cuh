// Thin wrappers of the sm_90a instructions that the kernel uses. Names follow the PTX manual.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "arithmetic.cuh"

namespace trtconvert::attention::sm90 {

// ---- Barriers in shared memory ----

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ float load_shared(uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

// Loaded here, and kept: the compiler must not compute it again where it is used.
__device__ __forceinline__ uint32_t keep_shared(uint32_t address) {
  uint32_t x;
  asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

// Barriers are given by their address in shared memory.

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of this parity is complete. The thread may sleep up to 10 ms at a time: without a hint it asks again every
// hundred cycles, which takes issue slots and power from those that compute.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, %2;\n"
      "@!done bra wait;\n"
      "}" ::"r"(barrier),
      "r"(parity), "r"(10000000)
      : "memory");
}

// Whether that phase is complete, without waiting. The answer takes a while: ask early.
__device__ __forceinline__ bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

// Contiguous copy from global to shared memory; 16-byte aligned, a multiple of 16 bytes. Completes on the barrier.
__device__ __forceinline__ void bulk_copy(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// One box of a tensor of four dimensions, from the given coordinates on, to shared memory; what lies outside the tensor is zero
// and counts among the bytes. Completes on the barrier.
__device__ __forceinline__ void tensor_copy(uint32_t target, const CUtensorMap* map, const int (&at)[4], uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(target),
      "l"(map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(barrier)
      : "memory");
}

// The first copy would wait for the tensor's description.
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Makes ordinary stores to shared memory visible to wgmma and the copy engine; a barrier has to follow.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- Launch order, registers, named barriers ----

template <int kRegisters>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Read once: the compiler would read the thread index again wherever it is short of registers, and wait for it.
__device__ __forceinline__ int lane_id() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// ---- Arithmetic ----

// What the lane with the number of this one xor kMask has in x, for two values side by side.
template <int kMask>
__device__ __forceinline__ void shuffle_xor(const float (&x)[2], float (&other)[2]) {
  asm volatile(
      "shfl.sync.bfly.b32 %0, %2, %4, 0x1f, 0xffffffff;\n"
      "shfl.sync.bfly.b32 %1, %3, %4, 0x1f, 0xffffffff;\n"
      : "=&f"(other[0]), "=f"(other[1])
      : "f"(x[0]), "f"(x[1]), "n"(kMask));
}

// rne(e) of four values in [0, 255] as the bytes of a word, the first lowest. A conversion to s32 whose result is packed at once
// is one instruction of the packing (F2IP.U8.F32), for two values; on its own it would take the exponential unit's pipe.
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

// Shared-memory operand without swizzle. A core matrix is 8 rows of 16 contiguous bytes (128 bytes).
// K-major: `leading` bytes between core matrices along the depth, `stride` between groups of 8 rows.
// MN-major: `leading` bytes between groups of 8 along the depth, `stride` between chunks of 8 columns.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32;
}

// The same with the 128-byte swizzle, MN-major: rows of 64 16-bit elements along the columns. `leading` bytes between blocks of
// 64 columns, `stride` between groups of 8 along the depth. Groups are aligned to 1024 bytes.
__device__ __forceinline__ uint64_t swizzled_descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  return matrix_descriptor(address, leading, stride) | uint64_t(1) << 62;
}

// A descriptor whose start is `bytes` further on; sums stay within the address field.
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, int bytes) { return descriptor + (bytes >> 4); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Registers that a wgmma in flight reads or writes: keeps the compiler from moving their uses over a fence or a wait.
template <int N>
__device__ __forceinline__ void pin(int32_t (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(x[i])::"memory");
}
template <int N>
__device__ __forceinline__ void pin(uint32_t (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(x[i])::"memory");
}
template <int N>
__device__ __forceinline__ void pin(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

template <typename T, int M, int N>
__device__ __forceinline__ void pin(T (&x)[M][N]) {
#pragma unroll
  for (int i = 0; i < M; ++i) pin(x[i]);
}

// clang-format off
#define TRT_NAMES_24 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23"
#define TRT_NAMES_28 TRT_NAMES_24 ",%24,%25,%26,%27"
#define TRT_NAMES_32 TRT_NAMES_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define TRT_NAMES_36 TRT_NAMES_32 ",%32,%33,%34,%35"
#define TRT_NAMES_40 TRT_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define TRT_NAMES_44 TRT_NAMES_40 ",%40,%41,%42,%43"
#define TRT_NAMES_48 TRT_NAMES_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define TRT_NAMES_52 TRT_NAMES_48 ",%48,%49,%50,%51"
#define TRT_NAMES_64 TRT_NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define TRT_NAMES_68 TRT_NAMES_64 ",%64,%65,%66,%67"
#define TRT_REGS_4(C, d, i) C(d[i]), C(d[i + 1]), C(d[i + 2]), C(d[i + 3])
#define TRT_REGS_8(C, d, i) \
  C(d[i]), C(d[i + 1]), C(d[i + 2]), C(d[i + 3]), C(d[i + 4]), C(d[i + 5]), C(d[i + 6]), C(d[i + 7])
#define TRT_REGS_24(C, d) TRT_REGS_8(C, d, 0), TRT_REGS_8(C, d, 8), TRT_REGS_8(C, d, 16)
#define TRT_REGS_28(C, d) TRT_REGS_24(C, d), TRT_REGS_4(C, d, 24)
#define TRT_REGS_32(C, d) TRT_REGS_24(C, d), TRT_REGS_8(C, d, 24)
#define TRT_REGS_36(C, d) TRT_REGS_32(C, d), TRT_REGS_4(C, d, 32)
#define TRT_REGS_40(C, d) TRT_REGS_32(C, d), TRT_REGS_8(C, d, 32)
#define TRT_REGS_44(C, d) TRT_REGS_40(C, d), TRT_REGS_4(C, d, 40)
#define TRT_REGS_48(C, d) TRT_REGS_40(C, d), TRT_REGS_8(C, d, 40)
#define TRT_REGS_52(C, d) TRT_REGS_48(C, d), TRT_REGS_4(C, d, 48)
#define TRT_REGS_64(C, d) TRT_REGS_48(C, d), TRT_REGS_8(C, d, 48), TRT_REGS_8(C, d, 56)
#define TRT_REGS_68(C, d) TRT_REGS_64(C, d), TRT_REGS_4(C, d, 64)

// Accumulators of R registers; both operands in shared memory, or A in registers. `use_d` 0 starts from zero.
#define TRT_WGMMA_SS(OP, C, R, DESC_A, DESC_B, PRED, TAIL)                                     \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " PRED ", 0;\n"                               \
               "wgmma.mma_async.sync.aligned." OP " {" TRT_NAMES_##R "}, " DESC_A ", " DESC_B ", p" TAIL ";\n}" \
               : TRT_REGS_##R(C, d) : "l"(a), "l"(b), "r"(use_d))
#define TRT_WGMMA_RS(OP, C, R, A0, A1, A2, A3, DESC_B, PRED, TAIL)                             \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " PRED ", 0;\n"                               \
               "wgmma.mma_async.sync.aligned." OP " {" TRT_NAMES_##R "}, "                     \
               "{" A0 "," A1 "," A2 "," A3 "}, " DESC_B ", p" TAIL ";\n}"                      \
               : TRT_REGS_##R(C, d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(use_d))
// clang-format on

// d[64 x 128] or d[64 x 64] (+)= a[64 x 32] * b^T, s8.
__device__ __forceinline__ void wgmma_s8(int32_t (&d)[64], uint64_t a, uint64_t b, int use_d) {
  TRT_WGMMA_SS("m64n128k32.s32.s8.s8", "+r", 64, "%64", "%65", "%66", "");
}
__device__ __forceinline__ void wgmma_s8(int32_t (&d)[32], uint64_t a, uint64_t b, int use_d) {
  TRT_WGMMA_SS("m64n64k32.s32.s8.s8", "+r", 32, "%32", "%33", "%34", "");
}

// d[64 x 64] (+)= a[64 x 16] * b[64 x 16]^T in 16 bits.
template <bool kBf16>
__device__ __forceinline__ void wgmma_16bit(float (&d)[32], uint64_t a, uint64_t b, int use_d) {
  if constexpr (kBf16) {
    TRT_WGMMA_SS("m64n64k16.f32.bf16.bf16", "+f", 32, "%32", "%33", "%34", ", 1, 1, 0, 0");
  } else {
    TRT_WGMMA_SS("m64n64k16.f32.f16.f16", "+f", 32, "%32", "%33", "%34", ", 1, 1, 0, 0");
  }
}

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
// exponent of the sum, so that long sums of one sign lose what is added last.
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
#undef TRT_WGMMA_RS
#undef TRT_WGMMA_SS

}  // namespace trtconvert::attention::sm90
