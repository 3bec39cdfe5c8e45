// From the C API of INT8 layers to the kernels of whole tiles.
#pragma once

#include <cuda_runtime_api.h>

#include "trtconvert/int8_linear.h"

namespace trtconvert::linear {

struct Int8Params {
  const float* row_scale;      // [rows]
  const float2* weight_scale;  // [columns / 2] of each product, one behind the other
  const float2* bias;          // likewise, or null
  const uint32_t* residual;    // [rows, columns / 2], or null
  int rows, columns;           // of y
  int row_tiles;
  int column_tiles;
  int depth_tiles;
  int group_rows;              // row_tiles that are taken together, before the next ones
  TrtConvertActivation activation;
  bool may_be_16bit;           // the rows, which are then left to another kernel
  bool changes;                // rows are changes: the residual is added where the scale is positive, else the bias

  // Quantised rows in place of y, where there are row scales.
  TrtConvertModeTable out_table;
  const float2* out_factor;  // [columns / 2], or null
  const float2* out_offset;  // [columns / 2], or null
  float* out_row_scale;      // [rows]
  int out_sample_rows;
};

// For rows that are pixels of a convolution's results: the position and the scale of the input pixels.
struct ConvShape {
  int height, width, channels;  // of x
  int out_height, out_width;
  int kernel_width;
  int stride_y, stride_x, pad_y, pad_x;
  int chunks;  // depth tiles of a pixel's channels
  TrtConvertModeTable table;
  int sample_rows;     // of y
  const uint2* marks;  // [images, kMarkPairs]
};

struct ConvParams : Int8Params {
  ConvShape conv;
};

// 16-bit rows; their scales may be null.
struct WeightOnlyParams : Int8Params {};

}  // namespace trtconvert::linear
