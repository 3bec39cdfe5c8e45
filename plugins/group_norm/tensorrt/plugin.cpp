#include "group_norm/tensorrt/plugin.h"

#include "tensorrt/images.h"

namespace trtconvert::plugin {

using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorFormat;

TensorFormat GroupNormPlugin::input_format(int32_t input) noexcept {
  return input == kX ? TensorFormat::kHWC8 : TensorFormat::kLINEAR;
}

TensorFormat GroupNormPlugin::output_format(int32_t) const noexcept {
  return attributes().channels_last ? TensorFormat::kLINEAR : TensorFormat::kHWC8;
}

bool GroupNormPlugin::fill(PluginTensorDesc const* inputs, int32_t num_inputs,
                               TrtConvertGroupNormParams& params) const noexcept {
  Dims const& x = inputs[kX].dims;
  if (!check_image(kInputNames[kX], x)) return false;
  int64_t const batch = x.d[0], channels = x.d[1];
  Dims const of_channels{1, {channels}};
  Dims const expected[] = {x, of_channels, of_channels, {2, {batch, channels}}};
  if (!check_inputs(inputs, num_inputs, expected)) return false;
  params.batch = batch;
  params.pixels = rows_of({3, {x.d[2], x.d[3], channels}});
  params.channels = saturated(channels);
  params.groups = attributes().groups;
  params.data_type = data_type(inputs[kX].type);
  params.silu = attributes().silu;
  params.epsilon = attributes().epsilon;
  return true;
}

void GroupNormPlugin::place(void const* const* inputs, int32_t num_inputs, void* const* outputs,
                            TrtConvertGroupNormParams& params) const noexcept {
  params.x = inputs[kX];
  params.weight = inputs[kWeight];
  params.bias = inputs[kBias];
  params.shift = input_of(inputs, num_inputs, kShift);
  params.normed = outputs[kNormed];
}

int32_t GroupNormPlugin::getOutputShapes(DimsExprs const* inputs, int32_t nbInputs, DimsExprs const*, int32_t, DimsExprs* outputs,
                                         int32_t nbOutputs, nvinfer1::IExprBuilder&) noexcept {
  if (!check_counts(nbInputs, nbOutputs) || !check_image(kInputNames[kX], inputs[kX])) return kFailed;
  outputs[kNormed] = attributes().channels_last ? channels_last(inputs[kX]) : inputs[kX];
  return kOk;
}

}  // namespace trtconvert::plugin
