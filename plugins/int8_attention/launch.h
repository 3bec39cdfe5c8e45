// Host entry points of the kernels. Each enqueues on `stream` and returns CUDA's status of the launch.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "params.h"

namespace trtconvert::attention {

// Writes what the attention kernels read of the workspace of `params`, from its inputs: one kernel, or two where there is a norm
// across heads. All architectures.
cudaError_t launch_prepass(const Params& params, cudaStream_t stream);

// wgmma and bulk copies; sm_90a only. Everything but general masks. `values` describes V where params.direct_values is set.
cudaError_t launch_attention_sm90(const Params& params, const CUtensorMap& values, cudaStream_t stream);

// mma.sync and cp.async; sm_80 and later.
cudaError_t launch_attention_mma(const Params& params, cudaStream_t stream);

// The same, for calls that are is_one_tile(). Reads the inputs themselves: needs no pre-pass and no workspace.
cudaError_t launch_attention_one_tile(const Params& params, int multiprocessors, cudaStream_t stream);

}  // namespace trtconvert::attention
