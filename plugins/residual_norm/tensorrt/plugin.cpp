#include "residual_norm/tensorrt/plugin.h"

#include <iterator>
#include <string_view>

#include "tensorrt/fields.h"

namespace trtconvert::plugin {

using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorRTPhase;

namespace {

// Raised whenever a field is added or changes its meaning.
constexpr int32_t kSerializationVersion = 2;

constexpr char kEpsilon[] = "epsilon";
constexpr char kStartsEarly[] = "starts_early";
constexpr unsigned kVersionBit = 1, kEpsilonBit = 2, kStartsEarlyBit = 4;

}  // namespace

PluginFieldCollection const* ResidualNormPlugin::attribute_names() noexcept {
  static constexpr PluginField kFields[] = {{kEpsilon, nullptr, PluginFieldType::kFLOAT32, 1},
                                             {kStartsEarly, nullptr, PluginFieldType::kINT32, 1}};
  static constexpr PluginFieldCollection kCollection{std::size(kFields), kFields};
  return &kCollection;
}

bool ResidualNormPlugin::parse(PluginFieldCollection const* fields, TensorRTPhase phase, Attributes& attributes) noexcept {
  unsigned seen = 0;
  auto const read = [&](PluginField const& field) noexcept -> unsigned {
    std::string_view const name = field.name;
    if (name == kEpsilon) return read_epsilon(field, attributes.epsilon) ? kEpsilonBit : 0;
    if (name == kStartsEarly) return read_flag(field, attributes.starts_early) ? kStartsEarlyBit : 0;
    if (name == kSerializationVersionField && phase == TensorRTPhase::kRUNTIME)
      return read_version(field, kSerializationVersion) ? kVersionBit : 0;
    log(Severity::kERROR, "expected one of the attributes %s and %s, got '%s'; remove it", kEpsilon, kStartsEarly, field.name);
    return 0;
  };
  if (!read_fields(fields, read, seen)) return false;
  return phase != TensorRTPhase::kRUNTIME || check_complete(fields, seen, 3);
}

ResidualNormPlugin::ResidualNormPlugin(Attributes const& attributes) noexcept
    : attributes_(attributes),
      version_(kSerializationVersion),
      fields_{{kSerializationVersionField, &version_, PluginFieldType::kINT32, 1},
              {kEpsilon, &attributes_.epsilon, PluginFieldType::kFLOAT32, 1},
              {kStartsEarly, &attributes_.starts_early, PluginFieldType::kINT32, 1}},
      collection_{static_cast<int32_t>(std::size(fields_)), fields_} {}

bool ResidualNormPlugin::describe(PluginTensorDesc const* inputs, int32_t num_inputs,
                                  TrtConvertResidualNormParams& params) const noexcept {
  Dims const& x = inputs[kX].dims;
  if (x.nbDims < 1) {
    log(Severity::kERROR, "input 'x': expected one dimension or more, got shape %s", ShapeText(x).text);
    return false;
  }
  Dims const of_channels{1, {x.d[x.nbDims - 1]}};
  Dims const expected[kInputs] = {x, x, of_channels, of_channels};
  if (!check_inputs(inputs, num_inputs, expected)) return false;
  params = {};
  params.struct_size = sizeof(params);
  params.version = TRTCONVERT_RESIDUAL_NORM_VERSION;
  params.rows = rows_of(x);
  params.channels = saturated(of_channels.d[0]);
  params.data_type = data_type(inputs[kX]);
  params.epsilon = attributes_.epsilon;
  params.starts_early = attributes_.starts_early;
  char message[kMessageSize];
  return report(trtconvert_residual_norm_check(&params, message, sizeof(message)), message) == kOk;
}

void ResidualNormPlugin::place(void const* const* inputs, int32_t, void* const* outputs,
                               TrtConvertResidualNormParams& params) noexcept {
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
