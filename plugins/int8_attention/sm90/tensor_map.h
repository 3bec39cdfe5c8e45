// The caller's value tensor as the copy engine of sm_90 reads it.
#pragma once

#include <cuda.h>

#include "../params.h"

namespace trtconvert::attention {

// Describes V so that one copy of a box is the 16-bit image of 64 keys of a head (params.h): chunks of 8 channels, keys within,
// zeros beyond head_dim and beyond num_keys. False where the driver cannot (strides of zero, say): then the pre-pass copies V.
bool describe_values(const Params& p, CUtensorMap& map);

}  // namespace trtconvert::attention
