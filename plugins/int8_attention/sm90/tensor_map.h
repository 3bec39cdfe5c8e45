// Description of the caller's values for the copy engine of sm_90.
#pragma once

#include <cuda.h>

#include "../params.h"

namespace trtconvert::attention {

// The map of each part of the tokens (Params::parts).
struct ValueMaps {
  CUtensorMap of[2];
};

// Describes V in boxes of 64 keys by 64 channels of a head, with the 128-byte swizzle, zeros beyond head_dim and num_keys. Returns
// false if the layout is another one (swizzled_values()) or the driver cannot describe it (for example strides of zero): then the
// pre-pass copies V.
bool describe_values(const Params& p, ValueMaps& maps);

}  // namespace trtconvert::attention
