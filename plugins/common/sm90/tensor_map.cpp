#include "common/sm90/tensor_map.h"

#include <cuda_runtime_api.h>

namespace trtconvert::sm90 {
namespace {

// The driver's function, through the runtime, which has loaded the driver: the library links neither.
template <typename Encode>
Encode find_encode(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = {};
  constexpr unsigned kSinceCuda12 = 12000;
  if (cudaGetDriverEntryPointByVersion(name, &function, kSinceCuda12, cudaEnableDefault, &result) != cudaSuccess ||
      result != cudaDriverEntryPointSuccess) {
    cudaGetLastError();  // not an error of the caller's
    return nullptr;
  }
  return reinterpret_cast<Encode>(function);
}

// A thread that has only asked the runtime for its device has no context yet, which the driver needs.
template <typename Described>
bool with_context(Described described) {
  if (described()) return true;
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess && described();
}

}  // namespace

bool describe_tensor(CUtensorMap& map, CUtensorMapDataType type, const void* data, int rank, const cuuint64_t* sizes,
                     const cuuint64_t* strides, const cuuint32_t* box, CUtensorMapSwizzle swizzle) {
  static const auto encode = find_encode<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  constexpr cuuint32_t kSteps[] = {1, 1, 1, 1, 1};
  return encode && with_context([&] {
           return encode(&map, type, cuuint32_t(rank), const_cast<void*>(data), sizes, strides, box, kSteps,
                         CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                         CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
         });
}

bool describe_windows(CUtensorMap& map, const void* data, const Windows& w, int pixels, int box_channels, CUtensorMapSwizzle swizzle) {
  static const auto encode = find_encode<decltype(&cuTensorMapEncodeIm2col)>("cuTensorMapEncodeIm2col");
  const cuuint64_t sizes[] = {cuuint64_t(w.channels), cuuint64_t(w.width), cuuint64_t(w.height), cuuint64_t(w.images)};
  const cuuint64_t strides[] = {sizes[0], sizes[0] * sizes[1], sizes[0] * sizes[1] * sizes[2]};
  // Range of a window's first pixel: from the image's corner, and beyond its last pixel.
  const int lower[] = {-w.pad_x, -w.pad_y}, upper[] = {w.pad_x - (w.kernel_w - 1), w.pad_y - (w.kernel_h - 1)};
  const cuuint32_t steps[] = {1, cuuint32_t(w.stride_x), cuuint32_t(w.stride_y), 1};
  return encode && with_context([&] {
           return encode(&map, kInt8Bytes, 4, const_cast<void*>(data), sizes, strides, lower, upper, cuuint32_t(box_channels),
                         cuuint32_t(pixels), steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                         CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
         });
}

}  // namespace trtconvert::sm90
