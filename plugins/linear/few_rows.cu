// At most sixteen 16-bit rows times INT8 weights: modulations, embeddings of timesteps. The time goes to reading the weights once.
//
// A thread block has some rows of the weight; its warps share their depth: each takes every so many chunks of 64 channels. Weights go from
// memory to registers, 16 channels of a row to a thread, and mma.sync multiplies them there as 16-bit numbers. The order of channels in a
// sum is free, so a thread's 16 channels serve four instructions, with the same channels of x.
#include "linear/few_rows.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "common/activation.cuh"
#include "common/early_launch.cuh"
#include "common/mma.cuh"
#include "linear/widen.cuh"

namespace trtconvert::linear {
namespace {

constexpr int kWarps = 8;
constexpr int kChunk = 64;    // channels
constexpr int kColumns = 8;   // of one mma: rows of the weight
constexpr int kBlocks = 2;    // thread blocks that a multiprocessor has room for
template <int kHalves>
constexpr int kAhead = kHalves == 1 ? 3 : 2;  // chunks of a warp that are loaded together

// kTiles: of kColumns rows of the weight, half of them of each product with GEGLU. kHalves: of eight rows of x. The kernel is
// persistent and takes one set of columns after the other: the next loads are in flight while sums are combined.
template <bool kBf16, bool kGeglu, int kTiles, int kHalves>
__global__ void __launch_bounds__(kWarps * 32, kBlocks) few_rows_kernel(const __grid_constant__ FewRowsParams p) {
  using T = std::conditional_t<kBf16, __nv_bfloat16, __half>;
  constexpr int kOutTiles = kGeglu ? kTiles / 2 : kTiles, kOut = kOutTiles * kColumns;
  __shared__ float partial[kWarps][kTiles * kColumns][kFewRows];
  wait_for_previous_kernel();
  if (p.row_scale && !signbit(p.row_scale[0])) return;  // the rows are INT8, for another kernel
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int sets = (p.columns + kOut - 1) / kOut;
  constexpr int kChunks = kAhead<kHalves>, kAtOnce = kChunks * kWarps;
  const int rounds = ((p.depth + kChunk - 1) / kChunk + kAtOnce - 1) / kAtOnce;  // of kChunks chunks of each warp

  struct Chunk {
    uint4 weights[kTiles];  // 16 channels each
    uint4 x[kHalves][2];    // the same channels of this lane's rows
  };
  const auto load = [&](int set, int chunk, Chunk& loaded) {  // zeros beyond the depth
    const int sixteen = chunk * (kChunk / 16) + quad;
    const bool exists = sixteen * 16 < p.depth && set < sets;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int column = set * kOut + tile % kOutTiles * kColumns + group;
      const int64_t row = int64_t{tile / kOutTiles} * p.columns + column;
      loaded.weights[tile] = exists && column < p.columns ? __ldcs(p.weight + row * (p.depth / 16) + sixteen) : uint4{};
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int row = half * 8 + group;
      const uint4* const x = p.x + int64_t{row} * (p.depth / 8) + 2 * sixteen;
#pragma unroll
      for (int i = 0; i < 2; ++i) loaded.x[half][i] = exists && row < p.rows ? x[i] : uint4{};
    }
  };

  float sums[kTiles][4];
  const auto multiply_chunk = [&](const Chunk& chunk) {
    const auto word = [](const uint4& of, int i) { return i == 0 ? of.x : i == 1 ? of.y : i == 2 ? of.z : of.w; };
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t a[4] = {};
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        a[half] = word(chunk.x[half][step / 2], step % 2 * 2);
        a[2 + half] = word(chunk.x[half][step / 2], step % 2 * 2 + 1);
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint32_t bytes = word(chunk.weights[tile], step);
        multiply_16bit<T>(sums[tile], a, widen_two<kBf16>(bytes & 0xffff), widen_two<kBf16>(bytes >> 16));
      }
    }
  };

  Chunk loaded[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) load(blockIdx.x, warp + i * kWarps, loaded[i]);
  for (int set = blockIdx.x; set < sets; set += gridDim.x) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[tile][i] = 0.f;
    for (int round = 0; round < rounds; ++round) {
      const bool last = round + 1 == rounds;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const Chunk now = loaded[i];
        load(last ? set + int(gridDim.x) : set, warp + i * kWarps + (last ? 0 : (round + 1) * kAtOnce), loaded[i]);
        multiply_chunk(now);
      }
    }

    __syncthreads();  // all threads have read the sums of the previous set
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) partial[warp][tile * kColumns + quad * 2 + i % 2][i / 2 * 8 + group] = sums[tile][i];
    __syncthreads();
    const auto scaled = [&](int in_set, int product, int row) {  // of a column
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += partial[w][product * kOut + in_set][row];
      const int64_t column = int64_t{product} * p.columns + set * kOut + in_set;
      const float row_scale = p.row_scale ? fabsf(p.row_scale[row]) : 1.f;
      return fmaf(sum, row_scale * p.weight_scale[column], p.bias ? p.bias[column] : 0.f);
    };
    for (int at = threadIdx.x; at < kOut * p.rows; at += kWarps * 32) {
      const int in_set = at % kOut, row = at / kOut, column = set * kOut + in_set;
      if (column >= p.columns) continue;
      float y = scaled(in_set, 0, row);
      if constexpr (kGeglu) {
        y *= gelu(scaled(in_set, 1, row));
      } else {
        y = activated(p.activation, y);
        if (p.residual) y += static_cast<float>(reinterpret_cast<const T*>(p.residual)[int64_t{row} * p.columns + column]);
      }
      const int part = column / p.part_columns;
      reinterpret_cast<T*>(p.y[part])[int64_t{row} * p.part_columns + column - part * p.part_columns] = static_cast<T>(y);
    }
  }
}

template <bool kBf16, bool kGeglu, int kHalves>
cudaError_t launch(const FewRowsParams& p, int multiprocessors, bool early, cudaStream_t stream) {
  constexpr int kTiles = 2, kOut = kTiles * kColumns / (kGeglu ? 2 : 1);
  const int sets = (p.columns + kOut - 1) / kOut;
  const dim3 grid(static_cast<unsigned>(std::min(sets, kBlocks * multiprocessors)));
  return launch_kernel(few_rows_kernel<kBf16, kGeglu, kTiles, kHalves>, grid, kWarps * 32, 0, stream, early, p);
}

}  // namespace

cudaError_t launch_few_rows(const FewRowsParams& p, bool bf16, int multiprocessors, bool early, cudaStream_t stream) {
  const auto with = [&](auto is_bf16, auto geglu) {
    return p.rows <= 8 ? launch<is_bf16(), geglu(), 1>(p, multiprocessors, early, stream)
                       : launch<is_bf16(), geglu(), 2>(p, multiprocessors, early, stream);
  };
  using std::false_type, std::true_type;
  if (p.activation == TRTCONVERT_GEGLU) return bf16 ? with(true_type(), true_type()) : with(false_type(), true_type());
  return bf16 ? with(true_type(), false_type()) : with(false_type(), false_type());
}

}  // namespace trtconvert::linear
