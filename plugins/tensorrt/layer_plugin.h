// What plugins of single layers have in common: all tensors FP16 or all BF16, without gaps, one kernel without a workspace.
#pragma once

#include <algorithm>
#include <iterator>
#include <new>

#include "tensorrt/attribute_list.h"
#include "tensorrt/plugin_base.h"
#include "tensorrt/shapes.h"

namespace trtconvert::plugin {

// `Plugin` derives from it with its Attributes_ (attribute_list.h) and the C API's Params, takes its constructor, and has kName, its name
// in a network. For this class alone it has:
//   kInputNames, kFewestInputs (the last ones may be left out), kOutputs; kTensors and kShapesFrom, for messages;
//   fill(inputs, num_inputs, params): what the C API wants but pointers. Where shapes or types do not belong together it gives false
//     and has logged why;
//   place(inputs, num_inputs, outputs, params): fills in the pointers;
//   kParamsVersion, kCheck and kRun: the C API's version and functions.
// It has input_format(index) or output_format(index) of its own where a tensor's format is not linear, or an attribute decides.
template <typename Plugin, typename Attributes_, typename Params>
class LayerPlugin : public PluginBase {
 public:
  // For its creator.
  using Attributes = Attributes_;
  static bool parse(nvinfer1::PluginFieldCollection const* fields, nvinfer1::TensorRTPhase phase, Attributes& attributes) noexcept {
    return AttributeFields<Attributes>::parse(fields, phase, attributes);
  }
  static nvinfer1::PluginFieldCollection const* attribute_names() noexcept { return AttributeFields<Attributes>::names(); }

  explicit LayerPlugin(Attributes const& attributes) noexcept : fields_(attributes) {}

  nvinfer1::IPluginV3* clone() noexcept final {
    auto* copy = new (std::nothrow) Plugin(attributes());
    if (copy == nullptr) {
      log(Severity::kERROR, "expected %zu bytes of host memory for a copy of the plugin, got none", sizeof(*copy));
      return nullptr;
    }
    copy->num_inputs_ = num_inputs_;
    return copy;
  }
  char const* getPluginName() const noexcept final { return Plugin::kName; }

  int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t nbInputs, nvinfer1::DynamicPluginTensorDesc const*,
                          int32_t nbOutputs) noexcept final {
    if (!check_counts(nbInputs, nbOutputs)) return kFailed;
    for (Bound const bound : {Bound::kMin, Bound::kMax}) {
      nvinfer1::PluginTensorDesc descs[std::size(Plugin::kInputNames)];
      at_bound(in, nbInputs, bound, descs);
      Params params;
      if (!describe(descs, nbInputs, params)) return kFailed;
    }
    return kOk;
  }

  int32_t getOutputDataTypes(nvinfer1::DataType* outputTypes, int32_t nbOutputs, nvinfer1::DataType const* inputTypes,
                             int32_t nbInputs) const noexcept final {
    if (!check_counts(nbInputs, nbOutputs)) return kFailed;
    std::fill_n(outputTypes, nbOutputs, inputTypes[0]);
    return kOk;
  }

  bool supportsFormatCombination(int32_t pos, nvinfer1::DynamicPluginTensorDesc const* inOut, int32_t nbInputs,
                                 int32_t nbOutputs) noexcept final {
    if (!check_counts(nbInputs, nbOutputs)) return false;
    auto const format = pos < nbInputs ? self().input_format(pos) : self().output_format(pos - nbInputs);
    return is_as(inOut[pos].desc, inOut[0].desc, format);
  }

  int32_t getNbOutputs() const noexcept final { return Plugin::kOutputs; }

  int32_t onShapeChange(nvinfer1::PluginTensorDesc const* in, int32_t nbInputs, nvinfer1::PluginTensorDesc const*,
                        int32_t nbOutputs) noexcept final {
    Params params;
    if (!check_counts(nbInputs, nbOutputs) || !describe(in, nbInputs, params)) return kFailed;
    num_inputs_ = nbInputs;
    return kOk;
  }

  int32_t enqueue(nvinfer1::PluginTensorDesc const* inputDesc, nvinfer1::PluginTensorDesc const*, void const* const* inputs,
                  void* const* outputs, void*, CUstream_st* stream) noexcept final {
    Params params;
    if (!check_counts(num_inputs_, Plugin::kOutputs) || !describe(inputDesc, num_inputs_, params)) return kFailed;
    Plugin::place(inputs, num_inputs_, outputs, params);
    params.stream = stream;
    char message[kMessageSize];
    return report(Plugin::kRun(&params, message, sizeof(message)), message);
  }

  nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept final { return fields_.fields(); }

 protected:
  Attributes const& attributes() const noexcept { return fields_.values(); }

  // Unless the plugin says others.
  nvinfer1::TensorFormat input_format(int32_t) const noexcept { return nvinfer1::TensorFormat::kLINEAR; }
  nvinfer1::TensorFormat output_format(int32_t) const noexcept { return nvinfer1::TensorFormat::kLINEAR; }

  static bool check_counts(int32_t num_inputs, int32_t num_outputs) noexcept {
    constexpr int32_t kMostInputs = std::size(Plugin::kInputNames);
    if (num_inputs >= Plugin::kFewestInputs && num_inputs <= kMostInputs && num_outputs == Plugin::kOutputs) return true;
    log(Severity::kERROR, "expected %s, got %d and %d; build the engine again with this version of trtconvert", Plugin::kTensors,
        num_inputs, num_outputs);
    return false;
  }

  // Whether all inputs have the type of the first, their formats, and shapes that are expected.
  bool check_inputs(nvinfer1::PluginTensorDesc const* inputs, int32_t num_inputs, nvinfer1::Dims const* expected) const noexcept {
    for (int32_t i = 0; i < num_inputs; ++i) {
      auto const format = self().input_format(i);
      if (!is_as(inputs[i], inputs[0], format)) {
        log(Severity::kERROR, "input '%s': expected %s format and FP16 or BF16, as %s; got format %d and type %d",
            Plugin::kInputNames[i], name_of(format), Plugin::kInputNames[0], static_cast<int>(inputs[i].format),
            static_cast<int>(inputs[i].type));
        return false;
      }
      if (!is_same(inputs[i].dims, expected[i])) {
        log(Severity::kERROR, "input '%s': expected shape %s from %s, got %s", Plugin::kInputNames[i], ShapeText(expected[i]).text,
            Plugin::kShapesFrom, ShapeText(inputs[i].dims).text);
        return false;
      }
    }
    return true;
  }

  // Whether an input has rows: a last dimension of channels, and any others in front of it.
  static bool check_has_rows(int32_t input, nvinfer1::Dims const& dims) noexcept {
    if (dims.nbDims >= 1) return true;
    log(Severity::kERROR, "input '%s': expected one dimension or more, got shape %s", Plugin::kInputNames[input],
        ShapeText(dims).text);
    return false;
  }

  static TrtConvertDataType data_type(nvinfer1::PluginTensorDesc const& tensor) noexcept {
    return tensor.type == nvinfer1::DataType::kBF16 ? TRTCONVERT_BFLOAT16 : TRTCONVERT_FLOAT16;
  }

 private:
  // What the C API is told of tensors but where they lie; false, and a logged reason, where it does not take them.
  bool describe(nvinfer1::PluginTensorDesc const* inputs, int32_t num_inputs, Params& params) const noexcept {
    params = {};
    params.struct_size = sizeof(params);
    params.version = Plugin::kParamsVersion;
    if (!self().fill(inputs, num_inputs, params)) return false;
    char message[kMessageSize];
    return report(Plugin::kCheck(&params, message, sizeof(message)), message) == kOk;
  }

  static bool is_as(nvinfer1::PluginTensorDesc const& tensor, nvinfer1::PluginTensorDesc const& first,
                    nvinfer1::TensorFormat format) noexcept {
    return tensor.format == format && is_16bit_float(tensor.type) && tensor.type == first.type;
  }

  static char const* name_of(nvinfer1::TensorFormat format) noexcept {
    return format == nvinfer1::TensorFormat::kHWC8 ? "HWC8" : "linear";
  }

  Plugin const& self() const noexcept { return static_cast<Plugin const&>(*this); }

  AttributeFields<Attributes> const fields_;
  int32_t num_inputs_ = 0;  // of the last shape change
};

}  // namespace trtconvert::plugin
