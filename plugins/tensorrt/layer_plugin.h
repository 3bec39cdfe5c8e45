// The shared base of plugins of single layers: 16-bit tensors of one type, and perhaps FP32 and INT32 ones, without gaps; one call of a
// C API without a workspace.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <iterator>
#include <new>

#include "tensorrt/attribute_list.h"
#include "tensorrt/plugin_base.h"
#include "tensorrt/quantised_rows.h"
#include "tensorrt/shapes.h"

namespace trtconvert::plugin {

// The element type of a layer's tensor.
enum class Element {
  k16Bit,  // FP16 or BF16, the same for all of them
  kFloat,
  kInt32,
};

// `Plugin` derives from LayerPlugin with its Attributes_ (attribute_list.h) and the C API's Params, inherits the constructor, and has
// kName, its name in a network. LayerPlugin requires of it:
//   kInputNames, kFewestInputs (the last inputs may be left out), kOutputNames; kShapesFrom, for messages;
//   fill(inputs, num_inputs, params): sets all fields of `params` but pointers. Returns false, with a logged reason, if shapes or types
//     do not fit together;
//   place(inputs, num_inputs, outputs, params): sets the pointers;
//   kParamsVersion, kCheck and kRun: the C API's version and functions.
// `Plugin` replaces functions whose defaults below do not hold:
//   has_input(input), has_output(output): whether its attributes want the tensor;
//   input_element(input), output_element(output), input_format(input), output_format(output);
//   type_16bit(first): the type of 16-bit tensors, from that of the first input.
// TensorRT numbers the existing tensors; all functions here number the tensors of kInputNames and kOutputNames.
template <typename Plugin, typename Attributes_, typename Params>
class LayerPlugin : public PluginBase {
 public:
  // The interface for Creator in entry_points.cpp.
  using Attributes = Attributes_;
  static bool parse(nvinfer1::PluginFieldCollection const* fields, nvinfer1::TensorRTPhase phase,
                    Attributes& attributes) noexcept {
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
      nvinfer1::PluginTensorDesc descs[kMostInputs()];
      at_bound(in, nbInputs, bound, descs);
      Params params;
      if (!describe(descs, nbInputs, params)) return kFailed;
    }
    return kOk;
  }

  int32_t getOutputDataTypes(nvinfer1::DataType* outputTypes, int32_t nbOutputs, nvinfer1::DataType const* inputTypes,
                             int32_t nbInputs) const noexcept final {
    if (!check_counts(nbInputs, nbOutputs)) return kFailed;
    for (int32_t i = 0; i < nbOutputs; ++i)
      outputTypes[i] = type_of(self().output_element(output_at(i)), self().type_16bit(inputTypes[0]));
    return kOk;
  }

  bool supportsFormatCombination(int32_t pos, nvinfer1::DynamicPluginTensorDesc const* inOut, int32_t nbInputs,
                                 int32_t nbOutputs) noexcept final {
    if (!check_counts(nbInputs, nbOutputs)) return false;
    auto const& tensor = inOut[pos].desc;
    auto const first = inOut[0].desc.type;
    if (pos < nbInputs) {
      int32_t const input = input_at(pos);
      return is_as(tensor, first, self().input_element(input), self().input_format(input));
    }
    int32_t const output = output_at(pos - nbInputs);
    return is_as(tensor, first, self().output_element(output), self().output_format(output));
  }

  int32_t getNbOutputs() const noexcept final {
    int32_t count = 0;
    for (int32_t output = 0; output < kMostOutputs(); ++output) count += self().has_output(output);
    return count;
  }

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
    if (!check_counts(num_inputs_, getNbOutputs()) || !describe(inputDesc, num_inputs_, params)) return kFailed;
    self().place(inputs, num_inputs_, outputs, params);
    params.stream = stream;
    char message[kMessageSize];
    return report(Plugin::kRun(&params, message, sizeof(message)), message);
  }

  nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept final { return fields_.fields(); }

 protected:
  Attributes const& attributes() const noexcept { return fields_.values(); }

  // Defaults, unless the plugin overrides them.
  bool has_input(int32_t) const noexcept { return true; }
  bool has_output(int32_t) const noexcept { return true; }
  Element input_element(int32_t) const noexcept { return Element::k16Bit; }
  Element output_element(int32_t) const noexcept { return Element::k16Bit; }
  nvinfer1::TensorFormat input_format(int32_t) const noexcept { return nvinfer1::TensorFormat::kLINEAR; }
  nvinfer1::TensorFormat output_format(int32_t) const noexcept { return nvinfer1::TensorFormat::kLINEAR; }
  nvinfer1::DataType type_16bit(nvinfer1::DataType first) const noexcept { return first; }

  // Position of a tensor among the existing ones.
  int32_t input_position(int32_t input) const noexcept {
    int32_t position = 0;
    for (int32_t i = 0; i < input; ++i) position += self().has_input(i);
    return position;
  }
  int32_t output_position(int32_t output) const noexcept {
    int32_t position = 0;
    for (int32_t i = 0; i < output; ++i) position += self().has_output(i);
    return position;
  }

  // The address of a tensor, or null if there is none.
  template <typename T = void>
  T const* input_of(void const* const* inputs, int32_t num_inputs, int32_t input) const noexcept {
    int32_t const position = input_position(input);
    return self().has_input(input) && position < num_inputs ? static_cast<T const*>(inputs[position]) : nullptr;
  }
  template <typename T = void>
  T* output_of(void* const* outputs, int32_t output) const noexcept {
    return self().has_output(output) ? static_cast<T*>(outputs[output_position(output)]) : nullptr;
  }

  bool check_counts(int32_t num_inputs, int32_t num_outputs) const noexcept {
    int32_t const most = input_position(kMostInputs()), fewest = input_position(Plugin::kFewestInputs);
    if (num_inputs >= fewest && num_inputs <= most && num_outputs == getNbOutputs()) return true;
    log(Severity::kERROR, "expected %s, got %d and %d; build the engine again with this version of trtconvert",
        TensorsText(*this).text, num_inputs, num_outputs);
    return false;
  }

  // True if all existing inputs have their types and formats, and the expected shapes.
  bool check_inputs(nvinfer1::PluginTensorDesc const* inputs, int32_t num_inputs, nvinfer1::Dims const* expected) const noexcept {
    for (int32_t i = 0; i < num_inputs; ++i) {
      int32_t const input = input_at(i);
      auto const format = self().input_format(input);
      auto const element = self().input_element(input);
      if (!is_as(inputs[i], inputs[0].type, element, format)) {
        log(Severity::kERROR, "input '%s': expected %s format and %s; got format %d and type %d", Plugin::kInputNames[input],
            name_of(format), name_of(element).text, static_cast<int>(inputs[i].format), static_cast<int>(inputs[i].type));
        return false;
      }
      if (!is_same(inputs[i].dims, expected[input])) {
        log(Severity::kERROR, "input '%s': expected shape %s from %s, got %s", Plugin::kInputNames[input],
            ShapeText(expected[input]).text, Plugin::kShapesFrom, ShapeText(inputs[i].dims).text);
        return false;
      }
    }
    return true;
  }

  // True if an input has rows: a last dimension of channels, and any others in front of it.
  static bool check_has_rows(int32_t input, nvinfer1::Dims const& dims) noexcept {
    if (dims.nbDims >= 1) return true;
    log(Severity::kERROR, "input '%s': expected one dimension or more, got shape %s", Plugin::kInputNames[input],
        ShapeText(dims).text);
    return false;
  }

  // Where the inputs of RowsInput begin with Plugin::kRows: the table of modes but for its pointers, and the pointers of all five.
  bool fill_rows_table(nvinfer1::PluginTensorDesc const* inputs, TrtConvertModeTable& table) const noexcept {
    auto const dims_of = [&](int32_t input) {
      return self().has_input(Plugin::kRows + input) ? &inputs[input_position(Plugin::kRows + input)].dims : nullptr;
    };
    return fill_table(attributes(), dims_of(kRowsTimestep), dims_of(kRowsModes), dims_of(kRowsXScale), table);
  }
  void place_rows_inputs(void const* const* inputs, int32_t num_inputs, Params& params) const noexcept {
    params.factor = input_of<float>(inputs, num_inputs, Plugin::kRows + kRowsFactor);
    params.offset = input_of<float>(inputs, num_inputs, Plugin::kRows + kRowsOffset);
    params.table.timestep = input_of<float>(inputs, num_inputs, Plugin::kRows + kRowsTimestep);
    params.table.modes = input_of<int32_t>(inputs, num_inputs, Plugin::kRows + kRowsModes);
    params.table.x_scale = input_of<float>(inputs, num_inputs, Plugin::kRows + kRowsXScale);
  }

  static TrtConvertDataType data_type(nvinfer1::DataType type) noexcept {
    return type == nvinfer1::DataType::kBF16 ? TRTCONVERT_BFLOAT16 : TRTCONVERT_FLOAT16;
  }

 private:
  // Functions, not constants: Plugin is complete only where they are called.
  static constexpr int32_t kMostInputs() noexcept { return std::size(Plugin::kInputNames); }
  static constexpr int32_t kMostOutputs() noexcept { return std::size(Plugin::kOutputNames); }

  // The C API's view of tensors except for their addresses; false, with a logged reason, if the C API does not take them.
  bool describe(nvinfer1::PluginTensorDesc const* inputs, int32_t num_inputs, Params& params) const noexcept {
    params = {};
    params.struct_size = sizeof(params);
    params.version = Plugin::kParamsVersion;
    if (!self().fill(inputs, num_inputs, params)) return false;
    char message[kMessageSize];
    return report(Plugin::kCheck(&params, message, sizeof(message)), message) == kOk;
  }

  int32_t input_at(int32_t position) const noexcept {
    int32_t input = 0;
    while (!self().has_input(input) || input_position(input) < position) ++input;
    return input;
  }
  int32_t output_at(int32_t position) const noexcept {
    int32_t output = 0;
    while (!self().has_output(output) || output_position(output) < position) ++output;
    return output;
  }

  static nvinfer1::DataType type_of(Element element, nvinfer1::DataType type_16bit) noexcept {
    if (element == Element::kFloat) return nvinfer1::DataType::kFLOAT;
    return element == Element::kInt32 ? nvinfer1::DataType::kINT32 : type_16bit;
  }

  bool is_as(nvinfer1::PluginTensorDesc const& tensor, nvinfer1::DataType first, Element element,
             nvinfer1::TensorFormat format) const noexcept {
    auto const type_16bit = self().type_16bit(first);
    return tensor.format == format && tensor.type == type_of(element, type_16bit) &&
           (element != Element::k16Bit || is_16bit_float(type_16bit));
  }

  static char const* name_of(nvinfer1::TensorFormat format) noexcept {
    return format == nvinfer1::TensorFormat::kHWC8 ? "HWC8" : "linear";
  }

  // The expected element type, as text.
  struct ElementText {
    char text[64];
  };
  ElementText name_of(Element element) const noexcept {
    ElementText name;
    auto const type = self().type_16bit(nvinfer1::DataType::kINT32);  // kINT32 unless an attribute decides
    if (element != Element::k16Bit) {
      std::snprintf(name.text, sizeof(name.text), "%s", element == Element::kFloat ? "FP32" : "INT32");
    } else if (type == nvinfer1::DataType::kINT32) {
      std::snprintf(name.text, sizeof(name.text), "FP16 or BF16, as %s", Plugin::kInputNames[0]);
    } else {
      std::snprintf(name.text, sizeof(name.text), "%s", type == nvinfer1::DataType::kBF16 ? "BF16" : "FP16");
    }
    return name;
  }

  // Numbers and names of tensors, "2 or 3 inputs (x, weight, and perhaps bias) and 1 output".
  struct TensorsText {
    char text[320];

    explicit TensorsText(LayerPlugin const& plugin) noexcept {
      Plugin const& self = plugin.self();
      int32_t const most = plugin.input_position(kMostInputs()), fewest = plugin.input_position(Plugin::kFewestInputs);
      if (fewest < most) add("%d or ", fewest);
      add("%d inputs (", most);
      for (int32_t input = 0, listed = 0; input < kMostInputs(); ++input) {
        if (!self.has_input(input)) continue;
        add("%s%s%s", listed == 0 ? "" : ", ", listed >= fewest ? "and perhaps " : "", Plugin::kInputNames[input]);
        ++listed;
      }
      int32_t const outputs = plugin.getNbOutputs();
      add(outputs == 1 ? ") and %d output" : ") and %d outputs (", outputs);
      if (outputs == 1) return;
      for (int32_t output = 0, listed = 0; output < kMostOutputs(); ++output)
        if (self.has_output(output)) add("%s%s", listed++ == 0 ? "" : ", ", Plugin::kOutputNames[output]);
      add(")");
    }

   private:
    [[gnu::format(printf, 2, 3)]] void add(char const* format, ...) noexcept {
      if (used_ >= sizeof(text)) return;
      va_list arguments;
      va_start(arguments, format);
      used_ += static_cast<size_t>(std::vsnprintf(text + used_, sizeof(text) - used_, format, arguments));
      va_end(arguments);
    }

    size_t used_ = 0;
  };

  Plugin const& self() const noexcept { return static_cast<Plugin const&>(*this); }

  AttributeFields<Attributes> const fields_;
  int32_t num_inputs_ = 0;  // of the last shape change
};

}  // namespace trtconvert::plugin
