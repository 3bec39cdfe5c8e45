// The order of tiles that keeps in the L2 cache what they share.
#pragma once

#include "linear/int8_params.h"

namespace trtconvert::linear {

// All columns' tiles of some rows, then those of the next rows: as many of both as thread blocks have at once read least.
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
