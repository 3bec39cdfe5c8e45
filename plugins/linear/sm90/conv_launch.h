// From the C API of INT8 convolutions to the kernel.
#pragma once

#include "linear/sm90/int8_launch.h"

namespace trtconvert::linear {

// Returns the instance with the least estimated time. `depth`: channels of a window, whole tiles for each pixel.
Int8Instance choose_int8_conv_instance(int64_t rows, int out_columns, int depth, bool bf16, int multiprocessors);

// Enqueues on `stream`. The boxes of x are windows; the boxes of the other tensors are those of the tile.
cudaError_t launch_int8_conv(const ConvParams& params, const Maps& maps, const Int8Instance& instance, int multiprocessors,
                             cudaStream_t stream);

}  // namespace trtconvert::linear
