#include "group_norm/tensorrt/int8_plugin.h"

#include "tensorrt/images.h"

namespace trtconvert::plugin {

using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::PluginTensorDesc;

bool Int8GroupNormPlugin::has_input(int32_t input) const noexcept {
  switch (input) {
    case kShift:
      return attributes().shift;
    case kFactor:
      return attributes().factor;
    case kTimestep:
      return attributes().timestep;
    default:
      return true;
  }
}

bool Int8GroupNormPlugin::fill(PluginTensorDesc const* inputs, int32_t num_inputs, TrtConvertGroupNormParams& params) const noexcept {
  auto const dims_of = [&](int32_t input) { return has_input(input) ? &inputs[input_position(input)].dims : nullptr; };
  Dims const& x = inputs[kX].dims;
  if (!check_image(kInputNames[kX], x) || !fill_static_table(attributes().timestep_max, dims_of(kTimestep), dims_of(kXScale), params.table))
    return false;
  int64_t const batch = x.d[0], channels = x.d[1];
  Dims const of_channels{1, {channels}};
  Dims const expected[kInputs] = {
      x, of_channels, of_channels, {2, {batch, channels}}, of_channels, {1, {params.table.batch}}, {1, {params.table.num_bins}}};
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

void Int8GroupNormPlugin::place(void const* const* inputs, int32_t num_inputs, void* const* outputs,
                                TrtConvertGroupNormParams& params) const noexcept {
  params.x = inputs[kX];
  params.weight = inputs[kWeight];
  params.bias = inputs[kBias];
  params.shift = input_of(inputs, num_inputs, kShift);
  params.factor = input_of<float>(inputs, num_inputs, kFactor);
  params.table.timestep = input_of<float>(inputs, num_inputs, kTimestep);
  params.table.x_scale = input_of<float>(inputs, num_inputs, kXScale);
  params.payload = outputs[kPayload];
  params.marks = outputs[kMarks];
}

int32_t Int8GroupNormPlugin::getOutputShapes(DimsExprs const* inputs, int32_t nbInputs, DimsExprs const*, int32_t, DimsExprs* outputs,
                                             int32_t nbOutputs, nvinfer1::IExprBuilder& exprBuilder) noexcept {
  if (!check_counts(nbInputs, nbOutputs) || !check_image(kInputNames[kX], inputs[kX])) return kFailed;
  outputs[kPayload] = channels_last(inputs[kX]);
  outputs[kPayload].d[3] = exprBuilder.operation(nvinfer1::DimensionOperation::kFLOOR_DIV, *inputs[kX].d[1],
                                                 *exprBuilder.constant(payload_divisor(TRTCONVERT_MODE_BIT(TRTCONVERT_STATIC))));
  outputs[kMarks] = {2, {inputs[kX].d[0], exprBuilder.constant(kMarkWords)}};
  return kOk;
}

}  // namespace trtconvert::plugin
