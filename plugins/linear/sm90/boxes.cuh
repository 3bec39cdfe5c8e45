// Results in 16 bits, in boxes in shared memory, from which the copy engine writes them.
#pragma once

#include "common/activation.cuh"
#include "common/sm90/ptx.cuh"
#include "linear/pairs.cuh"
#include "linear/sm90/launch.h"

namespace trtconvert::linear {

constexpr int kBoxBytes = kBlockRows * kStoreColumns * 2;  // of y

// Epilogue of scaled sums. Each variant has separate, contiguous code: a tile's epilogue runs once, for as long as its code takes to
// come from memory, and skipped code in between takes as long as executed code.
enum class Finish { kPlain, kGelu, kGeluTanh, kResidual, kChange, kQuantised };

// Address of a thread's share of 64 rows by 16 columns: each thread gives the address of a row of one of four matrices of 8 by 8.
struct MatrixRow {
  int matrix, row;
};

__device__ __forceinline__ MatrixRow matrix_row() {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const int matrix = lane / 8, row = warp * 16 + matrix % 2 * 8 + lane % 8;
  return {matrix, row};
}

// Writes sixteen columns of 64 rows of y, from a warpgroup's sums, to adjacent boxes of 32 columns: rows of 64 bytes with the
// 64-byte swizzle, so that eight rows of a chunk of 16 bytes are in eight different groups of banks.
__device__ __forceinline__ void store_in_boxes(uint32_t boxes, int sixteen, MatrixRow at, const uint32_t (&pairs)[4]) {
  const int chunk = 2 * sixteen + at.matrix / 2;
  const uint32_t box = boxes + chunk / 4 * kBoxBytes;
  sm90::stmatrix(box + at.row * (kStoreColumns * 2) + (chunk % 4 ^ at.row / 2 % 4) * 16, pairs[0], pairs[1], pairs[2], pairs[3]);
}

}  // namespace trtconvert::linear
