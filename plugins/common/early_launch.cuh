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

// Launches a kernel that has wait_for_previous_kernel() in it: early, where the device and the compiled code can; in clusters of so many
// thread blocks.
template <typename... Expected, typename... Actual>
cudaError_t launch_clusters(void (*kernel)(Expected...), int cluster, dim3 grid, int threads, size_t shared_bytes, cudaStream_t stream,
                            bool early, Actual&&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  if (early) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, static_cast<Actual&&>(arguments)...);
}

template <typename... Expected, typename... Actual>
cudaError_t launch_kernel(void (*kernel)(Expected...), dim3 grid, int threads, size_t shared_bytes, cudaStream_t stream, bool early,
                          Actual&&... arguments) {
  return launch_clusters(kernel, 1, grid, threads, shared_bytes, stream, early, static_cast<Actual&&>(arguments)...);
}

}  // namespace trtconvert
