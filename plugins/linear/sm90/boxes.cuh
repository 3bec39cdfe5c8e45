// What epilogues do with results before they are written: 16-bit numbers, boxes.
#pragma once

#include "common/activation.cuh"
#include "common/sm90/ptx.cuh"
#include "linear/pairs.cuh"
#include "linear/sm90/launch.h"

namespace trtconvert::linear {

constexpr int kBoxBytes = kBlockRows * kStoreColumns * 2;  // of y

// What becomes of scaled sums. Each has code of its own, one piece behind the other: a tile's is run once, as long as it takes to come
// from memory, and what lies between what is run takes as long as if it were run.
enum class Finish { kPlain, kGelu, kGeluTanh, kResidual, kChange, kQuantised };

// Where a thread's share of 64 rows by 16 columns goes: each thread gives the address of a row of one of four matrices of 8 by 8.
struct MatrixRow {
  int matrix, row;
};

__device__ __forceinline__ MatrixRow matrix_row() {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const int matrix = lane / 8, row = warp * 16 + matrix % 2 * 8 + lane % 8;
  return {matrix, row};
}

// Sixteen columns of 64 rows of y, from a warpgroup's sums, to boxes of 32 columns one behind the other: rows of 64 bytes with the
// 64-byte swizzle, so that eight rows of a chunk of 16 bytes lie in eight different groups of banks.
__device__ __forceinline__ void store_in_boxes(uint32_t boxes, int sixteen, MatrixRow at, const uint32_t (&pairs)[4]) {
  const int chunk = 2 * sixteen + at.matrix / 2;
  const uint32_t box = boxes + chunk / 4 * kBoxBytes;
  sm90::stmatrix(box + at.row * (kStoreColumns * 2) + (chunk % 4 ^ at.row / 2 % 4) * 16, pairs[0], pairs[1], pairs[2], pairs[3]);
}

}  // namespace trtconvert::linear
