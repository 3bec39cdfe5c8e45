// From the C API of INT8 layers to the kernel of few 16-bit rows, which every GPU has.
#pragma once

#include <cuda_runtime_api.h>

#include "trtconvert/int8_linear.h"

namespace trtconvert::linear {

constexpr int kFewRows = 16;  // those of one mma

struct FewRowsParams {
  const uint4* x;              // [rows, depth / 8] in 16 bits
  const float* row_scale;      // [rows], or null: the sign of the first tells whether rows are 16-bit
  const uint4* weight;         // [columns, depth / 16] in INT8 of each product, one behind the other
  const float* weight_scale;   // [columns] of each product
  const float* bias;           // likewise, or null
  const uint16_t* residual;    // [rows, columns], or null
  uint16_t* y[TRTCONVERT_MOST_PARTS];  // [rows, part_columns] each, one behind the other along the columns
  int part_columns;            // columns, unless y has several parts
  int rows, columns, depth;
  TrtConvertActivation activation;
};

// Enqueues on `stream`, early where the device can.
cudaError_t launch_few_rows(const FewRowsParams& params, bool bf16, int multiprocessors, bool early, cudaStream_t stream);

}  // namespace trtconvert::linear
