// Choice of the fastest tile for the kernels of INT8 rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "linear/sm90/int8_launch.h"

namespace trtconvert::linear {

template <int kColumns, bool kAlternate>
struct Tile {
  static constexpr int columns = kColumns;
  static constexpr bool alternate = kAlternate;
};

// The tile with the least estimated time among those that `for_each_tile` enumerates.
template <typename ForEachTile>
Int8Instance choose_tile(ForEachTile for_each_tile, int64_t rows, int out_columns, int depth, bool geglu, bool bf16, int multiprocessors) {
  constexpr int64_t kBeside = 320;
  const auto in = [](int64_t size, int tile) { return (size + tile - 1) / tile; };
  Int8Instance best = {};
  int64_t least = INT64_MAX;
  for_each_tile([&](auto tile) {
    const Int8Instance candidate = {tile.columns, tile.alternate, geglu, bf16};
    const int64_t tiles = in(in(rows, kTileRows) * in(out_columns, candidate.out_columns()), multiprocessors);
    const int64_t deep = std::max(tile.columns, (tile.columns + kTileRows) / 2);
    const int64_t time = tiles * deep * in(depth, kRowBytes) + kBeside * (tile.alternate ? 1 : tiles);
    if (time >= least) return;
    least = time;
    best = candidate;
  });
  return best;
}

}  // namespace trtconvert::linear
