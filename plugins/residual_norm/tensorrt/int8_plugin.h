// Int8ResidualNorm as a TensorRT plugin: a residual connection and the layer norm behind it, with quantised rows for INT8 layers as
// output. The C API does the work.
#pragma once

#include "tensorrt/layer_plugin.h"
#include "trtconvert/residual_norm.h"

namespace trtconvert::plugin {

struct Int8ResidualNormAttributes : QuantisedRowsAttributes {
  float epsilon = 1e-5f;
  int32_t normed = 0;  // 1: whether there is such an output
  int32_t starts_early = 0;

  static constexpr int32_t kSerializationVersion = 1;
  static constexpr auto list() {
    return std::tuple_cat(rows_list(), std::tuple(attribute("epsilon", &Int8ResidualNormAttributes::epsilon, read_epsilon),
                                                  attribute("normed", &Int8ResidualNormAttributes::normed, read_flag),
                                                  attribute("starts_early", &Int8ResidualNormAttributes::starts_early, read_flag)));
  }
};

class Int8ResidualNormPlugin final
    : public LayerPlugin<Int8ResidualNormPlugin, Int8ResidualNormAttributes, TrtConvertResidualNormParams> {
 public:
  static constexpr char kName[] = "Int8ResidualNorm";
  using LayerPlugin::LayerPlugin;

  int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const* shapeInputs,
                          int32_t nbShapeInputs, nvinfer1::DimsExprs* outputs, int32_t nbOutputs,
                          nvinfer1::IExprBuilder& exprBuilder) noexcept override;

 private:
  friend LayerPlugin;

  enum Input : int32_t {
    kX,         // [..., C], FP16 or BF16, as the next three
    kResidual,  // as x
    kWeight,    // [C]
    kBias,      // [C]
    kRows,      // and those of RowsInput
    kInputs = kRows + kRowsInputs,
  };
  enum Output : int32_t {
    kSum,      // as x
    kPayload,  // as quantised_shapes() says
    kRowScale,
    kNormed,  // as x, with the attribute
  };

  static constexpr char const* kInputNames[] = {"x", "residual", "weight", "bias", "factor", "offset", "timestep", "modes", "x_scale"};
  static constexpr int32_t kFewestInputs = kInputs;
  static constexpr char const* kOutputNames[] = {"sum", "payload", "row_scale", "normed"};
  static constexpr char kShapesFrom[] = "x and the tables";
  static constexpr uint32_t kParamsVersion = TRTCONVERT_RESIDUAL_NORM_VERSION;
  static constexpr auto kCheck = trtconvert_residual_norm_check;
  static constexpr auto kRun = trtconvert_residual_norm_run;

  bool has_input(int32_t input) const noexcept { return input < kRows || has_rows_input(attributes(), input - kRows); }
  bool has_output(int32_t output) const noexcept { return output != kNormed || attributes().normed; }
  static Element input_element(int32_t input) noexcept {
    return input < kRows ? Element::k16Bit : input == kRows + kRowsModes ? Element::kInt32 : Element::kFloat;
  }
  static Element output_element(int32_t output) noexcept {
    return output == kPayload ? Element::kInt32 : output == kRowScale ? Element::kFloat : Element::k16Bit;
  }
  bool fill(nvinfer1::PluginTensorDesc const* inputs, int32_t num_inputs, TrtConvertResidualNormParams& params) const noexcept;
  void place(void const* const* inputs, int32_t num_inputs, void* const* outputs,
             TrtConvertResidualNormParams& params) const noexcept;
};

}  // namespace trtconvert::plugin
