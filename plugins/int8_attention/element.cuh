// Mode, bin and number of keys of a batch element, from the caller's timestep and tables.
#pragma once

#include <cmath>

#include "common/timestep.cuh"
#include "params.h"

namespace trtconvert::attention {

// An unusable timestep or mode is reported through `valid`.
struct Element {
  int mode, bin, num_keys;
  bool valid;
};

__device__ __forceinline__ int num_keys_of(const Params& p, int b) {
  return p.key_lengths ? min(max(p.key_lengths[b], 0), p.num_keys) : p.num_keys;
}

__device__ __forceinline__ Element element_of(const Params& p, int b) {
  const float t = p.timestep[b];
  Element e;
  e.bin = timestep_bin(t, p.timestep_max, p.num_bins);
  e.mode = p.modes[e.bin];
  e.valid = !isnan(t) && e.mode >= 0 && e.mode < kModes;
  if (!e.valid || (e.mode == 4 && !p.fp8_values)) e.mode = 1;
  e.num_keys = num_keys_of(p, b);
  return e;
}

}  // namespace trtconvert::attention
