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

// Makes the scales of a lane's rows NaN where they are of an image that the group norm in front has found not to be finite: it leaves
// codes of -128 then, also in the image's first pixel (group_norm.h). Called by a whole warp, which has 16 rows of each block of the
// kernel's: a lane those at lane / 4 and 8 behind.
//
// All images that the warp has rows of are looked at together, several loads at a time: one after another, they took as long as the
// products of small images.
template <int kBlocks>
__device__ __forceinline__ void mark_broken_images(const ConvShape& conv, int first_row, int block_rows, int rows,
                                                   float (&scales)[kBlocks][2]) {
  constexpr int kAtOnce = 4, kImages = 32;  // a bit for each image
  const int lane = threadIdx.x % 32, pixels = conv.out_height * conv.out_width, vectors = conv.channels / 16;
  const int last_row = min(first_row + (kBlocks - 1) * block_rows + 16, rows) - 1;
  if (last_row < first_row) return;
  const auto* const x = reinterpret_cast<const uint4*>(conv.x);
  const int64_t image_step = int64_t{conv.height} * conv.width * vectors;
  const int last_image = last_row / pixels;
  for (int first_image = first_row / pixels; first_image <= last_image; first_image += kImages) {
    const int count = min(last_image - first_image + 1, kImages) * vectors;
    unsigned broken = 0;
    for (int first = lane; first < count; first += 32 * kAtOnce) {
      uint4 codes[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = first + 32 * i, image = at / vectors;
        codes[i] = at < count ? x[(first_image + image) * image_step + at - image * vectors] : uint4{};
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const unsigned found = __vcmpeq4(codes[i].x, 0x80808080) | __vcmpeq4(codes[i].y, 0x80808080) |
                               __vcmpeq4(codes[i].z, 0x80808080) | __vcmpeq4(codes[i].w, 0x80808080);
        if (found) broken |= 1u << (first + 32 * i) / vectors;
      }
    }
    broken = __reduce_or_sync(0xffffffffu, broken);
    if (!broken) continue;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int image = (first_row + block * block_rows + half * 8 + lane / 4) / pixels - first_image;
        if (image >= 0 && image < kImages && broken >> image & 1) scales[block][half] = NAN;
      }
  }
}

}  // namespace trtconvert::linear
