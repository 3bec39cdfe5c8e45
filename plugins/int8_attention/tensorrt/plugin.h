// Int8Attention as a TensorRT plugin. The plugin knows shapes, types and attributes; the C API computes.
#pragma once

#include "attributes.h"
#include "tensorrt/plugin_base.h"

namespace trtconvert::plugin {

// Uses only its attributes and the shapes of each call, so contexts and streams share no state.
class Int8AttentionPlugin final : public PluginBase {
 public:
  // The interface for Creator in entry_points.cpp.
  static constexpr char kName[] = "Int8Attention";
  using Attributes = plugin::Attributes;
  static bool parse(nvinfer1::PluginFieldCollection const* fields, nvinfer1::TensorRTPhase phase,
                    Attributes& attributes) noexcept {
    return parse_attributes(fields, phase, attributes);
  }
  static nvinfer1::PluginFieldCollection const* attribute_names() noexcept { return plugin::attribute_names(); }

  explicit Int8AttentionPlugin(Attributes const& attributes) noexcept
      : attributes_(attributes), serialized_(attributes) {}

  // IPluginV3, IPluginV3OneCore
  nvinfer1::IPluginV3* clone() noexcept override;
  char const* getPluginName() const noexcept override { return kName; }

  // IPluginV3OneBuild
  int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t nbInputs,
                          nvinfer1::DynamicPluginTensorDesc const* out, int32_t nbOutputs) noexcept override;
  int32_t getOutputDataTypes(nvinfer1::DataType* outputTypes, int32_t nbOutputs,
                             nvinfer1::DataType const* inputTypes, int32_t nbInputs) const noexcept override;
  int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const* shapeInputs,
                          int32_t nbShapeInputs, nvinfer1::DimsExprs* outputs, int32_t nbOutputs,
                          nvinfer1::IExprBuilder& exprBuilder) noexcept override;
  bool supportsFormatCombination(int32_t pos, nvinfer1::DynamicPluginTensorDesc const* inOut, int32_t nbInputs,
                                 int32_t nbOutputs) noexcept override;
  int32_t getNbOutputs() const noexcept override { return attributes_.parts; }
  size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t nbInputs,
                          nvinfer1::DynamicPluginTensorDesc const* outputs, int32_t nbOutputs) const noexcept override;

  // IPluginV3OneRuntime
  int32_t onShapeChange(nvinfer1::PluginTensorDesc const* in, int32_t nbInputs, nvinfer1::PluginTensorDesc const* out,
                        int32_t nbOutputs) noexcept override;
  int32_t enqueue(nvinfer1::PluginTensorDesc const* inputDesc, nvinfer1::PluginTensorDesc const* outputDesc,
                  void const* const* inputs, void* const* outputs, void* workspace,
                  CUstream_st* stream) noexcept override;
  nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override;

 private:
  Attributes const attributes_;
  SerializedAttributes const serialized_;
  // enqueue() does not receive the number of inputs; the last shapes give it. A mask is a property of the node, so every call sets
  // the same value.
  int32_t num_inputs_ = 0;
};

}  // namespace trtconvert::plugin
