// From the C API of INT8 layers to the kernel that every GPU has.
#pragma once

#include "linear/int8_params.h"

namespace trtconvert::linear {

constexpr int kMmaRows = 128;     // of a tile, of x
constexpr int kMmaColumns = 128;  // rows of the weight; with two products, half of the rows belong to each
constexpr int kMmaDepth = 64;     // channels at a time

struct MmaParams : Int8Params {
  const uint8_t* x;       // [rows, depth], INT8 or 16-bit
  const uint8_t* weight;  // [columns, depth] of each product, one behind the other
  uint8_t* y;             // [rows, columns], 16-bit, or INT8 where rows are quantised
  int depth;
};

struct MmaConvParams : MmaParams {  // depth: of the weight
  ConvShape conv;
};

// For INT8 rows, or 16-bit rows; the scales of 16-bit rows may be null. Enqueues on `stream`, early where the device can.
cudaError_t launch_mma(const MmaParams& params, bool rows_16bit, bool bf16, bool early, cudaStream_t stream);

// Of a convolution's INT8 pixels.
cudaError_t launch_mma_conv(const MmaConvParams& params, bool bf16, bool early, cudaStream_t stream);

}  // namespace trtconvert::linear
