// What a thread block of the Hopper kernel is made of: sizes that follow from the mode and the padded head dims, the barriers of
// its ring, its task, the turns of its consumers.
#pragma once

#include <cmath>
#include <initializer_list>

#include "launch.h"
#include "sm90/ptx.cuh"
#include "sm90/schedule.h"

namespace trtconvert::attention::sm90 {

constexpr int kWarpgroup = 128;
constexpr int kSharedLimit = 227 * 1024;
constexpr int kSwizzledBlock = kHalfTile * 128;  // 64 keys of 64 channels in 16 bits
constexpr int kMaxStages = 4;
constexpr float kLog2Of255 = 7.99435343685885f;
// Accumulators of QK^T start at the bits of this float, 1.5 * 2^23: as long as a sum stays within +-2^22 the accumulator
// read as a float is kMagic + sum, so no conversion is needed, and sums compare like their bits.
constexpr float kMagic = 12582912.f;
// Exponents are x * c - maximum * c with x near kMagic. Up to this c the rounding of maximum * c stays under 0.001.
constexpr float kLargestFastScale = 0x1p-10f;
constexpr float kLargestPlainMaximum = 0x1p13f;    // of mode 3: the same of products of integers
constexpr float kLargestPlainReference = 0x1p20f;  // of modes 0 and 1: up to it rounded to 2^-4
constexpr float kRescaleThreshold = 8.f;           // O is rescaled when a maximum grows by more than 2^8: FP32 sums have the room

// One consumer's rows, in shared memory: registers are too dear for what a tile needs once.
struct RowScales {
  float scale[kQueryBlock];           // base-2 exponent per unit of S and of K's scale
  float largest[4], smallest[4];      // of the 16 rows of each warp
};

// What a thread block works on.
struct Task {
  int head, first_block, active;  // query blocks first_block .. first_block + active - 1; with several streams first_block of
  int streams;                    // the heads head .. head + streams - 1, one per consumer. Tiles of the streams alternate
  int first_step, steps;          // over the keys, in tiles of the mode; steps may be 0
  int num_keys;                   // keys beyond do not exist
  int divided;                    // which of the units that several thread blocks compute, or -1
  int part, parts;

  __device__ __forceinline__ int head_of(int consumer) const { return streams > 1 ? head + consumer : head; }
  __device__ __forceinline__ int block_of(int consumer) const { return streams > 1 ? first_block : first_block + consumer; }

  // Of a consumer's query block and of a stream's first key tile, in the workspace.
  __device__ __forceinline__ int64_t q_block(const Params& p, int consumer) const {
    return (int64_t(blockIdx.y) * p.heads + head_of(consumer)) * p.query_blocks + block_of(consumer);
  }
  __device__ __forceinline__ int64_t kv_tile(const Params& p, int stream) const {
    return (int64_t(blockIdx.y) * p.kv_heads + (head + stream) / p.group) * p.key_tiles;
  }
};

struct Barriers {
  uint64_t query[kMaxConsumers];
  uint64_t key_full[kMaxStages], key_empty[kMaxStages];
  uint64_t value_full[kMaxStages], value_empty[kMaxStages];
  int32_t last_part[kMaxConsumers];  // whether the consumer was the last to finish its part of a query block
  Task task;  // here because a consumer's loop has no registers for what only its end needs; active 0 where there is none
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
  // Modes 0 and 1: a thread's registers of S, and how many of the next tile's there is room for while P and O are in use.
  static constexpr int kScores = kKeys / 2;
  static constexpr int kAhead = kDimPv <= 64 ? kScores : kMode == 1 && kDimPv == 128 ? 0 : 32;
  // Whether there is room for P beside the S that it may have to be computed from again.
  static constexpr bool kOptimistic = !kInt8Pv && kDimPv <= 80;
  static constexpr int kQueryBytes = kQueryBlock * (kInt8Qk ? kDimQk : 2 * kDimPv);
  static constexpr int kKeyBytes = kKeys * (kInt8Qk ? kDimQk : 2 * kDimPv);
  static constexpr int kValueBytes = kKeys * (kInt8Pv ? kDimPv : 2 * kDimPv);
  // V in 16 bits of whole 64 channels lies in blocks of 64 keys by 64 channels with the 128-byte swizzle, which the copy engine
  // writes straight from the caller's tensor; else as the images of params.h.
  static constexpr bool kSwizzled = !kInt8Pv && swizzled_values(kDimPv);
  // Eight more columns of V in 16 bits, the first of ones, the others zero: the row sums of P come out of the second product.
  // In the swizzled layout one block serves all stages; else they lie behind the channels of each 64 keys of each stage.
  // Written once.
  static constexpr int kOnes = !kInt8Pv && kDimPv <= 96 ? 8 : 0;
  static constexpr int kOnesBytes = kSwizzled && kOnes > 0 ? kSwizzledBlock : 0;
  static constexpr int kHalfBytes = kHalfTile * 2 * (kDimPv + (kSwizzled ? 0 : kOnes));  // of 64 keys of V in 16 bits
  static constexpr int kValueRoom = kInt8Pv ? kValueBytes : kKeys / kHalfTile * kHalfBytes;
  // What the tile needs of TileScales: everything in mode 2, the last 16 bytes in modes 1 and 3.
  static constexpr int kScaleOffset = kMode == 2 ? 0 : offsetof(TileScales, log2_v_max);
  static constexpr int kScaleBytes = kMode == 0 ? 0 : int(sizeof(TileScales)) - kScaleOffset;
  static constexpr int kStageBytes = kValueRoom + kKeyBytes;
  static constexpr int kTableBytes = kInt8Pv ? 2 * kDimPv * int(sizeof(float)) : 0;  // v_scale and v_offset, per consumer
  static constexpr int kConsumerBytes = kQueryBytes + kTableBytes + int(sizeof(RowScales));
  static constexpr int kFit = (kSharedLimit - int(sizeof(Barriers)) - kOnesBytes - kConsumers * kConsumerBytes) /
                              (kStageBytes + int(sizeof(TileScales)));
  static constexpr int kStages = kFit < kMaxStages ? kFit : kMaxStages;
  static_assert(kStages >= 2);
  // Whether each consumer may have keys of its own, which with few channels costs more than it saves. They share the ring, and a
  // consumer must not ask for a phase of a barrier before the one before it is known to be complete. The turns see to that
  // where every consumer has a stage. Without turns the stages have to be the same consumer's always, two of them, as the
  // values of the tile before are in use.
  static constexpr bool kCanGather = kDimPv > 96 && (kPipelined ? kStages == 2 * kConsumers : kStages >= kConsumers);
  // Shared memory: the ring of stages (values, then keys) from its start, which is aligned for the swizzle, the block of ones,
  // the stages' scales, the consumers' own, the barriers.
  static_assert(!kSwizzled || (kStageBytes % 1024 == 0 && kHalfBytes % 1024 == 0));
  static constexpr int kOnesBlock = kStages * kStageBytes;
  static constexpr int kScales = kOnesBlock + kOnesBytes;
  static constexpr int kConsumerArea = kScales + kStages * int(sizeof(TileScales));
  static constexpr int kBarriers = kConsumerArea + kConsumers * kConsumerBytes;
  static constexpr int kSharedBytes = kBarriers + int(sizeof(Barriers));
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

// Position in the ring.
template <int kStages>
struct Cursor {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int stages) {  // up to kStages
    stage += stages;
    if (stage >= kStages) {
      stage -= kStages;
      parity ^= 1;
    }
  }
};

// False for a thread block without a task: the grid suits the mode and the batch element with the most.
template <int kKeys, int kConsumers>
__device__ __forceinline__ bool find_task(const Params& p, const Schedule& schedule, int num_keys, Task& task) {
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
  task.streams = 1;
  if (unit < schedule.full_units) {
    task.head = unit / schedule.full;
    task.first_block = unit % schedule.full * kConsumers;
    task.active = kConsumers;
  } else {
    task.head = (unit - schedule.full_units) * schedule.gathered;
    task.first_block = schedule.full * kConsumers;
    task.active = schedule.rest;
    if (schedule.gathered > 1) task.active = task.streams = min(schedule.gathered, p.heads - task.head);
  }
  task.num_keys = num_keys;
  const int64_t all = ceil_div(task.num_keys, kKeys);
  task.first_step = int(all * task.part / task.parts);
  task.steps = int(all * (task.part + 1) / task.parts) - task.first_step;
  return true;
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

}  // namespace trtconvert::attention::sm90
