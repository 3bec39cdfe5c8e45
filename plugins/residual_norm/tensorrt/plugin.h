// ResidualNorm as a TensorRT plugin: a residual connection and the layer norm behind it. The C API does the work.
//
// Behind a plugin TensorRT computes both in separate kernels; without a plugin it adds the residual inside the previous product.
#pragma once

#include "tensorrt/layer_plugin.h"
#include "trtconvert/residual_norm.h"

namespace trtconvert::plugin {

struct ResidualNormAttributes {
  float epsilon = 1e-5f;
  int32_t starts_early = 0;

  static constexpr int32_t kSerializationVersion = 2, kOldestVersion = 1;
  static constexpr auto list() {
    return std::tuple(attribute("epsilon", &ResidualNormAttributes::epsilon, read_epsilon),
                      attribute("starts_early", &ResidualNormAttributes::starts_early, read_flag, false, 2));
  }
};

class ResidualNormPlugin final : public LayerPlugin<ResidualNormPlugin, ResidualNormAttributes, TrtConvertResidualNormParams> {
 public:
  static constexpr char kName[] = "ResidualNorm";
  using LayerPlugin::LayerPlugin;

  int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const* shapeInputs,
                          int32_t nbShapeInputs, nvinfer1::DimsExprs* outputs, int32_t nbOutputs,
                          nvinfer1::IExprBuilder& exprBuilder) noexcept override;

 private:
  friend LayerPlugin;

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
  };

  static constexpr char const* kInputNames[] = {"x", "residual", "weight", "bias"};
  static constexpr int32_t kFewestInputs = kInputs;
  static constexpr char const* kOutputNames[] = {"sum", "normed"};
  static constexpr char kShapesFrom[] = "x";
  static constexpr uint32_t kParamsVersion = TRTCONVERT_RESIDUAL_NORM_VERSION;
  static constexpr auto kCheck = trtconvert_residual_norm_check;
  static constexpr auto kRun = trtconvert_residual_norm_run;

  bool fill(nvinfer1::PluginTensorDesc const* inputs, int32_t num_inputs, TrtConvertResidualNormParams& params) const noexcept;
  void place(void const* const* inputs, int32_t num_inputs, void* const* outputs,
                    TrtConvertResidualNormParams& params) const noexcept;
};

}  // namespace trtconvert::plugin
