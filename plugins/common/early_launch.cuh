// Kernels that start before the one in front of them ends (programmatic dependent launch, Hopper and later).
//
// In a network, the first microseconds of a kernel go to the launch, to instructions outside of every cache, and to tables in DRAM,
// one after another. An early launch hides this time behind the previous kernel. But the waiting thread blocks take room from the
// previous kernel, which slows down many kernels by more than the gain.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace trtconvert {

// Before this call the kernel may run beside the previous kernel of the stream: it must not write, nor read data that another kernel
// writes. Behind the call it must not read such data by `__ldg` either, because the compiler may move the load in front. After an
// ordinary launch the call does not wait.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on, in every thread block or behind its end, a kernel that starts early may start: its thread blocks take free room.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Launches a kernel that calls wait_for_previous_kernel(): early if the device and the compiled code allow it; in clusters of the given
// number of thread blocks.
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
