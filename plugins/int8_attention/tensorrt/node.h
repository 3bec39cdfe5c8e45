// The node's inputs and outputs: their order, types and shapes, and the kernel parameters that follow from them.
#pragma once

#include "tensorrt/abi.h"
#include "attributes.h"
#include "trtconvert/int8_attention.h"

namespace trtconvert::plugin {

// H query heads, Hkv key/value heads, T timestep bins, D head_dim. In layout BNHD q, k and v may be one tensor [B, N, 3, H, D], given
// three times. TensorRT computes the three projections as one product anyway, and would copy the parts out for three tensors. For
// the same reason the k and v of several nodes may be one tensor [B, Nk, P, D] with the P heads of all these nodes, given twice; the
// attributes kv_heads, k_head and v_head select the node's heads.
//
// Text and image that attend to each other have separate projections, and TensorRT concatenates them for a plugin with one input.
// With the attribute parts = 2 the plugin takes both: q is the packed tensor [B, N1, 3, H, D] of the first tokens, N1 a multiple of
// 128, and k and v are the packed tensor of the other tokens, [B, N2, 3, H, D], given twice. There are two outputs, [B, N1, H, D] and [B,
// N2, H, D]; everything else counts the tokens of both: Nq = Nk = N1 + N2.
enum Input : int32_t {
  kQ,          // [B, H, Nq, D] (BHND) or [B, Nq, H, D] (BNHD), FP16 or BF16
  kK,          // [B, Hkv, Nk, D] or [B, Nk, Hkv, D], as q
  kV,          // as k
  kTimestep,   // [B] FP32
  kQScale,     // [T, H] FP32
  kKScale,     // [T, Hkv] FP32
  kVScale,     // [T, Hkv, D] FP32
  kKOffset,    // [T, Hkv, D] FP32
  kVOffset,    // [T, Hkv, D] FP32
  kModes,      // [T] INT32
  kMask,       // broadcastable to [B, H, Nq, Nk], BOOL or as q
  kBlockMask,  // [B or 1, H or 1, ceil(Nq / 128), ceil(Nk / 128)] BOOL: the blocks of queries and keys to compute
  kKeyIndex,   // [B, Hkv, n] INT32: the rows of k and v to attend to; in mask and block_mask Nk is then n
  kRotary,     // [N, D / 2, 2] FP32: cosine and sine that turn neighbouring channels of q and k; Nq = Nk = N
  kNorm,       // [2, D] FP32: weights of the RMS norms of q and k, before the rotation; [2, H, D], Hkv = H: across the heads;
               // with norm_split s [2, 2, D]: of q and k, of the tokens before s and of those from s on, 0 < s < Nq = Nk
  kMaxInputs,
};
constexpr int32_t kRequiredInputs = kMask;
constexpr int32_t kPacked = 3;  // tensors in a packed one

// Whether q, k and v are one tensor, from the shape of q.
bool is_packed(nvinfer1::Dims const& dims) noexcept;

// Positions of the optional inputs, which follow the others in the order above; -1 if the node has none. Attributes say which
// inputs exist, except for the mask, which follows from the number of inputs.
struct OptionalInputs {
  int32_t mask = -1, block_mask = -1, key_index = -1, rotary = -1, norm = -1;
};
OptionalInputs optional_inputs(Attributes const& attributes, int32_t num_inputs) noexcept;

// Returns false, with a logged reason, unless the node has the inputs of its attributes, with or without a mask, and its outputs.
bool check_counts(Attributes const& attributes, int32_t num_inputs, int32_t num_outputs) noexcept;

// True if tensor `position` (inputs, then outputs) may have this type and format. Types of q come first and decide the others. No
// message: TensorRT probes combinations.
bool supports(Attributes const& attributes, int32_t position, nvinfer1::DynamicPluginTensorDesc const* tensors,
              int32_t num_inputs) noexcept;

// Fills in shapes, strides and attributes; pointers stay null. Returns false, with a logged reason, if shapes or types do not
// belong together. The C API checks head_dim and the divisibility of heads.
bool describe(Attributes const& attributes, nvinfer1::PluginTensorDesc const* inputs, int32_t num_inputs,
              TrtConvertAttentionParams& params) noexcept;

// Sets the positions of q, k, v and the output in described parameters.
void place(Attributes const& attributes, nvinfer1::Dims const& q, void const* const* inputs, void* const* outputs,
           TrtConvertAttentionParams& params) noexcept;

}  // namespace trtconvert::plugin
