// Descriptions of tensors for the copy engine of sm_90.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace trtconvert::sm90 {

constexpr CUtensorMapDataType kInt8Bytes = CU_TENSOR_MAP_DATA_TYPE_UINT8;  // INT8 is copied unchanged, as bytes

constexpr CUtensorMapDataType float16_type(bool bf16) {
  return bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

// Describes a tensor in boxes: `sizes` and `box` in elements, the contiguous dimension first, `strides` in bytes of the other
// dimensions. Returns false if the driver cannot describe the tensor, for example strides of zero, or without a driver.
bool describe_tensor(CUtensorMap& map, CUtensorMapDataType type, const void* data, int rank, const cuuint64_t* sizes,
                     const cuuint64_t* strides, const cuuint32_t* box, CUtensorMapSwizzle swizzle);

// Describes INT8 images [images, height, width, channels] for a convolution's windows: `pixels` windows with this number of channels
// at once.
struct Windows {
  int images, height, width, channels;
  int kernel_h, kernel_w, stride_y, stride_x, pad_y, pad_x;
};
bool describe_windows(CUtensorMap& map, const void* data, const Windows& windows, int pixels, int box_channels, CUtensorMapSwizzle swizzle);

// A tensor of contiguous rows, as by describe_tensor.
inline bool describe_rows(CUtensorMap& map, CUtensorMapDataType type, const void* data, int64_t rows, int channels, int box_rows,
                          int box_channels, CUtensorMapSwizzle swizzle) {
  const int bytes = type == kInt8Bytes ? 1 : 2;
  const cuuint64_t sizes[] = {cuuint64_t(channels), cuuint64_t(rows)}, stride = bytes * cuuint64_t(channels);
  const cuuint32_t box[] = {cuuint32_t(box_channels), cuuint32_t(box_rows)};
  return describe_tensor(map, type, data, 2, sizes, &stride, box, swizzle);
}

}  // namespace trtconvert::sm90
