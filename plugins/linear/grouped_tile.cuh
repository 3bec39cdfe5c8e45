// An order of tiles that keeps their shared operands in the L2 cache.
#pragma once

#include "linear/int8_params.h"

namespace trtconvert::linear {

// All columns' tiles of some rows, then those of the next rows: concurrent thread blocks share most of their operands.
struct GroupedTile {
  int row, column;

  __device__ __forceinline__ GroupedTile(const Int8Params& p, int tile) {
    const int of_group = p.group_rows * p.column_tiles, group = tile / of_group, in_group = tile - group * of_group;
    const int first = group * p.group_rows, rows = min(p.group_rows, p.row_tiles - first);
    row = first + in_group % rows;
    column = in_group / rows;
  }
};

}  // namespace trtconvert::linear
