#include "linear/tensorrt/conv_plugin.h"

#include <algorithm>

namespace trtconvert::plugin {

using nvinfer1::Dims;
using nvinfer1::DimensionOperation;
using nvinfer1::DimsExprs;
using nvinfer1::IDimensionExpr;
using nvinfer1::PluginField;
using nvinfer1::PluginTensorDesc;

namespace {

// Above all limits of the C APIs; sums and multiples of this size do not overflow.
constexpr int64_t kLarge = int64_t{1} << 40;

int64_t clamped(int64_t size) noexcept { return std::clamp<int64_t>(size, -kLarge, kLarge); }

// Size of y in a direction; 0 if no window fits.
int64_t out_size(int64_t size, int64_t kernel, int32_t stride, int32_t pad) noexcept {
  int64_t const room = clamped(size) + 2 * pad - clamped(kernel);
  return room < 0 ? 0 : room / stride + 1;
}

bool read_limited(PluginField const& field, int64_t least, int64_t most, char const* expected, int32_t& value) noexcept {
  int64_t read = 0;
  if (!read_integer(field, read)) return false;
  value = static_cast<int32_t>(read);
  if (read >= least && read <= most) return true;
  log(Severity::kERROR, "attribute '%s': expected %s, got %lld", field.name, expected, static_cast<long long>(read));
  return false;
}

}  // namespace

bool read_stride(PluginField const& field, int32_t& value) noexcept { return read_limited(field, 1, 8, "1 to 8", value); }
bool read_padding(PluginField const& field, int32_t& value) noexcept { return read_limited(field, 0, 14, "0 to 14", value); }

bool Int8ConvPlugin::has_input(int32_t input) const noexcept {
  switch (input) {
    case kBias:
      return attributes().bias;
    case kResidual:
      return attributes().residual;
    case kTimestep:
      return attributes().timestep;
    default:
      return true;
  }
}

Element Int8ConvPlugin::input_element(int32_t input) noexcept {
  if (input == kResidual) return Element::k16Bit;
  return input == kX || input == kMarks || input == kWeight ? Element::kInt32 : Element::kFloat;
}

bool Int8ConvPlugin::fill(PluginTensorDesc const* inputs, int32_t num_inputs, TrtConvertInt8ConvParams& params) const noexcept {
  auto const dims_of = [&](int32_t input) { return has_input(input) ? &inputs[input_position(input)].dims : nullptr; };
  Dims const &x = *dims_of(kX), &weight = *dims_of(kWeight);
  for (int32_t const input : {kX, kWeight}) {
    Dims const& dims = *dims_of(input);
    if (dims.nbDims == 4) continue;
    log(Severity::kERROR, "input '%s': expected 4 dimensions, got shape %s", kInputNames[input], ShapeText(dims).text);
    return false;
  }
  if (!fill_static_table(attributes().timestep_max, dims_of(kTimestep), dims_of(kXScale), params.table)) return false;
  int64_t const outputs = weight.d[0];
  int64_t const height = out_size(x.d[1], weight.d[1], attributes().stride_y, attributes().pad_y);
  int64_t const width = out_size(x.d[2], weight.d[2], attributes().stride_x, attributes().pad_x);
  Dims const of_outputs{1, {outputs}};
  Dims const expected[kInputs] = {{4, {x.d[0], x.d[1], x.d[2], weight.d[3]}},
                                  {2, {x.d[0], kMarkWords}},
                                  weight,
                                  of_outputs,
                                  of_outputs,
                                  {4, {x.d[0], outputs, height, width}},
                                  {1, {params.table.batch}},
                                  {1, {params.table.num_bins}}};
  if (!check_inputs(inputs, num_inputs, expected)) return false;
  params.batch = x.d[0];
  params.height = saturated(x.d[1]);
  params.width = saturated(x.d[2]);
  params.in_channels = saturated(4 * clamped(weight.d[3]));
  params.out_channels = saturated(outputs);
  params.kernel_h = saturated(weight.d[1]);
  params.kernel_w = saturated(weight.d[2]);
  params.stride_y = attributes().stride_y;
  params.stride_x = attributes().stride_x;
  params.pad_y = attributes().pad_y;
  params.pad_x = attributes().pad_x;
  params.data_type = data_type(type_16bit(inputs[kX].type));
  return true;
}

void Int8ConvPlugin::place(void const* const* inputs, int32_t num_inputs, void* const* outputs,
                           TrtConvertInt8ConvParams& params) const noexcept {
  params.x = inputs[kX];
  params.marks = inputs[kMarks];
  params.weight = inputs[kWeight];
  params.weight_scale = input_of<float>(inputs, num_inputs, kWeightScale);
  params.bias = input_of<float>(inputs, num_inputs, kBias);
  params.residual = input_of(inputs, num_inputs, kResidual);
  params.table.timestep = input_of<float>(inputs, num_inputs, kTimestep);
  params.table.x_scale = input_of<float>(inputs, num_inputs, kXScale);
  params.y = outputs[kY];
}

int32_t Int8ConvPlugin::getOutputShapes(DimsExprs const* inputs, int32_t nbInputs, DimsExprs const*, int32_t, DimsExprs* outputs,
                                        int32_t nbOutputs, nvinfer1::IExprBuilder& exprBuilder) noexcept {
  if (!check_counts(nbInputs, nbOutputs)) return kFailed;
  DimsExprs const &x = inputs[kX], &weight = inputs[kWeight];
  if (x.nbDims != 4 || weight.nbDims != 4) {
    log(Severity::kERROR, "expected x and weight of 4 dimensions, got %d and %d", x.nbDims, weight.nbDims);
    return kFailed;
  }
  auto const size = [&](int32_t axis, int32_t stride, int32_t pad) {
    IDimensionExpr const* const padded = exprBuilder.operation(DimensionOperation::kSUM, *x.d[axis], *exprBuilder.constant(2 * pad));
    IDimensionExpr const* const room = exprBuilder.operation(DimensionOperation::kSUB, *padded, *weight.d[axis]);
    IDimensionExpr const* const steps = exprBuilder.operation(DimensionOperation::kFLOOR_DIV, *room, *exprBuilder.constant(stride));
    return exprBuilder.operation(DimensionOperation::kSUM, *steps, *exprBuilder.constant(1));
  };
  outputs[kY].nbDims = 4;
  outputs[kY].d[0] = x.d[0];
  outputs[kY].d[1] = weight.d[0];
  outputs[kY].d[2] = size(1, attributes().stride_y, attributes().pad_y);
  outputs[kY].d[3] = size(2, attributes().stride_x, attributes().pad_x);
  return kOk;
}

}  // namespace trtconvert::plugin
