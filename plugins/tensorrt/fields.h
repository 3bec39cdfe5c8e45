// Attributes of a network's node, or of an engine's plugin, as TensorRT passes them. Whoever returns false logged why.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tensorrt/abi.h"
#include "tensorrt/logger.h"

namespace trtconvert::plugin {

// The field of an engine that tells which serialization it has.
constexpr char kSerializationVersionField[] = "serialization_version";

// Text with or without the final zeros that some callers count in.
bool read_text(nvinfer1::PluginField const& field, std::string_view& text) noexcept;
bool read_integer(nvinfer1::PluginField const& field, int64_t& value) noexcept;
// 0 or 1.
bool read_flag(nvinfer1::PluginField const& field, int32_t& value) noexcept;
// A number of something that there is one of at least.
bool read_positive(nvinfer1::PluginField const& field, int32_t& value) noexcept;
bool read_real(nvinfer1::PluginField const& field, float& value) noexcept;
// A finite number from 0.
bool read_epsilon(nvinfer1::PluginField const& field, float& value) noexcept;
// The positive finite timestep at which the last bin ends.
bool read_timestep_max(nvinfer1::PluginField const& field, float& value) noexcept;
// Bits of the modes that a table has (layer_modes.h).
bool read_mode_set(nvinfer1::PluginField const& field, int32_t& value) noexcept;
// TrtConvertActivation.
bool read_activation(nvinfer1::PluginField const& field, int32_t& value) noexcept;
// A place in a list, from 0.
bool read_place(nvinfer1::PluginField const& field, int32_t& value) noexcept;
// The serialization version of an engine, which is one of those that a plugin reads.
bool read_version(nvinfer1::PluginField const& field, int32_t oldest, int32_t newest, int32_t& version) noexcept;

// Whether there is a collection, and each of its fields has a name.
bool check_fields(nvinfer1::PluginFieldCollection const* fields) noexcept;

// Calls `read` with each field; `seen` gets the bits that it returns, each once. 0 stands for a field that it refused.
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

// Logs that a plugin has no attribute of the name that it got.
void refuse_attribute(char const* const* names, size_t count, char const* got) noexcept;

// Whether an engine has the fields that its plugin serialised, by their bits.
bool check_complete(nvinfer1::PluginFieldCollection const* fields, unsigned seen, unsigned expected) noexcept;

}  // namespace trtconvert::plugin
