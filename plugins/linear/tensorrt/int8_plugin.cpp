#include "linear/tensorrt/int8_plugin.h"

#include <algorithm>

namespace trtconvert::plugin {

using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::PluginField;
using nvinfer1::PluginTensorDesc;

namespace {

// As large as no C API takes, and its multiples do not overflow.
constexpr int64_t kLarge = int64_t{1} << 40;

int64_t clamped(int64_t size) noexcept { return std::clamp<int64_t>(size, -kLarge, kLarge); }

// The same rows with other channels.
Dims with_channels(Dims rows, int64_t channels) noexcept {
  rows.d[rows.nbDims - 1] = channels;
  return rows;
}

}  // namespace

bool read_activation(PluginField const& field, int32_t& value) noexcept {
  int64_t read = 0;
  if (!read_integer(field, read)) return false;
  value = static_cast<int32_t>(read);
  if (read >= TRTCONVERT_NO_ACTIVATION && read <= TRTCONVERT_GELU_TANH) return true;
  log(Severity::kERROR, "attribute '%s': expected 0 (none), 1 (GEGLU), 2 (GELU) or 3 (GELU by tanh), got %lld", field.name,
      static_cast<long long>(read));
  return false;
}

bool Int8LinearPlugin::has_input(int32_t input) const noexcept {
  return input == kBias ? attributes().bias : input == kResidual ? attributes().residual : true;
}

Element Int8LinearPlugin::input_element(int32_t input) noexcept {
  return input == kResidual ? Element::k16Bit : input == kX || input == kWeight ? Element::kInt32 : Element::kFloat;
}

bool Int8LinearPlugin::fill(PluginTensorDesc const* inputs, int32_t num_inputs, TrtConvertInt8LinearParams& params) const noexcept {
  Dims const &x = inputs[kX].dims, &weight = inputs[kWeight].dims;
  if (!check_has_rows(kX, x)) return false;
  int32_t const rank = weight_rank();
  if (weight.nbDims != rank) {
    log(Severity::kERROR, "input 'weight': expected %d dimensions, got shape %s", rank, ShapeText(weight).text);
    return false;
  }
  int64_t const in_channels = 4 * clamped(weight.d[rank - 1]), out_channels = weight.d[rank - 2];
  Dims const of_channels = rank == 3 ? Dims{2, {2, out_channels}} : Dims{1, {out_channels}};
  Dims const expected[kInputs] = {
      with_channels(x, in_channels / payload_divisor(attributes().mode_set)),
      with_channels(x, 1),
      rank == 3 ? Dims{3, {2, out_channels, weight.d[rank - 1]}} : weight,
      of_channels,
      of_channels,
      with_channels(x, out_channels),
  };
  if (!check_inputs(inputs, num_inputs, expected)) return false;
  params.rows = rows_of(x);
  params.in_channels = saturated(in_channels);
  params.out_channels = saturated(out_channels);
  params.data_type = data_type(type_16bit(inputs[kX].type));
  params.activation = attributes().activation;
  params.mode_set = attributes().mode_set;
  return true;
}

void Int8LinearPlugin::place(void const* const* inputs, int32_t num_inputs, void* const* outputs,
                             TrtConvertInt8LinearParams& params) const noexcept {
  params.x = inputs[kX];
  params.row_scale = input_of<float>(inputs, num_inputs, kRowScale);
  params.weight = input_of(inputs, num_inputs, kWeight);
  params.weight_scale = input_of<float>(inputs, num_inputs, kWeightScale);
  params.bias = input_of<float>(inputs, num_inputs, kBias);
  params.residual = input_of(inputs, num_inputs, kResidual);
  params.y = outputs[kY];
}

int32_t Int8LinearPlugin::getOutputShapes(DimsExprs const* inputs, int32_t nbInputs, DimsExprs const*, int32_t, DimsExprs* outputs,
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
