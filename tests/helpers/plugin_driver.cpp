// Calls a plugin the way TensorRT does, for plugin_driver.py: C functions around the virtual ones, and a logger that
// remembers. Compiled with -DTENSORRT_MAJOR=10 or 11, it stands for that TensorRT: the plugin asks the library that the
// logger finder comes from for its version.
#include <dlfcn.h>

#include <string>

#include "tensorrt/abi.h"

#if TENSORRT_MAJOR >= 11
namespace logging = trtconvert::abi::v11;
#else
namespace logging = trtconvert::abi::v10;
#endif

using namespace nvinfer1;

namespace {

std::string g_messages;

class Logger final : public logging::ILogger {
 public:
#if TENSORRT_MAJOR >= 11
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"ILogger", 1, 0}; }
#endif
  void log(trtconvert::abi::Severity severity, char const* message) noexcept override {
    g_messages += std::to_string(static_cast<int>(severity)) + " " + message + "\n";
  }
};

class LoggerFinder final : public logging::ILoggerFinder {
 public:
#if TENSORRT_MAJOR >= 11
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"ILoggerFinder", 1, 0}; }
#endif
  logging::ILogger* findLogger() override {
    static Logger logger;
    return &logger;
  }
};

// Expressions are what they stand for, as addresses.
class Expressions final : public apiv::VExprBuilder {
 public:
  IDimensionExpr const* constant(int64_t value) override { return reinterpret_cast<IDimensionExpr const*>(value); }
  IDimensionExpr const* operation(DimensionOperation op, IDimensionExpr const& first, IDimensionExpr const& second) override {
    auto const a = reinterpret_cast<int64_t>(&first), b = reinterpret_cast<int64_t>(&second);
    switch (op) {
      case DimensionOperation::kSUM:
        return constant(a + b);
      case DimensionOperation::kSUB:
        return constant(a - b);
      case DimensionOperation::kFLOOR_DIV:
        return constant(a / b);
    }
    return nullptr;
  }
};

class Builder final : public IExprBuilder {
 public:
  Builder() { mImpl = &expressions_; }

 private:
  Expressions expressions_;
};

template <typename Capability>
Capability* capability(IPluginV3* plugin, PluginCapabilityType type) {
  return static_cast<Capability*>(plugin->getCapabilityInterface(type));
}

IPluginV3OneBuild* build(IPluginV3* plugin) {
  return capability<IPluginV3OneBuild>(plugin, PluginCapabilityType::kBUILD);
}

IPluginV3OneRuntime* runtime(IPluginV3* plugin) {
  return capability<IPluginV3OneRuntime>(plugin, PluginCapabilityType::kRUNTIME);
}

int32_t outputs(IPluginV3* plugin) { return build(plugin)->getNbOutputs(); }

}  // namespace

extern "C" {

int32_t getInferLibVersion() { return TENSORRT_MAJOR * 10000; }

// Loads the plugin library as a plugin registry does, and finds a plugin by its name. Null, and dlerror()'s text as a message, where it
// cannot.
IPluginCreatorV3One* driver_open(char const* path, char const* name) {
  void* library = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) {
    g_messages = dlerror();
    return nullptr;
  }
  static LoggerFinder finder;
  reinterpret_cast<void (*)(void*)>(dlsym(library, "setLoggerFinder"))(&finder);
  int32_t count = 0;
  auto const creators =
      reinterpret_cast<IPluginCreatorInterface* const* (*)(int32_t&)>(dlsym(library, "getCreators"))(count);
  for (int32_t i = 0; i < count; ++i) {
    auto* const creator = static_cast<IPluginCreatorV3One*>(creators[i]);
    if (std::string(creator->getPluginName()) == name) return creator;
  }
  g_messages = std::string("no plugin ") + name;
  return nullptr;
}

// The messages since the last call, one "severity text" a line.
char const* driver_take_messages() {
  static std::string taken;
  taken.swap(g_messages);
  g_messages.clear();
  return taken.c_str();
}

IPluginV3* driver_create(IPluginCreatorV3One* creator, PluginFieldCollection const* fields, int32_t phase) {
  return creator->createPlugin("layer", fields, static_cast<TensorRTPhase>(phase));
}

void driver_destroy(IPluginV3* plugin) { delete plugin; }
IPluginV3* driver_clone(IPluginV3* plugin) { return plugin->clone(); }
IPluginV3* driver_attach(IPluginV3* plugin) { return runtime(plugin)->attachToContext(nullptr); }
PluginFieldCollection const* driver_fields(IPluginV3* plugin) { return runtime(plugin)->getFieldsToSerialize(); }

bool driver_supports(IPluginV3* plugin, int32_t position, DynamicPluginTensorDesc const* tensors, int32_t inputs) {
  return build(plugin)->supportsFormatCombination(position, tensors, inputs, outputs(plugin));
}

int32_t driver_configure(IPluginV3* plugin, DynamicPluginTensorDesc const* tensors, int32_t inputs) {
  return build(plugin)->configurePlugin(tensors, inputs, tensors + inputs, outputs(plugin));
}

size_t driver_workspace(IPluginV3* plugin, DynamicPluginTensorDesc const* tensors, int32_t inputs) {
  return build(plugin)->getWorkspaceSize(tensors, inputs, tensors + inputs, outputs(plugin));
}

// Of all outputs.
int32_t driver_output_type(IPluginV3* plugin, int32_t const* types, int32_t inputs, int32_t* type) {
  return build(plugin)->getOutputDataTypes(reinterpret_cast<DataType*>(type), outputs(plugin),
                                           reinterpret_cast<DataType const*>(types), inputs);
}

// `dims` are opaque expressions, as in TensorRT.
int32_t driver_output_shape(IPluginV3* plugin, DimsExprs const* dims, int32_t inputs, DimsExprs* out) {
  static Builder builder;
  return build(plugin)->getOutputShapes(dims, inputs, nullptr, 0, out, outputs(plugin), builder);
}

int32_t driver_shape_change(IPluginV3* plugin, PluginTensorDesc const* tensors, int32_t inputs) {
  return runtime(plugin)->onShapeChange(tensors, inputs, tensors + inputs, outputs(plugin));
}

int32_t driver_enqueue(IPluginV3* plugin, PluginTensorDesc const* tensors, int32_t inputs, void const* const* pointers,
                       void* const* outputs, void* workspace) {
  return runtime(plugin)->enqueue(tensors, tensors + inputs, pointers, outputs, workspace, nullptr);
}

}  // extern "C"
