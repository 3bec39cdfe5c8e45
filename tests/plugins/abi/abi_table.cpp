// Prints the binary interface of the TensorRT declarations that the plugin uses, one "name value" line each: enumerator
// values, sizes and offsets, interface names and versions, and every virtual function's slot in its table and signature.
//
// Compiled twice, with the official headers (-DOFFICIAL_HEADERS) and with our own; test_plugin_abi.py compares the lines.
// -DTENSORRT_MAJOR=N picks our declaration of the logger, which differs between TensorRT 10 and 11.
#ifdef OFFICIAL_HEADERS
#include <NvInferRuntime.h>
namespace logging = nvinfer1;
using Severity = nvinfer1::ILogger::Severity;
#else
#include "tensorrt/abi.h"
#if TENSORRT_MAJOR >= 11
namespace logging = trtconvert::abi::v11;
#else
namespace logging = trtconvert::abi::v10;
#endif
using Severity = trtconvert::abi::Severity;
#endif

#include <cstdio>
#include <cstring>
#include <typeinfo>

using namespace nvinfer1;

namespace {

void print(char const* name, long value) { std::printf("%s %ld\n", name, value); }

// Under the Itanium ABI a pointer to a virtual member function holds 1 + the function's byte offset in the table, then
// the adjustment of `this`.
template <typename Function>
void print_slot(char const* name, Function function) {
  static_assert(sizeof(function) == 2 * sizeof(std::ptrdiff_t));
  std::ptrdiff_t words[2];
  std::memcpy(words, &function, sizeof(words));
  std::printf("%s slot %ld adjust %ld\n", name, long((words[0] - 1) / sizeof(void*)), long(words[1]));
}

// The default implementations never touch the object, so that an interface can be asked for its name without one.
template <typename Interface>
void print_info(char const* name) {
  alignas(Interface) static unsigned char storage[sizeof(Interface)] = {};
  auto* object = reinterpret_cast<Interface*>(storage);
  InterfaceInfo const info = object->Interface::getInterfaceInfo();  // qualified: no virtual call
  std::printf("%s info %s %d.%d type %s\n", name, info.kind, info.major, info.minor, typeid(Interface).name());
}

}  // namespace

#define VALUE(name) print(#name, static_cast<long>(name))
#define SIZE(type) std::printf("%s size %zu align %zu\n", #type, sizeof(type), alignof(type))
#define OFFSET(type, member) print(#type "." #member, offsetof(type, member))
#define SLOT(type, function) print_slot(#type "." #function, &type::function)
#define FUNCTION(type, function) \
  SLOT(type, function);          \
  std::printf("%s signature %s\n", #type "." #function, typeid(&type::function).name())

int main() {
  VALUE(DataType::kFLOAT);
  VALUE(DataType::kHALF);
  VALUE(DataType::kINT8);
  VALUE(DataType::kINT32);
  VALUE(DataType::kBOOL);
  VALUE(DataType::kBF16);
  VALUE(TensorFormat::kLINEAR);
  VALUE(TensorFormat::kHWC8);
  VALUE(PluginFieldType::kFLOAT32);
  VALUE(PluginFieldType::kFLOAT64);
  VALUE(PluginFieldType::kINT32);
  VALUE(PluginFieldType::kCHAR);
  VALUE(PluginFieldType::kINT64);
  VALUE(PluginCapabilityType::kCORE);
  VALUE(PluginCapabilityType::kBUILD);
  VALUE(PluginCapabilityType::kRUNTIME);
  VALUE(DimensionOperation::kSUM);
  VALUE(DimensionOperation::kSUB);
  VALUE(DimensionOperation::kFLOOR_DIV);
  VALUE(TensorRTPhase::kBUILD);
  VALUE(TensorRTPhase::kRUNTIME);
  VALUE(APILanguage::kCPP);
  VALUE(Severity::kINTERNAL_ERROR);
  VALUE(Severity::kERROR);
  VALUE(Severity::kWARNING);
  VALUE(Severity::kINFO);
  VALUE(Severity::kVERBOSE);

  SIZE(DataType);
  SIZE(TensorFormat);
  SIZE(PluginFieldType);
  SIZE(PluginCapabilityType);
  SIZE(TensorRTPhase);
  SIZE(APILanguage);
  SIZE(Severity);
  SIZE(Dims);
  OFFSET(Dims, nbDims);
  OFFSET(Dims, d);
  SIZE(PluginTensorDesc);
  OFFSET(PluginTensorDesc, dims);
  OFFSET(PluginTensorDesc, type);
  OFFSET(PluginTensorDesc, format);
  OFFSET(PluginTensorDesc, scale);
  SIZE(DynamicPluginTensorDesc);
  OFFSET(DynamicPluginTensorDesc, desc);
  OFFSET(DynamicPluginTensorDesc, min);
  OFFSET(DynamicPluginTensorDesc, max);
  OFFSET(DynamicPluginTensorDesc, opt);
  SIZE(DimsExprs);
  OFFSET(DimsExprs, nbDims);
  OFFSET(DimsExprs, d);
  SIZE(DimensionOperation);
  SIZE(IExprBuilder);
  SIZE(apiv::VExprBuilder);
  FUNCTION(apiv::VExprBuilder, constant);
  FUNCTION(apiv::VExprBuilder, operation);
  SIZE(PluginField);
  OFFSET(PluginField, name);
  OFFSET(PluginField, data);
  OFFSET(PluginField, type);
  OFFSET(PluginField, length);
  SIZE(PluginFieldCollection);
  OFFSET(PluginFieldCollection, nbFields);
  OFFSET(PluginFieldCollection, fields);
  SIZE(InterfaceInfo);
  OFFSET(InterfaceInfo, kind);
  OFFSET(InterfaceInfo, major);
  OFFSET(InterfaceInfo, minor);

  SIZE(IVersionedInterface);
  FUNCTION(IVersionedInterface, getAPILanguage);
  FUNCTION(IVersionedInterface, getInterfaceInfo);

  SIZE(IPluginV3);
  print_info<IPluginV3>("IPluginV3");
  FUNCTION(IPluginV3, getInterfaceInfo);
  FUNCTION(IPluginV3, getCapabilityInterface);
  FUNCTION(IPluginV3, clone);

  SIZE(IPluginV3OneCore);
  print_info<IPluginV3OneCore>("IPluginV3OneCore");
  FUNCTION(IPluginV3OneCore, getPluginName);
  FUNCTION(IPluginV3OneCore, getPluginVersion);
  FUNCTION(IPluginV3OneCore, getPluginNamespace);

  // Our plugin implements the first version of this interface; later ones add functions behind it.
  using Build = v_1_0::IPluginV3OneBuild;
  SIZE(Build);
  print_info<Build>("IPluginV3OneBuild");
  FUNCTION(Build, configurePlugin);
  FUNCTION(Build, getOutputDataTypes);
  FUNCTION(Build, getOutputShapes);
  FUNCTION(Build, supportsFormatCombination);
  FUNCTION(Build, getNbOutputs);
  FUNCTION(Build, getWorkspaceSize);
  FUNCTION(Build, getValidTactics);
  FUNCTION(Build, getNbTactics);
  FUNCTION(Build, getTimingCacheID);
  FUNCTION(Build, getFormatCombinationLimit);
  FUNCTION(Build, getMetadataString);

  SIZE(IPluginV3OneRuntime);
  print_info<IPluginV3OneRuntime>("IPluginV3OneRuntime");
  FUNCTION(IPluginV3OneRuntime, setTactic);
  FUNCTION(IPluginV3OneRuntime, onShapeChange);
  FUNCTION(IPluginV3OneRuntime, enqueue);
  FUNCTION(IPluginV3OneRuntime, attachToContext);
  FUNCTION(IPluginV3OneRuntime, getFieldsToSerialize);

  SIZE(IPluginCreatorV3One);
  print_info<IPluginCreatorV3One>("IPluginCreatorV3One");
  FUNCTION(IPluginCreatorV3One, createPlugin);
  FUNCTION(IPluginCreatorV3One, getFieldNames);
  FUNCTION(IPluginCreatorV3One, getPluginName);
  FUNCTION(IPluginCreatorV3One, getPluginVersion);
  FUNCTION(IPluginCreatorV3One, getPluginNamespace);

  // Signatures are not compared here: ours carry our own names.
  SLOT(logging::ILogger, log);
  SLOT(logging::ILoggerFinder, findLogger);
}
