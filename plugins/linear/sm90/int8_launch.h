// From the C API of INT8 layers to the kernel.
#pragma once

#include "linear/sm90/launch.h"
#include "trtconvert/int8_linear.h"

namespace trtconvert::linear {

struct Int8Params {
  const float* row_scale;      // [rows]
  const float2* weight_scale;  // [columns / 2] of each product, one behind the other
  const float2* bias;          // likewise, or null
  const uint32_t* residual;    // [rows, columns / 2], or null
  int rows, columns;           // of y
  int row_tiles;               // of a cluster: kTileRows for each of its thread blocks
  int column_tiles;
  int depth_tiles;
  int group_rows;              // row_tiles that are taken together, before the next ones: what these read stays in the L2 cache
  TrtConvertActivation activation;
  bool may_be_16bit;           // the rows, which are then left to another kernel
};

// The kernel's instances.
struct Int8Instance {
  int columns;     // of a tile: rows of weight, half of them of each product where there are two
  bool alternate;  // whether its consumers do, or share tiles
  int cluster;     // thread blocks that share their tiles of the weight
  bool geglu, bf16;

  int out_columns() const { return geglu ? columns / 2 : columns; }
};

// The instance that takes least time.
Int8Instance choose_int8_instance(int64_t rows, int out_columns, int depth, bool geglu, bool bf16, int multiprocessors);

// Enqueues on `stream`. The tensors' boxes are those of the tile.
cudaError_t launch_int8_linear(const Int8Params& params, const Maps& maps, const Int8Instance& instance, int multiprocessors,
                               cudaStream_t stream);

}  // namespace trtconvert::linear
