// Shapes: compared, and as text.
#pragma once

#include <algorithm>
#include <cstdio>

#include "tensorrt/abi.h"

namespace trtconvert::plugin {

// A shape as text, "[1, 24, 4096, 128]".
struct ShapeText {
  char text[160];

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

}  // namespace trtconvert::plugin
