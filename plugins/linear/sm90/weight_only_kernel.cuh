// y = (x * weight^T) * weight_scale + bias of 16-bit rows and INT8 weights, and the epilogues.
//
// The product is computed transposed: weights are wgmma's first operand, which may come from registers, where a consumer converts
// them to 16 bits during the products of the previous stage. Weights are therefore read from memory as INT8, x unchanged, and y is
// transposed when it is written.
#pragma once

#include <cmath>
#include <type_traits>

#include "linear/grouped_tile.cuh"
#include "linear/sm90/boxes.cuh"
#include "linear/sm90/int8_launch.h"
#include "linear/sm90/ring.cuh"
#include "linear/widen.cuh"

namespace trtconvert::linear {

// A stage has kRows_ rows of x and kWeightOnlyColumns of the weight, half for each consumer. A consumer writes y in boxes of some rows by
// its columns, and waits until all but the last box are free.
template <int kRows_, bool kGeglu_>
struct WeightOnlyShape {
  static constexpr bool kGeglu = kGeglu_;
  static constexpr int kRows = kRows_;
  static constexpr int kOutColumns = kWeightOnlyColumns / (kGeglu ? 2 : 1);
  static constexpr int kConsumerColumns = kOutColumns / kConsumers;
  static constexpr int kDepth = kTileDepth;
  static constexpr int kWeightRowBytes = kTileDepth;
  static constexpr int kXBytes = kRows * kRowBytes;
  static constexpr int kStageBytes = kXBytes + kWeightOnlyColumns * kWeightRowBytes;
  static constexpr int kStepRows = weight_only_step_rows(kRows);
  static constexpr int kBoxes = kConsumerColumns / kStoreColumns;  // side by side
  static constexpr int kStepBoxBytes = kStepRows * kStoreColumns * 2;
  static constexpr int kStepBytes = kBoxes * kStepBoxBytes;
  static constexpr int kSteps = 2;  // steps of a consumer's output in shared memory
  static constexpr int kOutBytes = kConsumers * kSteps * kStepBytes;
  static constexpr int kScaleBytes = kRows * int(sizeof(float));
  static constexpr int kBarrierBytes = 256;
  static constexpr int kAlignment = 1024;  // of the swizzle
  static constexpr int kMostStages = 8;
  static constexpr int kRoom = (kSharedLimit - kAlignment - kOutBytes - kConsumers * kScaleBytes - kBarrierBytes) / kStageBytes;
  static constexpr int kStages = kRoom < kMostStages ? kRoom : kMostStages;
  static constexpr int kOut = kStages * kStageBytes;
  static constexpr int kScales = kOut + kOutBytes;
  static constexpr int kBarriers = kScales + kConsumers * kScaleBytes;
  static constexpr int kSharedBytes = kAlignment + kBarriers + kBarrierBytes;
  static constexpr int kReaders = kConsumers;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static_assert(kStageBytes % kAlignment == 0 && kStages >= 3 && kRows % kStepRows == 0);
};

template <typename S>
__device__ __forceinline__ Place place_of(const WeightOnlyParams& p, int tile) {
  const GroupedTile at(p, tile);
  return {at.row * S::kRows, at.column * S::kOutColumns};
}

__device__ __forceinline__ bool is_for_another(const WeightOnlyParams& p) { return p.row_scale && !signbit(p.row_scale[0]); }

// A consumer's weights of a stage in the layout of wgmma's first operand, 64 rows by 64 channels: a warp has 16 of the rows, in two
// halves of eight. With GEGLU the first half are rows of the value's layer, the second half those of the gate's, so that a thread has
// both.
template <bool kBf16, typename S>
__device__ __forceinline__ void load_weights(uint32_t weight, int consumer, uint32_t (&a)[kTileDepth / 16][4]) {
  const int warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32, quad = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = S::kGeglu ? half * S::kOutColumns + consumer * 32 + warp * 8 + lane / 4
                              : consumer * 64 + warp * 16 + half * 8 + lane / 4;
    const uint32_t of_row = weight + row * S::kWeightRowBytes;
#pragma unroll
    for (int step = 0; step < kTileDepth / 16; ++step) {
      const uint32_t chunk = of_row + (step ^ row / 2 % 4) * 16 + quad * 2;  // the 64-byte swizzle
#pragma unroll
      for (int part = 0; part < 2; ++part) a[step][2 * part + half] = widen_two<kBf16>(load_shared_u16(chunk + part * 8));
    }
  }
}

// Scales and rounds a consumer's sums, which are transposed, and writes them. `of_columns` are scales and biases of a thread's two columns,
// with GEGLU those of its column in both layers; scales of rows are in shared memory.
template <Finish kFinish, bool kBf16, typename S>
__device__ __forceinline__ void store_turned(const WeightOnlyParams& p, const Maps& maps, const Place& place, int consumer,
                                             const float (&sums)[S::kRows / 2], const float2 (&of_columns)[2], uint32_t out,
                                             uint32_t scales, int& next_step) {
  const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32, barrier = kOwnBarrier + consumer;
#pragma unroll
  for (int block = 0; block < S::kRows / S::kStepRows; ++block) {
    const uint32_t step = out + next_step * S::kStepBytes;
    next_step = next_step + 1 == S::kSteps ? 0 : next_step + 1;
    if (thread == 0) bulk_wait_read<S::kSteps - 1>();
    named_barrier_sync(barrier, kWarpgroup);
    // Sixteen rows of y at a time, with GEGLU 32: four matrices of 8 by 8 columns and rows, which are transposed.
    constexpr int kEights = S::kGeglu ? 4 : 2;
#pragma unroll
    for (int first = 0; first < S::kStepRows / 8; first += kEights) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < kEights; ++i) {
        const int eight = block * (S::kStepRows / 8) + first + i;
        const float2 row_scales = load_shared_float2(scales + (eight * 8 + lane % 4 * 2) * 4);
        float y[2][2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* const s = sums + 4 * eight + 2 * half;
          y[half][0] = fmaf(s[0], row_scales.x * of_columns[half].x, of_columns[half].y);
          y[half][1] = fmaf(s[1], row_scales.y * of_columns[half].x, of_columns[half].y);
        }
        if constexpr (S::kGeglu) {
          pairs[i] = pack<kBf16>(y[0][0] * gelu(y[1][0]), y[0][1] * gelu(y[1][1]));
        } else {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              float& of = y[half][j];
              if (kFinish == Finish::kGelu) of = gelu(of);
              if (kFinish == Finish::kGeluTanh) of = gelu_tanh(of);
              if constexpr (kFinish == Finish::kResidual) {
                const int row = place.row + eight * 8 + lane % 4 * 2 + j;
                const int column = place.column + consumer * 64 + warp * 16 + half * 8 + lane / 4;
                if (row < p.rows && column < p.columns)
                  of += widen<kBf16>(reinterpret_cast<const uint16_t*>(p.residual)[int64_t{row} * p.columns + column]).x;
              }
            }
            pairs[2 * i + half] = pack<kBf16>(y[half][0], y[half][1]);
          }
        }
      }
      // Matrix i has eight rows of y and eight columns: with GEGLU its i-th eight rows, else rows i / 2 and columns i % 2.
      const int matrix = lane / 8, row = (first + (S::kGeglu ? matrix : matrix / 2)) * 8 + lane % 8;
      const int chunk = S::kGeglu ? warp : 2 * warp + matrix % 2;  // of eight columns
      stmatrix_transposed(step + chunk / 4 * S::kStepBoxBytes + row * (kStoreColumns * 2) + (chunk % 4 ^ row / 2 % 4) * 16, pairs[0], pairs[1],
                          pairs[2], pairs[3]);
    }
    fence_async_proxy();
    named_barrier_sync(barrier, kWarpgroup);
    if (thread == 0) {
#pragma unroll
      for (int box = 0; box < S::kBoxes; ++box)
        tensor_store(&maps.y, {place.column + consumer * S::kConsumerColumns + box * kStoreColumns, place.row + block * S::kStepRows},
                     step + box * S::kStepBoxBytes);
      bulk_commit();
    }
  }
}

// Runs in one warpgroup.
template <bool kBf16, typename S>
__device__ __forceinline__ void consume_weight_only(const WeightOnlyParams& p, const Maps& maps, const Ring<S>& ring, int consumer) {
  constexpr int kSteps = kTileDepth / 16;
  const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32;
  const uint32_t out = ring.start + S::kOut + consumer * S::kSteps * S::kStepBytes;
  const uint32_t scales = ring.start + S::kScales + consumer * S::kScaleBytes;
  Cursor<S::kStages> at;
  int next_step = 0;
  const int tiles = p.row_tiles * p.column_tiles;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Place place = place_of<S>(p, tile);
    // Loaded before the products, needed behind them: scales and biases of both halves' columns, and the scale of each row.
    float2 of_columns[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int in_tile = S::kGeglu ? consumer * 32 + warp * 8 + lane / 4 : consumer * 64 + warp * 16 + half * 8 + lane / 4;
      const int column = place.column + in_tile, at_column = (S::kGeglu ? half * p.columns : 0) + column;
      of_columns[half] = {};
      if (column < p.columns) {
        of_columns[half].x = reinterpret_cast<const float*>(p.weight_scale)[at_column];
        if (p.bias) of_columns[half].y = reinterpret_cast<const float*>(p.bias)[at_column];
      }
    }
    float of_rows[(S::kRows + kWarpgroup - 1) / kWarpgroup];
#pragma unroll
    for (int i = 0; i < int(sizeof(of_rows) / sizeof(float)); ++i) {
      const int row = place.row + i * kWarpgroup + thread;
      of_rows[i] = p.row_scale && row < p.rows ? fabsf(p.row_scale[row]) : 1.f;
    }

    float sums[S::kRows / 2];
    uint32_t a[2][kSteps][4];
    int previous = 0;
    const auto stage = [&](int k, uint32_t (&now)[kSteps][4], uint32_t (&before)[kSteps][4]) {
      mbarrier_wait(ring.full(at.stage), at.parity);
      load_weights<kBf16, S>(ring.weight(at.stage), consumer, now);
      const uint64_t x = swizzled_descriptor(ring.x(at.stage), 0, 8 * kRowBytes);
      pin(sums);
      pin(now);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        wgmma_16bit_rs<kBf16>(sums, now[step], advance(x, step * 32), k > 0 || step > 0);
      wgmma_commit();
      if (k > 0) {
        wgmma_wait<1>();
        pin(sums);
        pin(before);
        ring.release(previous, thread);
      }
      previous = at.stage;
      at.advance();
    };
    for (int k = 0; k < p.depth_tiles; k += 2) {
      stage(k, a[0], a[1]);
      if (k + 1 < p.depth_tiles) stage(k + 1, a[1], a[0]);
    }
    wgmma_wait<0>();
    pin(sums);
    pin(a[0]);
    pin(a[1]);
    ring.release(previous, thread);

    // A barrier lies in between: all threads have read the last tile's values.
#pragma unroll
    for (int i = 0; i < int(sizeof(of_rows) / sizeof(float)); ++i)
      if (i * kWarpgroup + thread < S::kRows) store_shared(scales + (i * kWarpgroup + thread) * 4, of_rows[i]);
    const auto finish = [&](auto as) { store_turned<decltype(as)::value, kBf16, S>(p, maps, place, consumer, sums, of_columns, out, scales, next_step); };
    if constexpr (S::kGeglu) {
      finish(std::integral_constant<Finish, Finish::kPlain>());
    } else if (p.residual) {
      finish(std::integral_constant<Finish, Finish::kResidual>());
    } else if (p.activation == TRTCONVERT_GELU) {
      finish(std::integral_constant<Finish, Finish::kGelu>());
    } else if (p.activation == TRTCONVERT_GELU_TANH) {
      finish(std::integral_constant<Finish, Finish::kGeluTanh>());
    } else {
      finish(std::integral_constant<Finish, Finish::kPlain>());
    }
  }
  if (thread == 0) bulk_wait_read();
}

template <int kRows, bool kGeglu, bool kBf16>
__global__ void __launch_bounds__(kThreads, 1)
    weight_only_kernel(const __grid_constant__ WeightOnlyParams p, const __grid_constant__ Maps maps) {
  extern __shared__ uint8_t shared[];
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using S = WeightOnlyShape<kRows, kGeglu>;
  run_block<S>(p, maps, shared, [&](const Ring<S>& ring, int consumer) { consume_weight_only<kBf16, S>(p, maps, ring, consumer); });
#endif
}

}  // namespace trtconvert::linear
