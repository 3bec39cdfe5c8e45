// Entry points for TensorRT: the creators of the plugins, and the setter of the logger.
#include <new>

#include "channels_last_add/tensorrt/plugin.h"
#include "group_norm/tensorrt/int8_plugin.h"
#include "group_norm/tensorrt/plugin.h"
#include "int8_attention/tensorrt/plugin.h"
#include "linear/tensorrt/conv_plugin.h"
#include "linear/tensorrt/int8_plugin.h"
#include "linear/tensorrt/plugin.h"
#include "quantise/tensorrt/change_plugin.h"
#include "quantise/tensorrt/plugin.h"
#include "residual_norm/tensorrt/int8_plugin.h"
#include "residual_norm/tensorrt/plugin.h"
#include "tensorrt/abi.h"
#include "tensorrt/logger.h"
#include "tensorrt/plugin_base.h"

namespace trtconvert::plugin {
namespace {

// Creator of a plugin that is constructed from its Attributes.
template <typename Plugin>
class Creator final : public nvinfer1::IPluginCreatorV3One {
 public:
  nvinfer1::IPluginV3* createPlugin(char const* name, nvinfer1::PluginFieldCollection const* fc,
                                    nvinfer1::TensorRTPhase phase) noexcept override {
    typename Plugin::Attributes attributes;
    if (!Plugin::parse(fc, phase, attributes)) {
      log(Severity::kERROR, "the plugin %s of layer '%s' was not made, for the reason above", Plugin::kName,
          name != nullptr ? name : "");
      return nullptr;
    }
    auto* plugin = new (std::nothrow) Plugin(attributes);
    if (plugin == nullptr) log(Severity::kERROR, "expected %zu bytes of host memory, got none", sizeof(*plugin));
    return plugin;
  }

  nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override { return Plugin::attribute_names(); }
  char const* getPluginName() const noexcept override { return Plugin::kName; }
  char const* getPluginVersion() const noexcept override { return kPluginVersion; }
  char const* getPluginNamespace() const noexcept override { return kPluginNamespace; }
};

}  // namespace
}  // namespace trtconvert::plugin

#define TRTCONVERT_EXPORT extern "C" __attribute__((visibility("default")))

// TensorRT looks these up by name when a library is loaded into its plugin registry.

TRTCONVERT_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& nbCreators) {
  using namespace trtconvert::plugin;
  static Creator<Int8AttentionPlugin> attention;
  static Creator<LinearPlugin> linear;
  static Creator<ResidualNormPlugin> residual_norm;
  static Creator<GroupNormPlugin> group_norm;
  static Creator<ChannelsLastAddPlugin> channels_last_add;
  static Creator<QuantiseRowsPlugin> quantise_rows;
  static Creator<QuantiseChangedRowsPlugin> quantise_changed_rows;
  static Creator<Int8LinearPlugin> int8_linear;
  static Creator<Int8ResidualNormPlugin> int8_residual_norm;
  static Creator<Int8GroupNormPlugin> int8_group_norm;
  static Creator<Int8ConvPlugin> int8_conv;
  static nvinfer1::IPluginCreatorInterface* const creators[] = {
      &attention,   &linear,             &residual_norm,   &group_norm, &channels_last_add, &quantise_rows, &quantise_changed_rows,
      &int8_linear, &int8_residual_norm, &int8_group_norm, &int8_conv};
  nbCreators = static_cast<int32_t>(sizeof(creators) / sizeof(creators[0]));
  return creators;
}

// The list of pre-V3 creators, which is empty here. TensorRT 10 requires the function.
TRTCONVERT_EXPORT void* const* getPluginCreators(int32_t& nbCreators) {
  nbCreators = 0;
  return nullptr;
}

TRTCONVERT_EXPORT void setLoggerFinder(void* finder) { trtconvert::plugin::set_logger_finder(finder); }
