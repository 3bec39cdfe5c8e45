// The node's attributes: read from TensorRT's plugin fields, checked, and written back for the serialised engine.
#pragma once

#include <array>

#include "abi.h"

namespace trtconvert::plugin {

struct Attributes {
  bool heads_first = true;       // layout: "BHND" (true) or "BNHD"
  float softmax_scale = 0.0f;    // factor of the logits; 0 stands for 1/sqrt(head_dim)
  float timestep_max = 1000.0f;  // the timestep at which the last bin ends
  bool dynamic_scaling = false;  // scaling: "calibrated" (false) or "dynamic"
  bool smooth_k = true;          // subtract k_offset from the keys
};

// What the creator offers to fill in, and their types.
nvinfer1::PluginFieldCollection const* attribute_names() noexcept;

// Reads `fields` over the defaults above. In the build phase they are a network's attributes and any may be absent; in the
// runtime phase they come from an engine and must be exactly those that this version serialises. False, and a logged
// reason, where a field is unknown, malformed or out of range.
bool parse_attributes(nvinfer1::PluginFieldCollection const* fields, nvinfer1::TensorRTPhase phase,
                      Attributes& attributes) noexcept;

// Attributes as fixed-width fields. They point into the object, which therefore outlives their use and is never copied.
class SerializedAttributes {
 public:
  explicit SerializedAttributes(Attributes const& attributes) noexcept;
  SerializedAttributes(SerializedAttributes const&) = delete;
  SerializedAttributes& operator=(SerializedAttributes const&) = delete;

  nvinfer1::PluginFieldCollection const* fields() const noexcept { return &collection_; }

 private:
  int32_t version_;
  float softmax_scale_;
  float timestep_max_;
  int32_t smooth_k_;
  std::array<nvinfer1::PluginField, 6> fields_;
  nvinfer1::PluginFieldCollection collection_;
};

}  // namespace trtconvert::plugin
