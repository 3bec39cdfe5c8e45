// Host entry points of the kernels. Each enqueues on `stream` and returns CUDA's status of the launch.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"
#include "sm90/tensor_map.h"

namespace trtconvert::attention {

// A pair of padded head dims that kernels are compiled for: one translation unit each.
template <int kQk, int kPv>
struct DimsOf {
  static constexpr int qk = kQk, pv = kPv;
};

// Calls `launch` with the DimsOf<> that padded_dims() found.
template <typename Launch>
cudaError_t with_dims(const PaddedDims& dims, Launch launch) {
  switch (dims.pv) {
    case 48: return launch(DimsOf<64, 48>());
    case 64: return launch(DimsOf<64, 64>());
    case 80: return launch(DimsOf<96, 80>());
    case 96: return launch(DimsOf<96, 96>());
    case 128: return launch(DimsOf<128, 128>());
    case 160: return launch(DimsOf<160, 160>());
    case 192: return launch(DimsOf<192, 192>());
    case 256: return launch(DimsOf<256, 256>());
    default: return cudaErrorInvalidValue;
  }
}

// Writes visible_keys and visible_counts from the key mask and key_lengths. All architectures.
cudaError_t launch_key_lists(const Params& params, cudaStream_t stream);

// Writes the parts of the workspace about the block mask. All architectures.
cudaError_t launch_block_lists(const Params& params, cudaStream_t stream);

// Writes the workspace of `params` for the attention kernels, from its inputs: one kernel, or two with a norm across heads. All
// architectures.
cudaError_t launch_prepass(const Params& params, cudaStream_t stream);

// wgmma and bulk copies; sm_90a only. Everything but general masks. `values` describes V if params.direct_values is set.
cudaError_t launch_attention_sm90(const Params& params, const ValueMaps& values, cudaStream_t stream);

// mma.sync and cp.async; sm_80 and later.
cudaError_t launch_attention_mma(const Params& params, cudaStream_t stream);

// The same, for calls that are is_one_tile(). Reads the inputs themselves: needs no pre-pass and no workspace.
cudaError_t launch_attention_one_tile(const Params& params, int multiprocessors, cudaStream_t stream);

}  // namespace trtconvert::attention
