// The caller's value tensor as the copy engine of sm_90 reads it.
#pragma once

#include <cuda.h>

#include "../params.h"

namespace trtconvert::attention {

// Describes V in boxes of 64 keys by 64 channels of a head, with the 128-byte swizzle, zeros beyond head_dim and num_keys. False
// where the layout is another one (swizzled_values()) or the driver cannot (strides of zero, say): then the pre-pass copies V.
bool describe_values(const Params& p, CUtensorMap& map);

}  // namespace trtconvert::attention
