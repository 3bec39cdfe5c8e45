// ResidualNorm as a TensorRT plugin: a residual connection and the layer norm behind it. The work is done by the C API.
//
// Behind a plugin TensorRT computes both in kernels of their own, where without one it adds the residual inside the product before.
#pragma once

#include "tensorrt/plugin_base.h"
#include "trtconvert/residual_norm.h"

namespace trtconvert::plugin {

class ResidualNormPlugin final : public PluginBase {
 public:
  struct Attributes {
    float epsilon = 1e-5f;
    int32_t starts_early = 0;
  };

  // For its creator.
  static constexpr char kName[] = "ResidualNorm";
  static bool parse(nvinfer1::PluginFieldCollection const* fields, nvinfer1::TensorRTPhase phase,
                    Attributes& attributes) noexcept;
  static nvinfer1::PluginFieldCollection const* attribute_names() noexcept;

  explicit ResidualNormPlugin(Attributes const& attributes) noexcept;

  // IPluginV3, IPluginV3OneCore
  nvinfer1::IPluginV3* clone() noexcept override;
  char const* getPluginName() const noexcept override { return kName; }

  // IPluginV3OneBuild
  int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t nbInputs,
                          nvinfer1::DynamicPluginTensorDesc const* out, int32_t nbOutputs) noexcept override;
  int32_t getOutputDataTypes(nvinfer1::DataType* outputTypes, int32_t nbOutputs, nvinfer1::DataType const* inputTypes,
                             int32_t nbInputs) const noexcept override;
  int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const* shapeInputs,
                          int32_t nbShapeInputs, nvinfer1::DimsExprs* outputs, int32_t nbOutputs,
                          nvinfer1::IExprBuilder& exprBuilder) noexcept override;
  bool supportsFormatCombination(int32_t pos, nvinfer1::DynamicPluginTensorDesc const* inOut, int32_t nbInputs,
                                 int32_t nbOutputs) noexcept override;
  int32_t getNbOutputs() const noexcept override { return kOutputs; }

  // IPluginV3OneRuntime
  int32_t onShapeChange(nvinfer1::PluginTensorDesc const* in, int32_t nbInputs, nvinfer1::PluginTensorDesc const* out,
                        int32_t nbOutputs) noexcept override;
  int32_t enqueue(nvinfer1::PluginTensorDesc const* inputDesc, nvinfer1::PluginTensorDesc const* outputDesc,
                  void const* const* inputs, void* const* outputs, void* workspace, CUstream_st* stream) noexcept override;
  nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override { return &collection_; }

 private:
  enum Input : int32_t {
    kX,         // [..., C], FP16 or BF16, as are all tensors
    kResidual,  // as x
    kWeight,    // [C]
    kBias,      // [C]
    kInputs,
  };
  enum Output : int32_t {
    kSum,     // as x
    kNormed,  // as x
    kOutputs,
  };

  static bool check_counts(int32_t num_inputs, int32_t num_outputs) noexcept;
  bool describe(nvinfer1::PluginTensorDesc const* inputs, TrtConvertResidualNormParams& params) const noexcept;

  Attributes const attributes_;
  int32_t const version_;
  nvinfer1::PluginField const fields_[3];
  nvinfer1::PluginFieldCollection const collection_;
};

}  // namespace trtconvert::plugin
