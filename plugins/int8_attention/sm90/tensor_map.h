// The caller's values as the copy engine of sm_90 reads them.
#pragma once

#include <cuda.h>

#include "../params.h"

namespace trtconvert::attention {

// Of each part of the tokens.
struct ValueMaps {
  CUtensorMap of[2];
};

// Describes V in boxes of 64 keys by 64 channels of a head, with the 128-byte swizzle, zeros beyond head_dim and num_keys. False
// where the layout is another one (swizzled_values()) or the driver cannot (strides of zero, say): then the pre-pass copies V.
bool describe_values(const Params& p, ValueMaps& maps);

}  // namespace trtconvert::attention
