// From the C API of INT8 layers to the kernel.
#pragma once

#include "linear/int8_params.h"
#include "linear/sm90/launch.h"

namespace trtconvert::linear {

constexpr int kQuantisedColumns = 32;   // of the boxes of kBlockRows that write quantised rows, with the 32-byte swizzle
constexpr int kWeightOnlyColumns = 128;  // of a tile for 16-bit rows: rows of the weight; with two products, half for each

// The kernel's instances.
struct Int8Instance {
  int columns;     // of a tile: rows of the weight; with two products, half of the rows belong to each
  bool alternate;  // whether consumers alternate tiles; otherwise they share tiles
  bool geglu, bf16;

  int out_columns() const { return geglu ? columns / 2 : columns; }
};

// Rows of y that are written at once, of a tile for 16-bit rows.
constexpr int weight_only_step_rows(int rows) { return rows % 64 ? 32 : 64; }

// Instances of the kernel for 16-bit rows.
struct WeightOnlyInstance {
  int rows;  // of a tile: columns of wgmma
  bool geglu, bf16;

  int step_rows() const { return weight_only_step_rows(rows); }
  int out_columns() const { return kWeightOnlyColumns / (geglu ? 2 : 1); }
};

// Returns the instance with the least estimated time.
Int8Instance choose_int8_instance(int64_t rows, int out_columns, int depth, bool geglu, bool bf16, int multiprocessors);

// Enqueues on `stream`. The tensors' boxes are those of the tile; quantised rows are described in place of y.
cudaError_t launch_int8_linear(const Int8Params& params, const Maps& maps, const Int8Instance& instance, int multiprocessors,
                               cudaStream_t stream);

WeightOnlyInstance choose_weight_only_instance(int64_t rows, int out_columns, bool geglu, bool bf16, int multiprocessors);

// Boxes are kTileDepth channels deep, and those of y have step_rows(); the weight's have the 64-byte swizzle.
cudaError_t launch_weight_only(const WeightOnlyParams& params, const Maps& maps, const WeightOnlyInstance& instance, int multiprocessors,
                               cudaStream_t stream);

}  // namespace trtconvert::linear
