// The node's inputs and output: their order, types and shapes, and the kernel parameters that they amount to.
#pragma once

#include "abi.h"
#include "attributes.h"
#include "trtconvert/int8_attention.h"

namespace trtconvert::plugin {

// H query heads, Hkv key/value heads, T timestep bins, D head_dim. Instead of three tensors q, k and v may be one, given three
// times: [B, N, 3, H, D] in layout BNHD, as one projection computes them. TensorRT computes it as one anyway, and for three
// tensors copies the parts out.
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
  kMask,       // optional, broadcastable to [B, H, Nq, Nk], BOOL or as q
  kMaxInputs,
};
constexpr int32_t kMinInputs = kMask;
constexpr int32_t kPacked = 3;  // tensors in a packed one

// Whether q, k and v are one tensor, from the shape of q.
bool is_packed(nvinfer1::Dims const& dims) noexcept;

// False, and a logged reason, unless the node has 10 or 11 inputs and one output.
bool check_counts(int32_t num_inputs, int32_t num_outputs) noexcept;

// Whether tensor `position` (inputs, then the output) may have this type and format. Types of q come first and decide the
// others. No message: TensorRT asks this to find out.
bool supports(int32_t position, nvinfer1::DynamicPluginTensorDesc const* tensors, int32_t num_inputs) noexcept;

// Fills in shapes, strides and attributes; pointers stay null. False, and a logged reason, where shapes or types do not
// belong together. What the C API checks itself (head_dim, divisibility of heads) is left to it.
bool describe(Attributes const& attributes, nvinfer1::PluginTensorDesc const* inputs, int32_t num_inputs,
              TrtConvertAttentionParams& params) noexcept;

}  // namespace trtconvert::plugin
