#include "linear/tensorrt/plugin.h"

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
constexpr int32_t kSerializationVersion = 1;

constexpr char kGeglu[] = "geglu";
constexpr unsigned kVersionBit = 1, kGegluBit = 2;

}  // namespace

PluginFieldCollection const* LinearPlugin::attribute_names() noexcept {
  static constexpr PluginField kFields[] = {{kGeglu, nullptr, PluginFieldType::kINT32, 1}};
  static constexpr PluginFieldCollection kCollection{std::size(kFields), kFields};
  return &kCollection;
}

bool LinearPlugin::parse(PluginFieldCollection const* fields, TensorRTPhase phase, Attributes& attributes) noexcept {
  unsigned seen = 0;
  auto const read = [&](PluginField const& field) noexcept -> unsigned {
    std::string_view const name = field.name;
    if (name == kGeglu) return read_flag(field, attributes.geglu) ? kGegluBit : 0;
    if (name == kSerializationVersionField && phase == TensorRTPhase::kRUNTIME)
      return read_version(field, kSerializationVersion) ? kVersionBit : 0;
    log(Severity::kERROR, "expected the attribute %s, got '%s'; remove it", kGeglu, field.name);
    return 0;
  };
  if (!read_fields(fields, read, seen)) return false;
  return phase != TensorRTPhase::kRUNTIME || check_complete(fields, seen, 2);
}

LinearPlugin::LinearPlugin(Attributes const& attributes) noexcept
    : attributes_(attributes),
      version_(kSerializationVersion),
      fields_{{kSerializationVersionField, &version_, PluginFieldType::kINT32, 1},
              {kGeglu, &attributes_.geglu, PluginFieldType::kINT32, 1}},
      collection_{static_cast<int32_t>(std::size(fields_)), fields_} {}

bool LinearPlugin::describe(PluginTensorDesc const* inputs, int32_t num_inputs, TrtConvertLinearParams& params) const noexcept {
  Dims const &x = inputs[kX].dims, &weight = inputs[kWeight].dims;
  if (x.nbDims < 1) {
    log(Severity::kERROR, "input 'x': expected one dimension or more, got shape %s", ShapeText(x).text);
    return false;
  }
  int32_t const rank = weight_rank();
  if (weight.nbDims != rank) {
    log(Severity::kERROR, "input 'weight': expected %d dimensions, got shape %s", rank, ShapeText(weight).text);
    return false;
  }
  int64_t const in_channels = x.d[x.nbDims - 1], out_channels = weight.d[rank - 2];
  Dims const expected[] = {
      x,
      attributes_.geglu ? Dims{3, {2, out_channels, in_channels}} : Dims{2, {out_channels, in_channels}},
      attributes_.geglu ? Dims{2, {2, out_channels}} : Dims{1, {out_channels}},
  };
  if (!check_inputs(inputs, num_inputs, expected)) return false;
  params = {};
  params.struct_size = sizeof(params);
  params.version = TRTCONVERT_LINEAR_VERSION;
  params.rows = rows_of(x);
  params.in_channels = saturated(in_channels);
  params.out_channels = saturated(out_channels);
  params.data_type = data_type(inputs[kX]);
  params.geglu = attributes_.geglu;
  char message[kMessageSize];
  return report(trtconvert_linear_check(&params, message, sizeof(message)), message) == kOk;
}

void LinearPlugin::place(void const* const* inputs, int32_t num_inputs, void* const* outputs,
                         TrtConvertLinearParams& params) noexcept {
  params.x = inputs[kX];
  params.weight = inputs[kWeight];
  params.bias = num_inputs > kBias ? inputs[kBias] : nullptr;
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
