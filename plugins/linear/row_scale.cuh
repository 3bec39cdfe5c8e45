// What a row's sums are scaled by, for all columns.
#pragma once

#include <type_traits>

#include "common/layer_modes.cuh"
#include "linear/int8_params.h"

namespace trtconvert::linear {

// Of rows that were quantised one by one.
template <typename P>
__device__ __forceinline__ float row_scale_of(const P& p, int row) {
  return fabsf(p.row_scale[row]);
}

// Of pixels of a convolution: the calibrated scale of the sample's timestep bin.
__device__ __forceinline__ float row_scale_of(const ConvShape& conv, int row) {
  const Sample sample = sample_of(conv.table, {TRTCONVERT_STATIC, true}, row / conv.sample_rows);
  return sample.usable ? sample.x_scale : NAN;
}
__device__ __forceinline__ float row_scale_of(const ConvParams& p, int row) { return row_scale_of(p.conv, row); }

}  // namespace trtconvert::linear
