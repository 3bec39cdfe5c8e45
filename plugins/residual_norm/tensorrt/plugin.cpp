#include "residual_norm/tensorrt/plugin.h"

#include <iterator>
#include <new>
#include <string_view>

#include "tensorrt/fields.h"
#include "tensorrt/shapes.h"

namespace trtconvert::plugin {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorFormat;
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

nvinfer1::IPluginV3* ResidualNormPlugin::clone() noexcept {
  auto* copy = new (std::nothrow) ResidualNormPlugin(attributes_);
  if (copy == nullptr) log(Severity::kERROR, "expected %zu bytes of host memory for a copy of the plugin, got none", sizeof(*copy));
  return copy;
}

bool ResidualNormPlugin::check_counts(int32_t num_inputs, int32_t num_outputs) noexcept {
  if (num_inputs == kInputs && num_outputs == kOutputs) return true;
  log(Severity::kERROR,
      "expected 4 inputs (x, residual, weight, bias) and 2 outputs (sum, normed), got %d and %d; build the engine again with this "
      "version of trtconvert",
      num_inputs, num_outputs);
  return false;
}

// Fills in shapes and attributes; pointers stay null. False, and a logged reason, where shapes or types do not belong together or
// the kernel does not take them.
bool ResidualNormPlugin::describe(PluginTensorDesc const* inputs, TrtConvertResidualNormParams& params) const noexcept {
  static constexpr char const* kNames[kInputs] = {"x", "residual", "weight", "bias"};
  Dims const& x = inputs[kX].dims;
  if (x.nbDims < 1) {
    log(Severity::kERROR, "input 'x': expected one dimension or more, got shape %s", ShapeText(x).text);
    return false;
  }
  Dims const of_channels{1, {x.d[x.nbDims - 1]}};
  for (int32_t i = 0; i < kInputs; ++i) {
    if (inputs[i].format != TensorFormat::kLINEAR || !is_16bit_float(inputs[i].type) || inputs[i].type != inputs[kX].type) {
      log(Severity::kERROR, "input '%s': expected linear format and FP16 or BF16, as x; got format %d and type %d", kNames[i],
          static_cast<int>(inputs[i].format), static_cast<int>(inputs[i].type));
      return false;
    }
    Dims const& expected = i <= kResidual ? x : of_channels;
    if (!is_same(inputs[i].dims, expected)) {
      log(Severity::kERROR, "input '%s': expected shape %s from x, got %s", kNames[i], ShapeText(expected).text,
          ShapeText(inputs[i].dims).text);
      return false;
    }
  }
  params = {};
  params.struct_size = sizeof(params);
  params.version = TRTCONVERT_RESIDUAL_NORM_VERSION;
  params.rows = rows_of(x);
  params.channels = saturated(of_channels.d[0]);
  params.data_type = inputs[kX].type == DataType::kBF16 ? TRTCONVERT_BFLOAT16 : TRTCONVERT_FLOAT16;
  params.epsilon = attributes_.epsilon;
  params.starts_early = attributes_.starts_early;
  char message[kMessageSize];
  return report(trtconvert_residual_norm_check(&params, message, sizeof(message)), message) == kOk;
}

int32_t ResidualNormPlugin::configurePlugin(DynamicPluginTensorDesc const* in, int32_t nbInputs, DynamicPluginTensorDesc const*,
                                            int32_t nbOutputs) noexcept {
  if (!check_counts(nbInputs, nbOutputs)) return kFailed;
  for (Bound const bound : {Bound::kMin, Bound::kMax}) {
    PluginTensorDesc descs[kInputs];
    at_bound(in, kInputs, bound, descs);
    TrtConvertResidualNormParams params;
    if (!describe(descs, params)) return kFailed;
  }
  return kOk;
}

int32_t ResidualNormPlugin::getOutputDataTypes(DataType* outputTypes, int32_t nbOutputs, DataType const* inputTypes,
                                               int32_t nbInputs) const noexcept {
  if (!check_counts(nbInputs, nbOutputs)) return kFailed;
  outputTypes[kSum] = outputTypes[kNormed] = inputTypes[kX];
  return kOk;
}

int32_t ResidualNormPlugin::getOutputShapes(DimsExprs const* inputs, int32_t nbInputs, DimsExprs const*, int32_t, DimsExprs* outputs,
                                            int32_t nbOutputs, nvinfer1::IExprBuilder&) noexcept {
  if (!check_counts(nbInputs, nbOutputs)) return kFailed;
  outputs[kSum] = outputs[kNormed] = inputs[kX];
  return kOk;
}

bool ResidualNormPlugin::supportsFormatCombination(int32_t pos, DynamicPluginTensorDesc const* inOut, int32_t nbInputs,
                                                   int32_t nbOutputs) noexcept {
  PluginTensorDesc const& tensor = inOut[pos].desc;
  return check_counts(nbInputs, nbOutputs) && tensor.format == TensorFormat::kLINEAR && is_16bit_float(tensor.type) &&
         tensor.type == inOut[kX].desc.type;
}

int32_t ResidualNormPlugin::onShapeChange(PluginTensorDesc const* in, int32_t nbInputs, PluginTensorDesc const*,
                                          int32_t nbOutputs) noexcept {
  TrtConvertResidualNormParams params;
  return check_counts(nbInputs, nbOutputs) && describe(in, params) ? kOk : kFailed;
}

int32_t ResidualNormPlugin::enqueue(PluginTensorDesc const* inputDesc, PluginTensorDesc const*, void const* const* inputs,
                                    void* const* outputs, void*, CUstream_st* stream) noexcept {
  TrtConvertResidualNormParams params;
  if (!describe(inputDesc, params)) return kFailed;
  params.x = inputs[kX];
  params.residual = inputs[kResidual];
  params.weight = inputs[kWeight];
  params.bias = inputs[kBias];
  params.sum = outputs[kSum];
  params.normed = outputs[kNormed];
  params.stream = stream;
  char message[kMessageSize];
  return report(trtconvert_residual_norm_run(&params, message, sizeof(message)), message);
}

}  // namespace trtconvert::plugin
