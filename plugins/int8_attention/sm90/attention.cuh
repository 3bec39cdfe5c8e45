// The attention kernel for sm_90a (Hopper): bulk copies into a ring of key tiles, wgmma for both products.
//
// A thread block takes two or three query blocks of 64 rows of one head, one consumer warpgroup each, and a producer
// warpgroup of which one thread feeds the ring. Nothing but the ring couples the consumers: while one is in its softmax, the
// others keep the tensor cores busy.
//
// Registers are named after the accumulator layout of wgmma: thread t = lane % 4 of a quad holds, for its rows g = lane / 4
// and g + 8 of its warp's 16, the columns 8 c + 2 t and 8 c + 2 t + 1 of every group c of eight:
//   x[4 c + 0], x[4 c + 1]: row g        x[4 c + 2], x[4 c + 3]: row g + 8
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <initializer_list>

#include "launch.h"
#include "sm90/ptx.cuh"

namespace trtconvert::attention::sm90 {

constexpr int kWarpgroup = 128;
constexpr int kSharedLimit = 227 * 1024;
constexpr int kBarrierBytes = 256;
constexpr int kMaxStages = 4;
constexpr float kLog2Of255 = 7.99435343685885f;
// Accumulators of QK^T start at the bits of this float, 1.5 * 2^23: as long as a sum stays within +-2^22 the accumulator
// read as a float is kMagic + sum, so no conversion is needed, and sums compare like their bits.
constexpr float kMagic = 12582912.f;
// Exponents are x * c - maximum * c with x near kMagic. Up to this c the rounding of maximum * c stays under 0.001.
constexpr float kLargestFastScale = 0x1p-10f;
constexpr float kLargestPlainMaximum = 0x1p13f;  // the same for mode 0, whose x are logits
constexpr float kRescaleThreshold = 8.f;         // O is rescaled when a maximum grows by more than 2^8: FP32 sums have the room

// One consumer's rows, in shared memory: registers are too dear for what a tile needs once.
struct RowScales {
  float scale[kQueryBlock];           // base-2 exponent per unit of S and of K's scale
  float largest[4], smallest[4];      // of the 16 rows of each warp
};

// Sizes that follow from the mode and the padded head dims.
template <int kMode, int kDimQk, int kDimPv>
struct Shape {
  static constexpr bool kInt8Qk = kMode >= 1, kInt8Pv = kMode >= 2;
  // Warpgroups that compute. Three hide each other's latencies best where S (64 registers a thread), O (kDimPv / 2) and what
  // the mode adds fit into 160 registers. The INT8 second product adds its integer sums, kDimPv / 2 more.
  static constexpr int kConsumers = kDimPv <= (kInt8Pv ? 80 : 128) ? 3 : 2;
  // Two consumers with room for a whole tile's integer sums promote them between the next tile's exponentials.
  static constexpr bool kPipelined = kInt8Pv && kConsumers == 2 && kDimPv <= 128;
  // Columns of one second product; O is the concatenation of these chunks.
  static constexpr int kChunk = kDimPv <= 96 || kPipelined ? kDimPv : kDimPv == 160 ? 80 : 64;
  static constexpr int kChunks = kDimPv / kChunk;
  // Mode 0 may take half tiles: the key tile is part of the numerics in the INT8 modes only.
  static constexpr int kKeys = kMode == 0 && kDimPv > 128 ? kHalfTile : kKeyTile;
  static constexpr int kQueryBytes = kQueryBlock * (kInt8Qk ? kDimQk : 2 * kDimPv);
  static constexpr int kKeyBytes = kKeys * (kInt8Qk ? kDimQk : 2 * kDimPv);
  static constexpr int kValueBytes = kKeys * (kInt8Pv ? kDimPv : 2 * kDimPv);
  // What the tile needs of TileScales: everything in mode 2, the last 16 bytes in modes 1 and 3.
  static constexpr int kScaleOffset = kMode == 2 ? 0 : offsetof(TileScales, log2_v_max);
  static constexpr int kScaleBytes = kMode == 0 ? 0 : int(sizeof(TileScales)) - kScaleOffset;
  static constexpr int kStageBytes = kKeyBytes + int(sizeof(TileScales)) + kValueBytes;
  static constexpr int kTableBytes = kInt8Pv ? 2 * kDimPv * int(sizeof(float)) : 0;  // v_scale and v_offset, per consumer
  static constexpr int kConsumerBytes = kQueryBytes + kTableBytes + int(sizeof(RowScales));
  static constexpr int kFit = (kSharedLimit - kBarrierBytes - kConsumers * kConsumerBytes) / kStageBytes;
  static constexpr int kStages = kFit < kMaxStages ? kFit : kMaxStages;
  static_assert(kStages >= 2);
  static constexpr int kSharedBytes = kBarrierBytes + kConsumers * kConsumerBytes + kStages * kStageBytes;
};

constexpr int largest(std::initializer_list<int> values) {
  int result = 0;
  for (int value : values) result = value > result ? value : result;
  return result;
}

template <int kDimQk, int kDimPv>
struct Config {
  // One producer warpgroup and room for the most consumers of any mode; where a mode uses fewer, the rest give their
  // registers away.
  static constexpr int kWarpgroups = 1 + Shape<1, kDimQk, kDimPv>::kConsumers;
  static constexpr int kThreads = kWarpgroups * kWarpgroup;
  static constexpr int kSharedBytes = largest({Shape<0, kDimQk, kDimPv>::kSharedBytes, Shape<1, kDimQk, kDimPv>::kSharedBytes,
                                               Shape<2, kDimQk, kDimPv>::kSharedBytes, Shape<3, kDimQk, kDimPv>::kSharedBytes});
};

struct Barriers {
  uint64_t query[4];
  uint64_t key_full[kMaxStages], key_empty[kMaxStages];
  uint64_t value_full[kMaxStages], value_empty[kMaxStages];
};
static_assert(sizeof(Barriers) <= kBarrierBytes);

// Position in the ring.
template <int kStages>
struct Cursor {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Where this thread block's tiles lie in the workspace.
struct Task {
  const uint8_t* q_images;  // of the first query block
  const uint8_t* k_images;
  const uint8_t* v_images;
  const TileScales* tile_scales;
  const float* row_scales;  // of the first query block
  int first_block, active;  // query blocks of this thread block
  int head, batch;
  ElementInfo element;
};

// One thread: feeds queries, then keys and values tile by tile.
template <int kMode, int kDimQk, int kDimPv>
__device__ void produce(const Params& p, const Task& task, uint8_t* shared) {
  using S = Shape<kMode, kDimQk, kDimPv>;
  Barriers& barriers = *reinterpret_cast<Barriers*>(shared);
  uint8_t* const queries = shared + kBarrierBytes;
  uint8_t* const ring = queries + S::kConsumers * S::kConsumerBytes;

  for (int w = 0; w < task.active; ++w) {
    mbarrier_arrive_expect(&barriers.query[w], S::kQueryBytes);
    bulk_copy(queries + w * S::kConsumerBytes, task.q_images + w * p.q_block_bytes, S::kQueryBytes, &barriers.query[w]);
  }
  const int steps = ceil_div(task.element.num_keys, S::kKeys);
  Cursor<S::kStages> at;
  for (int step = 0; step < steps; ++step) {
    uint8_t* const key = ring + at.stage * S::kStageBytes;
    uint8_t* const scales = key + S::kKeyBytes;
    uint8_t* const value = scales + sizeof(TileScales);
    // Half tiles: the two 16-bit images of a tile follow each other.
    constexpr int kParts = kKeyTile / S::kKeys;
    const int64_t tile = step / kParts;
    const int part = step % kParts;

    mbarrier_wait(&barriers.key_empty[at.stage], at.parity ^ 1);
    mbarrier_arrive_expect(&barriers.key_full[at.stage], S::kKeyBytes + S::kScaleBytes);
    bulk_copy(key, task.k_images + tile * p.k_tile_bytes + part * S::kKeyBytes, S::kKeyBytes,
              &barriers.key_full[at.stage]);
    if constexpr (S::kScaleBytes > 0)
      bulk_copy(scales + S::kScaleOffset, reinterpret_cast<const uint8_t*>(task.tile_scales + tile) + S::kScaleOffset,
                S::kScaleBytes, &barriers.key_full[at.stage]);

    mbarrier_wait(&barriers.value_empty[at.stage], at.parity ^ 1);
    mbarrier_arrive_expect(&barriers.value_full[at.stage], S::kValueBytes);
    bulk_copy(value, task.v_images + tile * p.v_tile_bytes + part * S::kValueBytes, S::kValueBytes,
              &barriers.value_full[at.stage]);
    at.advance();
  }
}

// Both rows at once: each step waits for a shuffle.
__device__ __forceinline__ void quad_max(float (&x)[2]) {
#pragma unroll
  for (int offset = 1; offset <= 2; offset *= 2) {
    const float other[2] = {__shfl_xor_sync(0xffffffffu, x[0], offset), __shfl_xor_sync(0xffffffffu, x[1], offset)};
    x[0] = fmaxf(x[0], other[0]);
    x[1] = fmaxf(x[1], other[1]);
  }
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
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

// The running state of a thread's two rows. `reference` is the exponent (base 2) that O and the sum are relative to: the
// maximum of the tiles so far, except that small growth is left in the factors.
struct Rows {
  float reference[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.f, 0.f};
};

// Takes a tile's row maxima; rescales O and the sums where a maximum grew past the threshold.
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

// -inf for the columns of a partial tile that do not exist.
template <int N>
__device__ __forceinline__ void mask_columns(float (&x)[N], int columns) {
  const int first = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (i / 4 * 8 + first + i % 2 >= columns) x[i] = -INFINITY;
}

template <int N>
__device__ __forceinline__ void row_maxima(const float (&x)[N], float (&maximum)[2]) {
  float partial[4] = {x[0], x[1], x[2], x[3]};  // two chains per row
#pragma unroll
  for (int i = 4; i < N; ++i) partial[i % 4] = fmaxf(partial[i % 4], x[i]);
  maximum[0] = fmaxf(partial[0], partial[1]);
  maximum[1] = fmaxf(partial[2], partial[3]);
  quad_max(maximum);
}

// The channel tables of this thread block's head, v_scale then v_offset, for store(). A barrier has to follow.
template <int kDimPv>
__device__ __forceinline__ void load_channel_tables(const Params& p, const Task& task, float* tables) {
  const int64_t row = (int64_t(task.element.bin) * p.kv_heads + task.head / p.group) * p.head_dim;
  for (int d = threadIdx.x % kWarpgroup; d < kDimPv; d += kWarpgroup) {
    tables[d] = d < p.head_dim ? p.v_scale[row + d] : 0.f;
    tables[kDimPv + d] = d < p.head_dim ? p.v_offset[row + d] : 0.f;
  }
}

// out = o / sum[row], with `tables` times v_scale plus v_offset, for the rows and columns that exist.
template <bool kBf16, int kChunks, int kHalf>
__device__ __forceinline__ void store(const Params& p, const Task& task, int block, const Rows& rows,
                                      const float (&o)[kChunks][kHalf], const float* tables) {
  constexpr int kDimPv = kChunks * kHalf * 2;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = quad_sum(rows.sum[r]);
    const int row = block * kQueryBlock + warp * 16 + lane / 4 + 8 * r;
    const bool empty = sum == 0.f;  // no visible key: zeros
    const float inverse = empty ? 0.f : 1.f / sum;
    uint16_t* const out = static_cast<uint16_t*>(p.out) + task.batch * p.out_strides.batch +
                          row * p.out_strides.token + task.head * p.out_strides.head;
    const int columns = row < p.num_queries ? p.head_dim : 0;
#pragma unroll
    for (int n = 0; n < kChunks; ++n)
#pragma unroll
      for (int c = 0; c < kHalf / 4; ++c) {
        const int column = n * kHalf * 2 + c * 8 + lane % 4 * 2;
        float low = o[n][4 * c + 2 * r] * inverse, high = o[n][4 * c + 2 * r + 1] * inverse;
        if (tables) {
          const float2 scale = *reinterpret_cast<const float2*>(tables + column);
          const float2 offset = *reinterpret_cast<const float2*>(tables + kDimPv + column);
          low = fmaf(low, scale.x, empty ? 0.f : offset.x);
          high = fmaf(high, scale.y, empty ? 0.f : offset.y);
        }
        if (column < columns) *reinterpret_cast<uint32_t*>(out + column) = pack_16bit<kBf16>(low, high);
      }
  }
}

// Modes 1 to 3: S += Q8 K8^T for the tile in `key`.
template <int kDimQk>
__device__ __forceinline__ void issue_qk_int8(int32_t (&s)[64], uint64_t query, uint32_t key) {
  const uint64_t b = matrix_descriptor(key, kKeyTile * 16, 128);
#pragma unroll
  for (int k = 0; k < kDimQk / 32; ++k)
    wgmma_s8(s, advance(query, k * 2 * kQueryBlock * 16), advance(b, k * 2 * kKeyTile * 16), 1);
  wgmma_commit();
}

// A thread's rows within its query block are first_row() and first_row() + 8.
__device__ __forceinline__ int first_row() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }

__device__ __forceinline__ void load_row_scales(RowScales& rows, const float* row_scales, int consumer) {
  const int row = first_row(), warp = threadIdx.x / 32 % 4;
  const float scale[2] = {row_scales[row], row_scales[row + 8]};
  float largest = fmaxf(scale[0], scale[1]), smallest = fminf(scale[0], scale[1]);
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    smallest = fminf(smallest, __shfl_xor_sync(0xffffffffu, smallest, offset));
  }
  if (threadIdx.x % 4 == 0) {
    rows.scale[row] = scale[0];
    rows.scale[row + 8] = scale[1];
  }
  if (threadIdx.x % 32 == 0) {
    rows.largest[warp] = largest;
    rows.smallest[warp] = smallest;
  }
  named_barrier_sync(1 + consumer, kWarpgroup);
}

// What a thread knows of a tile's scores before they are computed.
struct TileState {
  float c[2];                  // base-2 exponent per unit of S
  float inverse[2], start[2];  // accumulators start at log2_v * inverse + start
  float offset;                // base-2 exponent that the whole tile shares
  bool fast;                   // the scores are kMagic + S (+ the token's scale), ready to use; the same in a warp
};

template <int kDimQk>
__device__ __forceinline__ TileState prepare_tile(const TileScales& scales, const RowScales& rows, int row) {
  // Room beside |S| <= 127^2 D within 2^22. Rows of tiny scale against tiny tokens may not fit: the slow way serves them.
  constexpr float kRoom = float((1 << 22) - 127 * 127 * kDimQk - 64);
  const float4 tile = *reinterpret_cast<const float4*>(&scales.log2_v_max);  // max, min, k, 1 / k
  TileState state;
  state.offset = tile.x;
  // `start` below is kMagic plus the largest log2(sv) in units of S: beyond 2^22 of them kMagic would drown.
  const float smallest = rows.smallest[row / 16] * tile.z;
  state.fast = rows.largest[row / 16] * tile.z <= kLargestFastScale && tile.x - tile.y <= kRoom * smallest &&
               fabsf(tile.x) <= 0x1p22f * smallest;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float scale = rows.scale[row + 8 * r];
    state.c[r] = scale * tile.z;
    state.inverse[r] = state.fast ? reciprocal(scale) * tile.w : 0.f;
    state.start[r] = fmaf(-tile.x, state.inverse[r], kMagic);
  }
  return state;
}

// Modes 1 to 3: starts the accumulators of a tile at kMagic, in mode 2 plus log2(sv) in units of S, relative to the tile's
// largest: exp2(S c) then already carries the token's scale. `quad` is the lane's place among four.
template <int kMode>
__device__ __forceinline__ void start_scores(int32_t (&s)[64], const TileScales& scales, const TileState& state, int quad) {
#pragma unroll
  for (int g = 0; g < kKeyTile / 16; ++g) {
    // Modes 1 and 3 have no token scales; the same instruction with zeros leaves the busy integer units alone.
    float4 v = make_float4(state.offset, state.offset, state.offset, state.offset);
    if constexpr (kMode == 2) v = *reinterpret_cast<const float4*>(&scales.log2_v[16 * g + 4 * quad]);
    const float bias[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float start;
      asm volatile("fma.rn.f32 %0, %1, %2, %3;"
                   : "=f"(start)
                   : "f"(bias[i / 4 * 2 + i % 2]), "f"(state.inverse[i / 2 % 2]), "f"(state.start[i / 2 % 2]));
      s[8 * g + i] = __float_as_int(start);
    }
  }
}

// Row maxima of a tile: of S (with its token's scale) in `top`, and the x that stands for them in `peak`. The weight of an
// x, relative to the maximum, is exp2((x - peak) c).
struct Maxima {
  float top[2], peak[2];
};

template <int kMode>
__device__ __forceinline__ Maxima take_scores(float (&x)[64], const TileState& state, const TileScales& scales, int quad) {
  Maxima maxima;
  if (__builtin_expect(state.fast, 1)) {
    int32_t top[4] = {__float_as_int(x[0]), __float_as_int(x[2]), __float_as_int(x[4]), __float_as_int(x[6])};
#pragma unroll
    for (int i = 0; i < 64; i += 4) {
      const int chain = i / 2 % 4;
      top[chain] = __vimax3_s32(top[chain], __float_as_int(x[i]), __float_as_int(x[i + 1]));
      top[chain + 1] = __vimax3_s32(top[chain + 1], __float_as_int(x[i + 2]), __float_as_int(x[i + 3]));
    }
    maxima.peak[0] = __int_as_float(max(top[0], top[2]));
    maxima.peak[1] = __int_as_float(max(top[1], top[3]));
    quad_max(maxima.peak);
#pragma unroll
    for (int r = 0; r < 2; ++r) maxima.top[r] = maxima.peak[r] - kMagic;
  } else {
    if constexpr (kMode == 2) {
      const float* const bias = scales.log2_v + 4 * quad;
      const float inverse[2] = {1.f / state.c[0], 1.f / state.c[1]};
#pragma unroll
      for (int i = 0; i < 64; ++i)
        x[i] = fmaf(bias[i / 8 * 16 + i % 8 / 4 * 2 + i % 2] - state.offset, inverse[i / 2 % 2], x[i] - kMagic);
    } else {
#pragma unroll
      for (int i = 0; i < 64; ++i) x[i] -= kMagic;
    }
    row_maxima(x, maxima.top);
#pragma unroll
    for (int i = 0; i < 64; ++i) x[i] -= maxima.top[i / 2 % 2];  // exact for the maximum, however large c is
    maxima.peak[0] = maxima.peak[1] = 0.f;
  }
  return maxima;
}

// P = 255 exp(w - tile maximum) of a tile, the exponents being x * c + shift: the A operand of the second product in u8, and
// this thread's part of the row sums of the unrounded P (over sv in mode 2). Between the groups of 16 keys `meanwhile(group)`
// runs: the exponential unit takes 8 cycles per instruction, and a warp issues in order.
template <int kMode, typename Meanwhile>
__device__ __forceinline__ void weights(const float (&x)[64], const TileState& state, const float (&shift)[2],
                                        const TileScales& scales, int quad, uint32_t (&probability)[4][4],
                                        float (&sum)[2], const Meanwhile& meanwhile) {
  float partial[2][2] = {};
#pragma unroll
  for (int g = 0; g < kKeyTile / 16; ++g) {
    float inverse[4] = {1.f, 1.f, 1.f, 1.f};
    if constexpr (kMode == 2) {
      const float4 v = *reinterpret_cast<const float4*>(&scales.inverse_v[16 * g + 4 * quad]);
      inverse[0] = v.x, inverse[1] = v.y, inverse[2] = v.z, inverse[3] = v.w;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float e[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        e[i] = exp2_approx(fmaf(x[8 * g + i / 2 * 4 + 2 * r + i % 2], state.c[r], shift[r]));
        partial[r][i % 2] = kMode == 2 ? fmaf(e[i], inverse[i], partial[r][i % 2]) : partial[r][i % 2] + e[i];
      }
      probability[g / 2][g % 2 * 2 + r] = pack_u8(e[0], e[1], e[2], e[3]);
    }
    meanwhile(g);
  }
  sum[0] = partial[0][0] + partial[0][1];
  sum[1] = partial[1][0] + partial[1][1];
}

// Issues product = P V for the columns of one chunk; `value` is the chunk's first row of the transposed V image.
template <int kChunk, int kDimPv>
__device__ __forceinline__ void issue_pv_int8(int32_t (&product)[kChunk / 2], uint32_t (&probability)[4][4], uint32_t value) {
  const uint64_t b = matrix_descriptor(value, kDimPv * 16, 128);
  pin(product);
#pragma unroll
  for (int k = 0; k < 4; ++k) pin(probability[k]);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma_u8s8<kChunk>(product, probability[k], advance(b, k * 2 * kDimPv * 16), k > 0);
  wgmma_commit();
}

// Modes 2 and 3: u8 P times s8 V, in tiles of 128 keys whose integer sums are promoted with the tile's row factor.
template <int kMode, int kDimQk, int kDimPv>
__device__ void consume_int8(const Params& p, const Task& task, uint8_t* shared, int consumer) {
  using S = Shape<kMode, kDimQk, kDimPv>;
  constexpr int kStages = S::kStages;
  constexpr int kChunk = S::kChunk, kChunks = S::kChunks;
  Barriers& barriers = *reinterpret_cast<Barriers*>(shared);
  const uint32_t queries = shared_address(shared) + kBarrierBytes;
  uint8_t* const ring = shared + kBarrierBytes + S::kConsumers * S::kConsumerBytes;
  float* const tables = reinterpret_cast<float*>(shared + kBarrierBytes + consumer * S::kConsumerBytes + S::kQueryBytes);
  const uint64_t query = matrix_descriptor(queries + consumer * S::kConsumerBytes, kQueryBlock * 16, 128);
  const int lane = lane_id(), quad = lane % 4;
  const int row = first_row();
  RowScales& row_scales = *reinterpret_cast<RowScales*>(tables + 2 * kDimPv);
  load_channel_tables<kDimPv>(p, task, tables);
  load_row_scales(row_scales, task.row_scales + consumer * kQueryBlock, consumer);
  const int tiles = ceil_div(task.element.num_keys, kKeyTile);
  const int last_columns = task.element.num_keys - (tiles - 1) * kKeyTile;
  const int partial_tile = last_columns < kKeyTile ? tiles - 1 : -1;
  const auto scales_of = [&](int stage) -> const TileScales& {
    return *reinterpret_cast<const TileScales*>(ring + stage * S::kStageBytes + S::kKeyBytes);
  };
  const auto key_of = [&](int stage) { return shared_address(ring) + stage * S::kStageBytes; };
  const auto value_of = [&](int stage) { return key_of(stage) + S::kKeyBytes + int(sizeof(TileScales)); };

  Rows rows;
  float o[kChunks][kChunk / 2] = {};
  // Of the tile whose second product is under way: P, the integer sums, row maxima and sums, and the factors of the sums.
  uint32_t probability[4][4] = {};
  int32_t product[kChunk / 2];
  float maximum[2], sum[2], factor[2] = {0.f, 0.f};
  const auto take_tile = [&] {
    take_maxima(rows, maximum, o);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factor[r] = exp2_approx(maximum[r] - rows.reference[r]);
      rows.sum[r] = fmaf(sum[r], factor[r], rows.sum[r]);
    }
  };
  const auto promote = [&](int chunk, int first, int count) {
#pragma unroll
    for (int i = first; i < first + count; ++i)
      o[chunk][i] = fmaf(factor[i / 2 % 2], __int2float_rn(product[i]), o[chunk][i]);
  };

  Cursor<kStages> at, previous;
  bool key_ready = false;
  mbarrier_wait(&barriers.query[consumer], 0);
  for (int tile = 0; tile < tiles; ++tile) {
    const TileScales& scales = scales_of(at.stage);
    if (!key_ready) mbarrier_wait(&barriers.key_full[at.stage], at.parity);
    const TileState state = prepare_tile<kDimQk>(scales, row_scales, row);
    int32_t s[64];
    start_scores<kMode>(s, scales, state, quad);
    pin(s);
    wgmma_fence();
    issue_qk_int8<kDimQk>(s, query, key_of(at.stage));
    if constexpr (S::kPipelined)
      // The tile before: its second product runs behind this tile's first one and under this tile's maxima. Before the first
      // tile P is zero, and any V will do.
      issue_pv_int8<kChunk, kDimPv>(product, probability, value_of(previous.stage));
    // Asked now, needed later: an answer takes some fifty cycles.
    Cursor<kStages> next = at;
    next.advance();
    const bool value_ready = mbarrier_test(&barriers.value_full[at.stage], at.parity);
    key_ready = mbarrier_test(&barriers.key_full[next.stage], next.parity);
    if (S::kPipelined && tile > 0) take_tile();
    wgmma_wait<S::kPipelined ? 1 : 0>();
    pin(s);
    float x[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) x[i] = __int_as_float(s[i]);
    if (__builtin_expect(tile == partial_tile, 0)) mask_columns(x, last_columns);

    const Maxima maxima = take_scores<kMode>(x, state, scales, quad);
    float shift[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Rounded towards smaller P: 255 must not be exceeded. What the rounding takes is given back through the maximum.
      shift[r] = __fsub_rd(kLog2Of255, __fmul_ru(maxima.peak[r], state.c[r]));
      maximum[r] = fmaf(maxima.top[r], state.c[r], state.offset) +
                   (kLog2Of255 - fmaf(maxima.peak[r], state.c[r], shift[r]));
    }
    if constexpr (S::kPipelined) {
      wgmma_wait<0>();
      pin(product);
      weights<kMode>(x, state, shift, scales, quad, probability, sum,
                     [&](int g) { promote(0, g * kChunk / 16, kChunk / 16); });
    } else {
      weights<kMode>(x, state, shift, scales, quad, probability, sum, [](int) {});
    }
    if (!value_ready) mbarrier_wait(&barriers.value_full[at.stage], at.parity);
    if constexpr (!S::kPipelined) {
#pragma unroll
      for (int n = 0; n < kChunks; ++n) {
        issue_pv_int8<kChunk, kDimPv>(product, probability, value_of(at.stage) + n * kChunk * 16);
        if (n == 0) take_tile();
        wgmma_wait<0>();
        pin(product);
        promote(n, 0, kChunk / 2);
      }
    }
    __syncwarp();
    if (lane == 0) {
      mbarrier_arrive(&barriers.key_empty[at.stage]);
      if (!S::kPipelined || tile > 0) mbarrier_arrive(&barriers.value_empty[S::kPipelined ? previous.stage : at.stage]);
    }
    previous = at;
    at = next;
  }
  if constexpr (S::kPipelined) {
    issue_pv_int8<kChunk, kDimPv>(product, probability, value_of(previous.stage));
    if (tiles > 0) take_tile();
    wgmma_wait<0>();
    pin(product);
    promote(0, 0, kChunk / 2);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (isnan(row_scales.scale[row + 8 * r])) rows.sum[r] = row_scales.scale[row + 8 * r];
  const int block = task.first_block + consumer;
  if (p.bf16) {
    store<true>(p, task, block, rows, o, tables);
  } else {
    store<false>(p, task, block, rows, o, tables);
  }
}

// Modes 0 and 1: P and V in 16 bits, O in the tensor cores' FP32 accumulators.
template <int kMode, bool kBf16, int kDimQk, int kDimPv>
__device__ void consume_16bit(const Params& p, const Task& task, uint8_t* shared, int consumer) {
  using S = Shape<kMode, kDimQk, kDimPv>;
  constexpr int kStages = S::kStages;
  constexpr int kChunk = S::kChunk, kChunks = S::kChunks, kKeys = S::kKeys;
  constexpr int kRegisters = kKeys / 2;  // of S per thread
  Barriers& barriers = *reinterpret_cast<Barriers*>(shared);
  const uint32_t queries = shared_address(shared) + kBarrierBytes;
  uint8_t* const ring = shared + kBarrierBytes + S::kConsumers * S::kConsumerBytes;
  const uint64_t query = matrix_descriptor(queries + consumer * S::kConsumerBytes, kQueryBlock * 16, 128);
  const int lane = lane_id(), quad = lane % 4;
  const int row = first_row();
  RowScales& row_scales =
      *reinterpret_cast<RowScales*>(shared + kBarrierBytes + consumer * S::kConsumerBytes + S::kQueryBytes);
  load_row_scales(row_scales, task.row_scales + consumer * kQueryBlock, consumer);
  const int steps = ceil_div(task.element.num_keys, kKeys);
  const int last_columns = task.element.num_keys - (steps - 1) * kKeys;
  const int partial_step = last_columns < kKeys ? steps - 1 : -1;

  Rows rows;
  float o[kChunks][kChunk / 2] = {};
  Cursor<kStages> at;

  mbarrier_wait(&barriers.query[consumer], 0);
  for (int step = 0; step < steps; ++step) {
    uint8_t* const key = ring + at.stage * S::kStageBytes;
    mbarrier_wait(&barriers.key_full[at.stage], at.parity);
    float x[kRegisters];
    float c[2], maximum[2], peak[2];  // exponents are relative to x = peak, which stands for `maximum`
    bool value_ready;
    if constexpr (kMode == 0) {
#pragma unroll
      for (int half = 0; half < kKeys / kHalfTile; ++half) {
        const uint64_t b =
            matrix_descriptor(shared_address(key) + half * kHalfTile * 2 * kDimPv, kHalfTile * 16, 128);
        float(&part)[32] = *reinterpret_cast<float(*)[32]>(x + half * 32);
        pin(part);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDimPv / 16; ++k)
          wgmma_16bit<kBf16>(part, advance(query, k * 2 * kQueryBlock * 16), advance(b, k * 2 * kHalfTile * 16), k > 0);
      }
      wgmma_commit();
      value_ready = mbarrier_test(&barriers.value_full[at.stage], at.parity);
      wgmma_wait<0>();
      pin(x);
      if (__builtin_expect(step == partial_step, 0)) mask_columns(x, last_columns);
      row_maxima(x, peak);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        c[r] = row_scales.scale[row + 8 * r];
        maximum[r] = peak[r] * c[r];
      }
      // Logits so large that the rounding of their maximum shows: subtract before multiplying, which is exact where it counts.
      if (__any_sync(0xffffffffu, fmaxf(fabsf(maximum[0]), fabsf(maximum[1])) > kLargestPlainMaximum)) {
#pragma unroll
        for (int i = 0; i < kRegisters; ++i) x[i] -= peak[i / 2 % 2];
        peak[0] = peak[1] = 0.f;
      }
    } else {
      const TileScales& scales = *reinterpret_cast<const TileScales*>(key + S::kKeyBytes);
      const TileState state = prepare_tile<kDimQk>(scales, row_scales, row);
      int32_t s[64];
      start_scores<kMode>(s, scales, state, quad);
      pin(s);
      wgmma_fence();
      issue_qk_int8<kDimQk>(s, query, shared_address(key));
      value_ready = mbarrier_test(&barriers.value_full[at.stage], at.parity);
      wgmma_wait<0>();
      pin(s);
#pragma unroll
      for (int i = 0; i < 64; ++i) x[i] = __int_as_float(s[i]);
      if (__builtin_expect(step == partial_step, 0)) mask_columns(x, last_columns);
      const Maxima maxima = take_scores<kMode>(x, state, scales, quad);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        c[r] = state.c[r];
        peak[r] = maxima.peak[r];
        maximum[r] = maxima.top[r] * c[r];
      }
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&barriers.key_empty[at.stage]);
    take_maxima(rows, maximum, o);

    float shift[2], partial[2][2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) shift[r] = fmaf(-peak[r], c[r], maximum[r] - rows.reference[r]);
    uint32_t probability[kKeys / 16][4];
#pragma unroll
    for (int i = 0; i < kRegisters; i += 2) {
      const int r = i / 2 % 2;
      const float low = exp2_approx(fmaf(x[i], c[r], shift[r]));
      const float high = exp2_approx(fmaf(x[i + 1], c[r], shift[r]));
      partial[r][0] += low;
      partial[r][1] += high;
      probability[i / 8][i % 8 / 4 * 2 + r] = pack_16bit<kBf16>(low, high);
    }
    rows.sum[0] += partial[0][0] + partial[0][1];
    rows.sum[1] += partial[1][0] + partial[1][1];

    if (!value_ready) mbarrier_wait(&barriers.value_full[at.stage], at.parity);
    const uint32_t value = shared_address(key) + S::kKeyBytes + int(sizeof(TileScales));
#pragma unroll
    for (int n = 0; n < kChunks; ++n) pin(o[n]);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) pin(probability[k]);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < kChunks; ++n)
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k) {
        const uint32_t image = value + k / 4 * kHalfTile * 2 * kDimPv + n * kChunk / 8 * kHalfTile * 16 + k % 4 * 256;
        wgmma_16bit_pv<kBf16, kChunk>(o[n], probability[k], matrix_descriptor(image, 128, kHalfTile * 16), 1);
      }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < kChunks; ++n) pin(o[n]);
    if (lane == 0) mbarrier_arrive(&barriers.value_empty[at.stage]);
    at.advance();
  }
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (isnan(row_scales.scale[row + 8 * r])) rows.sum[r] = row_scales.scale[row + 8 * r];
  store<kBf16>(p, task, task.first_block + consumer, rows, o, nullptr);
}

// The thread block's work in one mode, which is the same for all its threads.
template <int kMode, bool kBf16, int kDimQk, int kDimPv>
__device__ __forceinline__ void attend(const Params& p, Task& task, uint8_t* shared, int warpgroup) {
  using S = Shape<kMode, kDimQk, kDimPv>;
  constexpr int kWarpgroups = Config<kDimQk, kDimPv>::kWarpgroups;
  constexpr int kIdle = kWarpgroups - 1 - S::kConsumers;
  // Per thread; 512 over the warpgroups are the 65536 of the multiprocessor.
  constexpr int kProducerRegisters = S::kConsumers == 3 ? 32 : 24;
  constexpr int kConsumerRegisters = S::kConsumers == 3 ? 160 : kIdle ? 232 : 240;

  // The grid suits the mode with the fewest consumers; what is too much for this one comes last.
  const int per_head = ceil_div(p.query_blocks, S::kConsumers);
  if (blockIdx.x >= unsigned(per_head) * p.heads) return;
  task.head = blockIdx.x / per_head;
  task.first_block = blockIdx.x % per_head * S::kConsumers;
  task.active = min(S::kConsumers, p.query_blocks - task.first_block);
  const int64_t q_block = (int64_t(task.batch) * p.heads + task.head) * p.query_blocks + task.first_block;
  task.q_images = p.q_images + q_block * p.q_block_bytes;
  task.row_scales = p.row_scales + q_block * kQueryBlock;
  const int64_t kv_tile = (int64_t(task.batch) * p.kv_heads + task.head / p.group) * p.key_tiles;
  task.k_images = p.k_images + kv_tile * p.k_tile_bytes;
  task.v_images = p.v_images + kv_tile * p.v_tile_bytes;
  task.tile_scales = p.tile_scales + kv_tile;

  Barriers& barriers = *reinterpret_cast<Barriers*>(shared);
  if (threadIdx.x == 0) {
    for (int w = 0; w < S::kConsumers; ++w) mbarrier_init(&barriers.query[w], 1);
    for (int s = 0; s < S::kStages; ++s) {
      mbarrier_init(&barriers.key_full[s], 1);
      mbarrier_init(&barriers.value_full[s], 1);
      mbarrier_init(&barriers.key_empty[s], task.active * 4);  // one arrival per warp
      mbarrier_init(&barriers.value_empty[s], task.active * 4);
    }
    fence_barrier_init();
  }
  __syncthreads();

  if (warpgroup == 0 || warpgroup > S::kConsumers) {
    lower_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce<kMode, kDimQk, kDimPv>(p, task, shared);
  } else {
    raise_registers<kConsumerRegisters>();
    const int consumer = warpgroup - 1;
    if (consumer >= task.active) return;
    if constexpr (kMode <= 1) {
      consume_16bit<kMode, kBf16, kDimQk, kDimPv>(p, task, shared, consumer);
    } else {
      consume_int8<kMode, kDimQk, kDimPv>(p, task, shared, consumer);
    }
  }
}

// Grid: (heads * query blocks / fewest consumers of any mode, batch), the queries of a head side by side.
template <int kDimQk, int kDimPv>
__global__ void __launch_bounds__(Config<kDimQk, kDimPv>::kThreads, 1) attention_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t shared[];
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  wait_for_previous_kernel();
  Task task;
  task.batch = blockIdx.y;
  task.element = p.elements[task.batch];
  // The same in every lane, and through the shuffle the compiler knows: wgmma wants provably uniform control flow.
  task.element.mode = __shfl_sync(0xffffffffu, task.element.mode, 0);
  task.element.num_keys = __shfl_sync(0xffffffffu, task.element.num_keys, 0);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  switch (task.element.mode) {
    case 0:
      p.bf16 ? attend<0, true, kDimQk, kDimPv>(p, task, shared, warpgroup)
             : attend<0, false, kDimQk, kDimPv>(p, task, shared, warpgroup);
      break;
    case 1:
      p.bf16 ? attend<1, true, kDimQk, kDimPv>(p, task, shared, warpgroup)
             : attend<1, false, kDimQk, kDimPv>(p, task, shared, warpgroup);
      break;
    case 2: attend<2, false, kDimQk, kDimPv>(p, task, shared, warpgroup); break;
    default: attend<3, false, kDimQk, kDimPv>(p, task, shared, warpgroup); break;
  }
#endif
}

template <int kDimQk, int kDimPv>
cudaError_t launch(const Params& p, cudaStream_t stream) {
  using C = Config<kDimQk, kDimPv>;
  constexpr int kSharedBytes = C::kSharedBytes;
  const auto kernel = attention_kernel<kDimQk, kDimPv>;
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes))
    return error;
  cudaLaunchAttribute beside_prepass = {};
  beside_prepass.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  beside_prepass.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  const int64_t blocks = int64_t(ceil_div(p.query_blocks, Shape<2, kDimQk, kDimPv>::kConsumers)) * p.heads;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  config.gridDim = dim3(static_cast<unsigned>(blocks), p.batch);
  config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  config.attrs = &beside_prepass;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace trtconvert::attention::sm90
