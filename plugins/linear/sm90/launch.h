// Interface between the C API and the kernel.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace trtconvert::linear {

constexpr int kTileRows = 128;
constexpr int kBlockRows = 64;     // of a tile: those of one wgmma
constexpr int kRowBytes = 128;     // of x and weight at a time, as the swizzle requires
constexpr int kTileDepth = 64;     // 16-bit channels of these
constexpr int kStoreColumns = 32;  // of the boxes of kBlockRows that write y

struct Params {
  const void* bias;  // [columns] of each product, one behind the other, or null
  int columns;       // of y
  int row_tiles, column_tiles;
  int depth_tiles;
};

struct Maps {
  CUtensorMap x, weight, y;
};

// The kernel's instances.
struct Instance {
  int columns;     // of a tile: rows of the weight; with two products, half of the rows belong to each
  bool alternate;  // whether consumers alternate tiles; otherwise they share tiles
  bool geglu, bf16;

  int out_columns() const { return geglu ? columns / 2 : columns; }
};

// Returns the instance with the least estimated time.
Instance choose_instance(int64_t rows, int out_columns, int depth, bool geglu, bool bf16, int multiprocessors);

// Enqueues on `stream`. The tensors' boxes are those of the tile.
cudaError_t launch_linear(const Params& params, const Maps& maps, const Instance& instance, int multiprocessors, cudaStream_t stream);

}  // namespace trtconvert::linear
