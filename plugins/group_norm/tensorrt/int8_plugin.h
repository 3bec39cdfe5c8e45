// Int8GroupNorm as a TensorRT plugin: the group norm of plugin.h, in INT8 for a convolution. The C API does the work.
#pragma once

#include "tensorrt/layer_plugin.h"
#include "trtconvert/group_norm.h"

namespace trtconvert::plugin {

struct Int8GroupNormAttributes {
  float epsilon = 1e-5f;
  int32_t groups = 0;  // has to be given
  int32_t silu = 0;
  float timestep_max = 1000.0f;
  int32_t shift = 0, factor = 0, timestep = 0;  // 1: whether there is such an input

  static constexpr int32_t kSerializationVersion = 2;
  static constexpr auto list() {
    return std::tuple(attribute("epsilon", &Int8GroupNormAttributes::epsilon, read_epsilon),
                      attribute("groups", &Int8GroupNormAttributes::groups, read_positive, true),
                      attribute("silu", &Int8GroupNormAttributes::silu, read_flag),
                      attribute("timestep_max", &Int8GroupNormAttributes::timestep_max, read_timestep_max),
                      attribute("shift", &Int8GroupNormAttributes::shift, read_flag),
                      attribute("factor", &Int8GroupNormAttributes::factor, read_flag),
                      attribute("timestep", &Int8GroupNormAttributes::timestep, read_flag));
  }
};

class Int8GroupNormPlugin final : public LayerPlugin<Int8GroupNormPlugin, Int8GroupNormAttributes, TrtConvertGroupNormParams> {
 public:
  static constexpr char kName[] = "Int8GroupNorm";
  using LayerPlugin::LayerPlugin;

  int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const* shapeInputs,
                          int32_t nbShapeInputs, nvinfer1::DimsExprs* outputs, int32_t nbOutputs,
                          nvinfer1::IExprBuilder& exprBuilder) noexcept override;

 private:
  friend LayerPlugin;

  enum Input : int32_t {
    kX,         // [B, C, H, W] in HWC8, FP16 or BF16
    kWeight,    // [C], of the same type, as bias and shift
    kBias,      // [C]
    kShift,     // [B, C], with the attribute
    kFactor,    // [C] FP32, with the attribute
    kTimestep,  // [samples] FP32, with the attribute
    kXScale,    // [T] FP32
    kInputs,
  };
  enum Output : int32_t {
    kPayload,  // [B, H, W, C / 4] INT32
    kMarks,    // [B, kMarkWords] INT32
  };

  static constexpr char const* kInputNames[] = {"x", "weight", "bias", "shift", "factor", "timestep", "x_scale"};
  static constexpr int32_t kFewestInputs = kInputs;
  static constexpr char const* kOutputNames[] = {"payload", "marks"};
  static constexpr char kShapesFrom[] = "x and the tables";
  static constexpr uint32_t kParamsVersion = TRTCONVERT_GROUP_NORM_VERSION;
  static constexpr auto kCheck = trtconvert_group_norm_check;
  static constexpr auto kRun = trtconvert_group_norm_run;

  bool has_input(int32_t input) const noexcept;
  static Element input_element(int32_t input) noexcept { return input >= kFactor ? Element::kFloat : Element::k16Bit; }
  static Element output_element(int32_t) noexcept { return Element::kInt32; }
  static nvinfer1::TensorFormat input_format(int32_t input) noexcept {
    return input == kX ? nvinfer1::TensorFormat::kHWC8 : nvinfer1::TensorFormat::kLINEAR;
  }
  bool fill(nvinfer1::PluginTensorDesc const* inputs, int32_t num_inputs, TrtConvertGroupNormParams& params) const noexcept;
  void place(void const* const* inputs, int32_t num_inputs, void* const* outputs, TrtConvertGroupNormParams& params) const noexcept;
};

}  // namespace trtconvert::plugin
