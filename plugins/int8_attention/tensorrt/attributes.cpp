#include "attributes.h"

#include <cmath>
#include <limits>
#include <string_view>

#include "tensorrt/fields.h"
#include "tensorrt/logger.h"

namespace trtconvert::plugin {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::TensorRTPhase;

// Raised whenever a field is added or changes its meaning.
constexpr int32_t kSerializationVersion = 5;

constexpr char kLayout[] = "layout";
constexpr char kSoftmaxScale[] = "softmax_scale";
constexpr char kTimestepMax[] = "timestep_max";
constexpr char kScaling[] = "scaling";
constexpr char kSmoothK[] = "smooth_k";
constexpr char kBlockMask[] = "block_mask";
constexpr char kKeyIndex[] = "key_index";
constexpr char kRotary[] = "rotary";
constexpr char kNorm[] = "norm";
constexpr char kNormEpsilon[] = "norm_eps";
constexpr char kNormSplit[] = "norm_split";
constexpr char kKvHeads[] = "kv_heads";
constexpr char kKHead[] = "k_head";
constexpr char kVHead[] = "v_head";
constexpr char kParts[] = "parts";

// One of two words; `second` tells which.
bool read_choice(PluginField const& field, char const* word0, char const* word1, bool& second) noexcept {
  std::string_view text;
  if (!read_text(field, text)) return false;
  if (text != word0 && text != word1) {
    log(Severity::kERROR, "attribute '%s': expected '%s' or '%s', got '%.*s'", field.name, word0, word1,
        static_cast<int>(text.size()), text.data());
    return false;
  }
  second = text == word1;
  return true;
}

bool read_flag(PluginField const& field, bool& flag) noexcept {
  int64_t value = 0;
  if (!read_integer(field, value)) return false;
  if (value != 0 && value != 1) {
    log(Severity::kERROR, "attribute '%s': expected 0 or 1, got %lld", field.name, static_cast<long long>(value));
    return false;
  }
  flag = value == 1;
  return true;
}

bool read_softmax_scale(PluginField const& field, float& value) noexcept {
  if (!read_real(field, value)) return false;
  if (std::isfinite(value) && value >= 0.0f) return true;
  log(Severity::kERROR, "attribute '%s': expected a positive finite factor, or 0 for 1/sqrt(head_dim), got %g",
      field.name, static_cast<double>(value));
  return false;
}

bool read_count(PluginField const& field, char const* counted, int32_t& value) noexcept {
  int64_t wide = 0;
  if (!read_integer(field, wide)) return false;
  value = static_cast<int32_t>(wide);
  if (wide >= 0 && wide <= std::numeric_limits<int32_t>::max()) return true;
  log(Severity::kERROR, "attribute '%s': expected a number of %s from 0 to 2^31 - 1, got %lld", field.name, counted,
      static_cast<long long>(wide));
  return false;
}

bool read_parts(PluginField const& field, int32_t& parts) noexcept {
  int64_t value = 0;
  if (!read_integer(field, value)) return false;
  parts = static_cast<int32_t>(value);
  if (value == 1 || value == 2) return true;
  log(Severity::kERROR, "attribute '%s': expected 1 or 2, got %lld", field.name, static_cast<long long>(value));
  return false;
}

// Which fields were seen, to tell repeated and missing ones.
constexpr unsigned kVersionBit = 1, kLayoutBit = 2, kSoftmaxScaleBit = 4, kTimestepMaxBit = 8, kScalingBit = 16,
                   kSmoothKBit = 32, kRotaryBit = 64, kNormBit = 128, kNormEpsilonBit = 256, kKvHeadsBit = 512,
                   kKHeadBit = 1024, kVHeadBit = 2048, kNormSplitBit = 4096, kPartsBit = 8192, kBlockMaskBit = 16384,
                   kKeyIndexBit = 32768;

// Reads one field; 0 where it is unknown or wrong, after logging why.
unsigned read_field(PluginField const& field, TensorRTPhase phase, Attributes& attributes) noexcept {
  std::string_view const name = field.name;
  if (name == kLayout) {
    bool tokens_first = false;
    if (!read_choice(field, "BHND", "BNHD", tokens_first)) return 0;
    attributes.heads_first = !tokens_first;
    return kLayoutBit;
  }
  if (name == kScaling) return read_choice(field, "calibrated", "dynamic", attributes.dynamic_scaling) ? kScalingBit : 0;
  if (name == kSoftmaxScale) return read_softmax_scale(field, attributes.softmax_scale) ? kSoftmaxScaleBit : 0;
  if (name == kTimestepMax) return read_timestep_max(field, attributes.timestep_max) ? kTimestepMaxBit : 0;
  if (name == kSmoothK) return read_flag(field, attributes.smooth_k) ? kSmoothKBit : 0;
  if (name == kBlockMask) return read_flag(field, attributes.block_mask) ? kBlockMaskBit : 0;
  if (name == kKeyIndex) return read_flag(field, attributes.key_index) ? kKeyIndexBit : 0;
  if (name == kRotary) return read_flag(field, attributes.rotary) ? kRotaryBit : 0;
  if (name == kNorm) return read_flag(field, attributes.norm) ? kNormBit : 0;
  if (name == kNormEpsilon) return read_epsilon(field, attributes.norm_epsilon) ? kNormEpsilonBit : 0;
  if (name == kNormSplit) return read_count(field, "tokens", attributes.norm_split) ? kNormSplitBit : 0;
  if (name == kKvHeads) return read_count(field, "heads", attributes.kv_heads) ? kKvHeadsBit : 0;
  if (name == kKHead) return read_count(field, "heads", attributes.k_head) ? kKHeadBit : 0;
  if (name == kVHead) return read_count(field, "heads", attributes.v_head) ? kVHeadBit : 0;
  if (name == kParts) return read_parts(field, attributes.parts) ? kPartsBit : 0;
  if (int32_t version; name == kSerializationVersionField && phase == TensorRTPhase::kRUNTIME)
    return read_version(field, kSerializationVersion, kSerializationVersion, version) ? kVersionBit : 0;
  log(Severity::kERROR, "expected the attributes %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, got '%s'; remove it",
      kLayout, kSoftmaxScale, kTimestepMax, kScaling, kSmoothK, kBlockMask, kKeyIndex, kRotary, kNorm, kNormEpsilon, kNormSplit,
      kKvHeads, kKHead, kVHead, kParts, field.name);
  return 0;
}

}  // namespace

PluginFieldCollection const* attribute_names() noexcept {
  static constexpr PluginField kFields[] = {
      {kLayout, nullptr, PluginFieldType::kCHAR, 1},         {kSoftmaxScale, nullptr, PluginFieldType::kFLOAT32, 1},
      {kTimestepMax, nullptr, PluginFieldType::kFLOAT32, 1}, {kScaling, nullptr, PluginFieldType::kCHAR, 1},
      {kSmoothK, nullptr, PluginFieldType::kINT32, 1},       {kRotary, nullptr, PluginFieldType::kINT32, 1},
      {kNorm, nullptr, PluginFieldType::kINT32, 1},          {kNormEpsilon, nullptr, PluginFieldType::kFLOAT32, 1},
      {kNormSplit, nullptr, PluginFieldType::kINT32, 1},     {kKvHeads, nullptr, PluginFieldType::kINT32, 1},
      {kKHead, nullptr, PluginFieldType::kINT32, 1},         {kVHead, nullptr, PluginFieldType::kINT32, 1},
      {kParts, nullptr, PluginFieldType::kINT32, 1},         {kBlockMask, nullptr, PluginFieldType::kINT32, 1},
      {kKeyIndex, nullptr, PluginFieldType::kINT32, 1},
  };
  static constexpr PluginFieldCollection kCollection{std::size(kFields), kFields};
  return &kCollection;
}

bool parse_attributes(PluginFieldCollection const* fields, TensorRTPhase phase, Attributes& attributes) noexcept {
  unsigned seen = 0;
  auto const read = [&](PluginField const& field) { return read_field(field, phase, attributes); };
  if (!read_fields(fields, read, seen)) return false;
  if (phase == TensorRTPhase::kRUNTIME && !check_complete(fields, seen, (1u << SerializedAttributes::kNumFields) - 1)) return false;
  if (attributes.norm_split > 0 && !attributes.norm) {
    log(Severity::kERROR, "attribute '%s': expected 0 without an input 'norm', got %d", kNormSplit, attributes.norm_split);
    return false;
  }
  if (attributes.key_index && (attributes.rotary || attributes.norm || attributes.parts > 1)) {
    log(Severity::kERROR, "attribute '%s': expected 0 with inputs 'rotary' or 'norm' or with parts 2, got 1; compute these before",
        kKeyIndex);
    return false;
  }
  return true;
}

SerializedAttributes::SerializedAttributes(Attributes const& attributes) noexcept
    : version_(kSerializationVersion),
      softmax_scale_(attributes.softmax_scale),
      timestep_max_(attributes.timestep_max),
      smooth_k_(attributes.smooth_k),
      block_mask_(attributes.block_mask),
      key_index_(attributes.key_index),
      rotary_(attributes.rotary),
      norm_(attributes.norm),
      norm_epsilon_(attributes.norm_epsilon),
      norm_split_(attributes.norm_split),
      kv_heads_(attributes.kv_heads),
      k_head_(attributes.k_head),
      v_head_(attributes.v_head),
      parts_(attributes.parts) {
  auto const text = [](char const* name, std::string_view value) {
    return PluginField{name, value.data(), PluginFieldType::kCHAR, static_cast<int32_t>(value.size())};
  };
  fields_ = {
      PluginField{kSerializationVersionField, &version_, PluginFieldType::kINT32, 1},
      text(kLayout, attributes.heads_first ? "BHND" : "BNHD"),
      PluginField{kSoftmaxScale, &softmax_scale_, PluginFieldType::kFLOAT32, 1},
      PluginField{kTimestepMax, &timestep_max_, PluginFieldType::kFLOAT32, 1},
      text(kScaling, attributes.dynamic_scaling ? "dynamic" : "calibrated"),
      PluginField{kSmoothK, &smooth_k_, PluginFieldType::kINT32, 1},
      PluginField{kBlockMask, &block_mask_, PluginFieldType::kINT32, 1},
      PluginField{kKeyIndex, &key_index_, PluginFieldType::kINT32, 1},
      PluginField{kRotary, &rotary_, PluginFieldType::kINT32, 1},
      PluginField{kNorm, &norm_, PluginFieldType::kINT32, 1},
      PluginField{kNormEpsilon, &norm_epsilon_, PluginFieldType::kFLOAT32, 1},
      PluginField{kNormSplit, &norm_split_, PluginFieldType::kINT32, 1},
      PluginField{kKvHeads, &kv_heads_, PluginFieldType::kINT32, 1},
      PluginField{kKHead, &k_head_, PluginFieldType::kINT32, 1},
      PluginField{kVHead, &v_head_, PluginFieldType::kINT32, 1},
      PluginField{kParts, &parts_, PluginFieldType::kINT32, 1},
  };
  collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
}

}  // namespace trtconvert::plugin
