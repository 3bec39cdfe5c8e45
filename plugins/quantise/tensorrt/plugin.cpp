#include "quantise/tensorrt/plugin.h"

namespace trtconvert::plugin {

using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::PluginTensorDesc;

bool QuantiseRowsPlugin::fill(PluginTensorDesc const* inputs, int32_t num_inputs, TrtConvertQuantiseParams& params) const noexcept {
  Dims const& x = inputs[kX].dims;
  if (!check_has_rows(kX, x) || !fill_rows_table(inputs, params.table)) return false;
  int64_t const channels = x.d[x.nbDims - 1];
  Dims expected[kInputs] = {x};
  for (int32_t input = 0; input < kRowsInputs; ++input) expected[kRows + input] = rows_input_dims(input, channels, params.table);
  if (!check_inputs(inputs, num_inputs, expected)) return false;
  params.rows = rows_of(x);
  params.channels = saturated(channels);
  params.data_type = data_type(inputs[kX].type);
  params.starts_early = attributes().starts_early;
  return true;
}

void QuantiseRowsPlugin::place(void const* const* inputs, int32_t num_inputs, void* const* outputs,
                               TrtConvertQuantiseParams& params) const noexcept {
  params.x = inputs[kX];
  place_rows_inputs(inputs, num_inputs, params);
  params.payload = outputs[kPayload];
  params.row_scale = static_cast<float*>(outputs[kRowScale]);
}

int32_t QuantiseRowsPlugin::getOutputShapes(DimsExprs const* inputs, int32_t nbInputs, DimsExprs const*, int32_t, DimsExprs* outputs,
                                            int32_t nbOutputs, nvinfer1::IExprBuilder& exprBuilder) noexcept {
  if (!check_counts(nbInputs, nbOutputs)) return kFailed;
  return quantised_shapes(inputs[kX], attributes().mode_set, exprBuilder, outputs[kPayload], outputs[kRowScale]) ? kOk : kFailed;
}

}  // namespace trtconvert::plugin
