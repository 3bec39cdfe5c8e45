// ChannelsLastAdd as a TensorRT plugin: the sum of two images. The shape of the second image has its channels last. The C API does
// the work.
//
// In memory x has its channels last, in vectors of eight (HWC8). The C API takes multiples of eight channels only: no vector is
// padded, and x lies as y does.
#pragma once

#include "tensorrt/layer_plugin.h"
#include "trtconvert/channels_last_add.h"

namespace trtconvert::plugin {

struct ChannelsLastAddAttributes {
  static constexpr int32_t kSerializationVersion = 1;
  static constexpr auto list() { return std::tuple(); }
};

class ChannelsLastAddPlugin final
    : public LayerPlugin<ChannelsLastAddPlugin, ChannelsLastAddAttributes, TrtConvertChannelsLastAddParams> {
 public:
  static constexpr char kName[] = "ChannelsLastAdd";
  using LayerPlugin::LayerPlugin;

  int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const* shapeInputs,
                          int32_t nbShapeInputs, nvinfer1::DimsExprs* outputs, int32_t nbOutputs,
                          nvinfer1::IExprBuilder& exprBuilder) noexcept override;

 private:
  friend LayerPlugin;

  enum Input : int32_t {
    kX,  // [B, C, H, W] in HWC8, FP16 or BF16, as are all tensors
    kY,  // [B, H, W, C]
    kInputs,
  };
  enum Output : int32_t {
    kSum,  // as x
  };

  static constexpr char const* kInputNames[] = {"x", "y"};
  static constexpr int32_t kFewestInputs = kInputs;
  static constexpr char const* kOutputNames[] = {"sum"};
  static constexpr char kShapesFrom[] = "x";
  static constexpr uint32_t kParamsVersion = TRTCONVERT_CHANNELS_LAST_ADD_VERSION;
  static constexpr auto kCheck = trtconvert_channels_last_add_check;
  static constexpr auto kRun = trtconvert_channels_last_add_run;

  static nvinfer1::TensorFormat input_format(int32_t input) noexcept;
  static nvinfer1::TensorFormat output_format(int32_t) noexcept { return nvinfer1::TensorFormat::kHWC8; }
  bool fill(nvinfer1::PluginTensorDesc const* inputs, int32_t num_inputs,
                TrtConvertChannelsLastAddParams& params) const noexcept;
  void place(void const* const* inputs, int32_t num_inputs, void* const* outputs,
                    TrtConvertChannelsLastAddParams& params) const noexcept;
};

}  // namespace trtconvert::plugin
