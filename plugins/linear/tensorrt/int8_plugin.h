// Int8Linear as a TensorRT plugin: a linear layer with INT8 weights, or GEGLU of two, on quantised rows. The work is done by the C API.
#pragma once

#include "tensorrt/layer_plugin.h"
#include "tensorrt/quantised_rows.h"
#include "trtconvert/int8_linear.h"

namespace trtconvert::plugin {

bool read_activation(nvinfer1::PluginField const& field, int32_t& value) noexcept;

struct Int8LinearAttributes {
  int32_t mode_set = 0;            // has to be given: that of the rows
  int32_t activation = 0;          // TrtConvertActivation; with GEGLU the weights are those of two layers
  int32_t bias = 0, residual = 0;  // 1: whether there is such an input
  int32_t bfloat16 = 0;            // of residual and y: 1 BF16, 0 FP16

  static constexpr int32_t kSerializationVersion = 1;
  static constexpr auto list() {
    return std::tuple(attribute("mode_set", &Int8LinearAttributes::mode_set, read_mode_set, true),
                      attribute("activation", &Int8LinearAttributes::activation, read_activation),
                      attribute("bias", &Int8LinearAttributes::bias, read_flag),
                      attribute("residual", &Int8LinearAttributes::residual, read_flag),
                      attribute("bfloat16", &Int8LinearAttributes::bfloat16, read_flag));
  }
};

class Int8LinearPlugin final : public LayerPlugin<Int8LinearPlugin, Int8LinearAttributes, TrtConvertInt8LinearParams> {
 public:
  static constexpr char kName[] = "Int8Linear";
  using LayerPlugin::LayerPlugin;

  int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const* shapeInputs,
                          int32_t nbShapeInputs, nvinfer1::DimsExprs* outputs, int32_t nbOutputs,
                          nvinfer1::IExprBuilder& exprBuilder) noexcept override;

 private:
  friend LayerPlugin;

  enum Input : int32_t {
    kX,            // [..., K / 4] INT32: a payload, [..., K / 2] where mode_set has WEIGHT_ONLY
    kRowScale,     // [..., 1] FP32
    kWeight,       // [N, K / 4] INT32, with GEGLU [2, N, K / 4]
    kWeightScale,  // [N] FP32, with GEGLU [2, N]
    kBias,         // as weight_scale, with the attribute
    kResidual,     // [..., N] FP16 or BF16, with the attribute
    kInputs,
  };
  enum Output : int32_t {
    kY,  // [..., N] FP16 or BF16
  };

  static constexpr char const* kInputNames[] = {"x", "row_scale", "weight", "weight_scale", "bias", "residual"};
  static constexpr int32_t kFewestInputs = kInputs;
  static constexpr char const* kOutputNames[] = {"y"};
  static constexpr char kShapesFrom[] = "x and weight";
  static constexpr uint32_t kParamsVersion = TRTCONVERT_INT8_LINEAR_VERSION;
  static constexpr auto kCheck = trtconvert_int8_linear_check;
  static constexpr auto kRun = trtconvert_int8_linear_run;

  bool has_input(int32_t input) const noexcept;
  static Element input_element(int32_t input) noexcept;
  nvinfer1::DataType type_16bit(nvinfer1::DataType) const noexcept {
    return attributes().bfloat16 ? nvinfer1::DataType::kBF16 : nvinfer1::DataType::kHALF;
  }
  int32_t weight_rank() const noexcept { return attributes().activation == TRTCONVERT_GEGLU ? 3 : 2; }
  bool fill(nvinfer1::PluginTensorDesc const* inputs, int32_t num_inputs, TrtConvertInt8LinearParams& params) const noexcept;
  void place(void const* const* inputs, int32_t num_inputs, void* const* outputs, TrtConvertInt8LinearParams& params) const noexcept;
};

}  // namespace trtconvert::plugin
