// Quantised rows among the outputs of a plugin, and their quantisation among its attributes and inputs.
#pragma once

#include <tuple>

#include "tensorrt/abi.h"
#include "tensorrt/attribute_list.h"
#include "tensorrt/logger.h"
#include "tensorrt/shapes.h"
#include "trtconvert/layer_modes.h"

namespace trtconvert::plugin {

inline bool has_mode(int32_t mode_set, TrtConvertLayerMode mode) noexcept { return mode_set & TRTCONVERT_MODE_BIT(mode); }

// Channels of a payload's element.
inline int32_t payload_divisor(int32_t mode_set) noexcept { return has_mode(mode_set, TRTCONVERT_WEIGHT_ONLY) ? 2 : 4; }

// Elements of an image's marks (layer_modes.h).
constexpr int32_t kMarkWords = TRTCONVERT_IMAGE_MARKS / 4;

// Base of the attributes of a plugin with quantised rows.
struct QuantisedRowsAttributes {
  int32_t mode_set = 0;  // has to be given
  float timestep_max = 1000.0f;
  int32_t factor = 0, offset = 0, timestep = 0;  // 1: whether there is such an input

  static constexpr auto rows_list() {
    return std::tuple(attribute("mode_set", &QuantisedRowsAttributes::mode_set, read_mode_set, true),
                      attribute("timestep_max", &QuantisedRowsAttributes::timestep_max, read_timestep_max),
                      attribute("factor", &QuantisedRowsAttributes::factor, read_flag),
                      attribute("offset", &QuantisedRowsAttributes::offset, read_flag),
                      attribute("timestep", &QuantisedRowsAttributes::timestep, read_flag));
  }
};

// The last inputs of such a plugin, by their place among these five. K channels, B samples, T timestep bins.
enum RowsInput : int32_t {
  kRowsFactor,    // [K] FP32, with the attribute
  kRowsOffset,    // [K] FP32, with the attribute
  kRowsTimestep,  // [B] FP32, with the attribute
  kRowsModes,     // [T] INT32, where mode_set has more than one mode
  kRowsXScale,    // [T] FP32, where mode_set has STATIC
  kRowsInputs,
};

inline bool has_rows_input(QuantisedRowsAttributes const& attributes, int32_t input) noexcept {
  switch (input) {
    case kRowsFactor:
      return attributes.factor;
    case kRowsOffset:
      return attributes.offset;
    case kRowsTimestep:
      return attributes.timestep;
    case kRowsModes:
      return attributes.mode_set & (attributes.mode_set - 1);
    default:
      return has_mode(attributes.mode_set, TRTCONVERT_STATIC);
  }
}

// Attributes, and the sizes of a table's inputs, null for missing inputs. Returns false, with a logged reason, if there are several
// bins but no timestep.
inline bool fill_table(QuantisedRowsAttributes const& attributes, nvinfer1::Dims const* timestep, nvinfer1::Dims const* modes,
                       nvinfer1::Dims const* x_scale, TrtConvertModeTable& table) noexcept {
  auto const size_of = [](nvinfer1::Dims const* dims) { return dims == nullptr ? 1 : dims->nbDims < 1 ? 0 : saturated(dims->d[0]); };
  table.mode_set = attributes.mode_set;
  table.timestep_max = attributes.timestep_max;
  table.batch = size_of(timestep);
  table.num_bins = size_of(modes != nullptr ? modes : x_scale);
  if (timestep != nullptr || table.num_bins == 1) return true;
  log(Severity::kERROR, "attribute 'timestep': expected 1 with tables of %d bins, got 0", table.num_bins);
  return false;
}

// The same of a table of calibrated scales alone.
inline bool fill_static_table(float timestep_max, nvinfer1::Dims const* timestep, nvinfer1::Dims const* x_scale,
                              TrtConvertModeTable& table) noexcept {
  QuantisedRowsAttributes attributes;
  attributes.mode_set = TRTCONVERT_MODE_BIT(TRTCONVERT_STATIC);
  attributes.timestep_max = timestep_max;
  return fill_table(attributes, timestep, nullptr, x_scale, table);
}

// Description of one of these inputs, from the filled part of the table.
inline nvinfer1::Dims rows_input_dims(int32_t input, int64_t channels, TrtConvertModeTable const& table) noexcept {
  if (input == kRowsFactor || input == kRowsOffset) return {1, {channels}};
  return {1, {input == kRowsTimestep ? table.batch : table.num_bins}};
}

// Descriptions of the outputs, from that of the rows: a payload [..., K / 4] INT32, [..., K / 2] if mode_set has WEIGHT_ONLY, and scales
// [..., 1]. Returns false, with a logged reason, if there are no rows.
inline bool quantised_shapes(nvinfer1::DimsExprs const& rows, int32_t mode_set, nvinfer1::IExprBuilder& builder,
                             nvinfer1::DimsExprs& payload, nvinfer1::DimsExprs& row_scale) noexcept {
  if (rows.nbDims < 1) {
    log(Severity::kERROR, "expected rows of one dimension or more, got %d", rows.nbDims);
    return false;
  }
  int32_t const last = rows.nbDims - 1;
  payload = row_scale = rows;
  payload.d[last] = builder.operation(nvinfer1::DimensionOperation::kFLOOR_DIV, *rows.d[last],
                                      *builder.constant(payload_divisor(mode_set)));
  row_scale.d[last] = builder.constant(1);
  return true;
}

}  // namespace trtconvert::plugin
