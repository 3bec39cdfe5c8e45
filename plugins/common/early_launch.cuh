// Kernels that start before the one in front of them ends (programmatic dependent launch, Hopper and later).
//
// In a network a kernel's first microseconds go to being launched, to instructions that are not in any cache, and to tables that
// come from DRAM, one after another. Launched early it has that behind it when its inputs are there. But its thread blocks take room
// from those of the kernel in front, which many of them slow down by more than that.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace trtconvert {

// Until here the kernel may run beside the one before it in the stream: nothing may be written, and nothing read that another
// kernel writes. Not by `__ldg` behind it either, which the compiler may put in front. Launched in the ordinary way it does not wait.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on, in every thread block or behind its end, a kernel that starts early may: its thread blocks take the room that is left.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Launches a kernel that has wait_for_previous_kernel() in it: early, where the device and the compiled code can.
template <typename... Expected, typename... Actual>
cudaError_t launch_kernel(void (*kernel)(Expected...), dim3 grid, int threads, size_t shared_bytes, cudaStream_t stream, bool early,
                   Actual&&... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Actual&&>(arguments)...);
}

}  // namespace trtconvert
