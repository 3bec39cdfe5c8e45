// Where each array of Params lies in the workspace.
#pragma once

#include <algorithm>

#include "params.h"
#include "sm90/schedule.h"

namespace trtconvert::attention {

// Fills the workspace pointers and sizes of `p` from its shapes; returns the bytes needed. `base` may be null.
inline size_t lay_out_workspace(Params& p, void* base) {
  size_t offset = 0;
  const auto take = [&](size_t bytes) {
    auto* const start = reinterpret_cast<uint8_t*>(reinterpret_cast<uintptr_t>(base) + offset);
    offset += (bytes + 255) / 256 * 256;
    return start;
  };
  const size_t rows = size_t(p.batch) * p.heads * p.query_blocks;
  const size_t tiles = size_t(p.batch) * p.kv_heads * p.key_tiles;
  // The mode is known on the device only, so every image has room for its largest form.
  p.q_block_bytes = int64_t(kQueryBlock) * std::max(p.dims.qk, 2 * p.dims.pv);
  p.k_tile_bytes = int64_t(kKeyTile) * std::max(p.dims.qk, 2 * p.dims.pv);
  p.v_tile_bytes = int64_t(kKeyTile) * 2 * p.dims.pv;
  if (p.norm_across_heads) {
    p.q_norm_factors = reinterpret_cast<float*>(take(size_t(p.batch) * p.num_queries * sizeof(float)));
    p.k_norm_factors = reinterpret_cast<float*>(take(size_t(p.batch) * p.num_keys * sizeof(float)));
  }
  if (p.has_key_mask) {
    p.visible_keys = reinterpret_cast<int32_t*>(take(size_t(p.batch) * p.num_keys * sizeof(int32_t)));
    p.visible_counts = reinterpret_cast<int32_t*>(take(size_t(p.batch) * sizeof(int32_t)));
  }
  if (p.block_mask_heads > 0) {
    const size_t block_rows = size_t(p.batch) * p.block_mask_heads * p.block_rows;
    p.block_tiles = reinterpret_cast<int32_t*>(take(block_rows * p.key_tiles * sizeof(int32_t)));
    p.block_counts = reinterpret_cast<int32_t*>(take(block_rows * sizeof(int32_t)));
    if (p.multiprocessors > 0)
      p.block_order = reinterpret_cast<BlockRow*>(take(size_t(p.batch) * p.heads * p.block_rows * sizeof(BlockRow)));
  }
  p.elements = reinterpret_cast<ElementInfo*>(take(size_t(p.batch) * sizeof(ElementInfo)));
  p.row_scales = reinterpret_cast<float*>(take(rows * kQueryBlock * sizeof(float)));
  p.tile_scales = reinterpret_cast<TileScales*>(take(tiles * sizeof(TileScales)));
  p.q_images = take(rows * p.q_block_bytes);
  p.k_images = take(tiles * p.k_tile_bytes);
  p.v_images = take(tiles * p.v_tile_bytes);
  if (p.multiprocessors > 0) {
    p.units_taken = reinterpret_cast<int32_t*>(take(kModes * sizeof(int32_t)));
    p.divided_units = Schedule::most_divided(p);
    p.parts_done = reinterpret_cast<int32_t*>(take(size_t(p.divided_units) * kMaxConsumers * sizeof(int32_t)));
    p.unit_parts = reinterpret_cast<float*>(
        take(size_t(Schedule::most_parts(p)) * kMaxConsumers * part_floats(p.dims) * sizeof(float)));
  }
  return offset;
}

}  // namespace trtconvert::attention
