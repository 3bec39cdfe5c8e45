// Convolutions by the kernel of INT8 rows: a row of y is a pixel, and its depth the channels of each pixel of the window in turn.
//
// The copy engine finds the windows' pixels itself (im2col), with zeros outside of the image. The last channels of a pixel's tiles may be
// beyond the pixel: these are zeros too, so the weight's channels there, which belong to the next pixel, do not count.
#pragma once

#include "linear/sm90/conv_launch.h"
#include "linear/sm90/int8_kernel.cuh"

namespace trtconvert::linear {

// Its producer needs more registers than the producer of rows.
template <int kColumns, bool kAlternate>
struct ConvTile : Int8Shape<kColumns, false, kAlternate> {
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
};

// Runs in one thread.
template <typename S>
__device__ __forceinline__ void produce(const ConvParams& p, const Maps& maps, const Ring<S>& ring) {
  const ConvShape& conv = p.conv;
  Cursor<S::kStages> at;
  const int tiles = p.row_tiles * p.column_tiles, pixels = conv.out_height * conv.out_width;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Place place = place_of<S>(p, tile);
    const int image = place.row / pixels, pixel = place.row % pixels;
    const int y = pixel / conv.out_width * conv.stride_y - conv.pad_y, x = pixel % conv.out_width * conv.stride_x - conv.pad_x;
    int chunk = 0, right = 0, below = 0, depth = 0;  // depth: of the weight
    for (int k = 0; k < p.depth_tiles; ++k) {
      mbarrier_wait(ring.empty(at.stage), at.parity ^ 1);
      mbarrier_arrive_expect(ring.full(at.stage), S::kStageBytes);
      im2col_copy(ring.x(at.stage), &maps.x, {chunk * kRowBytes, x, y, image}, right, below, ring.full(at.stage));
      tensor_copy(ring.weight(at.stage), &maps.weight, {depth + chunk * kRowBytes, place.column}, ring.full(at.stage));
      at.advance();
      if (++chunk < conv.chunks) continue;
      chunk = 0;
      depth += conv.channels;
      if (++right < conv.kernel_width) continue;
      right = 0;
      ++below;
    }
  }
}

template <int kColumns, bool kAlternate, bool kBf16>
__global__ void __launch_bounds__(kThreads, 1)
    int8_conv_kernel(const __grid_constant__ ConvParams p, const __grid_constant__ Maps maps) {
  extern __shared__ uint8_t shared[];
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using S = ConvTile<kColumns, kAlternate>;
  multiply_tiles<S, ScaledEpilogue<kBf16, S, ConvParams>>(p, maps, shared);
#endif
}

}  // namespace trtconvert::linear
