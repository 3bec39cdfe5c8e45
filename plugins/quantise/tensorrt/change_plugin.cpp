#include "quantise/tensorrt/change_plugin.h"

namespace trtconvert::plugin {

using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::PluginTensorDesc;

bool QuantiseChangedRowsPlugin::fill(PluginTensorDesc const* inputs, int32_t num_inputs,
                                     TrtConvertQuantiseChangeParams& params) const noexcept {
  Dims const &x = inputs[kX].dims, &scales = inputs[kScales].dims;
  if (!check_has_rows(kX, x)) return false;
  if (scales.nbDims != 2) {
    log(Severity::kERROR, "input 'scales': expected 2 dimensions, samples and places, got shape %s", ShapeText(scales).text);
    return false;
  }
  int64_t const channels = x.d[x.nbDims - 1];
  Dims const expected[kInputs] = {x, x, scales, {1, {channels}}};
  if (!check_inputs(inputs, num_inputs, expected)) return false;
  params.rows = rows_of(x);
  params.channels = saturated(channels);
  params.data_type = data_type(inputs[kX].type);
  params.activation = attributes().activation;
  params.batch = saturated(scales.d[0]);
  params.places = saturated(scales.d[1]);
  params.place = attributes().place;
  return true;
}

void QuantiseChangedRowsPlugin::place(void const* const* inputs, int32_t num_inputs, void* const* outputs,
                                      TrtConvertQuantiseChangeParams& params) const noexcept {
  params.x = inputs[kX];
  params.factor = input_of<float>(inputs, num_inputs, kFactor);
  params.a_hat = inputs[kAHat];
  params.scales = static_cast<float const*>(inputs[kScales]);
  params.payload = outputs[kPayload];
  params.row_scale = static_cast<float*>(outputs[kRowScale]);
  params.a_next = outputs[kANext];
}

int32_t QuantiseChangedRowsPlugin::getOutputShapes(DimsExprs const* inputs, int32_t nbInputs, DimsExprs const*, int32_t,
                                                   DimsExprs* outputs, int32_t nbOutputs,
                                                   nvinfer1::IExprBuilder& exprBuilder) noexcept {
  if (!check_counts(nbInputs, nbOutputs)) return kFailed;
  outputs[kANext] = inputs[kX];
  return quantised_shapes(inputs[kX], TRTCONVERT_MODE_BIT(TRTCONVERT_STATIC), exprBuilder, outputs[kPayload], outputs[kRowScale])
             ? kOk
             : kFailed;
}

}  // namespace trtconvert::plugin
