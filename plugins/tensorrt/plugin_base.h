// The shared base of the library's plugins as TensorRT sees them.
#pragma once

#include "tensorrt/abi.h"
#include "tensorrt/logger.h"
#include "trtconvert/status.h"

namespace trtconvert::plugin {

// Return values for success and failure in TensorRT.
constexpr int32_t kOk = 0;
constexpr int32_t kFailed = 1;

// Size of a message of the C APIs.
constexpr size_t kMessageSize = 512;

// A status of the C API as TensorRT's return value; its message is logged.
inline int32_t report(TrtConvertStatus status, char const* message) noexcept {
  if (status == TRTCONVERT_OK) return kOk;
  log(Severity::kERROR, "%s", message);
  return kFailed;
}

constexpr char kPluginVersion[] = "1";
constexpr char kPluginNamespace[] = "";

// One end of a dynamic shape's range.
enum class Bound { kMin, kMax };

// Descriptions of one end of the range.
inline void at_bound(nvinfer1::DynamicPluginTensorDesc const* tensors, int32_t count, Bound bound,
                     nvinfer1::PluginTensorDesc* descs) noexcept {
  for (int32_t i = 0; i < count; ++i) {
    descs[i] = tensors[i].desc;
    descs[i].dims = bound == Bound::kMin ? tensors[i].min : tensors[i].max;
  }
}

inline bool is_16bit_float(nvinfer1::DataType type) noexcept {
  return type == nvinfer1::DataType::kHALF || type == nvinfer1::DataType::kBF16;
}

// The four bases are the interfaces TensorRT asks for by PluginCapabilityType.
class PluginBase : public nvinfer1::IPluginV3,
                   public nvinfer1::IPluginV3OneCore,
                   public nvinfer1::IPluginV3OneBuild,
                   public nvinfer1::IPluginV3OneRuntime {
 public:
  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept final {
    switch (type) {
      case nvinfer1::PluginCapabilityType::kCORE:
        return static_cast<nvinfer1::IPluginV3OneCore*>(this);
      case nvinfer1::PluginCapabilityType::kBUILD:
        return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
      case nvinfer1::PluginCapabilityType::kRUNTIME:
        return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
    }
    log(Severity::kERROR, "expected plugin capability 0, 1 or 2, got %d", static_cast<int>(type));
    return nullptr;
  }
  char const* getPluginVersion() const noexcept final { return kPluginVersion; }
  char const* getPluginNamespace() const noexcept final { return kPluginNamespace; }
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept final { return clone(); }
};

}  // namespace trtconvert::plugin
