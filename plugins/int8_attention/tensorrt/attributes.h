// The node's attributes: read from TensorRT's plugin fields, checked, and written back for the serialised engine.
#pragma once

#include <array>

#include "tensorrt/abi.h"

namespace trtconvert::plugin {

struct Attributes {
  bool heads_first = true;       // layout: "BHND" (true) or "BNHD"
  float softmax_scale = 0.0f;    // factor of the logits; 0 stands for 1/sqrt(head_dim)
  float timestep_max = 1000.0f;  // the end of the last bin
  bool dynamic_scaling = false;  // scaling: "calibrated" (false) or "dynamic"
  bool smooth_k = true;          // subtract k_offset from the keys
  bool block_mask = false;       // whether there is an input 'block_mask'
  bool key_index = false;        // whether there is an input 'key_index'
  bool rotary = false;           // whether there is an input 'rotary'
  bool norm = false;             // whether there is an input 'norm'
  float norm_epsilon = 0.0f;     // norm_eps: of the norm of q and k
  int32_t norm_split = 0;        // the first token that the second row of norm's weights is for; 0: one row for all tokens
  int32_t kv_heads = 0;          // key heads of this node, if k and v are one tensor for several nodes; else 0
  int32_t k_head = 0, v_head = 0;  // the node's first heads of k and of v in that tensor
  int32_t parts = 1;               // 2: tokens lie in two tensors, as do the outputs
};

// Names and types of the attributes, for the creator.
nvinfer1::PluginFieldCollection const* attribute_names() noexcept;

// Reads `fields` over the defaults above. In the build phase they are a network's attributes and any may be absent; in the
// runtime phase they come from an engine and must be exactly those that this version serialises. Returns false, with a logged
// reason, if a field is unknown, malformed or out of range.
bool parse_attributes(nvinfer1::PluginFieldCollection const* fields, nvinfer1::TensorRTPhase phase,
                      Attributes& attributes) noexcept;

// Attributes as fixed-width fields. They point into the object, which therefore outlives their use and is never copied.
class SerializedAttributes {
 public:
  explicit SerializedAttributes(Attributes const& attributes) noexcept;
  SerializedAttributes(SerializedAttributes const&) = delete;
  SerializedAttributes& operator=(SerializedAttributes const&) = delete;

  static constexpr int32_t kNumFields = 16;

  nvinfer1::PluginFieldCollection const* fields() const noexcept { return &collection_; }

 private:
  int32_t version_;
  float softmax_scale_;
  float timestep_max_;
  int32_t smooth_k_;
  int32_t block_mask_;
  int32_t key_index_;
  int32_t rotary_;
  int32_t norm_;
  float norm_epsilon_;
  int32_t norm_split_;
  int32_t kv_heads_;
  int32_t k_head_;
  int32_t v_head_;
  int32_t parts_;
  std::array<nvinfer1::PluginField, kNumFields> fields_;
  nvinfer1::PluginFieldCollection collection_;
};

}  // namespace trtconvert::plugin
