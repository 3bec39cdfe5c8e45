#include "common/sm90/tensor_map.h"

#include <cuda_runtime_api.h>

namespace trtconvert::sm90 {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// Through the runtime, which has loaded the driver: the library links neither.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = {};
  constexpr unsigned kSinceCuda12 = 12000;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kSinceCuda12, cudaEnableDefault, &result) !=
          cudaSuccess ||
      result != cudaDriverEntryPointSuccess) {
    cudaGetLastError();  // not an error of the caller's
    return nullptr;
  }
  return reinterpret_cast<Encode>(function);
}

}  // namespace

bool describe_tensor(CUtensorMap& map, CUtensorMapDataType type, const void* data, int rank, const cuuint64_t* sizes,
                     const cuuint64_t* strides, const cuuint32_t* box, CUtensorMapSwizzle swizzle) {
  static const Encode encode = find_encode();
  if (!encode) return false;
  const auto described = [&] {
    constexpr cuuint32_t kSteps[] = {1, 1, 1, 1, 1};
    return encode(&map, type, cuuint32_t(rank), const_cast<void*>(data), sizes, strides, box, kSteps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  };
  if (described()) return true;
  // A thread that has only asked the runtime for its device has no context yet, without which the driver does not.
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess && described();
}

}  // namespace trtconvert::sm90
