#include "plugin.h"

#include <new>

#include "node.h"
#include "tensorrt/logger.h"
#include "trtconvert/int8_attention.h"

namespace trtconvert::plugin {

using nvinfer1::DataType;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::IPluginV3;
using nvinfer1::PluginTensorDesc;

namespace {

// Kernel parameters of one end of the range. Returns false, with a logged reason, if the shapes do not belong together.
bool describe_bound(Attributes const& attributes, DynamicPluginTensorDesc const* inputs, int32_t num_inputs, Bound bound,
                    TrtConvertAttentionParams& params) noexcept {
  PluginTensorDesc descs[kMaxInputs];
  at_bound(inputs, num_inputs, bound, descs);
  return describe(attributes, descs, num_inputs, params);
}

// Every check that needs no device memory: the C API's own, through the query for the workspace.
int32_t check_shapes(TrtConvertAttentionParams const& params) noexcept {
  size_t bytes = 0;
  char message[kMessageSize];
  return report(trtconvert_attention_workspace_size(&params, &bytes, message, sizeof(message)), message);
}

}  // namespace

IPluginV3* Int8AttentionPlugin::clone() noexcept {
  auto* copy = new (std::nothrow) Int8AttentionPlugin(attributes_);
  if (copy == nullptr) {
    log(Severity::kERROR, "expected %zu bytes of host memory for a copy of the plugin, got none", sizeof(*copy));
    return nullptr;
  }
  copy->num_inputs_ = num_inputs_;
  return copy;
}

int32_t Int8AttentionPlugin::configurePlugin(DynamicPluginTensorDesc const* in, int32_t nbInputs,
                                             DynamicPluginTensorDesc const*, int32_t nbOutputs) noexcept {
  if (!check_counts(attributes_, nbInputs, nbOutputs)) return kFailed;
  for (Bound const bound : {Bound::kMin, Bound::kMax}) {
    TrtConvertAttentionParams params;
    if (!describe_bound(attributes_, in, nbInputs, bound, params) || check_shapes(params) != kOk) return kFailed;
  }
  return kOk;
}

int32_t Int8AttentionPlugin::getOutputDataTypes(DataType* outputTypes, int32_t nbOutputs, DataType const* inputTypes,
                                                int32_t nbInputs) const noexcept {
  if (!check_counts(attributes_, nbInputs, nbOutputs)) return kFailed;
  for (int32_t i = 0; i < nbOutputs; ++i) outputTypes[i] = inputTypes[kQ];
  return kOk;
}

int32_t Int8AttentionPlugin::getOutputShapes(DimsExprs const* inputs, int32_t nbInputs, DimsExprs const*, int32_t,
                                             DimsExprs* outputs, int32_t nbOutputs, nvinfer1::IExprBuilder&) noexcept {
  if (!check_counts(attributes_, nbInputs, nbOutputs)) return kFailed;
  for (int32_t part = 0; part < nbOutputs; ++part) {
    DimsExprs const& source = inputs[part == 0 ? kQ : kK];
    DimsExprs& out = outputs[part];
    if (source.nbDims == 4 && nbOutputs == 1) {
      out = source;
      continue;
    }
    if (source.nbDims != 5) {
      log(Severity::kERROR, "input '%s': expected %s, got %d", part == 0 ? "q" : "k",
          nbOutputs == 1 ? "4 dimensions, or 5 where q, k and v are packed" : "5 dimensions with parts 2", source.nbDims);
      return kFailed;
    }
    out.nbDims = 4;
    for (int32_t i = 0; i < 4; ++i) out.d[i] = source.d[i < 2 ? i : i + 1];  // without the axis of q, k and v
  }
  return kOk;
}

bool Int8AttentionPlugin::supportsFormatCombination(int32_t pos, DynamicPluginTensorDesc const* inOut, int32_t nbInputs,
                                                    int32_t nbOutputs) noexcept {
  return check_counts(attributes_, nbInputs, nbOutputs) && supports(attributes_, pos, inOut, nbInputs);
}

size_t Int8AttentionPlugin::getWorkspaceSize(DynamicPluginTensorDesc const* inputs, int32_t nbInputs,
                                             DynamicPluginTensorDesc const*, int32_t nbOutputs) const noexcept {
  TrtConvertAttentionParams params;
  if (!check_counts(attributes_, nbInputs, nbOutputs)) return 0;
  if (!describe_bound(attributes_, inputs, nbInputs, Bound::kMax, params)) return 0;
  size_t bytes = 0;
  char message[kMessageSize];
  report(trtconvert_attention_workspace_size(&params, &bytes, message, sizeof(message)), message);
  return bytes;
}

int32_t Int8AttentionPlugin::onShapeChange(PluginTensorDesc const* in, int32_t nbInputs, PluginTensorDesc const*,
                                           int32_t nbOutputs) noexcept {
  TrtConvertAttentionParams params;
  if (!check_counts(attributes_, nbInputs, nbOutputs) || !describe(attributes_, in, nbInputs, params)) return kFailed;
  if (check_shapes(params) != kOk) return kFailed;
  num_inputs_ = nbInputs;
  return kOk;
}

int32_t Int8AttentionPlugin::enqueue(PluginTensorDesc const* inputDesc, PluginTensorDesc const*,
                                     void const* const* inputs, void* const* outputs, void* workspace,
                                     CUstream_st* stream) noexcept {
  TrtConvertAttentionParams params;
  if (!check_counts(attributes_, num_inputs_, attributes_.parts) || !describe(attributes_, inputDesc, num_inputs_, params)) return kFailed;
  char message[kMessageSize];
  // TensorRT allocated getWorkspaceSize() bytes for the largest shapes, at least as many as these need.
  TrtConvertStatus status =
      trtconvert_attention_workspace_size(&params, &params.workspace_size, message, sizeof(message));
  if (status != TRTCONVERT_OK) return report(status, message);
  place(attributes_, inputDesc[kQ].dims, inputs, outputs, params);
  params.timestep = static_cast<float const*>(inputs[kTimestep]);
  params.q_scale = static_cast<float const*>(inputs[kQScale]);
  params.k_scale = static_cast<float const*>(inputs[kKScale]);
  params.v_scale = static_cast<float const*>(inputs[kVScale]);
  params.k_offset = static_cast<float const*>(inputs[kKOffset]);
  params.v_offset = static_cast<float const*>(inputs[kVOffset]);
  params.modes = static_cast<int32_t const*>(inputs[kModes]);
  OptionalInputs const optional = optional_inputs(attributes_, num_inputs_);
  if (optional.mask >= 0) params.mask = inputs[optional.mask];
  if (optional.block_mask >= 0) params.block_mask = inputs[optional.block_mask];
  if (optional.key_index >= 0) params.key_index = static_cast<int32_t const*>(inputs[optional.key_index]);
  if (optional.rotary >= 0) params.rotary = static_cast<float const*>(inputs[optional.rotary]);
  if (optional.norm >= 0) {
    params.q_norm = static_cast<float const*>(inputs[optional.norm]);
    int32_t const rows = params.norm_across_heads ? params.num_heads : params.norm_split > 0 ? 2 : 1;
    params.k_norm = params.q_norm + int64_t{params.head_dim} * rows;
  }
  params.workspace = workspace;
  params.stream = stream;
  return report(trtconvert_attention_run(&params, message, sizeof(message)), message);
}

nvinfer1::PluginFieldCollection const* Int8AttentionPlugin::getFieldsToSerialize() noexcept {
  return serialized_.fields();
}

}  // namespace trtconvert::plugin
