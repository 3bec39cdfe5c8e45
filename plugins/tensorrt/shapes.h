// Shapes: comparison, and text.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>

#include "tensorrt/abi.h"

namespace trtconvert::plugin {

// A shape as text, "[1, 24, 4096, 128]".
struct ShapeText {
  char text[192];  // eight sizes of 20 characters, and separators

  explicit ShapeText(nvinfer1::Dims const& dims) noexcept {
    int used = std::snprintf(text, sizeof(text), "[");
    for (int32_t i = 0; i < dims.nbDims && i < nvinfer1::Dims::MAX_DIMS; ++i) {
      used += std::snprintf(text + used, sizeof(text) - used, i == 0 ? "%lld" : ", %lld",
                            static_cast<long long>(dims.d[i]));
    }
    std::snprintf(text + used, sizeof(text) - used, "]");
  }
};

inline bool is_same(nvinfer1::Dims const& a, nvinfer1::Dims const& b) noexcept {
  return a.nbDims == b.nbDims && std::equal(a.d, a.d + a.nbDims, b.d);
}

// A size for the C APIs; sizes beyond their limits stay beyond.
inline int32_t saturated(int64_t size) noexcept {
  return static_cast<int32_t>(std::clamp<int64_t>(size, INT32_MIN, INT32_MAX));
}

// Elements of all dimensions but the last; 0 if a dimension is 0. Saturates above every limit of the C APIs.
inline int64_t rows_of(nvinfer1::Dims const& dims) noexcept {
  constexpr int64_t kLarge = (int64_t{1} << 31) + 1;  // its square does not overflow
  int64_t rows = 1;
  for (int32_t i = 0; i + 1 < dims.nbDims; ++i) rows = std::min(rows, kLarge) * std::clamp<int64_t>(dims.d[i], 0, kLarge);
  return rows;
}

}  // namespace trtconvert::plugin
