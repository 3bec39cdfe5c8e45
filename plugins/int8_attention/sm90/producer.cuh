// The producer of the Hopper kernel.
#pragma once

#include "sm90/shape.cuh"

namespace trtconvert::attention::sm90 {

// One thread: feeds queries, then keys and values tile by tile.
template <int kMode, int kDimQk, int kDimPv>
__device__ void produce(const Params& p, const CUtensorMap& values, const Task task, uint8_t* shared) {
  using S = Shape<kMode, kDimQk, kDimPv>;
  Barriers& barriers = *reinterpret_cast<Barriers*>(shared + S::kBarriers);
  uint8_t* const queries = shared + S::kConsumerArea;

  for (int w = 0; w < task.active; ++w) {
    mbarrier_arrive_expect(&barriers.query[w], S::kQueryBytes);
    bulk_copy(queries + w * S::kConsumerBytes, p.q_images + task.q_block(p, w) * p.q_block_bytes, S::kQueryBytes,
              &barriers.query[w]);
  }
  Cursor<S::kStages> at;
  int stream = 0, step = task.first_step;
  while (step < task.first_step + task.steps) {
    uint8_t* const value = shared + at.stage * S::kStageBytes;
    uint8_t* const key = value + S::kValueRoom;
    uint8_t* const scales = shared + S::kScales + at.stage * int(sizeof(TileScales));
    // Half tiles: the two 16-bit images of a tile follow each other.
    constexpr int kParts = kKeyTile / S::kKeys;
    const int64_t tile = task.kv_tile(p, stream) + step / kParts;
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
    if (S::kSwizzled && p.direct_values) {
#pragma unroll
      for (int half = 0; half < S::kKeys / kHalfTile; ++half)
#pragma unroll
        for (int block = 0; block < kDimPv / 64; ++block)
          tensor_copy(value + half * S::kHalfBytes + block * kSwizzledBlock, &values,
                      {block * 64, step * S::kKeys + half * kHalfTile, (task.head + stream) / p.group, int(blockIdx.y)},
                      &barriers.value_full[at.stage]);
    } else if constexpr (S::kOnes > 0 && !S::kSwizzled) {
#pragma unroll
      for (int half = 0; half < S::kKeys / kHalfTile; ++half)
        bulk_copy(value + half * S::kHalfBytes, v_image + half * kHalfTile * 2 * kDimPv, kHalfTile * 2 * kDimPv,
                  &barriers.value_full[at.stage]);
    } else {
      bulk_copy(value, v_image, S::kValueBytes, &barriers.value_full[at.stage]);
    }
    at.advance(1);
    if (++stream == task.streams) {
      stream = 0;
      ++step;
    }
  }
}

}  // namespace trtconvert::attention::sm90
