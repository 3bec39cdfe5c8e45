// Which row of a table a timestep selects.
#pragma once

#include <cmath>

namespace trtconvert {

// min(bins - 1, floor(t * bins / timestep_max)), from 0; 0 for NaN.
__device__ __forceinline__ int timestep_bin(float t, float timestep_max, int bins) {
  // The product before the quotient: the edges are exact for integer timesteps, as in the reference.
  const float position = floorf(__fdiv_rn(__fmul_rn(t, float(bins)), timestep_max));
  // The clamp in floating point first: a huge timestep must not overflow the conversion.
  return min(int(fminf(fmaxf(position, 0.f), float(bins - 1))), bins - 1);
}

}  // namespace trtconvert
