// Thin wrappers of sm_90a instructions. Names follow the PTX manual.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace trtconvert::sm90 {

// ---- Barriers in shared memory ----

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
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

// Waits until the phase of this parity is complete. The thread may sleep up to 10 ms at a time: without the hint it polls every
// hundred cycles, which takes issue slots and power from computing threads.
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

// True if that phase is complete, without waiting. The answer has a latency: ask early.
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

// Copies one box of a tensor of four dimensions, from the given coordinates on, to shared memory. Elements outside of the tensor
// are zero and count among the bytes. Completes on the barrier.
__device__ __forceinline__ void tensor_copy(uint32_t target, const CUtensorMap* map, const int (&at)[4], uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(target),
      "l"(map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(barrier)
      : "memory");
}

// The same of two dimensions.
__device__ __forceinline__ void tensor_copy(uint32_t target, const CUtensorMap* map, const int (&at)[2], uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(target),
      "l"(map), "r"(at[0]), "r"(at[1]), "r"(barrier)
      : "memory");
}

// Copies pixels of images [images, height, width, channels] at the positions of a convolution's window, starting at one window: its
// channel, x, y and image. The pixel that is copied lies `right` and `below` pixels away from the first pixel of each window.
__device__ __forceinline__ void im2col_copy(uint32_t target, const CUtensorMap* map, const int (&at)[4], int right, int below,
                                            uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6], "
      "{%7, %8};" ::"r"(target),
      "l"(map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(barrier), "h"(static_cast<uint16_t>(right)),
      "h"(static_cast<uint16_t>(below))
      : "memory");
}

// Copies one box from shared memory to a tensor of two dimensions, clipped at the tensor. Belongs to the thread's open group.
__device__ __forceinline__ void tensor_store(const CUtensorMap* map, const int (&at)[2], uint32_t source) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(at[0]), "r"(at[1]),
               "r"(source)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until the stores of all groups of this thread, but for the last ones, have read what they store.
template <int kPending = 0>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Without the prefetch the first copy would wait for the tensor's description.
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Makes ordinary stores to shared memory visible to wgmma and the copy engine; a barrier has to follow.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- Registers, named barriers ----

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

// Read once: otherwise the compiler reads the thread index again whenever registers are short, and waits for it.
__device__ __forceinline__ int lane_id() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

__device__ __forceinline__ float4 load_shared_float4(uint32_t address) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ void store_shared(uint32_t address, float4 x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}

__device__ __forceinline__ float2 load_shared_float2(uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ uint16_t load_shared_u16(uint32_t address) {
  uint16_t x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ void store_shared(uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, uint16_t x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(x) : "memory");
}

// Four matrices of 8 rows of 16 bytes to shared memory: lane 8 i + r gives the address of row r of matrix i.
__device__ __forceinline__ void stmatrix(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// The same of the transposed matrices: the row at a lane's address is a column of them.
__device__ __forceinline__ void stmatrix_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// ---- wgmma ----

// Shared-memory operand without swizzle. A core matrix is 8 rows of 16 contiguous bytes (128 bytes).
// K-major: `leading` bytes between core matrices along the depth, `stride` between groups of 8 rows.
// MN-major: `leading` bytes between groups of 8 along the depth, `stride` between chunks of 8 columns.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32;
}

// The same with the 128-byte swizzle; groups of 8 rows of 128 bytes are aligned to 1024 bytes. MN-major, rows of 64 16-bit elements
// along the columns: `leading` bytes between blocks of 64 columns, `stride` between groups of 8 along the depth. K-major, rows along
// the depth: `stride` bytes between groups of 8 rows; `leading` is not read.
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

// Keeps the compiler from moving uses of registers over a fence or a wait while a wgmma in flight reads or writes the registers.
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
#define TRT_NAMES_80 TRT_NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define TRT_NAMES_96 TRT_NAMES_80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define TRT_NAMES_128 TRT_NAMES_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
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
#define TRT_REGS_80(C, d) TRT_REGS_64(C, d), TRT_REGS_8(C, d, 64), TRT_REGS_8(C, d, 72)
#define TRT_REGS_96(C, d) TRT_REGS_80(C, d), TRT_REGS_8(C, d, 80), TRT_REGS_8(C, d, 88)
#define TRT_REGS_128(C, d) \
  TRT_REGS_96(C, d), TRT_REGS_8(C, d, 96), TRT_REGS_8(C, d, 104), TRT_REGS_8(C, d, 112), TRT_REGS_8(C, d, 120)

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

// d[64 x 2 R] (+)= a[64 x 16] * b[2 R x 16]^T in 16 bits, both with their depth contiguous (K-major).
template <bool kBf16, int R>
__device__ __forceinline__ void wgmma_16bit(float (&d)[R], uint64_t a, uint64_t b, int use_d) {
  static_assert(R == 32 || R == 48 || R == 64 || R == 80 || R == 96);
#define TRT_WGMMA_16BIT(N, R, DESC_A, DESC_B, PRED)                                                                 \
  if constexpr (kBf16) {                                                                                            \
    TRT_WGMMA_SS("m64n" #N "k16.f32.bf16.bf16", "+f", R, DESC_A, DESC_B, PRED, ", 1, 1, 0, 0");                     \
  } else {                                                                                                          \
    TRT_WGMMA_SS("m64n" #N "k16.f32.f16.f16", "+f", R, DESC_A, DESC_B, PRED, ", 1, 1, 0, 0");                       \
  }
  if constexpr (R == 32) { TRT_WGMMA_16BIT(64, 32, "%32", "%33", "%34") }
  if constexpr (R == 48) { TRT_WGMMA_16BIT(96, 48, "%48", "%49", "%50") }
  if constexpr (R == 64) { TRT_WGMMA_16BIT(128, 64, "%64", "%65", "%66") }
  if constexpr (R == 80) { TRT_WGMMA_16BIT(160, 80, "%80", "%81", "%82") }
  if constexpr (R == 96) { TRT_WGMMA_16BIT(192, 96, "%96", "%97", "%98") }
#undef TRT_WGMMA_16BIT
}

// The same with a in registers.
template <bool kBf16, int R>
__device__ __forceinline__ void wgmma_16bit_rs(float (&d)[R], const uint32_t (&a)[4], uint64_t b, int use_d) {
  static_assert(R == 32 || R == 64 || R == 80 || R == 96 || R == 128);
#define TRT_WGMMA_16BIT_RS(N, R, A0, A1, A2, A3, DESC_B, PRED)                                        \
  if constexpr (kBf16) {                                                                              \
    TRT_WGMMA_RS("m64n" #N "k16.f32.bf16.bf16", "+f", R, A0, A1, A2, A3, DESC_B, PRED, ", 1, 1, 0");  \
  } else {                                                                                            \
    TRT_WGMMA_RS("m64n" #N "k16.f32.f16.f16", "+f", R, A0, A1, A2, A3, DESC_B, PRED, ", 1, 1, 0");    \
  }
  if constexpr (R == 32) { TRT_WGMMA_16BIT_RS(64, 32, "%32", "%33", "%34", "%35", "%36", "%37") }
  if constexpr (R == 64) { TRT_WGMMA_16BIT_RS(128, 64, "%64", "%65", "%66", "%67", "%68", "%69") }
  if constexpr (R == 80) { TRT_WGMMA_16BIT_RS(160, 80, "%80", "%81", "%82", "%83", "%84", "%85") }
  if constexpr (R == 96) { TRT_WGMMA_16BIT_RS(192, 96, "%96", "%97", "%98", "%99", "%100", "%101") }
  if constexpr (R == 128) { TRT_WGMMA_16BIT_RS(256, 128, "%128", "%129", "%130", "%131", "%132", "%133") }
#undef TRT_WGMMA_16BIT_RS
}

// d[64 x 2 R] (+)= a[64 x 32] * b[2 R x 32]^T in s8, both with their depth contiguous.
template <int R>
__device__ __forceinline__ void wgmma_s8(int32_t (&d)[R], uint64_t a, uint64_t b, int use_d) {
  static_assert(R == 32 || R == 48 || R == 64 || R == 80 || R == 96 || R == 128);
  if constexpr (R == 32) TRT_WGMMA_SS("m64n64k32.s32.s8.s8", "+r", 32, "%32", "%33", "%34", "");
  if constexpr (R == 48) TRT_WGMMA_SS("m64n96k32.s32.s8.s8", "+r", 48, "%48", "%49", "%50", "");
  if constexpr (R == 64) TRT_WGMMA_SS("m64n128k32.s32.s8.s8", "+r", 64, "%64", "%65", "%66", "");
  if constexpr (R == 80) TRT_WGMMA_SS("m64n160k32.s32.s8.s8", "+r", 80, "%80", "%81", "%82", "");
  if constexpr (R == 96) TRT_WGMMA_SS("m64n192k32.s32.s8.s8", "+r", 96, "%96", "%97", "%98", "");
  if constexpr (R == 128) TRT_WGMMA_SS("m64n256k32.s32.s8.s8", "+r", 128, "%128", "%129", "%130", "");
}

}  // namespace trtconvert::sm90
