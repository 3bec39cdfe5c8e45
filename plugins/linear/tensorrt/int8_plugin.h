// Int8Linear as a TensorRT plugin: a linear layer with INT8 weights, or GEGLU of two, on quantised rows or 16-bit rows. The C API does
// the work.
#pragma once

#include "tensorrt/layer_plugin.h"
#include "trtconvert/int8_linear.h"

namespace trtconvert::plugin {

struct Int8LinearAttributes {
  int32_t mode_set = 0;            // has to be given: that of the rows
  int32_t activation = 0;          // TrtConvertActivation; with GEGLU the weights are those of two layers
  int32_t bias = 0, residual = 0;  // 1: whether there is such an input
  int32_t bfloat16 = 0;            // of 16-bit tensors: 1 BF16, 0 FP16

  // Quantised rows in mode STATIC in place of y, for the next layer.
  int32_t quantised = 0;
  int32_t out_factor = 0, out_offset = 0, timestep = 0;  // 1: whether there is such an input
  float timestep_max = 1000.0f;

  int32_t changes = 0;  // 1: of rows and the residual, see int8_linear.h
  int32_t parts = 1;    // of y, see int8_linear.h

  static constexpr int32_t kSerializationVersion = 3, kOldestVersion = 1;
  static constexpr auto list() {
    return std::tuple(attribute("mode_set", &Int8LinearAttributes::mode_set, read_mode_set, true),
                      attribute("activation", &Int8LinearAttributes::activation, read_activation),
                      attribute("bias", &Int8LinearAttributes::bias, read_flag),
                      attribute("residual", &Int8LinearAttributes::residual, read_flag),
                      attribute("bfloat16", &Int8LinearAttributes::bfloat16, read_flag),
                      attribute("quantised", &Int8LinearAttributes::quantised, read_flag),
                      attribute("out_factor", &Int8LinearAttributes::out_factor, read_flag),
                      attribute("out_offset", &Int8LinearAttributes::out_offset, read_flag),
                      attribute("timestep", &Int8LinearAttributes::timestep, read_flag),
                      attribute("timestep_max", &Int8LinearAttributes::timestep_max, read_timestep_max),
                      attribute("changes", &Int8LinearAttributes::changes, read_flag, false, 2),
                      attribute("parts", &Int8LinearAttributes::parts, read_parts, false, 3));
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
    kX,            // a payload, [..., K / 4] INT32, [..., K / 2] where mode_set has WEIGHT_ONLY; of that alone [..., K] FP16 or BF16
    kRowScale,     // [..., 1] FP32; none where mode_set has WEIGHT_ONLY alone
    kWeight,       // [N, K / 4] INT32, with GEGLU [2, N, K / 4]
    kWeightScale,  // [N] FP32, with GEGLU [2, N]
    kBias,         // as weight_scale, with the attribute
    kResidual,     // [..., N] FP16 or BF16, with the attribute
    kOutFactor,    // [N] FP32, with quantised and the attribute
    kOutOffset,    // [N] FP32, with quantised and the attribute
    kTimestep,     // [B] FP32, with quantised and the attribute
    kYScale,       // [T] FP32, with quantised
    kInputs,
  };
  enum Output : int32_t {
    kY,            // [..., N] FP16 or BF16; with quantised
    kPayload,      // [..., N / 4] INT32
    kOutRowScale,  // and [..., 1] FP32 instead
    kMoreY,        // further parts of y, each [..., N / parts]
  };

  static constexpr char const* kInputNames[] = {"x",        "row_scale",  "weight",     "weight_scale", "bias",
                                                "residual", "out_factor", "out_offset", "timestep",     "y_scale"};
  static constexpr int32_t kFewestInputs = kInputs;
  static constexpr char const* kOutputNames[] = {"y",       "payload", "row_scale", "second part",  "third part",
                                                 "fourth part", "fifth part",   "sixth part", "seventh part", "eighth part"};
  static_assert(std::size(kOutputNames) == kMoreY + TRTCONVERT_MORE_PARTS);
  static constexpr char kShapesFrom[] = "x, weight and the tables";
  static constexpr uint32_t kParamsVersion = TRTCONVERT_INT8_LINEAR_VERSION;
  static constexpr auto kCheck = trtconvert_int8_linear_check;
  static constexpr auto kRun = trtconvert_int8_linear_run;

  bool has_16bit_rows() const noexcept { return attributes().mode_set == TRTCONVERT_MODE_BIT(TRTCONVERT_WEIGHT_ONLY); }
  bool has_input(int32_t input) const noexcept;
  bool has_output(int32_t output) const noexcept {
    return output >= kMoreY ? output - kMoreY < attributes().parts - 1 : (output == kY) != (attributes().quantised != 0);
  }
  Element input_element(int32_t input) const noexcept;
  static Element output_element(int32_t output) noexcept {
    return output == kY || output >= kMoreY ? Element::k16Bit : output == kPayload ? Element::kInt32 : Element::kFloat;
  }
  nvinfer1::DataType type_16bit(nvinfer1::DataType) const noexcept {
    return attributes().bfloat16 ? nvinfer1::DataType::kBF16 : nvinfer1::DataType::kHALF;
  }
  int32_t weight_rank() const noexcept { return attributes().activation == TRTCONVERT_GEGLU ? 3 : 2; }
  bool fill(nvinfer1::PluginTensorDesc const* inputs, int32_t num_inputs, TrtConvertInt8LinearParams& params) const noexcept;
  void place(void const* const* inputs, int32_t num_inputs, void* const* outputs, TrtConvertInt8LinearParams& params) const noexcept;
};

}  // namespace trtconvert::plugin
