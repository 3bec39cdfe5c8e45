#include "channels_last_add/tensorrt/plugin.h"

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

constexpr unsigned kVersionBit = 1;

}  // namespace

PluginFieldCollection const* ChannelsLastAddPlugin::attribute_names() noexcept {
  static constexpr PluginFieldCollection kCollection{};
  return &kCollection;
}

bool ChannelsLastAddPlugin::parse(PluginFieldCollection const* fields, TensorRTPhase phase, Attributes&) noexcept {
  unsigned seen = 0;
  auto const read = [&](PluginField const& field) noexcept -> unsigned {
    if (std::string_view(field.name) == kSerializationVersionField && phase == TensorRTPhase::kRUNTIME)
      return read_version(field, kSerializationVersion) ? kVersionBit : 0;
    log(Severity::kERROR, "expected no attributes, got '%s'; remove it", field.name);
    return 0;
  };
  if (!read_fields(fields, read, seen)) return false;
  return phase != TensorRTPhase::kRUNTIME || check_complete(fields, seen, 1);
}

ChannelsLastAddPlugin::ChannelsLastAddPlugin(Attributes const&) noexcept
    : version_(kSerializationVersion),
      field_{kSerializationVersionField, &version_, PluginFieldType::kINT32, 1},
      collection_{1, &field_} {}

TensorFormat ChannelsLastAddPlugin::input_format(int32_t index) noexcept {
  return index == kX ? TensorFormat::kHWC8 : TensorFormat::kLINEAR;
}

bool ChannelsLastAddPlugin::describe(PluginTensorDesc const* inputs, int32_t num_inputs,
                                     TrtConvertChannelsLastAddParams& params) const noexcept {
  Dims const& x = inputs[kX].dims;
  if (!check_image(kInputNames[kX], x)) return false;
  Dims const y = channels_last(x);
  Dims const expected[kInputs] = {x, y};
  if (!check_inputs(inputs, num_inputs, expected)) return false;
  params = {};
  params.struct_size = sizeof(params);
  params.version = TRTCONVERT_CHANNELS_LAST_ADD_VERSION;
  params.pixels = rows_of(y);
  params.channels = saturated(x.d[1]);
  params.data_type = data_type(inputs[kX]);
  char message[kMessageSize];
  return report(trtconvert_channels_last_add_check(&params, message, sizeof(message)), message) == kOk;
}

void ChannelsLastAddPlugin::place(void const* const* inputs, int32_t, void* const* outputs,
                                  TrtConvertChannelsLastAddParams& params) noexcept {
  params.x = inputs[kX];
  params.y = inputs[kY];
  params.sum = outputs[kSum];
}

int32_t ChannelsLastAddPlugin::getOutputShapes(DimsExprs const* inputs, int32_t nbInputs, DimsExprs const*, int32_t,
                                               DimsExprs* outputs, int32_t nbOutputs, nvinfer1::IExprBuilder&) noexcept {
  if (!check_counts(nbInputs, nbOutputs) || !check_image(kInputNames[kX], inputs[kX])) return kFailed;
  outputs[kSum] = inputs[kX];
  return kOk;
}

}  // namespace trtconvert::plugin
