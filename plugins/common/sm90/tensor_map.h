// Tensors as the copy engine of sm_90 reads and writes them.
#pragma once

#include <cuda.h>

namespace trtconvert::sm90 {

// Describes a tensor of 16-bit numbers, FP16 or BF16, in boxes: `sizes` and `box` in elements, the contiguous dimension first,
// `strides` in bytes, of the others. False where the driver cannot: strides of zero, say, or no driver.
bool describe_tensor(CUtensorMap& map, bool bf16, const void* data, int rank, const cuuint64_t* sizes, const cuuint64_t* strides,
                     const cuuint32_t* box, CUtensorMapSwizzle swizzle);

}  // namespace trtconvert::sm90
