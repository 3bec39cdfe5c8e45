// Shapes of images, [B, C, H, W]: sizes, or expressions for them while the network is built.
#pragma once

#include "tensorrt/abi.h"
#include "tensorrt/logger.h"

namespace trtconvert::plugin {

// True if an input has an image's dimensions; otherwise the reason is logged.
template <typename Shape>
bool check_image(char const* input, Shape const& shape) noexcept {
  if (shape.nbDims == 4) return true;
  log(Severity::kERROR, "input '%s': expected 4 dimensions (batch, channels, height, width), got %d", input, shape.nbDims);
  return false;
}

// [B, H, W, C].
template <typename Shape>
Shape channels_last(Shape const& image) noexcept {
  return {4, {image.d[0], image.d[2], image.d[3], image.d[1]}};
}

}  // namespace trtconvert::plugin
