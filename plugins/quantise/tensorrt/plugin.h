// QuantiseRows as a TensorRT plugin: quantised rows for INT8 layers. The C API does the work.
//
// INT8 tensors would need scales of their own in a strongly typed network, so four channels are one INT32.
#pragma once

#include "tensorrt/layer_plugin.h"
#include "tensorrt/quantised_rows.h"
#include "trtconvert/quantise.h"

namespace trtconvert::plugin {

struct QuantiseRowsAttributes : QuantisedRowsAttributes {
  int32_t starts_early = 0;

  static constexpr int32_t kSerializationVersion = 1;
  static constexpr auto list() {
    return std::tuple_cat(rows_list(), std::tuple(attribute("starts_early", &QuantiseRowsAttributes::starts_early, read_flag)));
  }
};

class QuantiseRowsPlugin final : public LayerPlugin<QuantiseRowsPlugin, QuantiseRowsAttributes, TrtConvertQuantiseParams> {
 public:
  static constexpr char kName[] = "QuantiseRows";
  using LayerPlugin::LayerPlugin;

  int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const* shapeInputs,
                          int32_t nbShapeInputs, nvinfer1::DimsExprs* outputs, int32_t nbOutputs,
                          nvinfer1::IExprBuilder& exprBuilder) noexcept override;

 private:
  friend LayerPlugin;

  enum Input : int32_t {
    kX,     // [..., K], FP16 or BF16
    kRows,  // and those of RowsInput
    kInputs = kRows + kRowsInputs,
  };
  enum Output : int32_t {
    kPayload,   // as quantised_shapes() says
    kRowScale,
  };

  static constexpr char const* kInputNames[] = {"x", "factor", "offset", "timestep", "modes", "x_scale"};
  static constexpr int32_t kFewestInputs = kInputs;
  static constexpr char const* kOutputNames[] = {"payload", "row_scale"};
  static constexpr char kShapesFrom[] = "x and the tables";
  static constexpr uint32_t kParamsVersion = TRTCONVERT_QUANTISE_VERSION;
  static constexpr auto kCheck = trtconvert_quantise_check;
  static constexpr auto kRun = trtconvert_quantise_run;

  bool has_input(int32_t input) const noexcept { return input < kRows || has_rows_input(attributes(), input - kRows); }
  static Element input_element(int32_t input) noexcept {
    return input < kRows ? Element::k16Bit : input == kRows + kRowsModes ? Element::kInt32 : Element::kFloat;
  }
  static Element output_element(int32_t output) noexcept { return output == kPayload ? Element::kInt32 : Element::kFloat; }
  bool fill(nvinfer1::PluginTensorDesc const* inputs, int32_t num_inputs, TrtConvertQuantiseParams& params) const noexcept;
  void place(void const* const* inputs, int32_t num_inputs, void* const* outputs, TrtConvertQuantiseParams& params) const noexcept;
};

}  // namespace trtconvert::plugin
