// GroupNorm as a TensorRT plugin: the group norm of an image, with an optional shift of its channels before it and SiLU behind it.
// The C API does the work.
//
// In memory x has its channels last, in vectors of eight (HWC8). The C API takes multiples of eight channels only: no vector is
// padded, and x lies as [B, H, W, C].
#pragma once

#include "tensorrt/layer_plugin.h"
#include "trtconvert/group_norm.h"

namespace trtconvert::plugin {

struct GroupNormAttributes {
  float epsilon = 1e-5f;
  int32_t groups = 0;  // has to be given
  int32_t silu = 0;
  int32_t channels_last = 0;  // 1: the shape of the output has its channels last too

  static constexpr int32_t kSerializationVersion = 1;
  static constexpr auto list() {
    return std::tuple(attribute("epsilon", &GroupNormAttributes::epsilon, read_epsilon),
                      attribute("groups", &GroupNormAttributes::groups, read_positive, true),
                      attribute("silu", &GroupNormAttributes::silu, read_flag),
                      attribute("channels_last", &GroupNormAttributes::channels_last, read_flag));
  }
};

class GroupNormPlugin final : public LayerPlugin<GroupNormPlugin, GroupNormAttributes, TrtConvertGroupNormParams> {
 public:
  static constexpr char kName[] = "GroupNorm";
  using LayerPlugin::LayerPlugin;

  int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const* shapeInputs,
                          int32_t nbShapeInputs, nvinfer1::DimsExprs* outputs, int32_t nbOutputs,
                          nvinfer1::IExprBuilder& exprBuilder) noexcept override;

 private:
  friend LayerPlugin;

  enum Input : int32_t {
    kX,       // [B, C, H, W] in HWC8, FP16 or BF16, as are all tensors
    kWeight,  // [C]
    kBias,    // [C]
    kShift,   // [B, C]; may be left out
  };
  enum Output : int32_t {
    kNormed,  // [B, C, H, W] in HWC8, with channels_last [B, H, W, C]: the same memory
  };

  static constexpr char const* kInputNames[] = {"x", "weight", "bias", "shift"};
  static constexpr int32_t kFewestInputs = kShift;
  static constexpr char const* kOutputNames[] = {"normed"};
  static constexpr char kShapesFrom[] = "x";
  static constexpr uint32_t kParamsVersion = TRTCONVERT_GROUP_NORM_VERSION;
  static constexpr auto kCheck = trtconvert_group_norm_check;
  static constexpr auto kRun = trtconvert_group_norm_run;

  static nvinfer1::TensorFormat input_format(int32_t input) noexcept;
  nvinfer1::TensorFormat output_format(int32_t output) const noexcept;
  bool fill(nvinfer1::PluginTensorDesc const* inputs, int32_t num_inputs, TrtConvertGroupNormParams& params) const noexcept;
  void place(void const* const* inputs, int32_t num_inputs, void* const* outputs,
                    TrtConvertGroupNormParams& params) const noexcept;
};

}  // namespace trtconvert::plugin
