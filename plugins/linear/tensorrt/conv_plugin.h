// Int8Conv as a TensorRT plugin: a two-dimensional convolution of INT8 images with channels last. The C API does the work.
#pragma once

#include "tensorrt/layer_plugin.h"
#include "trtconvert/int8_conv.h"

namespace trtconvert::plugin {

bool read_stride(nvinfer1::PluginField const& field, int32_t& value) noexcept;
bool read_padding(nvinfer1::PluginField const& field, int32_t& value) noexcept;

struct Int8ConvAttributes {
  int32_t stride_y = 1, stride_x = 1, pad_y = 0, pad_x = 0;
  int32_t bias = 0, residual = 0, timestep = 0;  // 1: whether there is such an input
  int32_t bfloat16 = 0;                          // of 16-bit tensors: 1 BF16, 0 FP16
  float timestep_max = 1000.0f;

  static constexpr int32_t kSerializationVersion = 2;
  static constexpr auto list() {
    return std::tuple(attribute("stride_y", &Int8ConvAttributes::stride_y, read_stride),
                      attribute("stride_x", &Int8ConvAttributes::stride_x, read_stride),
                      attribute("pad_y", &Int8ConvAttributes::pad_y, read_padding),
                      attribute("pad_x", &Int8ConvAttributes::pad_x, read_padding),
                      attribute("bias", &Int8ConvAttributes::bias, read_flag),
                      attribute("residual", &Int8ConvAttributes::residual, read_flag),
                      attribute("timestep", &Int8ConvAttributes::timestep, read_flag),
                      attribute("bfloat16", &Int8ConvAttributes::bfloat16, read_flag),
                      attribute("timestep_max", &Int8ConvAttributes::timestep_max, read_timestep_max));
  }
};

class Int8ConvPlugin final : public LayerPlugin<Int8ConvPlugin, Int8ConvAttributes, TrtConvertInt8ConvParams> {
 public:
  static constexpr char kName[] = "Int8Conv";
  using LayerPlugin::LayerPlugin;

  int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const* shapeInputs,
                          int32_t nbShapeInputs, nvinfer1::DimsExprs* outputs, int32_t nbOutputs,
                          nvinfer1::IExprBuilder& exprBuilder) noexcept override;

 private:
  friend LayerPlugin;

  enum Input : int32_t {
    kX,            // a payload, [B, H, W, C / 4] INT32
    kMarks,        // of its images, [B, kMarkWords] INT32
    kWeight,       // [N, R, S, C / 4] INT32
    kWeightScale,  // [N] FP32
    kBias,         // [N] FP32, with the attribute
    kResidual,     // [B, N, P, Q] in HWC8, FP16 or BF16, with the attribute
    kTimestep,     // [samples] FP32, with the attribute
    kXScale,       // [T] FP32
    kInputs,
  };
  enum Output : int32_t {
    kY,  // [B, N, P, Q] in HWC8, FP16 or BF16
  };

  static constexpr char const* kInputNames[] = {"x", "marks", "weight", "weight_scale", "bias", "residual", "timestep", "x_scale"};
  static constexpr int32_t kFewestInputs = kInputs;
  static constexpr char const* kOutputNames[] = {"y"};
  static constexpr char kShapesFrom[] = "x, weight and the tables";
  static constexpr uint32_t kParamsVersion = TRTCONVERT_INT8_CONV_VERSION;
  static constexpr auto kCheck = trtconvert_int8_conv_check;
  static constexpr auto kRun = trtconvert_int8_conv_run;

  bool has_input(int32_t input) const noexcept;
  static Element input_element(int32_t input) noexcept;
  static nvinfer1::TensorFormat input_format(int32_t input) noexcept {
    return input == kResidual ? nvinfer1::TensorFormat::kHWC8 : nvinfer1::TensorFormat::kLINEAR;
  }
  static nvinfer1::TensorFormat output_format(int32_t) noexcept { return nvinfer1::TensorFormat::kHWC8; }
  nvinfer1::DataType type_16bit(nvinfer1::DataType) const noexcept {
    return attributes().bfloat16 ? nvinfer1::DataType::kBF16 : nvinfer1::DataType::kHALF;
  }
  bool fill(nvinfer1::PluginTensorDesc const* inputs, int32_t num_inputs, TrtConvertInt8ConvParams& params) const noexcept;
  void place(void const* const* inputs, int32_t num_inputs, void* const* outputs, TrtConvertInt8ConvParams& params) const noexcept;
};

}  // namespace trtconvert::plugin
