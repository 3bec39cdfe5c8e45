#include "tensorrt/fields.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

#include "trtconvert/activation.h"
#include "trtconvert/int8_linear.h"
#include "trtconvert/layer_modes.h"

namespace trtconvert::plugin {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;

namespace {

constexpr int32_t kTextLengthLimit = 64;
constexpr size_t kListLength = 512;  // of attributes' names in a message

// Attribute data need not be aligned for its type.
template <typename T>
T load(void const* data) noexcept {
  T value;
  std::memcpy(&value, data, sizeof(value));
  return value;
}

}  // namespace

bool read_text(PluginField const& field, std::string_view& text) noexcept {
  if (field.type != PluginFieldType::kCHAR || field.data == nullptr || field.length < 0 ||
      field.length > kTextLengthLimit) {
    log(Severity::kERROR, "attribute '%s': expected text of at most %d characters, got field type %d and length %d",
        field.name, kTextLengthLimit, static_cast<int>(field.type), field.length);
    return false;
  }
  text = std::string_view(static_cast<char const*>(field.data), static_cast<size_t>(field.length));
  while (!text.empty() && text.back() == '\0') text.remove_suffix(1);
  return true;
}

bool read_integer(PluginField const& field, int64_t& value) noexcept {
  if (field.data != nullptr && field.length == 1) {
    if (field.type == PluginFieldType::kINT32) return value = load<int32_t>(field.data), true;
    if (field.type == PluginFieldType::kINT64) return value = load<int64_t>(field.data), true;
  }
  log(Severity::kERROR, "attribute '%s': expected one integer, got field type %d and length %d", field.name,
      static_cast<int>(field.type), field.length);
  return false;
}

bool read_flag(PluginField const& field, int32_t& value) noexcept {
  int64_t read = 0;
  if (!read_integer(field, read)) return false;
  value = static_cast<int32_t>(read);
  if (read == 0 || read == 1) return true;
  log(Severity::kERROR, "attribute '%s': expected 0 or 1, got %lld", field.name, static_cast<long long>(read));
  return false;
}

bool read_positive(PluginField const& field, int32_t& value) noexcept {
  int64_t read = 0;
  if (!read_integer(field, read)) return false;
  value = static_cast<int32_t>(read);
  if (read >= 1 && read <= std::numeric_limits<int32_t>::max()) return true;
  log(Severity::kERROR, "attribute '%s': expected a number from 1 to 2^31 - 1, got %lld", field.name,
      static_cast<long long>(read));
  return false;
}

bool read_real(PluginField const& field, float& value) noexcept {
  if (field.data != nullptr && field.length == 1) {
    if (field.type == PluginFieldType::kFLOAT32) return value = load<float>(field.data), true;
    if (field.type == PluginFieldType::kFLOAT64) return value = static_cast<float>(load<double>(field.data)), true;
  }
  log(Severity::kERROR, "attribute '%s': expected one floating-point number, got field type %d and length %d",
      field.name, static_cast<int>(field.type), field.length);
  return false;
}

bool read_epsilon(PluginField const& field, float& value) noexcept {
  if (!read_real(field, value)) return false;
  if (std::isfinite(value) && value >= 0.0f) return true;
  log(Severity::kERROR, "attribute '%s': expected a finite number from 0, got %g", field.name, static_cast<double>(value));
  return false;
}

bool read_timestep_max(PluginField const& field, float& value) noexcept {
  if (!read_real(field, value)) return false;
  if (std::isfinite(value) && value > 0.0f) return true;
  log(Severity::kERROR,
      "attribute '%s': expected the positive finite timestep at which the schedule ends (diffusers: 1000), got %g",
      field.name, static_cast<double>(value));
  return false;
}

bool read_mode_set(PluginField const& field, int32_t& value) noexcept {
  int64_t read = 0;
  if (!read_integer(field, read)) return false;
  value = static_cast<int32_t>(read);
  if (read > 0 && !(read & ~int64_t{TRTCONVERT_ALL_MODES})) return true;
  log(Severity::kERROR, "attribute '%s': expected a sum of 2 (weights only), 4 (dynamic) and 8 (static), got %lld", field.name,
      static_cast<long long>(read));
  return false;
}

bool read_parts(PluginField const& field, int32_t& value) noexcept {
  int64_t read = 0;
  if (!read_integer(field, read)) return false;
  value = static_cast<int32_t>(read);
  if (read >= 1 && read <= TRTCONVERT_MOST_PARTS) return true;
  log(Severity::kERROR, "attribute '%s': expected 1..%d, got %lld", field.name, TRTCONVERT_MOST_PARTS, static_cast<long long>(read));
  return false;
}

bool read_activation(PluginField const& field, int32_t& value) noexcept {
  int64_t read = 0;
  if (!read_integer(field, read)) return false;
  value = static_cast<int32_t>(read);
  if (read >= TRTCONVERT_NO_ACTIVATION && read <= TRTCONVERT_GELU_TANH) return true;
  log(Severity::kERROR, "attribute '%s': expected 0 (none), 1 (GEGLU), 2 (GELU) or 3 (GELU by tanh), got %lld", field.name,
      static_cast<long long>(read));
  return false;
}

bool read_place(PluginField const& field, int32_t& value) noexcept {
  int64_t read = 0;
  if (!read_integer(field, read)) return false;
  value = static_cast<int32_t>(read);
  if (read >= 0 && read <= std::numeric_limits<int32_t>::max()) return true;
  log(Severity::kERROR, "attribute '%s': expected a number from 0 to 2^31 - 1, got %lld", field.name, static_cast<long long>(read));
  return false;
}

bool read_version(PluginField const& field, int32_t oldest, int32_t newest, int32_t& version) noexcept {
  int64_t read = 0;
  if (!read_integer(field, read)) return false;
  version = static_cast<int32_t>(read);
  if (read >= oldest && read <= newest) return true;
  char first[16] = "";
  if (oldest != newest) std::snprintf(first, sizeof(first), "%d to ", oldest);
  log(Severity::kERROR,
      "the engine holds serialization version %lld, this plugin reads %s%d; build the engine again with this plugin, or "
      "load the plugin that built it",
      static_cast<long long>(read), first, newest);
  return false;
}

bool check_fields(PluginFieldCollection const* fields) noexcept {
  if (fields == nullptr || fields->nbFields < 0 || (fields->nbFields > 0 && fields->fields == nullptr)) {
    log(Severity::kERROR, "expected a collection of plugin fields, got %s", fields == nullptr ? "null" : "a broken one");
    return false;
  }
  for (int32_t i = 0; i < fields->nbFields; ++i) {
    if (fields->fields[i].name == nullptr) {
      log(Severity::kERROR, "expected a name for attribute %d, got null", i);
      return false;
    }
  }
  return true;
}

void refuse_attribute(char const* const* names, size_t count, char const* got) noexcept {
  char listed[kListLength] = "";
  size_t used = 0;
  for (size_t i = 0; i < count && used < sizeof(listed); ++i) {
    char const* const before = i == 0 ? "" : i + 1 < count ? ", " : " and ";
    used += static_cast<size_t>(std::snprintf(listed + used, sizeof(listed) - used, "%s%s", before, names[i]));
  }
  char const* const expected = count == 0 ? "no attributes" : count == 1 ? "the attribute " : "one of the attributes ";
  log(Severity::kERROR, "expected %s%s, got '%s'; remove it", expected, listed, got);
}

bool check_complete(PluginFieldCollection const* fields, unsigned seen, unsigned expected) noexcept {
  if (seen == expected) return true;
  log(Severity::kERROR, "expected the %d fields that this plugin serialises, got %d; build the engine again",
      __builtin_popcount(expected), fields->nbFields);
  return false;
}

}  // namespace trtconvert::plugin
