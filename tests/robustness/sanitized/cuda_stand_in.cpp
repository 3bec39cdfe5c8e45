#include "cuda_stand_in.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>

#include "trtconvert/graph_copies.h"

namespace trtconvert::calls {

StandIn stand_in;

namespace {

int node;  // its address is that of the one node of a graph
dim3 pushed_grid, pushed_block;
size_t pushed_bytes;
cudaStream_t pushed_stream;
cudaError_t last_error = cudaSuccess;

cudaError_t fail(cudaError_t error) { return error == cudaSuccess ? error : last_error = error; }

// As the driver: a grid and thread blocks within its limits, and arguments that can be read.
cudaError_t launch(void const* function, dim3 grid, dim3 block, void** arguments, size_t shared_bytes) {
  bool const fits = grid.x >= 1 && grid.x <= INT32_MAX && grid.y >= 1 && grid.y <= 65535 && grid.z >= 1 && grid.z <= 65535 &&
                    block.x >= 1 && block.x * block.y * block.z <= 1024 && shared_bytes <= 227 * 1024;
  if (!stand_in.has_device || !function || !fits) {
    ++stand_in.refused_launches;
    return fail(stand_in.has_device ? cudaErrorInvalidConfiguration : cudaErrorNoDevice);
  }
  volatile char const first = *static_cast<char const*>(arguments[0]);
  static_cast<void>(first);
  ++stand_in.launches;
  return cudaSuccess;
}

// cuTensorMapEncodeTiled, as far as the driver's documentation tells what it refuses.
CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, cuuint64_t const* sizes,
                cuuint64_t const* strides, cuuint32_t const* box, cuuint32_t const* steps, CUtensorMapInterleave, CUtensorMapSwizzle,
                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (!map || rank < 1 || rank > 5 || reinterpret_cast<uintptr_t>(address) % 16) return CUDA_ERROR_INVALID_VALUE;
  if (type > CU_TENSOR_MAP_DATA_TYPE_BFLOAT16) return CUDA_ERROR_INVALID_VALUE;
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (sizes[i] == 0 || sizes[i] > uint64_t{1} << 32 || box[i] == 0 || box[i] > 256 || steps[i] == 0 || steps[i] > 8)
      return CUDA_ERROR_INVALID_VALUE;
    if (i + 1 < rank && (strides[i] % 16 || strides[i] >= uint64_t{1} << 40)) return CUDA_ERROR_INVALID_VALUE;
  }
  std::memset(map, 0, sizeof(*map));
  return CUDA_SUCCESS;
}

// cuTensorMapEncodeIm2col likewise, of images of rank 4.
CUresult encode_windows(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, cuuint64_t const* sizes,
                        cuuint64_t const* strides, int const* lower, int const* upper, cuuint32_t channels, cuuint32_t pixels,
                        cuuint32_t const* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                        CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  if (rank != 4 || pixels == 0 || pixels > 1024) return CUDA_ERROR_INVALID_VALUE;
  for (int i = 0; i < 2; ++i)
    if (std::min(lower[i], upper[i]) < -128 || std::max(lower[i], upper[i]) > 127) return CUDA_ERROR_INVALID_VALUE;
  cuuint32_t const box[] = {channels, 1, 1, 1};
  return encode(map, type, rank, address, sizes, strides, box, steps, interleave, swizzle, promotion, fill);
}

}  // namespace
}  // namespace trtconvert::calls

using namespace trtconvert::calls;

extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, char const*, char*, char const*, int, uint3*, uint3*, dim3*, dim3*, int*) {}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t bytes, CUstream_st* stream) {
  pushed_grid = grid, pushed_block = block, pushed_bytes = bytes, pushed_stream = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* bytes, void* stream) {
  *grid = pushed_grid, *block = pushed_block, *bytes = pushed_bytes, *static_cast<cudaStream_t*>(stream) = pushed_stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, void const* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t bytes, cudaStream_t) {
  return launch(kernel, grid, block, arguments, bytes);
}
cudaError_t cudaLaunchKernelExC(cudaLaunchConfig_t const* config, void const* function, void** arguments) {
  return launch(function, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes);
}

// Of the copies alone, whose one argument is the whole node.
cudaError_t cudaLaunchKernel(void const* function, dim3 grid, dim3 block, void** arguments, size_t bytes, cudaStream_t) {
  TrtConvertCopyNode copied;
  std::memcpy(&copied, arguments[0], sizeof(copied));
  return launch(function, grid, block, arguments, bytes);
}
cudaError_t cudaGraphExecKernelNodeSetParams(cudaGraphExec_t, cudaGraphNode_t of, cudaKernelNodeParams const* params) {
  TrtConvertCopyNode copied;
  std::memcpy(&copied, params->kernelParams[0], sizeof(copied));
  return fail(reinterpret_cast<void*>(of) == &node ? cudaSuccess : cudaErrorInvalidValue);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  ++stand_in.launches;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = stand_in.is_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*,
                                     cudaGraphNode_t const** dependencies, cudaGraphEdgeData const**, size_t* count) {
  static auto const one = reinterpret_cast<cudaGraphNode_t>(&node);
  *status = cudaStreamCaptureStatusActive;
  *dependencies = &one;
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return fail(stand_in.has_device ? cudaSuccess : cudaErrorNoDevice);
}
cudaError_t cudaSetDevice(int) { return fail(stand_in.has_device ? cudaSuccess : cudaErrorNoDevice); }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      return *value = stand_in.major, cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      return *value = stand_in.minor, cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      return *value = stand_in.multiprocessors, cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return *value = 227 * 1024, cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return *value = 228 * 1024, cudaSuccess;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      return *value = 1024, cudaSuccess;
    default:
      return fail(cudaErrorInvalidValue);
  }
}
cudaError_t cudaFuncSetAttribute(void const*, cudaFuncAttribute, int value) {
  return fail(value >= 0 && value <= 227 * 1024 ? cudaSuccess : cudaErrorInvalidValue);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void const*) {
  *attributes = {};
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, void const*, cudaLaunchConfig_t const* config) {
  *clusters = stand_in.multiprocessors / static_cast<int>(config->gridDim.x);
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(char const* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  bool const windows = std::strcmp(name, "cuTensorMapEncodeIm2col") == 0;
  *function = windows ? reinterpret_cast<void*>(encode_windows) : reinterpret_cast<void*>(encode);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  cudaError_t const error = last_error;
  last_error = cudaSuccess;
  return error;
}
char const* cudaGetErrorName(cudaError_t) { return "cudaErrorStandIn"; }
char const* cudaGetErrorString(cudaError_t) { return "what a CUDA runtime would say"; }

}  // extern "C"
