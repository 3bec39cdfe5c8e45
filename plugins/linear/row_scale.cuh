// The scale of a row's sums, for all columns.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/layer_modes.cuh"
#include "linear/int8_params.h"

namespace trtconvert::linear {

// For rows that were quantised individually.
template <typename P>
__device__ __forceinline__ float row_scale_of(const P& p, int row) {
  return fabsf(p.row_scale[row]);
}

// The scale of a convolution's pixels: the calibrated scale of the sample's timestep bin. A thread keeps the scale of its last row's
// sample: the rows of a thread are nearly always of one sample, so that the chain of dependent loads runs once, and not for each row.
class SampleScale {
 public:
  __device__ __forceinline__ float of(const ConvShape& conv, int row) {
    const int number = row / conv.sample_rows;
    if (number != number_) {
      const Sample sample = sample_of(conv.table, {TRTCONVERT_STATIC, true}, number);
      number_ = number;
      scale_ = sample.usable ? sample.x_scale : NAN;
    }
    return scale_;
  }

 private:
  int number_ = -1;
  float scale_ = 0.f;
};

// Marks of the images of a lane's rows. Four lanes have the same rows, and each lane loads a quarter of the marks. Only `break_marked`
// uses the loaded marks, so that a kernel can multiply during the loads.
constexpr int kMarkPairs = TRTCONVERT_IMAGE_MARKS / sizeof(uint2);
static_assert(kMarkPairs == 4);
__device__ __forceinline__ uint2 marks_of(const ConvShape& conv, int row) {
  return conv.marks[row / (conv.out_height * conv.out_width) * kMarkPairs + threadIdx.x % kMarkPairs];
}

// Makes the scales of a lane's rows NaN where their images are marked. Called by a whole warp.
__device__ __forceinline__ void break_marked(const uint2 (&marks)[2], float (&scales)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t found = marks[half].x | marks[half].y;
    found |= __shfl_xor_sync(0xffffffffu, found, 1);
    found |= __shfl_xor_sync(0xffffffffu, found, 2);
    if (found) scales[half] = NAN;
  }
}

}  // namespace trtconvert::linear
