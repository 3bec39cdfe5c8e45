// What a batch element asks for, from the caller's timestep and tables.
#pragma once

#include <cmath>

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
  // The product before the quotient: the edges are exact for integer timesteps, as in the reference.
  const float position = floorf(__fdiv_rn(__fmul_rn(t, float(p.num_bins)), p.timestep_max));
  // The clamp in floating point first: a huge timestep must not overflow the conversion.
  e.bin = min(int(fminf(fmaxf(position, 0.f), float(p.num_bins - 1))), p.num_bins - 1);
  e.mode = p.modes[e.bin];
  e.valid = !isnan(t) && e.mode >= 0 && e.mode < kModes;
  if (!e.valid || (e.mode == 4 && !p.fp8_values)) e.mode = 1;
  e.num_keys = num_keys_of(p, b);
  return e;
}

}  // namespace trtconvert::attention
