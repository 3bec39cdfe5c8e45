// What a row's sums are scaled by, for all columns.
#pragma once

#include <cmath>
#include <cstdint>
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

constexpr int kWarpRows16 = 16;  // of y, whose results a warp has at a time: lane / 4 and 8 more

// Makes the scales of a lane's two rows NaN where they are of an image that the group norm in front has found not to be finite: it leaves
// codes of -128 then, also in the image's first pixel (group_norm.h). Called by a whole warp, whose first row is given.
__device__ __forceinline__ void mark_broken_images(const ConvShape& conv, int first_row, int rows, float (&scales)[2]) {
  const int lane = threadIdx.x % 32, pixels = conv.out_height * conv.out_width, vectors = conv.channels / 16;
  const int last_row = min(first_row + kWarpRows16, rows) - 1;
  if (last_row < first_row) return;
  const int last_image = last_row / pixels;
  for (int image = first_row / pixels; image <= last_image; ++image) {
    const auto* const pixel = reinterpret_cast<const uint4*>(conv.x + int64_t{image} * conv.height * conv.width * conv.channels);
    unsigned broken = 0;
#pragma unroll 4
    for (int i = lane; i < vectors; i += 32) {
      const uint4 codes = __ldg(pixel + i);
      broken |= __vcmpeq4(codes.x, 0x80808080) | __vcmpeq4(codes.y, 0x80808080) | __vcmpeq4(codes.z, 0x80808080) |
                __vcmpeq4(codes.w, 0x80808080);
    }
    if (!__any_sync(0xffffffffu, broken != 0)) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if ((first_row + half * 8 + lane / 4) / pixels == image) scales[half] = NAN;
  }
}

}  // namespace trtconvert::linear
