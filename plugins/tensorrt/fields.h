// Attributes of a network's node, or of an engine's plugin, as TensorRT passes them. Functions that return false have logged why.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tensorrt/abi.h"
#include "tensorrt/logger.h"

namespace trtconvert::plugin {

// The field of an engine with its serialization version.
constexpr char kSerializationVersionField[] = "serialization_version";

// Text with or without the final zeros that some callers count in.
bool read_text(nvinfer1::PluginField const& field, std::string_view& text) noexcept;
bool read_integer(nvinfer1::PluginField const& field, int64_t& value) noexcept;
// 0 or 1.
bool read_flag(nvinfer1::PluginField const& field, int32_t& value) noexcept;
// A positive number of something.
bool read_positive(nvinfer1::PluginField const& field, int32_t& value) noexcept;
bool read_real(nvinfer1::PluginField const& field, float& value) noexcept;
// A finite number from 0.
bool read_epsilon(nvinfer1::PluginField const& field, float& value) noexcept;
// The positive finite timestep at the end of the last bin.
bool read_timestep_max(nvinfer1::PluginField const& field, float& value) noexcept;
// Bits of the modes in a table (layer_modes.h).
bool read_mode_set(nvinfer1::PluginField const& field, int32_t& value) noexcept;
// TrtConvertActivation.
bool read_activation(nvinfer1::PluginField const& field, int32_t& value) noexcept;
// A number of parts of a layer's result.
bool read_parts(nvinfer1::PluginField const& field, int32_t& value) noexcept;
// A position in a list, from 0.
bool read_place(nvinfer1::PluginField const& field, int32_t& value) noexcept;
// The serialization version of an engine, one of those that a plugin reads.
bool read_version(nvinfer1::PluginField const& field, int32_t oldest, int32_t newest, int32_t& version) noexcept;

// True if there is a collection, and each of its fields has a name.
bool check_fields(nvinfer1::PluginFieldCollection const* fields) noexcept;

// Calls `read` with each field; `seen` collects the returned bits, each once. 0 stands for a refused field.
template <typename Read>
bool read_fields(nvinfer1::PluginFieldCollection const* fields, Read read, unsigned& seen) noexcept {
  if (!check_fields(fields)) return false;
  for (int32_t i = 0; i < fields->nbFields; ++i) {
    unsigned const bit = read(fields->fields[i]);
    if (bit == 0) return false;
    if (seen & bit) {
      log(Severity::kERROR, "expected attribute '%s' once, got it twice", fields->fields[i].name);
      return false;
    }
    seen |= bit;
  }
  return true;
}

// Logs that a plugin has no attribute of the given name.
void refuse_attribute(char const* const* names, size_t count, char const* got) noexcept;

// True if an engine has the fields that its plugin serialised, by their bits.
bool check_complete(nvinfer1::PluginFieldCollection const* fields, unsigned seen, unsigned expected) noexcept;

}  // namespace trtconvert::plugin
