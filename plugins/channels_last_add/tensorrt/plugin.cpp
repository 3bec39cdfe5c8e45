#include "channels_last_add/tensorrt/plugin.h"

#include "tensorrt/images.h"

namespace trtconvert::plugin {

using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorFormat;

TensorFormat ChannelsLastAddPlugin::input_format(int32_t input) noexcept {
  return input == kX ? TensorFormat::kHWC8 : TensorFormat::kLINEAR;
}

bool ChannelsLastAddPlugin::fill(PluginTensorDesc const* inputs, int32_t num_inputs,
                                 TrtConvertChannelsLastAddParams& params) const noexcept {
  Dims const& x = inputs[kX].dims;
  if (!check_image(kInputNames[kX], x)) return false;
  Dims const y = channels_last(x);
  Dims const expected[kInputs] = {x, y};
  if (!check_inputs(inputs, num_inputs, expected)) return false;
  params.pixels = rows_of(y);
  params.channels = saturated(x.d[1]);
  params.data_type = data_type(inputs[kX].type);
  return true;
}

void ChannelsLastAddPlugin::place(void const* const* inputs, int32_t, void* const* outputs,
                                  TrtConvertChannelsLastAddParams& params) const noexcept {
  params.x = inputs[kX];
  params.y = inputs[kY];
  params.sum = outputs[kSum];
}

int32_t ChannelsLastAddPlugin::getOutputShapes(DimsExprs const* inputs, int32_t nbInputs, DimsExprs const*, int32_t,
                                               DimsExprs* outputs, int32_t nbOutputs, nvinfer1::IExprBuilder&) noexcept {
  if (!check_counts(nbInputs, nbOutputs) || !check_image(kInputNames[kX], inputs[kX])) return kFailed;
  outputs[kSum] = inputs[kX];
  return kOk;
}

}  // namespace trtconvert::plugin
