// Properties of the current device for the choice of kernels.
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

  // True if the device runs code for sm_90a, and the library has it.
  bool runs_sm90() const {
#ifdef TRTCONVERT_SM90
    return major == 9 && minor == 0;
#else
    return false;
#endif
  }

  // True if kernels may start early (early_launch.cuh).
  bool starts_early() const { return runs_hopper_code(); }

  // True if thread blocks of a cluster may read each other's shared memory.
  bool has_clusters() const { return runs_hopper_code(); }

 private:
  // True if the device has Hopper's features and runs code for its own generation: code for an older generation has none of the
  // features, whatever a driver compiles from it.
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
