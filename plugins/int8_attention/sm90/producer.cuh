// The producers of the Hopper kernel, and the warp beside them that finds the next task.
#pragma once

#include "sm90/shape.cuh"

namespace trtconvert::attention::sm90 {

// One warp finds the thread block's tasks, the first at once and each next one on request. The call must not precede the branch to
// the consumers: behind loops like these the compiler no longer knows which values are uniform.
template <int kMode, typename S>
__device__ void schedule_tasks(const Params& p, const Schedule& schedule, const Share& share, uint8_t* shared) {
  const BarrierAddresses barriers(shared_address(shared + S::kBarriers));
  Elements<kMode> elements(p, schedule, share);
  int unit = share.first;
  uint32_t phases = 0;
  for (int n = 0;; ++n) {
    Element element;
    int batch, unit_of_element;
    const bool found = elements.find(p, schedule, unit, batch, unit_of_element, element);
    if (n == 0 && p.block_mask_heads > 0) wait_for_previous_kernel();  // a kernel before the pre-pass writes the order of rows
    if (lane_id() == 0) {
      Task& task = barriers_in<S>(shared).tasks[n % kTaskSlots];
      task = found ? task_of<S::kKeys, S::kConsumers>(p, schedule, batch, unit_of_element, element, phases) : Task();
      phases = phases_after<S::kStages>(phases, task.steps * task.streams);
      mbarrier_arrive(barriers.task_full(n));
    }
    if (!found) return;
    if (n == 0) wait_for_previous_kernel();  // which clears the counters
    mbarrier_wait(barriers.task_wanted(), n & 1);
    if (lane_id() == 0) unit = share.step + atomicAdd(p.units_taken + kMode, 1);
    unit = __shfl_sync(0xffffffffu, unit, 0);
  }
}

// Iterates over the tasks of a producer.
template <typename S, typename Feed>
__device__ __forceinline__ void for_each_task(const Params& p, uint8_t* shared, const Feed& feed) {
  const BarrierAddresses barriers(shared_address(shared + S::kBarriers));
  uint32_t done_parity = 0;
  for (int n = 0;; ++n) {
    mbarrier_wait(barriers.task_full(n), n / kTaskSlots & 1);
    if (n == 0) wait_for_previous_kernel();
    const Task& task = barriers_in<S>(shared).tasks[n % kTaskSlots];
    feed(n, task);
    if (task.active == 0) return;
    if (!is_ordinary<S>(p, task)) {
      mbarrier_arrive(barriers.task_done());
      mbarrier_wait(barriers.task_done(), done_parity);
      done_parity ^= 1;
    }
  }
}

// Iterates over the tiles of a task, in the order of the ring: feed(tile of its kind, place among all steps over the keys, head of
// K and V, place in the ring).
template <typename S, typename Feed>
__device__ __forceinline__ void for_each_tile(const Params& p, const Task& task, const Feed& feed) {
  constexpr int kParts = kKeyTile / S::kKeys;
  const int streams = task.streams, end = task.first_step + task.steps, head = task.head;
  const unsigned heads = task.batch * p.kv_heads;
  int kv_head = p.group == 1 ? head : head / p.group;
  Cursor<S::kStages> at(task.phases);
  if (p.block_mask_heads > 0) {  // a separate loop: the other loop has no registers to spare
    const int32_t* next = p.block_tiles + int64_t(task.block_row) * p.key_tiles;
    const int steps = task.steps;
    int tile = steps > 0 ? *next : 0;  // of the next step, loaded while this one waits for room
    for (int step = 0; step < steps; ++step) {
      const int place = tile * kParts + step % kParts;
      if (step % kParts == kParts - 1 && step + 1 < steps) tile = *++next;
      feed((heads + kv_head) * p.key_tiles + place / kParts, place, kv_head, at);
      at.advance(1);
    }
    return;
  }
  for (int step = task.first_step; step < end; ++step)
    for (int stream = 0; stream < streams; ++stream) {
      if (streams > 1) kv_head = p.group == 1 ? head + stream : (head + stream) / p.group;
      feed((heads + kv_head) * p.key_tiles + step / kParts, step, kv_head, at);
      at.advance(1);
    }
}

// Arrivals in place of consumers that do not read a stage.
template <typename S>
__device__ __forceinline__ int missing_arrivals(const Task& task) {
  return kWarpgroup * (S::kConsumers - (task.streams > 1 ? 1 : task.active));
}

// One thread feeds queries and their scales, task after task. Consumers without queries learn of the task by this. Together with
// the producer of keys it requests the next task.
template <int kMode, int kDimQk, int kDimPv>
__device__ void produce_queries(const Params& p, uint8_t* shared) {
  using S = Shape<kMode, kDimQk, kDimPv>;
  const uint32_t ring = shared_address(shared);
  const BarrierAddresses barriers(ring + S::kBarriers);

  for_each_task<S>(p, shared, [&](int n, const Task& task) {
    const int active = task.active, streams = task.streams;
    int head = task.head, block = task.first_block;
    const unsigned first = task.batch * p.heads;
#pragma unroll 1
    for (int w = 0; w < S::kConsumers; ++w) {
      const uint32_t full = barriers.query_full(w);
      mbarrier_wait(barriers.query_empty(w), (n & 1) ^ 1);
      if (w >= active) {
        mbarrier_arrive(full);
        continue;
      }
      const uint32_t table_bytes = S::kBytePv ? p.head_dim * int(sizeof(float)) : 0;
      mbarrier_arrive_expect(full, S::kQueryBytes + S::kRowScaleBytes + 2 * table_bytes);
      const uint32_t own = ring + S::kConsumerArea + w * S::kConsumerBytes, beside = own + S::kQueryBytes + n % 2 * S::kBesideBytes;
      const unsigned index = (first + head) * p.query_blocks + block;
      bulk_copy(own, p.q_images + index * p.q_block_bytes, S::kQueryBytes, full);
      bulk_copy(beside, p.row_scales + uint64_t(index) * kQueryBlock, S::kRowScaleBytes, full);
      if constexpr (S::kBytePv) {
        const uint32_t tables = beside + S::kRowScaleBytes;
        const int64_t row = (int64_t(task.bin) * p.kv_heads + head / p.group) * p.head_dim;
        bulk_copy(tables, p.v_scale + row, table_bytes, full);
        bulk_copy(tables + S::kTableBytes / 2, p.v_offset + row, table_bytes, full);
      }
      if (streams > 1) {
        ++head;
      } else {
        ++block;
      }
    }
    if (active > 0) mbarrier_arrive(barriers.task_wanted());
  });
}

// One thread feeds keys, tile by tile, task after task, and requests the next task when the last tiles have room. It runs ahead of
// the consumers by the ring's stages, also across ordinary tasks.
template <int kMode, int kDimQk, int kDimPv>
__device__ void produce_keys(const Params& p, uint8_t* shared) {
  using S = Shape<kMode, kDimQk, kDimPv>;
  const uint32_t ring = shared_address(shared);
  const BarrierAddresses barriers(ring + S::kBarriers);

  for_each_task<S>(p, shared, [&](int, const Task& task) {
    if (task.active == 0) return;
    int left = task.steps * task.streams;
    const int missing = missing_arrivals<S>(task);
    if (left == 0) mbarrier_arrive(barriers.task_wanted());
    for_each_tile<S>(p, task, [&](unsigned tile, int step, int, const Cursor<S::kStages>& at) {
      const uint32_t full = barriers.key_full(at.stage), empty = barriers.key_empty(at.stage);
      mbarrier_wait(empty, at.parity() ^ 1);
      if (--left == 0) mbarrier_arrive(barriers.task_wanted());
      if (missing) mbarrier_arrive(empty, missing);
      mbarrier_arrive_expect(full, S::kKeyBytes + S::kScaleBytes);
      // Half tiles: the two 16-bit images of a tile follow each other.
      const int part = step % (kKeyTile / S::kKeys);
      bulk_copy(ring + at.stage * S::kStageBytes + S::kValueRoom, p.k_images + tile * p.k_tile_bytes + part * S::kKeyBytes,
                S::kKeyBytes, full);
      if constexpr (S::kScaleBytes > 0)
        bulk_copy(ring + S::kScales + at.stage * S::kScaleBytes,
                  reinterpret_cast<const uint8_t*>(p.tile_scales + tile) + S::kScaleOffset, S::kScaleBytes, full);
    });
  });
}

// One thread feeds values likewise.
template <int kMode, int kDimQk, int kDimPv>
__device__ void produce_values(const Params& p, const ValueMaps& values, uint8_t* shared) {
  using S = Shape<kMode, kDimQk, kDimPv>;
  const uint32_t ring = shared_address(shared);
  const BarrierAddresses barriers(ring + S::kBarriers);

  for_each_task<S>(p, shared, [&](int, const Task& task) {
    const int missing = missing_arrivals<S>(task), batch = task.batch;
    for_each_tile<S>(p, task, [&](unsigned tile, int step, int kv_head, const Cursor<S::kStages>& at) {
      const uint32_t full = barriers.value_full(at.stage), empty = barriers.value_empty(at.stage);
      mbarrier_wait(empty, at.parity() ^ 1);
      if (missing) mbarrier_arrive(empty, missing);
      mbarrier_arrive_expect(full, S::kValueBytes);
      const uint32_t target = ring + at.stage * S::kStageBytes;
      const uint8_t* const image = p.v_images + tile * p.v_tile_bytes + step % (kKeyTile / S::kKeys) * S::kValueBytes;
      if (S::kSwizzled && p.direct_values) {
        const int key = step * S::kKeys, part = part_of(p, key), place = key - first_token(p, part);
#pragma unroll
        for (int half = 0; half < S::kKeys / kHalfTile; ++half)
#pragma unroll
          for (int block = 0; block < kDimPv / 64; ++block)
            tensor_copy(target + half * S::kHalfBytes + block * kSwizzledBlock, &values.of[part],
                        {block * 64, place + half * kHalfTile, kv_head, batch}, full);
      } else if constexpr (S::kOnes > 0 && !S::kSwizzled && !S::kFp8Pv) {
#pragma unroll
        for (int half = 0; half < S::kKeys / kHalfTile; ++half)
          bulk_copy(target + half * S::kHalfBytes, image + half * kHalfTile * 2 * kDimPv, kHalfTile * 2 * kDimPv, full);
      } else {
        bulk_copy(target, image, S::kValueBytes, full);
      }
    });
  });
}

}  // namespace trtconvert::attention::sm90
