// Linear as a TensorRT plugin: a linear layer, or GEGLU of two. The C API does the work.
#pragma once

#include "tensorrt/layer_plugin.h"
#include "trtconvert/linear.h"

namespace trtconvert::plugin {

struct LinearAttributes {
  int32_t geglu = 0;  // 1: weight and bias are those of two layers

  static constexpr int32_t kSerializationVersion = 1;
  static constexpr auto list() { return std::tuple(attribute("geglu", &LinearAttributes::geglu, read_flag)); }
};

class LinearPlugin final : public LayerPlugin<LinearPlugin, LinearAttributes, TrtConvertLinearParams> {
 public:
  static constexpr char kName[] = "Linear";
  using LayerPlugin::LayerPlugin;

  int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const* shapeInputs,
                          int32_t nbShapeInputs, nvinfer1::DimsExprs* outputs, int32_t nbOutputs,
                          nvinfer1::IExprBuilder& exprBuilder) noexcept override;

 private:
  friend LayerPlugin;

  enum Input : int32_t {
    kX,       // [..., K], FP16 or BF16, as are all tensors
    kWeight,  // [N, K], with geglu [2, N, K]
    kBias,    // [N], with geglu [2, N]; may be left out
  };
  enum Output : int32_t {
    kY,  // [..., N]
  };

  static constexpr char const* kInputNames[] = {"x", "weight", "bias"};
  static constexpr int32_t kFewestInputs = kBias;
  static constexpr char const* kOutputNames[] = {"y"};
  static constexpr char kShapesFrom[] = "x and weight";
  static constexpr uint32_t kParamsVersion = TRTCONVERT_LINEAR_VERSION;
  static constexpr auto kCheck = trtconvert_linear_check;
  static constexpr auto kRun = trtconvert_linear_run;

  int32_t weight_rank() const noexcept { return attributes().geglu ? 3 : 2; }
  bool fill(nvinfer1::PluginTensorDesc const* inputs, int32_t num_inputs, TrtConvertLinearParams& params) const noexcept;
  void place(void const* const* inputs, int32_t num_inputs, void* const* outputs, TrtConvertLinearParams& params) const noexcept;
};

}  // namespace trtconvert::plugin
