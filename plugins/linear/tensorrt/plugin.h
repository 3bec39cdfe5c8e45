// Linear as a TensorRT plugin: a linear layer, or GEGLU of two. The work is done by the C API.
#pragma once

#include "tensorrt/layer_plugin.h"
#include "trtconvert/linear.h"

namespace trtconvert::plugin {

class LinearPlugin final : public LayerPlugin<LinearPlugin, TrtConvertLinearParams> {
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

  int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const* shapeInputs,
                          int32_t nbShapeInputs, nvinfer1::DimsExprs* outputs, int32_t nbOutputs,
                          nvinfer1::IExprBuilder& exprBuilder) noexcept override;
  nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override { return &collection_; }

 private:
  friend LayerPlugin;

  enum Input : int32_t {
    kX,       // [..., K], FP16 or BF16, as are all tensors
    kWeight,  // [N, K], with geglu [2, N, K]
    kBias,    // [N], with geglu [2, N]; may be left out
  };
  enum Output : int32_t {
    kY,  // [..., N]
    kOutputs,
  };

  static constexpr char const* kInputNames[] = {"x", "weight", "bias"};
  static constexpr int32_t kFewestInputs = kBias;
  static constexpr char kTensors[] = "2 or 3 inputs (x, weight, and perhaps bias) and 1 output";
  static constexpr char kShapesFrom[] = "x and weight";
  static constexpr auto kRun = trtconvert_linear_run;

  Attributes const& attributes() const noexcept { return attributes_; }
  int32_t weight_rank() const noexcept { return attributes_.geglu ? 3 : 2; }
  bool describe(nvinfer1::PluginTensorDesc const* inputs, int32_t num_inputs, TrtConvertLinearParams& params) const noexcept;
  static void place(void const* const* inputs, int32_t num_inputs, void* const* outputs, TrtConvertLinearParams& params) noexcept;

  Attributes const attributes_;
  int32_t const version_;
  nvinfer1::PluginField const fields_[2];
  nvinfer1::PluginFieldCollection const collection_;
};

}  // namespace trtconvert::plugin
