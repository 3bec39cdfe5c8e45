// What TensorRT finds in the library: the creator of Int8Attention, and the place to put its logger.
#include <new>

#include "abi.h"
#include "logger.h"
#include "plugin.h"

namespace trtconvert::plugin {
namespace {

class Int8AttentionCreator final : public nvinfer1::IPluginCreatorV3One {
 public:
  nvinfer1::IPluginV3* createPlugin(char const* name, nvinfer1::PluginFieldCollection const* fc,
                                    nvinfer1::TensorRTPhase phase) noexcept override {
    Attributes attributes;
    if (!parse_attributes(fc, phase, attributes)) {
      log(Severity::kERROR, "the plugin of layer '%s' was not made, for the reason above", name != nullptr ? name : "");
      return nullptr;
    }
    auto* plugin = new (std::nothrow) Int8AttentionPlugin(attributes);
    if (plugin == nullptr) log(Severity::kERROR, "expected %zu bytes of host memory, got none", sizeof(*plugin));
    return plugin;
  }

  nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override { return attribute_names(); }
  char const* getPluginName() const noexcept override { return kPluginName; }
  char const* getPluginVersion() const noexcept override { return kPluginVersion; }
  char const* getPluginNamespace() const noexcept override { return kPluginNamespace; }
};

}  // namespace
}  // namespace trtconvert::plugin

#define TRTCONVERT_EXPORT extern "C" __attribute__((visibility("default")))

// TensorRT looks these up by name when a library is loaded into its plugin registry.

TRTCONVERT_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& nbCreators) {
  static trtconvert::plugin::Int8AttentionCreator creator;
  static nvinfer1::IPluginCreatorInterface* const creators[] = {&creator};
  nbCreators = 1;
  return creators;
}

// The list of creators older than V3, which this library has none of. TensorRT 10 wants the function to exist.
TRTCONVERT_EXPORT void* const* getPluginCreators(int32_t& nbCreators) {
  nbCreators = 0;
  return nullptr;
}

TRTCONVERT_EXPORT void setLoggerFinder(void* finder) { trtconvert::plugin::set_logger_finder(finder); }
