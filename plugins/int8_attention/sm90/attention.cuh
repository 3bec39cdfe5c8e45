// The attention kernel for sm_90a (Hopper): bulk copies into a ring of key tiles, wgmma for both products.
//
// A thread block takes two or three query blocks of 64 rows of one head, one consumer warpgroup each, and all or some of the
// keys (schedule.h). A producer warpgroup, of which one thread works, feeds the ring. The consumers take turns at the tensor
// cores, so that while one multiplies the others are in their softmax.
//
// Registers are named after the accumulator layout of wgmma: thread t = lane % 4 of a quad holds, for its rows g = lane / 4
// and g + 8 of its warp's 16, the columns 8 c + 2 t and 8 c + 2 t + 1 of every group c of eight:
//   x[4 c + 0], x[4 c + 1]: row g        x[4 c + 2], x[4 c + 3]: row g + 8
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <initializer_list>
#include <type_traits>

#include "launch.h"
#include "sm90/ptx.cuh"
#include "sm90/schedule.h"

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
  static constexpr bool kOneChunk = kDimPv <= 96 || kPipelined || (!kInt8Pv && kDimPv == 128);
  static constexpr int kChunk = kOneChunk ? kDimPv : kDimPv == 160 ? 80 : 64;
  static constexpr int kChunks = kDimPv / kChunk;
  // Mode 0 may take half tiles: the key tile is part of the numerics in the INT8 modes only.
  static constexpr int kKeys = kMode == 0 && kDimPv > 128 ? kHalfTile : kKeyTile;
  static constexpr int kQueryBytes = kQueryBlock * (kInt8Qk ? kDimQk : 2 * kDimPv);
  static constexpr int kKeyBytes = kKeys * (kInt8Qk ? kDimQk : 2 * kDimPv);
  static constexpr int kValueBytes = kKeys * (kInt8Pv ? kDimPv : 2 * kDimPv);
  // Eight more columns of V in 16 bits, the first of ones, the others zero: the row sums of P come out of the second product.
  // They lie behind the channels of each 64 keys, written once per stage, and survive the copies.
  static constexpr int kOnes = !kInt8Pv && kDimPv <= 96 ? 8 : 0;
  static constexpr int kValueRoom = kValueBytes + kKeys * 2 * kOnes;
  // What the tile needs of TileScales: everything in mode 2, the last 16 bytes in modes 1 and 3.
  static constexpr int kScaleOffset = kMode == 2 ? 0 : offsetof(TileScales, log2_v_max);
  static constexpr int kScaleBytes = kMode == 0 ? 0 : int(sizeof(TileScales)) - kScaleOffset;
  static constexpr int kStageBytes = kKeyBytes + int(sizeof(TileScales)) + kValueRoom;
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
  uint64_t query[kMaxConsumers];
  uint64_t key_full[kMaxStages], key_empty[kMaxStages];
  uint64_t value_full[kMaxStages], value_empty[kMaxStages];
};

static_assert(sizeof(Barriers) + kMaxConsumers * sizeof(int32_t) <= kBarrierBytes);

// Whether the consumer was the last to finish its part of a query block; after the barriers.
__device__ __forceinline__ int32_t& last_part(uint8_t* shared, int consumer) {
  return reinterpret_cast<int32_t*>(shared + sizeof(Barriers))[consumer];
}

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

// What a thread block works on.
struct Task {
  int head, first_block, active;  // query blocks first_block .. first_block + active - 1
  int first_step, steps;          // over the keys, in tiles of the mode; steps may be 0
  int num_keys;                   // keys beyond do not exist
  int divided;                    // which of the units that several thread blocks compute, or -1
  int part, parts;

  // Of this task's first query block and of its head's first key tile, in the workspace.
  __device__ __forceinline__ int64_t q_block(const Params& p) const {
    return (int64_t(blockIdx.y) * p.heads + head) * p.query_blocks + first_block;
  }
  __device__ __forceinline__ int64_t kv_tile(const Params& p) const {
    return (int64_t(blockIdx.y) * p.kv_heads + head / p.group) * p.key_tiles;
  }
};

// False for a thread block without a task: the grid suits the mode and the batch element with the most.
template <int kKeys, int kConsumers>
__device__ __forceinline__ bool find_task(const Params& p, const Schedule& schedule, Task& task) {
  const int whole = schedule.units - (blockIdx.y == p.batch - 1 ? schedule.divided : 0);
  int unit = blockIdx.x;
  task.divided = -1;
  task.part = 0;
  task.parts = 1;
  if (unit >= whole) {
    if (blockIdx.y != p.batch - 1 || unit >= schedule.thread_blocks()) return false;
    task.divided = (unit - whole) / schedule.parts;
    task.part = (unit - whole) % schedule.parts;
    task.parts = schedule.parts;
    unit = whole + task.divided;
  }
  if (unit < schedule.full_units) {
    task.head = unit / schedule.full;
    task.first_block = unit % schedule.full * kConsumers;
    task.active = kConsumers;
  } else {
    task.head = unit - schedule.full_units;
    task.first_block = schedule.full * kConsumers;
    task.active = schedule.rest;
  }
  // The same in every lane, and through the shuffle the compiler knows: wgmma wants provably uniform control flow.
  task.num_keys = __shfl_sync(0xffffffffu, p.elements[blockIdx.y].num_keys, 0);
  const int64_t all = ceil_div(task.num_keys, kKeys);
  task.first_step = int(all * task.part / task.parts);
  task.steps = int(all * (task.part + 1) / task.parts) - task.first_step;
  return true;
}

// One thread: feeds queries, then keys and values tile by tile.
template <int kMode, int kDimQk, int kDimPv>
__device__ void produce(const Params& p, const Task& task, uint8_t* shared) {
  using S = Shape<kMode, kDimQk, kDimPv>;
  Barriers& barriers = *reinterpret_cast<Barriers*>(shared);
  uint8_t* const queries = shared + kBarrierBytes;
  uint8_t* const ring = queries + S::kConsumers * S::kConsumerBytes;

  const uint8_t* const q_images = p.q_images + task.q_block(p) * p.q_block_bytes;
  for (int w = 0; w < task.active; ++w) {
    mbarrier_arrive_expect(&barriers.query[w], S::kQueryBytes);
    bulk_copy(queries + w * S::kConsumerBytes, q_images + w * p.q_block_bytes, S::kQueryBytes, &barriers.query[w]);
  }
  const int64_t kv_tile = task.kv_tile(p);
  Cursor<S::kStages> at;
  for (int step = task.first_step; step < task.first_step + task.steps; ++step) {
    uint8_t* const key = ring + at.stage * S::kStageBytes;
    uint8_t* const scales = key + S::kKeyBytes;
    uint8_t* const value = scales + sizeof(TileScales);
    // Half tiles: the two 16-bit images of a tile follow each other.
    constexpr int kParts = kKeyTile / S::kKeys;
    const int64_t tile = kv_tile + step / kParts;
    const int part = step % kParts;

    mbarrier_wait(&barriers.key_empty[at.stage], at.parity ^ 1);
    mbarrier_arrive_expect(&barriers.key_full[at.stage], S::kKeyBytes + S::kScaleBytes);
    bulk_copy(key, p.k_images + tile * p.k_tile_bytes + part * S::kKeyBytes, S::kKeyBytes, &barriers.key_full[at.stage]);
    if constexpr (S::kScaleBytes > 0)
      bulk_copy(scales + S::kScaleOffset, reinterpret_cast<const uint8_t*>(p.tile_scales + tile) + S::kScaleOffset,
                S::kScaleBytes, &barriers.key_full[at.stage]);

    mbarrier_wait(&barriers.value_empty[at.stage], at.parity ^ 1);
    mbarrier_arrive_expect(&barriers.value_full[at.stage], S::kValueBytes);
    const uint8_t* const v_image = p.v_images + tile * p.v_tile_bytes + part * S::kValueBytes;
    if constexpr (S::kOnes > 0) {
#pragma unroll
      for (int half = 0; half < S::kKeys / kHalfTile; ++half)
        bulk_copy(value + half * kHalfTile * 2 * (kDimPv + S::kOnes), v_image + half * kHalfTile * 2 * kDimPv,
                  kHalfTile * 2 * kDimPv, &barriers.value_full[at.stage]);
    } else {
      bulk_copy(value, v_image, S::kValueBytes, &barriers.value_full[at.stage]);
    }
    at.advance();
  }
}

// Both rows at once: each step waits for its shuffles, which the compiler would put one after the other.
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

// Column of a thread's accumulator i within its tile.
__device__ __forceinline__ int column_of(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

// Takes the columns of a partial tile that do not exist out of the maxima.
__device__ __forceinline__ float lowest(float) { return -INFINITY; }
__device__ __forceinline__ int32_t lowest(int32_t) { return INT32_MIN; }
template <typename Score, int N>
__device__ __forceinline__ void hide_columns(Score (&x)[N], int columns) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (column_of(i) >= columns) x[i] = lowest(Score());
}

// Largest of each row, over its four threads.
template <int N>
__device__ __forceinline__ void row_maxima(const int32_t (&x)[N], float (&maximum)[2]) {
  int32_t partial[4] = {x[0], x[2], x[4], x[6]};  // two chains per row
#pragma unroll
  for (int i = 0; i < N; i += 2) partial[i / 2 % 4] = __vimax3_s32(partial[i / 2 % 4], x[i], x[i + 1]);
  // Sums are exact in FP32, and so is their order.
  maximum[0] = float(max(partial[0], partial[2]));
  maximum[1] = float(max(partial[1], partial[3]));
  quad_max(maximum);
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

// The channel tables of a head, v_scale then v_offset, for store(). A barrier has to follow.
template <int kDimPv>
__device__ __forceinline__ void load_channel_tables(const Params& p, int head, float* tables) {
  const int64_t row = (int64_t(p.elements[blockIdx.y].bin) * p.kv_heads + head / p.group) * p.head_dim;
  for (int d = threadIdx.x % kWarpgroup; d < kDimPv; d += kWarpgroup) {
    tables[d] = d < p.head_dim ? p.v_scale[row + d] : 0.f;
    tables[kDimPv + d] = d < p.head_dim ? p.v_offset[row + d] : 0.f;
  }
}

// out = o / sum[row], with `tables` times v_scale plus v_offset, for the rows and columns that exist.
template <int kChunks, int kHalf>
__device__ __forceinline__ void store(const Params& p, int head, int block, const Rows& rows,
                                      const float (&o)[kChunks][kHalf], const float* tables) {
  constexpr int kDimPv = kChunks * kHalf * 2;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = quad_sum(rows.sum[r]);
    const int row = block * kQueryBlock + warp * 16 + lane / 4 + 8 * r;
    const bool empty = sum == 0.f;  // no visible key: zeros
    const float inverse = empty ? 0.f : 1.f / sum;
    uint16_t* const out = static_cast<uint16_t*>(p.out) + blockIdx.y * p.out_strides.batch + row * p.out_strides.token +
                          head * p.out_strides.head;
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
        if (column < columns)
          *reinterpret_cast<uint32_t*>(out + column) = p.bf16 ? pack_16bit<true>(low, high) : pack_16bit<false>(low, high);
      }
  }
}

// Leaves this consumer's part of a query block in the workspace. In the consumer that finishes the block's last part, rows and
// o become those of the whole block, summed in the order of the keys whoever it is; false in the others.
template <int kChunks, int kHalf>
__device__ __forceinline__ bool merge(const Params& p, const Task& task, uint8_t* shared, int consumer, Rows& rows,
                                      float (&o)[kChunks][kHalf]) {
  constexpr int kOutputs = kChunks * kHalf;
  const int thread = threadIdx.x % kWarpgroup;
  const int64_t part_stride = kMaxConsumers * part_floats(p.dims);
  float* const first = p.parts + int64_t(task.divided) * task.parts * part_stride + consumer * part_floats(p.dims) + thread;
  float* const mine = first + task.part * part_stride;
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) mine[i * kWarpgroup] = o[i / kHalf][i % kHalf];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    mine[(kOutputs + r) * kWarpgroup] = rows.reference[r];
    mine[(kOutputs + 2 + r) * kWarpgroup] = rows.sum[r];
  }

  // Each thread's stores are visible before its warpgroup counts the part; whoever counts the last one sees all parts.
  __threadfence();
  named_barrier_sync(1 + consumer, kWarpgroup);
  if (thread == 0) {
    last_part(shared, consumer) = atomicAdd(&p.parts_done[task.divided * kMaxConsumers + consumer], 1) == task.parts - 1;
    __threadfence();
  }
  named_barrier_sync(1 + consumer, kWarpgroup);
  if (!last_part(shared, consumer)) return false;

  rows = Rows();
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) o[i / kHalf][i % kHalf] = 0.f;
  for (int n = 0; n < task.parts; ++n) {
    const float* const part = first + n * part_stride;
    float old_factor[2], factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float theirs = __ldcg(part + (kOutputs + r) * kWarpgroup);
      const float reference = fmaxf(rows.reference[r], theirs);
      old_factor[r] = rows.reference[r] == -INFINITY ? 0.f : exp2_approx(rows.reference[r] - reference);
      factor[r] = theirs == -INFINITY ? 0.f : exp2_approx(theirs - reference);
      rows.reference[r] = reference;
      rows.sum[r] = rows.sum[r] * old_factor[r] + factor[r] * __ldcg(part + (kOutputs + 2 + r) * kWarpgroup);
    }
#pragma unroll
    for (int i = 0; i < kOutputs; ++i)
      o[i / kHalf][i % kHalf] =
          o[i / kHalf][i % kHalf] * old_factor[i / 2 % 2] + factor[i / 2 % 2] * __ldcg(part + i * kWarpgroup);
  }
  return true;
}

// What a consumer does with its result. `row_scale` is NaN for rows that have to be NaN.
template <int kChunks, int kHalf>
__device__ __forceinline__ void finish(const Params& p, const Task& task, uint8_t* shared, int consumer,
                                       const float (&row_scale)[2], Rows& rows, float (&o)[kChunks][kHalf],
                                       const float* tables) {
  if (task.parts > 1 && !merge(p, task, shared, consumer, rows, o)) return;
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (isnan(row_scale[r])) rows.sum[r] = row_scale[r];
  store(p, task.head, task.first_block + consumer, rows, o, tables);
}

// Modes 1 to 3: S = Q8 K8^T, added to what S holds where it was started. `query` and `key` are the operands' descriptors.
template <int kDimQk, bool kStarted>
__device__ __forceinline__ void issue_qk_int8(int32_t (&s)[64], uint64_t query, uint64_t key) {
#pragma unroll
  for (int k = 0; k < kDimQk / 32; ++k)
    wgmma_s8(s, advance(query, k * 2 * kQueryBlock * 16), advance(key, k * 2 * kKeyTile * 16), kStarted || k > 0);
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

// What a thread knows of a tile's scores before they are computed; but for c and offset, mode 2 only.
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

// Mode 2: starts the accumulators of a tile at kMagic plus log2(sv) in units of S, relative to the tile's largest: exp2(S c)
// then already carries the token's scale. `quad` is the lane's place among four.
__device__ __forceinline__ void start_scores(int32_t (&s)[64], const TileScales& scales, const TileState& state, int quad) {
#pragma unroll
  for (int g = 0; g < kKeyTile / 16; ++g) {
    const float4 v = *reinterpret_cast<const float4*>(&scales.log2_v[16 * g + 4 * quad]);
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
    const float* const bias = scales.log2_v + 4 * quad;
    const float inverse[2] = {1.f / state.c[0], 1.f / state.c[1]};
#pragma unroll
    for (int i = 0; i < 64; ++i)
      x[i] = fmaf(bias[i / 8 * 16 + i % 8 / 4 * 2 + i % 2] - state.offset, inverse[i / 2 % 2], x[i] - kMagic);
    row_maxima(x, maxima.top);
#pragma unroll
    for (int i = 0; i < 64; ++i) x[i] -= maxima.top[i / 2 % 2];  // exact for the maximum, however large c is
    maxima.peak[0] = maxima.peak[1] = 0.f;
  }
  return maxima;
}

// P = 255 exp(w - tile maximum) of a tile, the exponents being value(i) * c + shift: the A operand of the second product in u8, and
// this thread's part of the row sums of the unrounded P (over sv in mode 2). Between the groups of 16 keys `meanwhile(group)`
// runs: the exponential unit takes 8 cycles per instruction, and a warp issues in order.
template <int kMode, typename Value, typename Meanwhile>
__device__ __forceinline__ void weights(const Value& value, const float (&c)[2], const float (&shift)[2],
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
        e[i] = exp2_approx(fmaf(value(8 * g + i / 2 * 4 + 2 * r + i % 2), c[r], shift[r]));
        partial[r][i % 2] = kMode == 2 ? fmaf(e[i], inverse[i], partial[r][i % 2]) : partial[r][i % 2] + e[i];
      }
      probability[g / 2][g % 2 * 2 + r] = pack_u8(e[0], e[1], e[2], e[3]);
    }
    meanwhile(g);
  }
  sum[0] = partial[0][0] + partial[0][1];
  sum[1] = partial[1][0] + partial[1][1];
}

// Issues product = P V for the columns of one chunk; `value` describes the transposed V image from the chunk's first row on.
template <int kChunk, int kDimPv>
__device__ __forceinline__ void issue_pv_int8(int32_t (&product)[kChunk / 2], uint32_t (&probability)[4][4], uint64_t value) {
  pin(product);
#pragma unroll
  for (int k = 0; k < 4; ++k) pin(probability[k]);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma_u8s8<kChunk>(product, probability[k], advance(value, k * 2 * kDimPv * 16), k > 0);
  wgmma_commit();
}

// The consumers take turns at the tensor cores, in a ring of named barriers. Without it they fall into step: all wait for
// the tensor cores, then all for the exponential unit.
class Turns {
 public:
  __device__ __forceinline__ Turns(int consumer, int active)
      : mine_(kFirstBarrier + consumer),
        next_(kFirstBarrier + (consumer + 1 == active ? 0 : consumer + 1)),
        alone_(active == 1) {
    if (consumer == active - 1) pass();  // to the first consumer's first turn
  }
  __device__ __forceinline__ void wait() {
    if (!alone_) named_barrier_sync(mine_, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void pass() {
    if (!alone_) named_barrier_arrive(next_, 2 * kWarpgroup);
  }

 private:
  static constexpr int kFirstBarrier = 1 + kMaxConsumers;  // 1 to 3 are the warpgroups' own
  int mine_, next_;
  bool alone_;
};

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
  const auto scales_of = [&](int stage) -> const TileScales& {
    return *reinterpret_cast<const TileScales*>(ring + stage * S::kStageBytes + S::kKeyBytes);
  };
  // Descriptors of the first stage: the others' lie a multiple of the stage's size further on.
  const uint64_t first_key = matrix_descriptor(shared_address(ring), kKeyTile * 16, 128);
  const uint64_t first_value =
      matrix_descriptor(shared_address(ring) + S::kKeyBytes + int(sizeof(TileScales)), kDimPv * 16, 128);
  const auto value_of = [&](int stage) { return advance(first_value, stage * S::kStageBytes); };

  load_channel_tables<kDimPv>(p, task.head, tables);
  load_row_scales(row_scales, p.row_scales + (task.q_block(p) + consumer) * kQueryBlock, consumer);
  const int last_columns = task.num_keys - (task.first_step + task.steps - 1) * kKeyTile;
  const int partial_step = last_columns < kKeyTile ? task.steps - 1 : -1;

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

  Turns turns(consumer, task.active);
  Cursor<kStages> at, previous;
  mbarrier_wait(&barriers.query[consumer], 0);
  bool key_ready = false;
  for (int step = 0; step < task.steps; ++step) {
    const bool partial = step == partial_step;
    const TileScales& scales = scales_of(at.stage);
    if (!key_ready) mbarrier_wait(&barriers.key_full[at.stage], at.parity);
    int32_t s[64];
    TileState state;
    if constexpr (kMode == 2) {
      state = prepare_tile<kDimQk>(scales, row_scales, row);
      start_scores(s, scales, state, quad);
    }
    pin(s);
    if constexpr (S::kPipelined) {
#pragma unroll
      for (int k = 0; k < 4; ++k) pin(probability[k]);
    }
    wgmma_fence();
    issue_qk_int8<kDimQk, kMode == 2>(s, query, advance(first_key, at.stage * S::kStageBytes));
    if constexpr (S::kPipelined)
      // The tile before: its second product runs behind this tile's first one and under this tile's maxima. Before the
      // first tile P is zero, and any V will do.
      issue_pv_int8<kChunk, kDimPv>(product, probability, value_of(previous.stage));
    // Asked now, needed later: an answer takes some fifty cycles.
    Cursor<kStages> next = at;
    next.advance();
    const bool value_ready = mbarrier_test(&barriers.value_full[at.stage], at.parity);
    key_ready = mbarrier_test(&barriers.key_full[next.stage], next.parity);
    if constexpr (kMode == 3) {
#pragma unroll
      for (int r = 0; r < 2; ++r) state.c[r] = row_scales.scale[row + 8 * r] * scales.k;
      state.offset = 0.f;
    }
    if (S::kPipelined && step > 0) take_tile();
    wgmma_wait<S::kPipelined ? 1 : 0>();
    pin(s);

    const auto meanwhile = [&](int g) {
      if constexpr (S::kPipelined) promote(0, g * kChunk / 16, kChunk / 16);
    };
    // The second product of the tile before; then P may be written again.
    const auto previous_done = [&] {
      if constexpr (S::kPipelined) {
        wgmma_wait<0>();
        pin(product);
      }
    };
    // P is 255 at most: shift is rounded towards smaller P. What the rounding takes is given back through the maximum.
    float shift[2];
    const auto take_shift = [&](const float(&top)[2], const float(&peak)[2]) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        shift[r] = __fsub_rd(kLog2Of255, __fmul_ru(peak[r], state.c[r]));
        maximum[r] = fmaf(top[r], state.c[r], state.offset) + (kLog2Of255 - fmaf(peak[r], state.c[r], shift[r]));
      }
    };
    if constexpr (kMode == 2) {
      float x[64];
#pragma unroll
      for (int i = 0; i < 64; ++i) x[i] = __int_as_float(s[i]);
      if (__builtin_expect(partial, 0)) hide_columns(x, last_columns);
      const Maxima maxima = take_scores(x, state, scales, quad);
      take_shift(maxima.top, maxima.peak);
      previous_done();
      weights<kMode>([&](int i) { return x[i]; }, state.c, shift, scales, quad, probability, sum, meanwhile);
    } else {
      if (__builtin_expect(partial, 0)) hide_columns(s, last_columns);
      float peak[2];
      row_maxima(s, peak);
      const float largest = fmaxf(fabsf(peak[0] * state.c[0]), fabsf(peak[1] * state.c[1]));
      previous_done();
      if (__builtin_expect(partial || __any_sync(0xffffffffu, largest > kLargestPlainMaximum), 0)) {
        // As in the 16-bit modes: columns that do not exist, or logits that call for subtracting before multiplying.
        take_shift(peak, {0.f, 0.f});
        const int columns = partial ? last_columns : kKeyTile;
        weights<kMode>(
            [&](int i) { return column_of(i) < columns ? float(s[i]) - peak[i / 2 % 2] : -INFINITY; }, state.c, shift,
            scales, quad, probability, sum, meanwhile);
      } else {
        take_shift(peak, peak);
        weights<kMode>([&](int i) { return float(s[i]); }, state.c, shift, scales, quad, probability, sum, meanwhile);
      }
    }
    if (!value_ready) mbarrier_wait(&barriers.value_full[at.stage], at.parity);
    if constexpr (!S::kPipelined) {
      turns.wait();
#pragma unroll
      for (int n = 0; n < kChunks; ++n) {
        issue_pv_int8<kChunk, kDimPv>(product, probability, advance(value_of(at.stage), n * kChunk * 16));
        if (n == 0) take_tile();
        wgmma_wait<0>();
        if (n == kChunks - 1) turns.pass();
        pin(product);
        promote(n, 0, kChunk / 2);
      }
    }
    __syncwarp();
    if (lane == 0) {
      mbarrier_arrive(&barriers.key_empty[at.stage]);
      if (!S::kPipelined || step > 0) mbarrier_arrive(&barriers.value_empty[S::kPipelined ? previous.stage : at.stage]);
    }
    previous = at;
    at = next;
  }
  if constexpr (S::kPipelined) {
    issue_pv_int8<kChunk, kDimPv>(product, probability, value_of(previous.stage));
    if (task.steps > 0) take_tile();
    wgmma_wait<0>();
    pin(product);
    promote(0, 0, kChunk / 2);
  }
  const float row_scale[2] = {row_scales.scale[row], row_scales.scale[row + 8]};
  finish(p, task, shared, consumer, row_scale, rows, o, tables);
}

// Modes 0 and 1: issues the first product of a tile. `query` and `key` are the operands' descriptors.
template <int kMode, bool kBf16, int kDimQk, int kDimPv, typename Score, int kRegisters>
__device__ __forceinline__ void issue_scores(Score (&s)[kRegisters], uint64_t query, uint64_t key) {
  if constexpr (kMode == 1) {
    issue_qk_int8<kDimQk, false>(s, query, key);
  } else {
#pragma unroll
    for (int half = 0; half < kRegisters / 32; ++half) {
      float(&part)[32] = *reinterpret_cast<float(*)[32]>(s + half * 32);
#pragma unroll
      for (int k = 0; k < kDimPv / 16; ++k)
        wgmma_16bit<kBf16>(part, advance(query, k * 2 * kQueryBlock * 16),
                           advance(key, half * kHalfTile * 2 * kDimPv + k * 2 * kHalfTile * 16), k > 0);
    }
    wgmma_commit();
  }
}

// exp2(x c + shift) of a tile as the A operand of the second product in 16 bits, and this thread's part of the row sums where
// the second product does not compute them. `value(i)` gives x[i] as a float.
template <bool kBf16, bool kSums, int N, typename Value>
__device__ __forceinline__ void weights_16bit(const Value& value, const float (&c)[2], const float (&shift)[2],
                                              uint32_t (&probability)[N / 8][4], float (&sum)[2]) {
  float partial[2][2] = {};
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const int r = i / 2 % 2;
    const float low = exp2_approx(fmaf(value(i), c[r], shift[r]));
    const float high = exp2_approx(fmaf(value(i + 1), c[r], shift[r]));
    probability[i / 8][i % 8 / 4 * 2 + r] = pack_16bit<kBf16>(low, high);
    if constexpr (kSums) {
      partial[r][0] += low;
      partial[r][1] += high;
    }
  }
  if constexpr (kSums) {
    sum[0] += partial[0][0] + partial[0][1];
    sum[1] += partial[1][0] + partial[1][1];
  }
}

// Modes 0 and 1: P and V in 16 bits, O in the tensor cores' FP32 accumulators.
//
// A consumer's turn at the tensor cores is the second product of one tile and the first product of the next; its softmax
// runs in the others' turns.
template <int kMode, bool kBf16, int kDimQk, int kDimPv>
__device__ void consume_16bit(const Params& p, const Task& task, uint8_t* shared, int consumer) {
  using S = Shape<kMode, kDimQk, kDimPv>;
  constexpr int kStages = S::kStages;
  constexpr int kChunk = S::kChunk, kChunks = S::kChunks, kKeys = S::kKeys;
  constexpr int kRegisters = kKeys / 2;  // of S per thread
  using Score = std::conditional_t<kMode == 0, float, int32_t>;
  Barriers& barriers = *reinterpret_cast<Barriers*>(shared);
  const uint32_t queries = shared_address(shared) + kBarrierBytes;
  uint8_t* const ring = shared + kBarrierBytes + S::kConsumers * S::kConsumerBytes;
  // Descriptors of the first stage: the others' lie a multiple of the stage's size further on.
  const uint64_t query = matrix_descriptor(queries + consumer * S::kConsumerBytes, kQueryBlock * 16, 128);
  const uint64_t first_key = matrix_descriptor(shared_address(ring), (kMode == 0 ? kHalfTile : kKeyTile) * 16, 128);
  const uint64_t first_value =
      matrix_descriptor(shared_address(ring) + S::kKeyBytes + int(sizeof(TileScales)), 128, kHalfTile * 16);
  const int lane = lane_id();

  const float* const scale_of_row = p.row_scales + (task.q_block(p) + consumer) * kQueryBlock + first_row();
  const float row_scale[2] = {scale_of_row[0], scale_of_row[8]};
  const int last_columns = task.num_keys - (task.first_step + task.steps - 1) * kKeys;
  const int partial_step = last_columns < kKeys ? task.steps - 1 : -1;

  Rows rows;
  float o[kChunks][(kChunk + S::kOnes) / 2] = {};
  Turns turns(consumer, task.active);
  Cursor<kStages> at;
  mbarrier_wait(&barriers.query[consumer], 0);
  if (task.steps > 0) turns.wait();
  for (int step = 0; step < task.steps; ++step) {
    mbarrier_wait(&barriers.key_full[at.stage], at.parity);
    Score s[kRegisters];
    pin(s);
    wgmma_fence();
    issue_scores<kMode, kBf16, kDimQk, kDimPv>(s, query, advance(first_key, at.stage * S::kStageBytes));
    turns.pass();
    // Asked now, needed later: an answer takes some fifty cycles.
    const bool value_ready = mbarrier_test(&barriers.value_full[at.stage], at.parity);
    float c[2] = {row_scale[0], row_scale[1]};  // base-2 exponent per unit of the score
    if constexpr (kMode == 1) {
      const float k = reinterpret_cast<const TileScales*>(ring + at.stage * S::kStageBytes + S::kKeyBytes)->k;
      c[0] *= k;
      c[1] *= k;
    }
    wgmma_wait<0>();
    pin(s);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&barriers.key_empty[at.stage]);

    const int columns = step == partial_step ? last_columns : kKeys;
    if (__builtin_expect(columns < kKeys, 0)) hide_columns(s, columns);
    float peak[2], maximum[2], shift[2];
    row_maxima(s, peak);
#pragma unroll
    for (int r = 0; r < 2; ++r) maximum[r] = peak[r] * c[r];
    take_maxima(rows, maximum, o);

    uint32_t probability[kKeys / 16][4];
    const bool large = fmaxf(fabsf(maximum[0]), fabsf(maximum[1])) > kLargestPlainMaximum;
    if (__builtin_expect(columns < kKeys || __any_sync(0xffffffffu, large), 0)) {
      // Columns that do not exist; or logits so large that the rounding of their maximum shows: subtracting before
      // multiplying is exact where it counts.
#pragma unroll
      for (int r = 0; r < 2; ++r) shift[r] = maximum[r] - rows.reference[r];
      const auto value = [&](int i) { return column_of(i) < columns ? float(s[i]) - peak[i / 2 % 2] : -INFINITY; };
      weights_16bit<kBf16, S::kOnes == 0, kRegisters>(value, c, shift, probability, rows.sum);
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) shift[r] = fmaf(-peak[r], c[r], maximum[r] - rows.reference[r]);
      weights_16bit<kBf16, S::kOnes == 0, kRegisters>([&](int i) { return float(s[i]); }, c, shift, probability, rows.sum);
    }

    if (!value_ready) mbarrier_wait(&barriers.value_full[at.stage], at.parity);
    const uint64_t value = advance(first_value, at.stage * S::kStageBytes);
#pragma unroll
    for (int n = 0; n < kChunks; ++n) pin(o[n]);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) pin(probability[k]);
    turns.wait();
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < kChunks; ++n)
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k) {
        const int offset = k / 4 * kHalfTile * 2 * (kDimPv + S::kOnes) + n * kChunk / 8 * kHalfTile * 16 + k % 4 * 256;
        wgmma_16bit_pv<kBf16, kChunk + S::kOnes>(o[n], probability[k], advance(value, offset), 1);
      }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < kChunks; ++n) pin(o[n]);
    if (lane == 0) mbarrier_arrive(&barriers.value_empty[at.stage]);
    at.advance();
  }
  turns.pass();
  if constexpr (S::kOnes > 0) {
    // The column of ones: the quad's first thread has it.
#pragma unroll
    for (int r = 0; r < 2; ++r) rows.sum[r] = lane % 4 == 0 ? o[0][kChunk / 2 + 2 * r] : 0.f;
  }
  finish(p, task, shared, consumer, row_scale, rows, o, nullptr);
}

struct Schedules {
  Schedule of[kMaxConsumers + 1];  // by number of consumers
};

// The thread block's work in one mode, which is the same for all its threads.
template <int kMode, bool kBf16, int kDimQk, int kDimPv>
__device__ __forceinline__ void attend(const Params& p, const Schedules& schedules, uint8_t* shared, int warpgroup) {
  using S = Shape<kMode, kDimQk, kDimPv>;
  constexpr int kWarpgroups = Config<kDimQk, kDimPv>::kWarpgroups;
  constexpr int kIdle = kWarpgroups - 1 - S::kConsumers;
  // Per thread; 512 over the warpgroups are the 65536 of the multiprocessor.
  constexpr int kProducerRegisters = S::kConsumers == 3 ? 32 : 24;
  constexpr int kConsumerRegisters = S::kConsumers == 3 ? 160 : kIdle ? 232 : 240;

  Task task;
  if (!find_task<S::kKeys, S::kConsumers>(p, schedules.of[S::kConsumers], task)) return;
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
  if constexpr (S::kOnes > 0) {
    uint8_t* const values = shared + kBarrierBytes + S::kConsumers * S::kConsumerBytes + S::kKeyBytes + sizeof(TileScales);
    for (int i = threadIdx.x; i < S::kStages * S::kKeys; i += Config<kDimQk, kDimPv>::kThreads) {
      const int stage = i / S::kKeys, half = i % S::kKeys / kHalfTile, row = i % kHalfTile;
      uint8_t* const ones = values + stage * S::kStageBytes + (half + 1) * kHalfTile * 2 * (kDimPv + S::kOnes) -
                            kHalfTile * 2 * S::kOnes + row * 16;
      *reinterpret_cast<uint4*>(ones) = make_uint4(kBf16 ? 0x3f80 : 0x3c00, 0, 0, 0);
    }
    fence_async_proxy();
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

// Grid: (thread blocks of a batch element, batch).
template <int kDimQk, int kDimPv>
__global__ void __launch_bounds__(Config<kDimQk, kDimPv>::kThreads, 1)
    attention_kernel(const __grid_constant__ Params p, const __grid_constant__ Schedules schedules) {
  extern __shared__ __align__(128) uint8_t shared[];
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  wait_for_previous_kernel();
  const int mode = __shfl_sync(0xffffffffu, p.elements[blockIdx.y].mode, 0);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  switch (mode) {
    case 0:
      p.bf16 ? attend<0, true, kDimQk, kDimPv>(p, schedules, shared, warpgroup)
             : attend<0, false, kDimQk, kDimPv>(p, schedules, shared, warpgroup);
      break;
    case 1:
      p.bf16 ? attend<1, true, kDimQk, kDimPv>(p, schedules, shared, warpgroup)
             : attend<1, false, kDimQk, kDimPv>(p, schedules, shared, warpgroup);
      break;
    case 2: attend<2, false, kDimQk, kDimPv>(p, schedules, shared, warpgroup); break;
    default: attend<3, false, kDimQk, kDimPv>(p, schedules, shared, warpgroup); break;
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
  if (Schedule::most_units(p) > INT32_MAX / 2) return cudaErrorInvalidConfiguration;
  Schedules schedules = {};
  int thread_blocks = 0;
  for (int consumers : {Shape<1, kDimQk, kDimPv>::kConsumers, Shape<2, kDimQk, kDimPv>::kConsumers}) {
    const Schedule& schedule = schedules.of[consumers] = Schedule(p, consumers);
    if (schedule.thread_blocks() > thread_blocks) thread_blocks = schedule.thread_blocks();
  }
  cudaLaunchAttribute beside_prepass = {};
  beside_prepass.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  beside_prepass.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(thread_blocks, p.batch);
  config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  config.attrs = &beside_prepass;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p, schedules);
}

}  // namespace trtconvert::attention::sm90
