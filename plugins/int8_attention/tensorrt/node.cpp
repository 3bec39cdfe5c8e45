#include "node.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tensorrt/logger.h"
#include "tensorrt/plugin_base.h"
#include "tensorrt/shapes.h"

namespace trtconvert::plugin {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorFormat;

constexpr char const* kInputNames[kMaxInputs] = {"q",       "k",        "v",        "timestep", "q_scale", "k_scale", "v_scale",
                                                 "k_offset", "v_offset", "modes",    "mask",     "block_mask", "key_index", "rotary",  "norm"};

bool check_shape(Input input, Dims const& got, Dims const& expected) noexcept {
  bool const same = is_same(got, expected);
  if (!same) {
    log(Severity::kERROR, "input '%s': expected shape %s from q, k, modes and attributes, got %s", kInputNames[input],
        ShapeText(expected).text, ShapeText(got).text);
  }
  return same;
}

bool check_rank(Input input, Dims const& dims, int32_t rank) noexcept {
  if (dims.nbDims != rank) {
    log(Severity::kERROR, "input '%s': expected %d dimensions, got shape %s", kInputNames[input], rank,
        ShapeText(dims).text);
    return false;
  }
  for (int32_t i = 0; i < rank; ++i) {
    if (dims.d[i] < 1 || dims.d[i] > std::numeric_limits<int32_t>::max()) {
      log(Severity::kERROR, "input '%s': expected dimensions from 1 to 2^31 - 1, got shape %s", kInputNames[input],
          ShapeText(dims).text);
      return false;
    }
  }
  return true;
}

// More than any GPU holds, so that strides are far from overflowing.
bool check_elements(Input input, Dims const& dims) noexcept {
  constexpr double kMost = double(int64_t{1} << 44);
  double elements = 1;
  for (int32_t i = 0; i < dims.nbDims; ++i) elements *= static_cast<double>(dims.d[i]);
  if (std::abs(elements) <= kMost) return true;
  log(Severity::kERROR, "input '%s': expected at most 2^44 elements, got shape %s", kInputNames[input], ShapeText(dims).text);
  return false;
}

// [batch, heads, tokens, head_dim] whatever the layout.
struct HeadsFirst {
  int64_t batch, heads, tokens, dim;
};

HeadsFirst heads_first(Dims const& dims, Attributes const& attributes) noexcept {
  if (is_packed(dims)) return {dims.d[0], dims.d[3], dims.d[1], dims.d[4]};
  int64_t const heads = dims.d[attributes.heads_first ? 1 : 2];
  int64_t const tokens = dims.d[attributes.heads_first ? 2 : 1];
  return {dims.d[0], heads, tokens, dims.d[3]};
}

TrtConvertStrides contiguous(HeadsFirst const& shape, Attributes const& attributes) noexcept {
  int64_t const batch = shape.heads * shape.tokens * shape.dim;
  if (attributes.heads_first) return {batch, shape.dim, shape.tokens * shape.dim};
  return {batch, shape.heads * shape.dim, shape.dim};
}

// Strides of k and v among the heads of several nodes.
TrtConvertStrides strides_in_shared(HeadsFirst const& shape, int64_t all_heads) noexcept {
  return {shape.tokens * all_heads * shape.dim, all_heads * shape.dim, shape.dim};
}

// Strides of one of the three in a packed input.
TrtConvertStrides strides_in_packed(HeadsFirst const& shape) noexcept {
  int64_t const token = kPacked * shape.heads * shape.dim;
  return {shape.tokens * token, token, shape.dim};
}

bool check_packed(Dims const& dims, Attributes const& attributes) noexcept {
  if (dims.d[2] == kPacked && !attributes.heads_first) return true;
  log(Severity::kERROR, "input 'q': expected [B, N, 3, H, D] and layout BNHD where q, k and v are packed, got %s and %s",
      ShapeText(dims).text, attributes.heads_first ? "BHND" : "BNHD");
  return false;
}

// Strides of tokens in two tensors; input k is the second tensor.
bool check_parts(Dims const& q, Dims const& k, Attributes const& attributes) noexcept {
  if (!is_packed(q) || attributes.kv_heads > 0) {
    log(Severity::kERROR, "input 'q': with parts 2 expected [B, N, 3, H, D] and kv_heads 0, got %s and %d", ShapeText(q).text,
        attributes.kv_heads);
    return false;
  }
  Dims of_second = q;
  of_second.d[1] = k.d[1];
  return check_shape(kK, k, of_second);
}

bool check_shared(Dims const& q, Dims const& k, Attributes const& attributes) noexcept {
  int64_t const last = std::max(attributes.k_head, attributes.v_head) + int64_t{attributes.kv_heads};
  if (!is_packed(q) && !attributes.heads_first && last <= k.d[2]) return true;
  log(Severity::kERROR,
      "input 'k': with kv_heads %d, k_head %d and v_head %d expected layout BNHD, q [B, Nq, H, D] and k [B, Nk, P, D] of P >= "
      "%lld heads, got %s, %s and %s",
      attributes.kv_heads, attributes.k_head, attributes.v_head, static_cast<long long>(last),
      attributes.heads_first ? "BHND" : "BNHD", ShapeText(q).text, ShapeText(k).text);
  return false;
}

// True if norms cover a token's heads together, from the shape of their weights. Norms of two parts may have the shape of norms
// across two heads: the attribute decides.
bool is_across_heads(Dims const& norm, Attributes const& attributes) noexcept {
  return attributes.norm_split == 0 && norm.nbDims == 3;
}

bool check_norm(Dims const& norm, HeadsFirst const& q, HeadsFirst const& k, Attributes const& attributes) noexcept {
  if (attributes.norm_split > 0) {
    Dims const of_parts{3, {2, 2, q.dim}};
    if (is_same(norm, of_parts)) return true;
    log(Severity::kERROR, "input 'norm': with norm_split %d expected shape %s of q and k, and of each the two parts, got %s",
        attributes.norm_split, ShapeText(of_parts).text, ShapeText(norm).text);
    return false;
  }
  Dims const of_heads{2, {2, q.dim}};
  Dims const across_heads{3, {2, q.heads, q.dim}};
  if (is_same(norm, of_heads) || (q.heads == k.heads && is_same(norm, across_heads))) return true;
  log(Severity::kERROR,
      "input 'norm': expected shape %s for norms of each head, or %s for norms across all heads where q and k have as many, got %s "
      "with %lld and %lld heads",
      ShapeText(of_heads).text, ShapeText(across_heads).text, ShapeText(norm).text, static_cast<long long>(q.heads),
      static_cast<long long>(k.heads));
  return false;
}

bool check_layers_before(Dims const* rotary, Dims const* norm, HeadsFirst const& q, HeadsFirst const& k,
                         Attributes const& attributes) noexcept {
  if (rotary != nullptr && q.tokens != k.tokens) {
    log(Severity::kERROR, "input 'rotary': expected as many queries as keys, got %lld and %lld",
        static_cast<long long>(q.tokens), static_cast<long long>(k.tokens));
    return false;
  }
  return (rotary == nullptr || check_shape(kRotary, *rotary, {3, {q.tokens, q.dim / 2, 2}})) &&
         (norm == nullptr || check_norm(*norm, q, k, attributes));
}

// Strides that broadcast the mask to [B, H, Nq, Nk], dimensions aligned at the right as in ONNX.
bool describe_mask(PluginTensorDesc const& mask, TrtConvertAttentionParams& params) noexcept {
  if (!check_elements(kMask, mask.dims)) return false;
  Dims const full{4, {params.batch, params.num_heads, params.num_queries, params.num_keys}};
  bool fits = mask.dims.nbDims >= 1 && mask.dims.nbDims <= 4;
  int64_t stride = 1;
  for (int32_t i = 3; fits && i >= 0; --i) {
    int32_t const own = i - (4 - mask.dims.nbDims);
    int64_t const size = own >= 0 ? mask.dims.d[own] : 1;
    fits = size == 1 || size == full.d[i];
    params.mask_strides[i] = size == 1 ? 0 : stride;
    if (fits) stride *= size;
  }
  if (!fits) {
    log(Severity::kERROR, "input 'mask': expected a shape that broadcasts to %s, got %s", ShapeText(full).text,
        ShapeText(mask.dims).text);
  }
  params.mask_kind = mask.type == DataType::kBOOL ? TRTCONVERT_MASK_BOOL : TRTCONVERT_MASK_ADDITIVE;
  return fits;
}

// The number of rows of an index.
bool check_key_index(Dims const& index, HeadsFirst const& k, int64_t& kept) noexcept {
  if (!check_rank(kKeyIndex, index, 3)) return false;
  kept = index.d[2];
  return check_shape(kKeyIndex, index, {3, {k.batch, k.heads, kept}});
}

bool describe_block_mask(Dims const& blocks, TrtConvertAttentionParams& params) noexcept {
  Dims const full{4, {params.batch, params.num_heads, (params.num_queries + int64_t{127}) / 128, (params.num_keys + int64_t{127}) / 128}};
  bool fits = blocks.nbDims == 4;
  for (int32_t i = 0; fits && i < 4; ++i) fits = blocks.d[i] == full.d[i] || (i < 2 && blocks.d[i] == 1);
  if (!fits) {
    log(Severity::kERROR, "input 'block_mask': expected shape %s, of which the first two may be 1, got %s", ShapeText(full).text,
        ShapeText(blocks).text);
    return false;
  }
  params.block_mask_batch = static_cast<int32_t>(blocks.d[0]);
  params.block_mask_heads = static_cast<int32_t>(blocks.d[1]);
  return true;
}

// The input at a position, or kV for an output: its type follows q, like the type of v.
Input role_of(Attributes const& attributes, int32_t position, int32_t num_inputs) noexcept {
  if (position >= num_inputs) return kV;
  OptionalInputs const optional = optional_inputs(attributes, num_inputs);
  if (position == optional.mask) return kMask;
  if (position == optional.block_mask) return kBlockMask;
  if (position == optional.key_index) return kKeyIndex;
  if (position == optional.rotary) return kRotary;
  if (position == optional.norm) return kNorm;
  return static_cast<Input>(position);
}

bool type_fits(Input role, DataType type, DataType q_type) noexcept {
  switch (role) {
    case kQ:
      return is_16bit_float(type);
    case kTimestep:
    case kQScale:
    case kKScale:
    case kVScale:
    case kKOffset:
    case kVOffset:
    case kRotary:
    case kNorm:
      return type == DataType::kFLOAT;
    case kBlockMask:
      return type == DataType::kBOOL;
    case kModes:
    case kKeyIndex:
      return type == DataType::kINT32;
    case kMask:
      return type == DataType::kBOOL || type == q_type;
    default:  // k, v and outputs
      return type == q_type;
  }
}

}  // namespace

bool is_packed(nvinfer1::Dims const& dims) noexcept { return dims.nbDims == 5; }

OptionalInputs optional_inputs(Attributes const& attributes, int32_t num_inputs) noexcept {
  OptionalInputs optional;
  int32_t next = num_inputs;
  if (attributes.norm) optional.norm = --next;
  if (attributes.rotary) optional.rotary = --next;
  if (attributes.key_index) optional.key_index = --next;
  if (attributes.block_mask) optional.block_mask = --next;
  if (next > kRequiredInputs) optional.mask = kRequiredInputs;
  return optional;
}

bool check_counts(Attributes const& attributes, int32_t num_inputs, int32_t num_outputs) noexcept {
  int32_t const fewest = kRequiredInputs + attributes.block_mask + attributes.key_index + attributes.rotary + attributes.norm;
  if (num_inputs >= fewest && num_inputs <= fewest + 1 && num_outputs == attributes.parts) return true;
  log(Severity::kERROR,
      "expected %d or %d inputs (q, k, v, timestep, q_scale, k_scale, v_scale, k_offset, v_offset, modes, perhaps mask%s%s%s%s) "
      "and %d output%s, got %d and %d; export the model again with this version of trtconvert",
      fewest, fewest + 1, attributes.block_mask ? ", block_mask" : "", attributes.key_index ? ", key_index" : "", attributes.rotary ? ", rotary" : "", attributes.norm ? ", norm" : "", attributes.parts,
      attributes.parts > 1 ? "s" : "", num_inputs, num_outputs);
  return false;
}

bool supports(Attributes const& attributes, int32_t position, nvinfer1::DynamicPluginTensorDesc const* tensors,
              int32_t num_inputs) noexcept {
  PluginTensorDesc const& tensor = tensors[position].desc;
  return tensor.format == TensorFormat::kLINEAR &&
         type_fits(role_of(attributes, position, num_inputs), tensor.type, tensors[kQ].desc.type);
}

bool describe(Attributes const& attributes, PluginTensorDesc const* inputs, int32_t num_inputs,
              TrtConvertAttentionParams& params) noexcept {
  for (int32_t i = 0; i < num_inputs; ++i) {
    Input const role = role_of(attributes, i, num_inputs);
    if (!type_fits(role, inputs[i].type, inputs[kQ].type) || inputs[i].format != TensorFormat::kLINEAR) {
      log(Severity::kERROR,
          "input '%s': expected linear format and FP16 or BF16 for q, k, v, FP32 for timestep, tables, rotary and norm, INT32 "
          "for modes and key_index, BOOL for block_mask, BOOL or q's type for mask; got type %d and format %d",
          kInputNames[role], static_cast<int>(inputs[i].type), static_cast<int>(inputs[i].format));
      return false;
    }
  }
  Dims const& q_dims = inputs[kQ].dims;
  Dims const& k_dims = inputs[kK].dims;
  Dims const& modes = inputs[kModes].dims;
  bool const packed = is_packed(q_dims);
  int32_t const rank = packed ? 5 : 4;
  if (!check_rank(kQ, q_dims, rank) || !check_rank(kK, k_dims, rank) || !check_rank(kModes, modes, 1)) return false;
  if (!check_elements(kQ, q_dims) || !check_elements(kK, k_dims)) return false;
  bool const in_parts = attributes.parts > 1;
  if (in_parts && !check_parts(q_dims, k_dims, attributes)) return false;
  if (packed && (!check_packed(q_dims, attributes) || (!in_parts && !check_shape(kK, k_dims, q_dims)))) return false;
  bool const shared = attributes.kv_heads > 0;
  if (shared && !check_shared(q_dims, k_dims, attributes)) return false;

  HeadsFirst const first = heads_first(q_dims, attributes), second = heads_first(k_dims, attributes);
  HeadsFirst q = first, k = second;
  if (in_parts) q.tokens = k.tokens = first.tokens + second.tokens;
  int64_t const all_kv_heads = k.heads;
  if (shared) k.heads = attributes.kv_heads;
  int64_t const bins = modes.d[0];
  if (k.batch != q.batch || k.dim != q.dim) {
    log(Severity::kERROR, "input 'k': expected the batch and head_dim of q %s, got %s", ShapeText(q_dims).text,
        ShapeText(k_dims).text);
    return false;
  }
  Dims const per_channel{3, {bins, k.heads, k.dim}};
  if (!check_shape(kV, inputs[kV].dims, k_dims) || !check_shape(kTimestep, inputs[kTimestep].dims, {1, {q.batch}}) ||
      !check_shape(kQScale, inputs[kQScale].dims, {2, {bins, q.heads}}) ||
      !check_shape(kKScale, inputs[kKScale].dims, {2, {bins, k.heads}}) ||
      !check_shape(kVScale, inputs[kVScale].dims, per_channel) ||
      !check_shape(kKOffset, inputs[kKOffset].dims, per_channel) ||
      !check_shape(kVOffset, inputs[kVOffset].dims, per_channel)) {
    return false;
  }

  OptionalInputs const optional = optional_inputs(attributes, num_inputs);
  if (!check_layers_before(optional.rotary < 0 ? nullptr : &inputs[optional.rotary].dims,
                           optional.norm < 0 ? nullptr : &inputs[optional.norm].dims, q, k, attributes)) {
    return false;
  }

  int64_t num_keys = k.tokens;
  if (optional.key_index >= 0 && !check_key_index(inputs[optional.key_index].dims, k, num_keys)) return false;

  params = {};
  params.struct_size = sizeof(params);
  params.version = TRTCONVERT_ATTENTION_VERSION;
  params.batch = static_cast<int32_t>(q.batch);
  params.num_heads = static_cast<int32_t>(q.heads);
  params.num_kv_heads = static_cast<int32_t>(k.heads);
  params.num_queries = static_cast<int32_t>(q.tokens);
  params.num_keys = static_cast<int32_t>(num_keys);
  params.source_keys = optional.key_index >= 0 ? static_cast<int32_t>(k.tokens) : 0;
  params.head_dim = static_cast<int32_t>(q.dim);
  params.num_bins = static_cast<int32_t>(bins);
  params.data_type = inputs[kQ].type == DataType::kBF16 ? TRTCONVERT_BFLOAT16 : TRTCONVERT_FLOAT16;
  params.scaling = attributes.dynamic_scaling ? TRTCONVERT_SCALING_DYNAMIC : TRTCONVERT_SCALING_CALIBRATED;
  params.smooth_k = attributes.smooth_k ? 1 : 0;
  params.softmax_scale = attributes.softmax_scale > 0.0f ? attributes.softmax_scale
                                                         : 1.0f / std::sqrt(static_cast<float>(q.dim));
  params.timestep_max = attributes.timestep_max;
  params.out_strides = contiguous(first, attributes);
  params.q_strides = packed ? strides_in_packed(first) : params.out_strides;
  params.k_strides = params.v_strides = packed   ? params.q_strides
                                        : shared ? strides_in_shared(k, all_kv_heads)
                                                 : contiguous(k, attributes);
  if (in_parts) {
    params.token_split = static_cast<int32_t>(first.tokens);
    params.second_out_strides = contiguous(second, attributes);
    params.second_q_strides = params.second_k_strides = params.second_v_strides = strides_in_packed(second);
  }
  params.norm_epsilon = attributes.norm_epsilon;
  params.norm_across_heads = optional.norm >= 0 && is_across_heads(inputs[optional.norm].dims, attributes) ? 1 : 0;
  params.norm_split = attributes.norm_split;
  params.mask_kind = TRTCONVERT_MASK_NONE;
  return (optional.mask < 0 || describe_mask(inputs[optional.mask], params)) &&
         (optional.block_mask < 0 || describe_block_mask(inputs[optional.block_mask].dims, params));
}

void place(Attributes const& attributes, Dims const& q, void const* const* inputs, void* const* outputs,
           TrtConvertAttentionParams& params) noexcept {
  auto const at = [](void const* tensor, int64_t elements) { return static_cast<uint16_t const*>(tensor) + elements; };
  int64_t const dim = params.head_dim, packed = is_packed(q) ? params.num_heads * dim : 0;
  bool const in_parts = attributes.parts > 1;
  params.q = inputs[kQ];
  params.k = at(inputs[in_parts ? kQ : kK], packed + attributes.k_head * dim);
  params.v = at(inputs[in_parts ? kQ : kV], 2 * packed + attributes.v_head * dim);
  params.out = outputs[0];
  if (!in_parts) return;
  params.second_q = inputs[kK];
  params.second_k = at(inputs[kK], packed);
  params.second_v = at(inputs[kV], 2 * packed);
  params.second_out = outputs[1];
}

}  // namespace trtconvert::plugin
