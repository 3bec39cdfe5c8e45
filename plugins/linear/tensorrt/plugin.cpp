#include "linear/tensorrt/plugin.h"

namespace trtconvert::plugin {

using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::PluginTensorDesc;

bool LinearPlugin::fill(PluginTensorDesc const* inputs, int32_t num_inputs, TrtConvertLinearParams& params) const noexcept {
  Dims const &x = inputs[kX].dims, &weight = inputs[kWeight].dims;
  if (!check_has_rows(kX, x)) return false;
  int32_t const rank = weight_rank();
  if (weight.nbDims != rank) {
    log(Severity::kERROR, "input 'weight': expected %d dimensions, got shape %s", rank, ShapeText(weight).text);
    return false;
  }
  int64_t const in_channels = x.d[x.nbDims - 1], out_channels = weight.d[rank - 2];
  Dims const expected[] = {
      x,
      attributes().geglu ? Dims{3, {2, out_channels, in_channels}} : Dims{2, {out_channels, in_channels}},
      attributes().geglu ? Dims{2, {2, out_channels}} : Dims{1, {out_channels}},
  };
  if (!check_inputs(inputs, num_inputs, expected)) return false;
  params.rows = rows_of(x);
  params.in_channels = saturated(in_channels);
  params.out_channels = saturated(out_channels);
  params.data_type = data_type(inputs[kX].type);
  params.geglu = attributes().geglu;
  return true;
}

void LinearPlugin::place(void const* const* inputs, int32_t num_inputs, void* const* outputs,
                         TrtConvertLinearParams& params) const noexcept {
  params.x = inputs[kX];
  params.weight = inputs[kWeight];
  params.bias = input_of(inputs, num_inputs, kBias);
  params.y = outputs[kY];
}

int32_t LinearPlugin::getOutputShapes(DimsExprs const* inputs, int32_t nbInputs, DimsExprs const*, int32_t, DimsExprs* outputs,
                                      int32_t nbOutputs, nvinfer1::IExprBuilder&) noexcept {
  if (!check_counts(nbInputs, nbOutputs)) return kFailed;
  int32_t const x_rank = inputs[kX].nbDims, got = inputs[kWeight].nbDims, rank = weight_rank();
  if (x_rank < 1 || got != rank) {
    log(Severity::kERROR, "expected x of one dimension or more and weight of %d, got %d and %d", rank, x_rank, got);
    return kFailed;
  }
  outputs[kY] = inputs[kX];
  outputs[kY].d[x_rank - 1] = inputs[kWeight].d[rank - 2];
  return kOk;
}

}  // namespace trtconvert::plugin
