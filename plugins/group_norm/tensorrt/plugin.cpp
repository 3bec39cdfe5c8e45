#include "group_norm/tensorrt/plugin.h"

#include <iterator>
#include <string_view>

#include "tensorrt/fields.h"
#include "tensorrt/images.h"

namespace trtconvert::plugin {

using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorFormat;
using nvinfer1::TensorRTPhase;

namespace {

// Raised whenever a field is added or changes its meaning.
constexpr int32_t kSerializationVersion = 1;

constexpr char kEpsilon[] = "epsilon";
constexpr char kGroups[] = "groups";
constexpr char kSilu[] = "silu";
constexpr char kChannelsLast[] = "channels_last";
constexpr unsigned kVersionBit = 1, kEpsilonBit = 2, kGroupsBit = 4, kSiluBit = 8, kChannelsLastBit = 16;

}  // namespace

PluginFieldCollection const* GroupNormPlugin::attribute_names() noexcept {
  static constexpr PluginField kFields[] = {{kEpsilon, nullptr, PluginFieldType::kFLOAT32, 1},
                                            {kGroups, nullptr, PluginFieldType::kINT32, 1},
                                            {kSilu, nullptr, PluginFieldType::kINT32, 1},
                                            {kChannelsLast, nullptr, PluginFieldType::kINT32, 1}};
  static constexpr PluginFieldCollection kCollection{std::size(kFields), kFields};
  return &kCollection;
}

bool GroupNormPlugin::parse(PluginFieldCollection const* fields, TensorRTPhase phase, Attributes& attributes) noexcept {
  unsigned seen = 0;
  auto const read = [&](PluginField const& field) noexcept -> unsigned {
    std::string_view const name = field.name;
    if (name == kEpsilon) return read_epsilon(field, attributes.epsilon) ? kEpsilonBit : 0;
    if (name == kGroups) return read_positive(field, attributes.groups) ? kGroupsBit : 0;
    if (name == kSilu) return read_flag(field, attributes.silu) ? kSiluBit : 0;
    if (name == kChannelsLast) return read_flag(field, attributes.channels_last) ? kChannelsLastBit : 0;
    if (name == kSerializationVersionField && phase == TensorRTPhase::kRUNTIME)
      return read_version(field, kSerializationVersion) ? kVersionBit : 0;
    log(Severity::kERROR, "expected one of the attributes %s, %s, %s and %s, got '%s'; remove it", kEpsilon, kGroups, kSilu,
        kChannelsLast, field.name);
    return 0;
  };
  if (!read_fields(fields, read, seen)) return false;
  if (phase == TensorRTPhase::kRUNTIME) return check_complete(fields, seen, 5);
  if (seen & kGroupsBit) return true;
  log(Severity::kERROR, "expected the attribute %s, got none", kGroups);
  return false;
}

GroupNormPlugin::GroupNormPlugin(Attributes const& attributes) noexcept
    : attributes_(attributes),
      version_(kSerializationVersion),
      fields_{{kSerializationVersionField, &version_, PluginFieldType::kINT32, 1},
              {kEpsilon, &attributes_.epsilon, PluginFieldType::kFLOAT32, 1},
              {kGroups, &attributes_.groups, PluginFieldType::kINT32, 1},
              {kSilu, &attributes_.silu, PluginFieldType::kINT32, 1},
              {kChannelsLast, &attributes_.channels_last, PluginFieldType::kINT32, 1}},
      collection_{static_cast<int32_t>(std::size(fields_)), fields_} {}

TensorFormat GroupNormPlugin::input_format(int32_t index) noexcept {
  return index == kX ? TensorFormat::kHWC8 : TensorFormat::kLINEAR;
}

TensorFormat GroupNormPlugin::output_format(int32_t) const noexcept {
  return attributes_.channels_last ? TensorFormat::kLINEAR : TensorFormat::kHWC8;
}

bool GroupNormPlugin::describe(PluginTensorDesc const* inputs, int32_t num_inputs,
                               TrtConvertGroupNormParams& params) const noexcept {
  Dims const& x = inputs[kX].dims;
  if (!check_image(kInputNames[kX], x)) return false;
  int64_t const batch = x.d[0], channels = x.d[1];
  Dims const of_channels{1, {channels}};
  Dims const expected[] = {x, of_channels, of_channels, {2, {batch, channels}}};
  if (!check_inputs(inputs, num_inputs, expected)) return false;
  params = {};
  params.struct_size = sizeof(params);
  params.version = TRTCONVERT_GROUP_NORM_VERSION;
  params.batch = batch;
  params.pixels = rows_of({3, {x.d[2], x.d[3], channels}});
  params.channels = saturated(channels);
  params.groups = attributes_.groups;
  params.data_type = data_type(inputs[kX]);
  params.silu = attributes_.silu;
  params.epsilon = attributes_.epsilon;
  char message[kMessageSize];
  return report(trtconvert_group_norm_check(&params, message, sizeof(message)), message) == kOk;
}

void GroupNormPlugin::place(void const* const* inputs, int32_t num_inputs, void* const* outputs,
                            TrtConvertGroupNormParams& params) noexcept {
  params.x = inputs[kX];
  params.weight = inputs[kWeight];
  params.bias = inputs[kBias];
  params.shift = num_inputs > kShift ? inputs[kShift] : nullptr;
  params.normed = outputs[kNormed];
}

int32_t GroupNormPlugin::getOutputShapes(DimsExprs const* inputs, int32_t nbInputs, DimsExprs const*, int32_t, DimsExprs* outputs,
                                         int32_t nbOutputs, nvinfer1::IExprBuilder&) noexcept {
  if (!check_counts(nbInputs, nbOutputs) || !check_image(kInputNames[kX], inputs[kX])) return kFailed;
  outputs[kNormed] = attributes_.channels_last ? channels_last(inputs[kX]) : inputs[kX];
  return kOk;
}

}  // namespace trtconvert::plugin
