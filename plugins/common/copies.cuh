// Asynchronous copies from global to shared memory (cp.async, sm_80 and later).
#pragma once

#include <cstdint>

namespace trtconvert {

// 16 bytes, both addresses aligned to them. `s_target` is an address of shared memory.
__device__ __forceinline__ void copy_async(uint32_t s_target, const void* g_source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(s_target), "l"(g_source) : "memory");
}

// The same, or zeros if there is nothing to copy.
__device__ __forceinline__ void copy_async(uint32_t s_target, const void* g_source, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(s_target), "l"(g_source), "r"(exists ? 16 : 0) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the last `kPending` groups of this thread's copies are in flight. The thread may then read the others.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace trtconvert
