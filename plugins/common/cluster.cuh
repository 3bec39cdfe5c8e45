// Thread block clusters (Hopper and later): thread blocks exchange numbers through shared memory.
//
// Kernels with clusters are compiled for older GPUs too, and never launched there.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace trtconvert {

// Receives numbers from all thread blocks of the cluster, including this one. First every thread calls `open` with the number of
// expected bytes. All threads must be past `wait_for_others` before any thread calls `send`, and past `wait` before any thread
// reads. A cluster barrier in place of `wait` would also wait for all writes to memory. No thread block may end before all its
// bytes have arrived. A lone thread block writes to itself, and waits for its threads.
class ClusterMail {
 public:
  __device__ __forceinline__ ClusterMail(uint64_t* barrier, int blocks)
      : barrier_(static_cast<uint32_t>(__cvta_generic_to_shared(barrier))), is_alone_(blocks == 1) {}

  __device__ __forceinline__ void open(uint32_t bytes) const {
#if __CUDA_ARCH__ >= 900
    if (is_alone_) return;
    if (threadIdx.x == 0) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier_) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    // Bytes may arrive earlier: the barrier stays closed until this one arrival.
    if (threadIdx.x == 0)
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier_), "r"(bytes) : "memory");
#endif
  }

  __device__ __forceinline__ void wait_for_others() const {
#if __CUDA_ARCH__ >= 900
    if (is_alone_) return;
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
  }

  // `target` is the destination in the other thread block's shared memory, as an address of this thread block.
  __device__ __forceinline__ void send(float2* target, int block, float2 value) const {
#if __CUDA_ARCH__ >= 900
    if (is_alone_) {
      *target = value;
      return;
    }
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                     address_in(static_cast<uint32_t>(__cvta_generic_to_shared(target)), block)),
                 "f"(value.x), "f"(value.y), "r"(address_in(barrier_, block))
                 : "memory");
#endif
  }

  __device__ __forceinline__ void wait() const {
#if __CUDA_ARCH__ >= 900
    if (is_alone_) {
      __syncthreads();
      return;
    }
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "wait:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
        "@!done bra wait;\n"
        "}" ::"r"(barrier_)
        : "memory");
#endif
  }

 private:
  __device__ __forceinline__ static uint32_t address_in(uint32_t here, int block) {
    uint32_t there = here;
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(block));
#endif
    return there;
  }

  uint32_t barrier_;
  bool is_alone_;
};

}  // namespace trtconvert
