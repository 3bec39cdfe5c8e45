// QuantiseChangedRows as a TensorRT plugin: deltas of rows between steps for INT8 layers, and the cache of their sum. The C API does the
// work.
#pragma once

#include "tensorrt/layer_plugin.h"
#include "trtconvert/quantise_change.h"

namespace trtconvert::plugin {

struct QuantiseChangedRowsAttributes {
  int32_t factor = 0;      // 1: whether there is such an input
  int32_t activation = 0;  // TrtConvertActivation of x
  int32_t place = 0;       // the column of scales

  static constexpr int32_t kSerializationVersion = 1;
  static constexpr auto list() {
    return std::tuple(attribute("factor", &QuantiseChangedRowsAttributes::factor, read_flag),
                      attribute("activation", &QuantiseChangedRowsAttributes::activation, read_activation),
                      attribute("place", &QuantiseChangedRowsAttributes::place, read_place, true));
  }
};

class QuantiseChangedRowsPlugin final
    : public LayerPlugin<QuantiseChangedRowsPlugin, QuantiseChangedRowsAttributes, TrtConvertQuantiseChangeParams> {
 public:
  static constexpr char kName[] = "QuantiseChangedRows";
  using LayerPlugin::LayerPlugin;

  int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const* shapeInputs,
                          int32_t nbShapeInputs, nvinfer1::DimsExprs* outputs, int32_t nbOutputs,
                          nvinfer1::IExprBuilder& exprBuilder) noexcept override;

 private:
  friend LayerPlugin;

  enum Input : int32_t {
    kX,       // [..., K], FP16 or BF16
    kAHat,    // of x's shape and type
    kScales,  // [B, S] FP32: of changes, negative where the sample begins
    kFactor,  // [K] FP32, with the attribute
    kInputs,
  };
  enum Output : int32_t {
    kPayload,   // [..., K / 4] INT32
    kRowScale,  // [..., 1] FP32
    kANext,     // as a_hat
  };

  static constexpr char const* kInputNames[] = {"x", "a_hat", "scales", "factor"};
  static constexpr int32_t kFewestInputs = kInputs;
  static constexpr char const* kOutputNames[] = {"payload", "row_scale", "a_next"};
  static constexpr char kShapesFrom[] = "x and scales";
  static constexpr uint32_t kParamsVersion = TRTCONVERT_QUANTISE_CHANGE_VERSION;
  static constexpr auto kCheck = trtconvert_quantise_change_check;
  static constexpr auto kRun = trtconvert_quantise_change_run;

  bool has_input(int32_t input) const noexcept { return input != kFactor || attributes().factor; }
  static Element input_element(int32_t input) noexcept { return input == kX || input == kAHat ? Element::k16Bit : Element::kFloat; }
  static Element output_element(int32_t output) noexcept {
    return output == kPayload ? Element::kInt32 : output == kRowScale ? Element::kFloat : Element::k16Bit;
  }
  bool fill(nvinfer1::PluginTensorDesc const* inputs, int32_t num_inputs, TrtConvertQuantiseChangeParams& params) const noexcept;
  void place(void const* const* inputs, int32_t num_inputs, void* const* outputs,
             TrtConvertQuantiseChangeParams& params) const noexcept;
};

}  // namespace trtconvert::plugin
