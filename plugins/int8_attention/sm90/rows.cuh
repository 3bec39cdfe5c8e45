// Operations of both kinds of consumers on the rows of a tile.
//
// Registers are named after the accumulator layout of wgmma: thread t = lane % 4 of a quad holds, for its rows g = lane / 4
// and g + 8 of its warp's 16, the columns 8 c + 2 t and 8 c + 2 t + 1 of every group c of eight:
//   x[4 c + 0], x[4 c + 1]: row g        x[4 c + 2], x[4 c + 3]: row g + 8
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "sm90/shape.cuh"

namespace trtconvert::attention::sm90 {

// A thread's rows within its query block are first_row() and first_row() + 8.
__device__ __forceinline__ int first_row() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }

// Modes 1 to 4: S = Q8 K8^T for a tile (N 64) or half of one (32), added to S if S was initialised. `query` and `key` are the
// operands' descriptors.
template <int kDimQk, bool kStarted, int N>
__device__ __forceinline__ void issue_qk_int8(int32_t (&s)[N], uint64_t query, uint64_t key) {
#pragma unroll
  for (int k = 0; k < kDimQk / 32; ++k)
    wgmma_s8(s, advance(query, k * 2 * kQueryBlock * 16), advance(key, k * 2 * kKeyTile * 16), kStarted || k > 0);
  wgmma_commit();
}

// Both rows at once: each step waits for its shuffles, which the compiler would otherwise serialise.
__device__ __forceinline__ void quad_max(float (&x)[2]) {
  float other[2];
  shuffle_xor<1>(x, other);
  x[0] = fmaxf(x[0], other[0]);
  x[1] = fmaxf(x[1], other[1]);
  shuffle_xor<2>(x, other);
  x[0] = fmaxf(x[0], other[0]);
  x[1] = fmaxf(x[1], other[1]);
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Base-2 exponents of a thread's rows per unit of a stage's scores. `row_scales` are the rows' scales in shared memory, `ring` is
// the start of the ring.
template <typename S>
__device__ __forceinline__ void load_exponents(float (&c)[2], uint32_t row_scales, uint32_t ring, int stage) {
  c[0] = load_shared(row_scales), c[1] = load_shared(row_scales + 32);
  if constexpr (S::kInt8Qk) {
    const float k = load_shared(ring + S::tile_scales_at(stage) + uint32_t(offsetof(TileScales, k)));
    c[0] *= k;
    c[1] *= k;
  }
}

template <bool kBf16>
__device__ __forceinline__ uint32_t pack_16bit(float low, float high) {
  uint32_t result;
  if constexpr (kBf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  }
  return result;
}

// The running state of a thread's two rows. `reference` is the exponent (base 2) of O and the sum: the maximum of the tiles so far,
// except that small growth stays in the factors.
struct Rows {
  float reference[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.f, 0.f};
};

// Takes a tile's row maxima; rescales O and the sums if a maximum grew past the threshold.
template <int kChunks, int kHalf>
__device__ __forceinline__ void take_maxima(Rows& rows, const float (&maximum)[2], float (&o)[kChunks][kHalf]) {
  const bool grew = maximum[0] > rows.reference[0] + kRescaleThreshold || maximum[1] > rows.reference[1] + kRescaleThreshold;
  if (__builtin_expect(!__any_sync(0xffffffffu, grew), 1)) return;
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float reference = fmaxf(rows.reference[r], maximum[r]);
    factor[r] = rows.reference[r] == -INFINITY ? 0.f : exp2_approx(rows.reference[r] - reference);
    rows.reference[r] = reference;
    rows.sum[r] *= factor[r];
  }
#pragma unroll
  for (int n = 0; n < kChunks; ++n)
#pragma unroll
    for (int i = 0; i < kHalf; ++i) o[n][i] *= factor[i / 2 % 2];
}

// Column of a thread's accumulator i within its tile.
__device__ __forceinline__ int column_of(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

// Excludes the missing columns of a partial tile from the maxima.
__device__ __forceinline__ float lowest(float) { return -INFINITY; }
__device__ __forceinline__ int32_t lowest(int32_t) { return INT32_MIN; }
template <typename Score, int N>
__device__ __forceinline__ void hide_columns(Score (&x)[N], int columns) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (column_of(i) >= columns) x[i] = lowest(Score());
}

// Largest score of each row in this thread.
template <int N>
__device__ __forceinline__ void thread_maxima(const int32_t (&x)[N], float (&maximum)[2]) {
  int32_t partial[4] = {x[0], x[2], x[4], x[6]};  // two chains per row
#pragma unroll
  for (int i = 0; i < N; i += 2) partial[i / 2 % 4] = __vimax3_s32(partial[i / 2 % 4], x[i], x[i + 1]);
  // Sums are exact in FP32, and so is their order.
  maximum[0] = float(max(partial[0], partial[2]));
  maximum[1] = float(max(partial[1], partial[3]));
}

template <int N>
__device__ __forceinline__ void thread_maxima(const float (&x)[N], float (&maximum)[2]) {
  float partial[4] = {x[0], x[1], x[2], x[3]};  // two chains per row
#pragma unroll
  for (int i = 4; i < N; ++i) partial[i % 4] = fmaxf(partial[i % 4], x[i]);
  maximum[0] = fmaxf(partial[0], partial[1]);
  maximum[1] = fmaxf(partial[2], partial[3]);
}

// Modes 0, 1 and 4: true if a reference is so large that its rounding might move weights out of their range.
__device__ __forceinline__ bool too_coarse(const Rows& rows, float largest) {
  return fmaxf(fabsf(rows.reference[0]), fabsf(rows.reference[1])) > largest;
}

// Modes 0, 1 and 4: true if one of this thread's rows needs another reference: its maximum grew by more than 2^most, or the
// reference is too coarse. The scores are x c.
template <typename Score, int N>
__device__ __forceinline__ bool outgrows(const Rows& rows, const Score (&x)[N], const float (&c)[2], float most,
                                         float largest_reference) {
  float largest[2];
  thread_maxima(x, largest);
  bool result = too_coarse(rows, largest_reference);
#pragma unroll
  for (int r = 0; r < 2; ++r) result |= largest[r] * c[r] > rows.reference[r] + most;
  return result;
}

// Rescales a tile whose references are too coarse to its maxima: subtraction before multiplication is exact there. `peak` and
// `maximum` are those of x and of x c, `reference` is the reference of x c.
template <typename Score, int N>
__device__ __forceinline__ void subtract_maxima(Score (&x)[N], const float (&peak)[2], const float (&maximum)[2],
                                                float (&reference)[2]) {
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] -= Score(peak[i / 2 % 2]);
  reference[0] -= maximum[0];
  reference[1] -= maximum[1];
}

// Modes 0 and 1: takes the row maxima of a tile that outgrows(). `reference` becomes the reference of the tile's x c.
template <typename Score, int N, int kChunks, int kHalf>
__device__ __forceinline__ void settle_references(Rows& rows, Score (&x)[N], const float (&c)[2], float (&reference)[2],
                                                  float (&o)[kChunks][kHalf]) {
  float peak[2];
  thread_maxima(x, peak);
  quad_max(peak);
  const float maximum[2] = {peak[0] * c[0], peak[1] * c[1]};
  take_maxima(rows, maximum, o);
  reference[0] = rows.reference[0];
  reference[1] = rows.reference[1];
  if (__any_sync(0xffffffffu, too_coarse(rows, kLargestPlainReference))) subtract_maxima(x, peak, maximum, reference);
}

}  // namespace trtconvert::attention::sm90
