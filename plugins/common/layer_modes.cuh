// The mode of a call, and its samples' entries of the table.
#pragma once

#include <climits>

#include "common/quantise.cuh"
#include "common/timestep.cuh"
#include "trtconvert/layer_modes.h"

namespace trtconvert {

constexpr float kLeastScale = 0x1p-100f;  // of a row of zeros, part of the numerics

// `usable` is false if the table has a mode outside of mode_set: the mode is then the first of the set, and no row is usable.
struct CallMode {
  int mode;
  bool usable;
};

__device__ __forceinline__ int sample_bin(const TrtConvertModeTable& table, int sample) {
  return table.timestep ? timestep_bin(table.timestep[sample], table.timestep_max, table.num_bins) : 0;
}

// Must be called by whole warps; every lane gets the mode.
__device__ __forceinline__ CallMode call_mode(const TrtConvertModeTable& table) {
  const int first = __ffs(table.mode_set) - 1;
  if (table.mode_set == TRTCONVERT_MODE_BIT(first) && !table.modes) return {first, true};
  int mode = INT_MAX;
  for (int sample = threadIdx.x % 32; sample < table.batch; sample += 32) mode = min(mode, table.modes[sample_bin(table, sample)]);
  mode = __reduce_min_sync(0xffffffffu, mode);
  const bool usable = mode >= 0 && mode < 31 && (table.mode_set >> mode & 1);
  return {usable ? mode : first, usable};
}

// Whether a sample has results, and the calibrated scale of its bin.
struct Sample {
  bool usable;
  float x_scale;  // in mode STATIC
};

__device__ __forceinline__ Sample sample_of(const TrtConvertModeTable& table, const CallMode& call, int sample) {
  Sample found = {call.usable && !(table.timestep && isnan(table.timestep[sample])), 1.f};
  if (call.mode == TRTCONVERT_STATIC) {
    found.x_scale = table.x_scale[sample_bin(table, sample)];
    found.usable = found.usable && usable_scale(found.x_scale);
  }
  return found;
}

}  // namespace trtconvert
