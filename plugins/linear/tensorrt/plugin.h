// Linear as a TensorRT plugin: a linear layer, or GEGLU of two. The work is done by the C API.
#pragma once

#include "tensorrt/plugin_base.h"
#include "trtconvert/linear.h"

namespace trtconvert::plugin {

class LinearPlugin final : public PluginBase {
 public:
  struct Attributes {
    int32_t geglu = 0;  // 1: weight and bias are those of two layers
  };

  // For its creator.
  static constexpr char kName[] = "Linear";
  static bool parse(nvinfer1::PluginFieldCollection const* fields, nvinfer1::TensorRTPhase phase,
                    Attributes& attributes) noexcept;
  static nvinfer1::PluginFieldCollection const* attribute_names() noexcept;

  explicit LinearPlugin(Attributes const& attributes) noexcept;

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
    kX,       // [..., K], FP16 or BF16, as are all tensors
    kWeight,  // [N, K], with geglu [2, N, K]
    kBias,    // [N], with geglu [2, N]; may be left out
    kMostInputs,
  };
  enum Output : int32_t {
    kY,  // [..., N]
    kOutputs,
  };

  static bool check_counts(int32_t num_inputs, int32_t num_outputs) noexcept;
  int32_t weight_rank() const noexcept { return attributes_.geglu ? 3 : 2; }
  bool describe(nvinfer1::PluginTensorDesc const* inputs, int32_t num_inputs, TrtConvertLinearParams& params) const noexcept;

  Attributes const attributes_;

  int32_t num_inputs_ = 0;  // of the last shape change
  int32_t const version_;
  nvinfer1::PluginField const fields_[2];
  nvinfer1::PluginFieldCollection const collection_;
};

}  // namespace trtconvert::plugin
