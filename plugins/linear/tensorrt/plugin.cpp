#include "linear/tensorrt/plugin.h"

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

nvinfer1::IPluginV3* LinearPlugin::clone() noexcept {
  auto* copy = new (std::nothrow) LinearPlugin(attributes_);
  if (copy == nullptr) {
    log(Severity::kERROR, "expected %zu bytes of host memory for a copy of the plugin, got none", sizeof(*copy));
    return nullptr;
  }
  copy->num_inputs_ = num_inputs_;
  return copy;
}

bool LinearPlugin::check_counts(int32_t num_inputs, int32_t num_outputs) noexcept {
  if ((num_inputs == kBias || num_inputs == kMostInputs) && num_outputs == kOutputs) return true;
  log(Severity::kERROR,
      "expected 2 or 3 inputs (x, weight, and perhaps bias) and 1 output, got %d and %d; build the engine again with this version of "
      "trtconvert",
      num_inputs, num_outputs);
  return false;
}

// Fills in shapes; pointers stay null. False, and a logged reason, where shapes or types do not belong together or the kernel does not
// take them.
bool LinearPlugin::describe(PluginTensorDesc const* inputs, int32_t num_inputs, TrtConvertLinearParams& params) const noexcept {
  static constexpr char const* kNames[kMostInputs] = {"x", "weight", "bias"};
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
  Dims const expected[kMostInputs] = {
      x,
      attributes_.geglu ? Dims{3, {2, out_channels, in_channels}} : Dims{2, {out_channels, in_channels}},
      attributes_.geglu ? Dims{2, {2, out_channels}} : Dims{1, {out_channels}},
  };
  for (int32_t i = 0; i < num_inputs; ++i) {
    if (inputs[i].format != TensorFormat::kLINEAR || !is_16bit_float(inputs[i].type) || inputs[i].type != inputs[kX].type) {
      log(Severity::kERROR, "input '%s': expected linear format and FP16 or BF16, as x; got format %d and type %d", kNames[i],
          static_cast<int>(inputs[i].format), static_cast<int>(inputs[i].type));
      return false;
    }
    if (!is_same(inputs[i].dims, expected[i])) {
      log(Severity::kERROR, "input '%s': expected shape %s from x and weight, got %s", kNames[i], ShapeText(expected[i]).text,
          ShapeText(inputs[i].dims).text);
      return false;
    }
  }
  params = {};
  params.struct_size = sizeof(params);
  params.version = TRTCONVERT_LINEAR_VERSION;
  params.rows = rows_of(x);
  params.in_channels = saturated(in_channels);
  params.out_channels = saturated(out_channels);
  params.data_type = inputs[kX].type == DataType::kBF16 ? TRTCONVERT_BFLOAT16 : TRTCONVERT_FLOAT16;
  params.geglu = attributes_.geglu;
  char message[kMessageSize];
  return report(trtconvert_linear_check(&params, message, sizeof(message)), message) == kOk;
}

int32_t LinearPlugin::configurePlugin(DynamicPluginTensorDesc const* in, int32_t nbInputs, DynamicPluginTensorDesc const*,
                                      int32_t nbOutputs) noexcept {
  if (!check_counts(nbInputs, nbOutputs)) return kFailed;
  for (Bound const bound : {Bound::kMin, Bound::kMax}) {
    PluginTensorDesc descs[kMostInputs];
    at_bound(in, nbInputs, bound, descs);
    TrtConvertLinearParams params;
    if (!describe(descs, nbInputs, params)) return kFailed;
  }
  return kOk;
}

int32_t LinearPlugin::getOutputDataTypes(DataType* outputTypes, int32_t nbOutputs, DataType const* inputTypes,
                                         int32_t nbInputs) const noexcept {
  if (!check_counts(nbInputs, nbOutputs)) return kFailed;
  outputTypes[kY] = inputTypes[kX];
  return kOk;
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

bool LinearPlugin::supportsFormatCombination(int32_t pos, DynamicPluginTensorDesc const* inOut, int32_t nbInputs,
                                             int32_t nbOutputs) noexcept {
  PluginTensorDesc const& tensor = inOut[pos].desc;
  return check_counts(nbInputs, nbOutputs) && tensor.format == TensorFormat::kLINEAR && is_16bit_float(tensor.type) &&
         tensor.type == inOut[kX].desc.type;
}

int32_t LinearPlugin::onShapeChange(PluginTensorDesc const* in, int32_t nbInputs, PluginTensorDesc const*,
                                    int32_t nbOutputs) noexcept {
  TrtConvertLinearParams params;
  if (!check_counts(nbInputs, nbOutputs) || !describe(in, nbInputs, params)) return kFailed;
  num_inputs_ = nbInputs;
  return kOk;
}

int32_t LinearPlugin::enqueue(PluginTensorDesc const* inputDesc, PluginTensorDesc const*, void const* const* inputs,
                              void* const* outputs, void*, CUstream_st* stream) noexcept {
  TrtConvertLinearParams params;
  if (!check_counts(num_inputs_, kOutputs) || !describe(inputDesc, num_inputs_, params)) return kFailed;
  params.x = inputs[kX];
  params.weight = inputs[kWeight];
  params.bias = num_inputs_ > kBias ? inputs[kBias] : nullptr;
  params.y = outputs[kY];
  params.stream = stream;
  char message[kMessageSize];
  return report(trtconvert_linear_run(&params, message, sizeof(message)), message);
}

}  // namespace trtconvert::plugin
