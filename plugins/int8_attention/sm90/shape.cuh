// Structure of a thread block of the Hopper kernel: sizes that follow from the mode and the padded head dims, the barriers of its
// ring, its tasks, the turns of its consumers.
#pragma once

#include <cmath>
#include <initializer_list>

#include "common/early_launch.cuh"
#include "element.cuh"
#include "launch.h"
#include "sm90/ptx.cuh"
#include "sm90/schedule.h"

namespace trtconvert::attention::sm90 {

constexpr int kWarpgroup = 128;
constexpr int kSharedLimit = 227 * 1024;
constexpr int kSwizzledBlock = kHalfTile * 128;  // 64 keys of 64 channels in 16 bits
constexpr int kMaxStages = 4;
constexpr int kProducers = 3;  // threads: of queries, keys and values
constexpr float kLog2Of255 = 7.99435343685885f;
constexpr float kLog2Of448 = 8.80735492205760f;  // the largest number of FP8 (E4M3)
// Accumulators of QK^T start at the bits of this float, 1.5 * 2^23: as long as a sum stays within +-2^22 the accumulator
// read as a float is kMagic + sum, so no conversion is needed, and sums compare like their bits.
constexpr float kMagic = 12582912.f;
// Exponents are x * c - maximum * c with x near kMagic. Up to this c the rounding of maximum * c stays under 0.001.
constexpr float kLargestFastScale = 0x1p-10f;
constexpr float kLargestPlainMaximum = 0x1p13f;    // of mode 3: the same of products of integers
constexpr float kLargestPlainReference = 0x1p20f;  // of modes 0 and 1: up to it rounded to 2^-4
constexpr float kRescaleThreshold = 8.f;           // O is rescaled when a maximum grows by more than 2^8: FP32 sums have the room

struct Schedules {
  Schedule of[kModes];
};

// Of mode 2, extremes of the scales of each warp's 16 rows.
struct Extremes {
  float largest[kWarpgroup / 32], smallest[kWarpgroup / 32];
};

// A thread block's current work: a unit of the schedule, or a part of one.
struct Task {
  int batch, bin;                 // the batch element, and its row of the tables
  int head, first_block, active;  // query blocks first_block .. first_block + active - 1 of a head
  int streams;                    // if more than 1: block first_block of the heads head .. head + streams - 1 instead, a head for
                                  // each consumer. Tiles of the heads alternate
  int first_step, steps;          // over the keys, in tiles of the mode; steps may be 0
  int num_keys;                   // keys beyond do not exist
  uint32_t phases;                // where the ring's first stage is: Cursor
  // Under a block mask steps go through the tiles of a list, and first_step is computed as if the list's last tiles were adjacent.
  // (Barriers have no room for more.)
  union {
    int divided;    // which of the units that several thread blocks compute, or -1
    int block_row;  // under a block mask: block_row_of()
  };
  int part, parts;

  // True if all `consumers` read every tile, and there is a tile. Then the ring's barriers suffice: a consumer must not ask for a phase
  // before it knows that the previous phase is complete, and the producer must not overwrite data of an earlier task. After any other
  // task the producers wait until all consumers, even idle ones, and the producers themselves have finished the task.
  __device__ __forceinline__ bool ordinary(int consumers) const { return steps > 0 && active == consumers && streams == 1; }

  __device__ __forceinline__ int head_of(int consumer) const { return streams > 1 ? head + consumer : head; }
  __device__ __forceinline__ int block_of(int consumer) const { return streams > 1 ? first_block : first_block + consumer; }
};

// Task n of a thread block is in tasks[n % kTaskSlots], with a barrier for each slot, and in phase n of the queries' barriers. When
// task n is requested, the queries of task n - 1 are in flight: each consumer has read those of task n - 2 and has finished the
// earlier tasks, and so has the producer of their values.
constexpr int kTaskSlots = 4;

struct Barriers {
  uint64_t query_full[kMaxConsumers], query_empty[kMaxConsumers];
  uint64_t key_full[kMaxStages], key_empty[kMaxStages];
  uint64_t value_full[kMaxStages], value_empty[kMaxStages];
  uint64_t task_full[kTaskSlots];
  uint64_t task_wanted;              // by the producers of queries and of keys
  uint64_t task_done;                // of tasks that are not ordinary
  int32_t last_part[kMaxConsumers];  // whether the consumer was the last to finish its part of a query block
  uint32_t address;                  // of shared memory: keep_shared()
  // Stored here because a consumer's loop has no registers for values of its end. `active` is 0 behind the last task.
  Task tasks[kTaskSlots];
};

// Addresses of the barriers in shared memory.
class BarrierAddresses {
 public:
  __device__ __forceinline__ explicit BarrierAddresses(uint32_t barriers) : at_(barriers) {}
  __device__ __forceinline__ uint32_t query_full(int w) const { return at_ + uint32_t(offsetof(Barriers, query_full)) + 8 * w; }
  __device__ __forceinline__ uint32_t query_empty(int w) const { return at_ + uint32_t(offsetof(Barriers, query_empty)) + 8 * w; }
  __device__ __forceinline__ uint32_t key_full(int s) const { return at_ + uint32_t(offsetof(Barriers, key_full)) + 8 * s; }
  __device__ __forceinline__ uint32_t key_empty(int s) const { return at_ + uint32_t(offsetof(Barriers, key_empty)) + 8 * s; }
  __device__ __forceinline__ uint32_t value_full(int s) const { return at_ + uint32_t(offsetof(Barriers, value_full)) + 8 * s; }
  __device__ __forceinline__ uint32_t value_empty(int s) const { return at_ + uint32_t(offsetof(Barriers, value_empty)) + 8 * s; }
  __device__ __forceinline__ uint32_t task_full(int n) const {
    return at_ + uint32_t(offsetof(Barriers, task_full)) + 8 * (n % kTaskSlots);
  }
  __device__ __forceinline__ uint32_t task_wanted() const { return at_ + uint32_t(offsetof(Barriers, task_wanted)); }
  __device__ __forceinline__ uint32_t task_done() const { return at_ + uint32_t(offsetof(Barriers, task_done)); }

 private:
  uint32_t at_;
};

// Sizes that follow from the mode and the padded head dims.
template <int kMode, int kDimQk, int kDimPv>
struct Shape {
  static constexpr bool kInt8Qk = kMode >= 1, kInt8Pv = kMode == 2 || kMode == 3, kFp8Pv = kMode == 4, kBytePv = kInt8Pv || kFp8Pv;
  static_assert(!kFp8Pv || has_fp8_values(kDimPv));
  // Warpgroups that compute. Three hide each other's latencies best if S (64 registers a thread), O (kDimPv / 2) and the mode's
  // other registers fit into 160. The INT8 second product adds its integer sums, kDimPv / 2 more.
  static constexpr int kConsumers = kDimPv <= (kInt8Pv ? 80 : 128) ? 3 : 2;
  // Two consumers with room for a whole tile's integer sums promote them in the next tile's iteration: between its exponentials, or
  // under its first product in mode 2, which has to initialise accumulators and lacks room. There the consumers take turns at the
  // exponentials.
  static constexpr bool kPipelined = kInt8Pv && kConsumers == 2 && kDimPv <= 128;
  static constexpr bool kPromoteFirst = kPipelined && kMode == 2, kPromoteBetween = kPipelined && !kPromoteFirst;
  // Whether a partial last tile of keys has separate machine code, so that the loop does not hide columns. Mode 3 loses 15 % with
  // separate code at 64 channels; all other measured cases, there, at 40 and at 128, gain up to 12 %.
  static constexpr bool kPeelsPartial = kMode != 3 || kPipelined || kDimPv <= 48;
  // Columns of one second product; O is the concatenation of these chunks.
  static constexpr bool kOneChunk = kDimPv <= 96 || kPipelined || (!kInt8Pv && kDimPv == 128);
  static constexpr int kChunk = kOneChunk ? kDimPv : kDimPv == 160 ? 80 : 64;
  static constexpr int kChunks = kDimPv / kChunk;
  // Mode 0 may take half tiles: the key tile is part of the numerics in the INT8 modes only.
  static constexpr int kKeys = kMode == 0 && kDimPv >= 128 ? kHalfTile : kKeyTile;
  // Modes 0, 1 and 4: a thread's registers of S, and the number of the next tile's that fit while P and O are in use.
  static constexpr int kScores = kKeys / 2;
  static constexpr int kAhead = kDimPv <= 64 ? kScores : kMode == 1 && kDimPv == 128 ? 0 : 32;
  // True if the registers hold P beside S: the kernel may have to compute P from S again.
  static constexpr bool kOptimistic = !kBytePv && kDimPv <= 80;
  static constexpr int kQueryBytes = kQueryBlock * (kInt8Qk ? kDimQk : 2 * kDimPv);
  static constexpr int kKeyBytes = kKeys * (kInt8Qk ? kDimQk : 2 * kDimPv);
  static constexpr int kValueRows = kFp8Pv ? fp8_value_rows(kDimPv) : kDimPv;
  static constexpr int kValueBytes = kKeys * (kBytePv ? kValueRows : 2 * kDimPv);
  // V in 16 bits of whole 64 channels lies in blocks of 64 keys by 64 channels with the 128-byte swizzle, which the copy engine
  // writes straight from the caller's tensor; else as the images of params.h.
  static constexpr bool kSwizzled = !kBytePv && swizzled_values(kDimPv);
  // Eight more columns of V in 16 bits, the first of ones, the others zero: the row sums of P come out of the second product. In
  // the swizzled layout one block serves all stages; otherwise the columns are behind the channels of each 64 keys of each stage.
  // Written once. In FP8 the image from the pre-pass contains them.
  static constexpr int kOnes = kFp8Pv || (!kInt8Pv && kDimPv <= 96) ? 8 : 0;
  static constexpr int kOnesBytes = kSwizzled && kOnes > 0 ? kSwizzledBlock : 0;
  static constexpr int kHalfBytes = kHalfTile * 2 * (kDimPv + (kSwizzled ? 0 : kOnes));  // of 64 keys of V in 16 bits
  static constexpr int kValueRoom = kBytePv ? kValueBytes : kKeys / kHalfTile * kHalfBytes;
  // The tile's part of TileScales: everything in mode 2, the last 16 bytes in modes 1, 3 and 4.
  static constexpr int kScaleOffset = kMode == 2 ? 0 : offsetof(TileScales, log2_v_max);
  static constexpr int kScaleBytes = kMode == 0 ? 0 : int(sizeof(TileScales)) - kScaleOffset;
  static constexpr int kStageBytes = kValueRoom + kKeyBytes;
  // A consumer's own data: its queries, and twice, because a task's data is in use until its end, the rows' scales (base-2
  // exponents per unit of S and of K's scale) and, with V in 8 bits, the channels' v_scale and v_offset.
  static constexpr int kRowScaleBytes = kQueryBlock * int(sizeof(float));
  static constexpr int kTableBytes = kBytePv ? 2 * kDimPv * int(sizeof(float)) : 0;
  static constexpr int kBesideBytes = kRowScaleBytes + kTableBytes;
  static constexpr int kExtremes = kQueryBytes + 2 * kBesideBytes;
  // In mode 4 also O but for the last few tiles, in FP32.
  static constexpr int kSums = kExtremes + (kMode == 2 ? int(sizeof(Extremes)) : 0);
  static constexpr int kConsumerBytes = kSums + (kFp8Pv ? kWarpgroup * kDimPv / 2 * int(sizeof(float)) : 0);
  static constexpr int kFit = (kSharedLimit - int(sizeof(Barriers)) - kOnesBytes - kConsumers * kConsumerBytes) /
                              (kStageBytes + kScaleBytes);
  static constexpr int kStages = kFit < kMaxStages ? kFit : kMaxStages;
  static_assert(kStages >= 2);
  // Whether each consumer may have its own keys, which costs more than it saves with few channels. Consumers share the ring, and a
  // consumer must not ask for a phase of a barrier before the previous phase is known to be complete. Turns guarantee this if every
  // consumer has a stage. Without turns the stages must always belong to the same consumer, two of them, because the values of the
  // previous tile are in use.
  static constexpr bool kCanGather = kDimPv > 96 && (kPipelined ? kStages == 2 * kConsumers : kStages >= kConsumers);
  // Shared memory: the ring of stages (values, then keys) from its start, which is aligned for the swizzle, the block of ones,
  // the stages' scales, the consumers' own data, the barriers.
  static_assert(!kSwizzled || (kStageBytes % 1024 == 0 && kHalfBytes % 1024 == 0));
  static constexpr int kOnesBlock = kStages * kStageBytes;
  static constexpr int kScales = kOnesBlock + kOnesBytes;
  static constexpr int kConsumerArea = kScales + kStages * kScaleBytes;
  static constexpr int kBarriers = kConsumerArea + kConsumers * kConsumerBytes;
  static constexpr int kSharedBytes = kBarriers + int(sizeof(Barriers));

  // Descriptors of a stage's keys and values; `address` is that of shared memory. With the swizzle the next 64 columns are the next
  // block, or the block of ones, which is the same for all stages: the distance to it shrinks as the start moves on.
  static constexpr bool kSharedOnes = kOnesBytes > 0;
  static __device__ __forceinline__ uint64_t key_descriptor(uint32_t address, int stage) {
    return matrix_descriptor(address + stage * kStageBytes + kValueRoom, (kInt8Qk ? kKeyTile : kHalfTile) * 16, 128);
  }
  static __device__ __forceinline__ uint64_t value_descriptor(uint32_t address, int stage) {
    const int moved = stage * kStageBytes;
    if (kBytePv) return matrix_descriptor(address + moved, kValueRows * 16, 128);
    if (!kSwizzled) return matrix_descriptor(address + moved, 128, kHalfTile * 16);
    return swizzled_descriptor(address + moved, kSharedOnes ? kOnesBlock - moved : kSwizzledBlock, 1024);
  }

  // Offset of a stage's TileScales in shared memory. Fields that the mode does not need are missing: kScaleOffset.
  static __device__ __forceinline__ int tile_scales_at(int stage) { return kScales + stage * kScaleBytes - kScaleOffset; }
};

template <typename S>
__device__ __forceinline__ Barriers& barriers_in(uint8_t* shared) {
  return *reinterpret_cast<Barriers*>(shared + S::kBarriers);
}

// The address of `shared`, which stays in a register.
template <typename S>
__device__ __forceinline__ uint32_t kept_address(uint8_t* shared) {
  return keep_shared(shared_address(&barriers_in<S>(shared).address));
}

constexpr int largest(std::initializer_list<int> values) {
  int result = 0;
  for (int value : values) result = value > result ? value : result;
  return result;
}

template <int kDimQk, int kDimPv>
struct Config {
  static constexpr int kFp8Mode = has_fp8_values(kDimPv) ? 4 : 1;  // the mode that computes mode 4
  // One producer warpgroup and room for the most consumers of any mode; where a mode uses fewer, the rest give their
  // registers away.
  static constexpr int kWarpgroups = 1 + Shape<1, kDimQk, kDimPv>::kConsumers;
  static constexpr int kThreads = kWarpgroups * kWarpgroup;
  static constexpr int kSharedBytes = largest({Shape<0, kDimQk, kDimPv>::kSharedBytes, Shape<1, kDimQk, kDimPv>::kSharedBytes,
                                               Shape<2, kDimQk, kDimPv>::kSharedBytes, Shape<3, kDimQk, kDimPv>::kSharedBytes,
                                               Shape<kFp8Mode, kDimQk, kDimPv>::kSharedBytes});
};

// Position in the ring. Each task begins with the first stage, a constant: the compiler has to know that descriptors are uniform
// over the threads.
template <int kStages>
struct Cursor {
  int stage = 0;
  uint32_t phases;  // bit i: parity of the phase that the stage after i more is about to be in
  __device__ __forceinline__ explicit Cursor(uint32_t first_phases) : phases(first_phases) {}
  __device__ __forceinline__ uint32_t parity() const { return phases & 1; }
  __device__ __forceinline__ void advance(int stages) {  // up to kStages
    stage += stages;
    if (stage >= kStages) stage -= kStages;
    phases = phases >> stages | (~phases & ((1 << stages) - 1)) << (kStages - stages);
  }
};

// Cursor of the first stage, after this number of tiles.
template <int kStages>
__device__ __forceinline__ uint32_t phases_after(uint32_t phases, unsigned tiles) {
  constexpr uint32_t kAll = (1 << kStages) - 1;
  return phases ^ (tiles / kStages % 2 ? kAll : 0) ^ ((1 << tiles % kStages) - 1);
}

// A thread block's part of a launch: units first, first + step, … of its mode, or the remaining ones.
struct Share {
  int mode, first, step;
  Element element;  // of a batch of one
};

// Called by one thread. `elements`: the number of batch elements of each mode.
__device__ __forceinline__ Share share_out(const int (&elements)[kModes], int batch) {
  int left = batch, thread_blocks = gridDim.x, modes = 0;
#pragma unroll 1
  for (int mode = 0; mode < kModes; ++mode) modes += elements[mode] > 0;
  Share share = {0, int(blockIdx.x), 0, {}};
#pragma unroll 1
  for (int mode = 0; mode < kModes; ++mode) {
    if (elements[mode] == 0) continue;
    // In proportion; each later mode needs at least one.
    const int in_proportion = int(float(thread_blocks) * elements[mode] / left + 0.5f);
    share.mode = mode;
    share.step = min(max(in_proportion, 1), thread_blocks - --modes);
    if (share.first < share.step) break;
    share.first -= share.step;
    thread_blocks -= share.step;
    left -= elements[mode];
  }
  return share;
}

// Returns the same share in all threads of the thread block. Several modes of a batch share the thread blocks by their elements.
// Overwrites the beginning of `shared`; a barrier has to follow before another use.
__device__ __forceinline__ Share share_of(const Params& p, uint8_t* shared) {
  // The shuffles tell the compiler that the values are uniform.
  if (p.batch == 1) {
    const Element element = element_of(p, 0);
    return {__shfl_sync(0xffffffffu, element.mode, 0), int(blockIdx.x), int(gridDim.x), element};
  }
  int(&elements)[kModes] = *reinterpret_cast<int(*)[kModes]>(shared);
  Share& share = *reinterpret_cast<Share*>(shared + sizeof(elements));
  if (threadIdx.x < kModes) elements[threadIdx.x] = 0;
  __syncthreads();
  for (int b = threadIdx.x; b < p.batch; b += blockDim.x) atomicAdd(&elements[element_of(p, b).mode], 1);
  __syncthreads();
  if (threadIdx.x == 0) share = share_out(elements, p.batch);
  fence_async_proxy();
  __syncthreads();
  return {__shfl_sync(0xffffffffu, share.mode, 0), __shfl_sync(0xffffffffu, share.first, 0),
          __shfl_sync(0xffffffffu, share.step, 0), {}};
}

// The batch elements of one mode's units. A whole warp must call it; it looks at 32 elements at once and only moves forward.
template <int kMode>
class Elements {
 public:
  __device__ __forceinline__ Elements(const Params& p, const Schedule& schedule, const Share& share) {
    if (p.batch > 1) {
      look(p, schedule);
    } else {
      mine_ = share.element;
      end_ = schedule.tasks(true);
    }
  }

  // The element of a unit and the unit's number in it; false if the unit does not exist. Units must not decrease.
  __device__ __forceinline__ bool find(const Params& p, const Schedule& schedule, int unit, int& batch, int& unit_of_element,
                                       Element& element) {
    unsigned before = __ballot_sync(0xffffffffu, end_ <= unit);
    while (before == 0xffffffffu) {
      if (first_ + 32 >= p.batch) return false;
      first_ += 32;
      begin_ = __shfl_sync(0xffffffffu, end_, 31);
      look(p, schedule);
      before = __ballot_sync(0xffffffffu, end_ <= unit);
    }
    const int lane = __popc(before);
    batch = first_ + lane;
    unit_of_element = unit - (lane ? __shfl_sync(0xffffffffu, end_, lane - 1) : begin_);
    element.bin = __shfl_sync(0xffffffffu, mine_.bin, lane);
    element.num_keys = __shfl_sync(0xffffffffu, mine_.num_keys, lane);
    return true;
  }

 private:
  __device__ __forceinline__ void look(const Params& p, const Schedule& schedule) {
    const int lane = lane_id(), b = first_ + lane;
    end_ = 0;
    if (b < p.batch) {
      mine_ = element_of(p, b);
      if (mine_.mode == kMode) end_ = schedule.tasks(b == p.batch - 1);
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, end_, distance);
      if (lane >= distance) end_ += other;
    }
    end_ += begin_;
  }

  int first_ = 0, begin_ = 0;  // the element of lane 0, and the units of those before
  Element mine_ = {};          // of element first_ + lane
  int end_ = 0;                // units of the elements up to that one
};

template <int kKeys, int kConsumers>
__device__ __forceinline__ Task task_of(const Params& p, const Schedule& schedule, int batch, int unit, const Element& element,
                                        uint32_t phases) {
  Task task;
  task.batch = batch;
  task.bin = element.bin;
  task.num_keys = element.num_keys;
  task.phases = phases;
  task.divided = -1;
  task.part = 0;
  task.parts = 1;
  if (p.block_mask_heads > 0) {
    constexpr int kParts = kKeyTile / kKeys, kActive = Schedule::kBlockConsumers;
    const int4 row = *reinterpret_cast<const int4*>(p.block_order + int64_t(batch) * schedule.units + unit);  // a BlockRow
    task.head = row.x / p.block_rows;
    const int block_row = row.x % p.block_rows;
    task.first_block = block_row * kActive;
    task.active = min(kActive, p.query_blocks - task.first_block);
    task.streams = 1;
    task.block_row = int(block_row_of(p, batch, task.head, block_row));
    task.steps = row.y * kParts;
    int last_step = row.z * kParts + kParts - 1;
    if (task.steps > 0 && last_step * kKeys >= task.num_keys) {  // half tiles
      --task.steps;
      --last_step;
    }
    task.first_step = last_step - task.steps + 1;
    return task;
  }
  const int whole = schedule.units - (batch == p.batch - 1 ? schedule.divided : 0);
  if (unit >= whole) {
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
  task.first_step = 0;
  task.steps = ceil_div(task.num_keys, kKeys);
  if (task.parts > 1) {
    const int all = task.steps;  // products with the few parts stay within 32 bits
    task.first_step = all * task.part / task.parts;
    task.steps = all * (task.part + 1) / task.parts - task.first_step;
  }
  return task;
}

// A consumer's part of a task: uniform over the lanes, which the shuffles tell the compiler. wgmma needs provably uniform control
// flow.
template <typename S>
struct ConsumerTask {
  int active, steps, streams;
  int partial_step, last_columns;  // the last step, if its tile has fewer keys than others, or -1; and the number of keys

  __device__ __forceinline__ explicit ConsumerTask(const Task& task)
      : active(__shfl_sync(0xffffffffu, task.active, 0)),
        steps(__shfl_sync(0xffffffffu, task.steps, 0)),
        streams(S::kCanGather ? __shfl_sync(0xffffffffu, task.streams, 0) : 1),
        last_columns(task.num_keys - (task.first_step + steps - 1) * S::kKeys) {
    partial_step = last_columns < S::kKeys ? steps - 1 : -1;
  }
};

// Under a block mask the first two consumers compute, and a third consumer never does.
template <typename S>
__device__ __forceinline__ bool is_ordinary(const Params& p, const Task& task) {
  return task.ordinary(p.block_mask_heads > 0 ? Schedule::kBlockConsumers : S::kConsumers);
}

// True if a consumer has a part in a task; an idle consumer finishes its queries and the task at once.
template <typename S>
__device__ __forceinline__ bool takes_part(const Params& p, const ConsumerTask<S>& mine, const Task& task, int consumer,
                                           const BarrierAddresses& barriers) {
  if (consumer < mine.active) return true;
  const bool ordinary = is_ordinary<S>(p, task);
  mbarrier_arrive(barriers.query_empty(consumer));
  if (!ordinary) mbarrier_arrive(barriers.task_done());
  return false;
}

// A bool as a compile-time constant. (std::bool_constant converts on the host only.)
template <bool kValue>
struct Known {
  __device__ constexpr operator bool() const { return kValue; }
};

// Calls compute_tile(step, Known<false>()) for every step of a task, except for the step of a partial tile, which is the last:
// compute_tile(step, Known<true>()).
template <typename S, typename ComputeTile>
__device__ __forceinline__ void compute_steps(const ConsumerTask<S>& mine, const ComputeTile& compute_tile) {
  const int whole = mine.partial_step < 0 ? mine.steps : mine.partial_step;
  for (int step = 0; step < whole; ++step) compute_tile(step, Known<false>());
  if (whole < mine.steps) compute_tile(whole, Known<true>());
}

// The consumers take turns at the tensor cores, in a ring of named barriers. Without turns they fall into step: all wait for the
// tensor cores, then all for the exponential unit. Between tasks it is the first consumer's turn, even if it was idle.
class Turns {
 public:
  __device__ __forceinline__ Turns(int consumer, int consumers) : mine_(kFirstBarrier + consumer) {
    if (consumer == consumers - 1) named_barrier_arrive(kFirstBarrier, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void begin(int consumer, int active) {
    next_ = active == 1 ? 0 : kFirstBarrier + (consumer + 1 == active ? 0 : consumer + 1);
  }
  __device__ __forceinline__ void wait() {
    if (next_) named_barrier_sync(mine_, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void pass() {
    if (next_) named_barrier_arrive(next_, 2 * kWarpgroup);
  }

 private:
  static constexpr int kFirstBarrier = 1 + kMaxConsumers;  // 1 to 3 are the warpgroups' own
  int mine_, next_ = 0;  // next_ 0: alone
};

}  // namespace trtconvert::attention::sm90
