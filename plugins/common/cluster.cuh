// Thread block clusters (Hopper and later): their barrier, and the shared memory of their other thread blocks.
//
// Kernels that need them are compiled for older GPUs too, and never launched there.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace trtconvert {

// Of all threads of a cluster. What was written before it is seen by those that have waited.
__device__ __forceinline__ void arrive_at_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// What another thread block of the cluster has where this one has `shared`.
__device__ __forceinline__ float2 load_from_block(const float2* shared, int block) {
  float2 value = {};
#if __CUDA_ARCH__ >= 900
  const auto here = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(block));
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(there) : "memory");
#endif
  return value;
}

}  // namespace trtconvert
