// A plugin's attributes as one list, for reading from a network's node, for writing to an engine, and for checks.
//
// A plugin has a struct of attributes with defaults. Values are int32_t or float. The struct defines:
//   kSerializationVersion: raised whenever an attribute or a tensor is added or changes its meaning;
//   kOldestVersion, where engines of earlier versions are read too: the first one of them. Attributes that came later have their defaults;
//   list(): std::tuple of attribute(...), in the order of the engine's fields.
#pragma once

#include <array>
#include <string_view>
#include <tuple>
#include <type_traits>

#include "tensorrt/abi.h"
#include "tensorrt/fields.h"
#include "tensorrt/logger.h"

namespace trtconvert::plugin {

template <typename Attributes, typename Value>
struct Attribute {
  static_assert(std::is_same_v<Value, int32_t> || std::is_same_v<Value, float>);
  static constexpr auto kType =
      std::is_same_v<Value, float> ? nvinfer1::PluginFieldType::kFLOAT32 : nvinfer1::PluginFieldType::kINT32;

  char const* name;
  Value Attributes::*value;
  bool (*read)(nvinfer1::PluginField const& field, Value& value) noexcept;  // false, and a logged reason, where it is refused
  bool required;                                                            // of a network's node; an engine has all
  int32_t since;                                                            // the serialization version that it came with
};

template <typename Attributes, typename Value>
constexpr Attribute<Attributes, Value> attribute(char const* name, Value Attributes::*value,
                                                 bool (*read)(nvinfer1::PluginField const&, Value&) noexcept,
                                                 bool required = false, int32_t since = 1) noexcept {
  return {name, value, read, required, since};
}

// The first serialization version that a plugin reads.
template <typename Attributes, typename = void>
constexpr int32_t kOldestVersionOf = Attributes::kSerializationVersion;
template <typename Attributes>
constexpr int32_t kOldestVersionOf<Attributes, std::void_t<decltype(Attributes::kOldestVersion)>> = Attributes::kOldestVersion;

// Attributes with their fields, which point into the object: it outlives their use and is never copied.
template <typename Attributes>
class AttributeFields {
 public:
  explicit AttributeFields(Attributes const& values) noexcept : values_(values) {
    fields_[0] = {kSerializationVersionField, &version_, nvinfer1::PluginFieldType::kINT32, 1};
    for_each([&](size_t i, auto const& of) { fields_[1 + i] = {of.name, &(values_.*of.value), of.kType, 1}; });
  }
  AttributeFields(AttributeFields const&) = delete;
  AttributeFields& operator=(AttributeFields const&) = delete;

  Attributes const& values() const noexcept { return values_; }
  // The fields in an engine.
  nvinfer1::PluginFieldCollection const* fields() const noexcept { return &collection_; }

  // The fields of a network's node: names and types.
  static nvinfer1::PluginFieldCollection const* names() noexcept {
    static constexpr std::array<nvinfer1::PluginField, kCount> kFields = named_fields();
    static constexpr nvinfer1::PluginFieldCollection kCollection{static_cast<int32_t>(kCount), kFields.data()};
    return &kCollection;
  }

  // Reads fields over the defaults. In the build phase they are a network's attributes, and optional ones may be absent; in the
  // runtime phase they come from an engine and are exactly those of its version. Returns false, with a logged reason, if a field is
  // unknown, malformed, out of range or missing.
  static bool parse(nvinfer1::PluginFieldCollection const* fields, nvinfer1::TensorRTPhase phase, Attributes& values) noexcept {
    constexpr unsigned kVersionBit = 1, kFirstBit = 2;
    bool const of_engine = phase == nvinfer1::TensorRTPhase::kRUNTIME;
    unsigned seen = 0;
    int32_t version = Attributes::kSerializationVersion;
    auto const read = [&](nvinfer1::PluginField const& field) noexcept -> unsigned {
      std::string_view const name = field.name;
      if (name == kSerializationVersionField && of_engine)
        return read_version(field, kOldestVersionOf<Attributes>, Attributes::kSerializationVersion, version) ? kVersionBit : 0;
      unsigned bit = 0;
      bool known = false;
      for_each([&](size_t i, auto const& of) {
        if (known || name != of.name) return;
        known = true;
        if (of.read(field, values.*of.value)) bit = kFirstBit << i;
      });
      if (!known) refuse(field.name);
      return bit;
    };
    if (!read_fields(fields, read, seen)) return false;
    if (of_engine) {
      unsigned kept = kVersionBit;
      for_each([&](size_t i, auto const& of) { kept |= of.since <= version ? kFirstBit << i : 0; });
      return check_complete(fields, seen, kept);
    }
    bool complete = true;
    for_each([&](size_t i, auto const& of) {
      if (!complete || !of.required || seen & kFirstBit << i) return;
      log(Severity::kERROR, "expected the attribute %s, got none", of.name);
      complete = false;
    });
    return complete;
  }

 private:
  static constexpr size_t kCount = std::tuple_size_v<decltype(Attributes::list())>;
  static_assert(kCount < 31);  // bits of the fields that were seen

  template <typename Action>
  static constexpr void for_each(Action action) noexcept {
    std::apply(
        [&](auto const&... of) {
          [[maybe_unused]] size_t i = 0;
          (action(i++, of), ...);
        },
        Attributes::list());
  }

  static constexpr std::array<nvinfer1::PluginField, kCount> named_fields() noexcept {
    return std::apply(
        [](auto const&... of) {
          return std::array<nvinfer1::PluginField, kCount>{nvinfer1::PluginField{of.name, nullptr, of.kType, 1}...};
        },
        Attributes::list());
  }

  static void refuse(char const* got) noexcept {
    std::array<char const*, kCount> names{};
    for_each([&](size_t i, auto const& of) { names[i] = of.name; });
    refuse_attribute(names.data(), kCount, got);
  }

  Attributes const values_;
  int32_t const version_ = Attributes::kSerializationVersion;
  std::array<nvinfer1::PluginField, 1 + kCount> fields_;
  nvinfer1::PluginFieldCollection const collection_{static_cast<int32_t>(1 + kCount), fields_.data()};
};

}  // namespace trtconvert::plugin
