// What a choice of kernels needs to know of the current device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>

namespace trtconvert {

struct Device {
  int major = 0, minor = 0, multiprocessors = 0;

  cudaError_t read() {
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    return error;
  }

  // Whether the device runs what was compiled for sm_90a, and the library has it.
  bool runs_sm90() const {
#ifdef TRTCONVERT_SM90
    return major == 9 && minor == 0;
#else
    return false;
#endif
  }

  // Whether kernels may start early (early_launch.cuh).
  bool starts_early() const { return runs_hopper_code(); }

  // Whether thread blocks of a cluster may read each other's shared memory.
  bool has_clusters() const { return runs_hopper_code(); }

 private:
  // Whether the device has what came with Hopper, and runs what was compiled for its generation: code for an older one has nothing
  // of it, whatever a driver makes of it.
  bool runs_hopper_code() const {
    if (major < 9) return false;
    for (const char* arch = TRTCONVERT_ARCHITECTURES; arch; arch = std::strchr(arch, ',')) {
      arch += *arch == ',';
      if (std::atoi(arch) / 10 == major) return true;
    }
    return false;
  }
};

}  // namespace trtconvert
