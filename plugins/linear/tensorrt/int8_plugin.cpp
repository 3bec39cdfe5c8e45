#include "linear/tensorrt/int8_plugin.h"

#include <algorithm>

namespace trtconvert::plugin {

using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::PluginTensorDesc;

namespace {

// Above all limits of the C APIs; multiples do not overflow.
constexpr int64_t kLarge = int64_t{1} << 40;

int64_t clamped(int64_t size) noexcept { return std::clamp<int64_t>(size, -kLarge, kLarge); }

// The same rows with other channels.
Dims with_channels(Dims rows, int64_t channels) noexcept {
  rows.d[rows.nbDims - 1] = channels;
  return rows;
}

}  // namespace

bool Int8LinearPlugin::has_input(int32_t input) const noexcept {
  bool const quantised = attributes().quantised;
  switch (input) {
    case kRowScale:
      return !has_16bit_rows();
    case kBias:
      return attributes().bias;
    case kResidual:
      return attributes().residual;
    case kOutFactor:
      return quantised && attributes().out_factor;
    case kOutOffset:
      return quantised && attributes().out_offset;
    case kTimestep:
      return quantised && attributes().timestep;
    case kYScale:
      return quantised;
    default:
      return true;
  }
}

Element Int8LinearPlugin::input_element(int32_t input) const noexcept {
  if (input == kResidual || (input == kX && has_16bit_rows())) return Element::k16Bit;
  return input == kX || input == kWeight ? Element::kInt32 : Element::kFloat;
}

bool Int8LinearPlugin::fill(PluginTensorDesc const* inputs, int32_t num_inputs, TrtConvertInt8LinearParams& params) const noexcept {
  auto const dims_of = [&](int32_t input) { return has_input(input) ? &inputs[input_position(input)].dims : nullptr; };
  Dims const &x = *dims_of(kX), &weight = *dims_of(kWeight);
  if (!check_has_rows(kX, x)) return false;
  if (attributes().changes && !attributes().residual) {
    log(Severity::kERROR, "attribute 'residual': expected 1 with changes, what the layer gave a step before, got 0");
    return false;
  }
  int32_t const rank = weight_rank();
  if (weight.nbDims != rank) {
    log(Severity::kERROR, "input 'weight': expected %d dimensions, got shape %s", rank, ShapeText(weight).text);
    return false;
  }
  if (attributes().quantised &&
      !fill_static_table(attributes().timestep_max, dims_of(kTimestep), dims_of(kYScale), params.out_table))
    return false;
  int64_t const in_channels = 4 * clamped(weight.d[rank - 1]), out_channels = weight.d[rank - 2];
  Dims const of_out_channels{1, {out_channels}}, of_channels = rank == 3 ? Dims{2, {2, out_channels}} : of_out_channels;
  Dims const expected[kInputs] = {
      with_channels(x, in_channels / (has_16bit_rows() ? 1 : payload_divisor(attributes().mode_set))),
      with_channels(x, 1),
      rank == 3 ? Dims{3, {2, out_channels, weight.d[rank - 1]}} : weight,
      of_channels,
      of_channels,
      with_channels(x, out_channels),
      of_out_channels,
      of_out_channels,
      {1, {params.out_table.batch}},
      {1, {params.out_table.num_bins}},
  };
  if (!check_inputs(inputs, num_inputs, expected)) return false;
  params.rows = rows_of(x);
  params.in_channels = saturated(in_channels);
  params.out_channels = saturated(out_channels);
  params.data_type = data_type(type_16bit(inputs[kX].type));
  params.activation = attributes().activation;
  params.mode_set = attributes().mode_set;
  params.changes = attributes().changes;
  params.parts = attributes().parts;
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
  params.y = output_of(outputs, kY);
  for (int32_t part = 1; part < attributes().parts; ++part) params.more_y[part - 1] = output_of(outputs, kMoreY + part - 1);
  params.out_factor = input_of<float>(inputs, num_inputs, kOutFactor);
  params.out_offset = input_of<float>(inputs, num_inputs, kOutOffset);
  params.out_table.timestep = input_of<float>(inputs, num_inputs, kTimestep);
  params.out_table.x_scale = input_of<float>(inputs, num_inputs, kYScale);
  params.out_payload = output_of(outputs, kPayload);
  params.out_row_scale = output_of<float>(outputs, kOutRowScale);
}

int32_t Int8LinearPlugin::getOutputShapes(DimsExprs const* inputs, int32_t nbInputs, DimsExprs const*, int32_t, DimsExprs* outputs,
                                          int32_t nbOutputs, nvinfer1::IExprBuilder& exprBuilder) noexcept {
  if (!check_counts(nbInputs, nbOutputs)) return kFailed;
  DimsExprs const &x = inputs[kX], &weight = inputs[input_position(kWeight)];
  int32_t const rank = weight_rank();
  if (x.nbDims < 1 || weight.nbDims != rank) {
    log(Severity::kERROR, "expected x of one dimension or more and weight of %d, got %d and %d", rank, x.nbDims, weight.nbDims);
    return kFailed;
  }
  DimsExprs y = x;
  y.d[x.nbDims - 1] = weight.d[rank - 2];
  if (!attributes().quantised) {
    if (attributes().parts > 1)
      y.d[x.nbDims - 1] = exprBuilder.operation(nvinfer1::DimensionOperation::kFLOOR_DIV, *y.d[x.nbDims - 1],
                                                *exprBuilder.constant(attributes().parts));
    std::fill_n(outputs, nbOutputs, y);
    return kOk;
  }
  return quantised_shapes(y, TRTCONVERT_MODE_BIT(TRTCONVERT_STATIC), exprBuilder, outputs[0], outputs[1]) ? kOk : kFailed;
}

}  // namespace trtconvert::plugin
