// What a batch element asks for, from the caller's timestep and tables.
#pragma once

#include <cmath>

#include "early_launch.cuh"
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

// What a thread block will want of the tables, in L2 before it is known which bin it wants: in a network they come from DRAM, and
// the timestep, the mode and a bin's scales would come one after the other.
__device__ __forceinline__ void prefetch_element(const Params& p, int b) {
  if (threadIdx.x == 0) prefetch(p.timestep + b);
  prefetch_bins(p.modes, 1, 0, p.num_bins * int(sizeof(int32_t)));
}
__device__ __forceinline__ void prefetch_query_tables(const Params& p, int head) {
  prefetch_bins(p.q_scale + head, p.num_bins, p.heads * sizeof(float), sizeof(float));
  prefetch_bins(p.k_scale + head / p.group, p.num_bins, p.kv_heads * sizeof(float), sizeof(float));
}
__device__ __forceinline__ void prefetch_channels(const Params& p, const float* table, int kv_head) {
  const int bytes = p.head_dim * int(sizeof(float));
  prefetch_bins(table + int64_t(kv_head) * p.head_dim, p.num_bins, int64_t(p.kv_heads) * bytes, bytes);
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
