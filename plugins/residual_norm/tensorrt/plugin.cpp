#include "residual_norm/tensorrt/plugin.h"

namespace trtconvert::plugin {

using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::PluginTensorDesc;

bool ResidualNormPlugin::fill(PluginTensorDesc const* inputs, int32_t num_inputs,
                                  TrtConvertResidualNormParams& params) const noexcept {
  Dims const& x = inputs[kX].dims;
  if (!check_has_rows(kX, x)) return false;
  Dims const of_channels{1, {x.d[x.nbDims - 1]}};
  Dims const expected[kInputs] = {x, x, of_channels, of_channels};
  if (!check_inputs(inputs, num_inputs, expected)) return false;
  params.rows = rows_of(x);
  params.channels = saturated(of_channels.d[0]);
  params.data_type = data_type(inputs[kX].type);
  params.epsilon = attributes().epsilon;
  params.starts_early = attributes().starts_early;
  return true;
}

void ResidualNormPlugin::place(void const* const* inputs, int32_t, void* const* outputs,
                               TrtConvertResidualNormParams& params) const noexcept {
  params.x = inputs[kX];
  params.residual = inputs[kResidual];
  params.weight = inputs[kWeight];
  params.bias = inputs[kBias];
  params.sum = outputs[kSum];
  params.normed = outputs[kNormed];
}

int32_t ResidualNormPlugin::getOutputShapes(DimsExprs const* inputs, int32_t nbInputs, DimsExprs const*, int32_t, DimsExprs* outputs,
                                            int32_t nbOutputs, nvinfer1::IExprBuilder&) noexcept {
  if (!check_counts(nbInputs, nbOutputs)) return kFailed;
  outputs[kSum] = outputs[kNormed] = inputs[kX];
  return kOk;
}

}  // namespace trtconvert::plugin
