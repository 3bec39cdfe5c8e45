// The part of TensorRT's C++ plugin ABI that this project implements or calls, declared in our own words.
//
// No pip package ships NVIDIA's headers. A plugin needs few of their declarations, and only the parts that determine machine code:
// the order of virtual functions, the layout of the structs, the numbers of the enumerators. These have been the same since
// TensorRT 10.0, except for the logger (see v10, v11 below), so one binary serves TensorRT 10 and 11. tests/plugins/abi compares
// this file with the official headers if they are available.
//
// Namespaces and names are the official ones: they are part of the ABI too, through the type information that
// dynamic_cast compares. Itanium C++ ABI only (GCC and Clang, Linux).
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" struct CUstream_st;

namespace nvinfer1 {

enum class DataType : int32_t {
  kFLOAT = 0,
  kHALF = 1,
  kINT8 = 2,
  kINT32 = 3,
  kBOOL = 4,
  kBF16 = 7,
};

enum class TensorFormat : int32_t { kLINEAR = 0, kHWC8 = 2 };

enum class PluginFieldType : int32_t {
  kFLOAT32 = 1,
  kFLOAT64 = 2,
  kINT32 = 5,
  kCHAR = 6,
  kINT64 = 10,
};

enum class PluginCapabilityType : int32_t { kCORE = 0, kBUILD = 1, kRUNTIME = 2 };

enum class TensorRTPhase : int32_t { kBUILD = 0, kRUNTIME = 1 };

enum class APILanguage : int32_t { kCPP = 0 };

// A shape. A dimension that is unknown when the network is built is -1.
class Dims64 {
 public:
  static constexpr int32_t MAX_DIMS = 8;
  int32_t nbDims;
  int64_t d[MAX_DIMS];
};
using Dims = Dims64;

struct PluginTensorDesc {
  Dims dims;
  DataType type;
  TensorFormat format;
  float scale;  // of INT8 tensors with implicit quantisation, which TensorRT 11 no longer has
};

struct DynamicPluginTensorDesc {
  PluginTensorDesc desc;
  Dims min;
  Dims max;
  Dims opt;
};

// Shapes while the network is built are expressions over the inputs' dimensions, which TensorRT makes and owns.
class IDimensionExpr;

enum class DimensionOperation : int32_t { kSUM = 0, kSUB = 4, kFLOOR_DIV = 7 };

// The implementation behind IExprBuilder: non-virtual functions of IExprBuilder call it.
namespace apiv {

class VRoot {
 public:
  virtual ~VRoot() noexcept = default;
};

class VExprBuilder : public VRoot {
 public:
  virtual IDimensionExpr const* constant(int64_t value) = 0;
  virtual IDimensionExpr const* operation(DimensionOperation op, IDimensionExpr const& first, IDimensionExpr const& second) = 0;
};

}  // namespace apiv

class IExprBuilder {
 public:
  IDimensionExpr const* constant(int64_t value) noexcept { return mImpl->constant(value); }
  IDimensionExpr const* operation(DimensionOperation op, IDimensionExpr const& first, IDimensionExpr const& second) noexcept {
    return mImpl->operation(op, first, second);
  }

 protected:
  apiv::VExprBuilder* mImpl;
  virtual ~IExprBuilder() noexcept = default;
};

class DimsExprs {
 public:
  int32_t nbDims;
  IDimensionExpr const* d[Dims::MAX_DIMS];
};

// One attribute of the plugin: `length` values of `type` at `data`. Text is kCHAR, with or without a final zero.
class PluginField {
 public:
  char const* name = nullptr;
  void const* data = nullptr;
  PluginFieldType type = PluginFieldType::kINT32;
  int32_t length = 0;
};

struct PluginFieldCollection {
  int32_t nbFields = 0;
  PluginField const* fields = nullptr;
};

// Which interface an object implements; TensorRT compares the name and the version before it calls anything else.
class InterfaceInfo {
 public:
  char const* kind;
  int32_t major;
  int32_t minor;
};

class IVersionedInterface {
 public:
  virtual APILanguage getAPILanguage() const noexcept { return APILanguage::kCPP; }
  virtual InterfaceInfo getInterfaceInfo() const noexcept = 0;
  virtual ~IVersionedInterface() noexcept = default;
};

class IPluginResourceContext;

namespace v_1_0 {

class IPluginCapability : public IVersionedInterface {};

class IPluginV3 : public IVersionedInterface {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN", 1, 0}; }
  virtual IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept = 0;
  virtual IPluginV3* clone() noexcept = 0;
};

class IPluginV3OneCore : public IPluginCapability {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_CORE", 1, 0}; }
  virtual char const* getPluginName() const noexcept = 0;
  virtual char const* getPluginVersion() const noexcept = 0;
  virtual char const* getPluginNamespace() const noexcept = 0;
};

class IPluginV3OneBuild : public IPluginCapability {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_BUILD", 1, 0}; }
  virtual int32_t configurePlugin(DynamicPluginTensorDesc const* in, int32_t nbInputs,
                                  DynamicPluginTensorDesc const* out, int32_t nbOutputs) noexcept = 0;
  virtual int32_t getOutputDataTypes(DataType* outputTypes, int32_t nbOutputs, DataType const* inputTypes,
                                     int32_t nbInputs) const noexcept = 0;
  virtual int32_t getOutputShapes(DimsExprs const* inputs, int32_t nbInputs, DimsExprs const* shapeInputs,
                                  int32_t nbShapeInputs, DimsExprs* outputs, int32_t nbOutputs,
                                  IExprBuilder& exprBuilder) noexcept = 0;
  // `pos` counts the inputs, then the outputs. Only descriptions up to and including `pos` are filled in.
  virtual bool supportsFormatCombination(int32_t pos, DynamicPluginTensorDesc const* inOut, int32_t nbInputs,
                                         int32_t nbOutputs) noexcept = 0;
  virtual int32_t getNbOutputs() const noexcept = 0;
  virtual size_t getWorkspaceSize(DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*,
                                  int32_t) const noexcept {
    return 0;
  }
  virtual int32_t getValidTactics(int32_t*, int32_t) noexcept { return 0; }
  virtual int32_t getNbTactics() noexcept { return 0; }
  virtual char const* getTimingCacheID() noexcept { return nullptr; }
  virtual int32_t getFormatCombinationLimit() noexcept { return 100; }
  virtual char const* getMetadataString() noexcept { return nullptr; }
};

class IPluginV3OneRuntime : public IPluginCapability {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_RUNTIME", 1, 0}; }
  virtual int32_t setTactic(int32_t) noexcept { return 0; }
  virtual int32_t onShapeChange(PluginTensorDesc const* in, int32_t nbInputs, PluginTensorDesc const* out,
                                int32_t nbOutputs) noexcept = 0;
  virtual int32_t enqueue(PluginTensorDesc const* inputDesc, PluginTensorDesc const* outputDesc,
                          void const* const* inputs, void* const* outputs, void* workspace,
                          CUstream_st* stream) noexcept = 0;
  // Makes the copy for one execution context.
  virtual IPluginV3* attachToContext(IPluginResourceContext* context) noexcept = 0;
  virtual PluginFieldCollection const* getFieldsToSerialize() noexcept = 0;
};

class IPluginCreatorInterface : public IVersionedInterface {};

class IPluginCreatorV3One : public IPluginCreatorInterface {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN CREATOR_V3ONE", 1, 0}; }
  virtual IPluginV3* createPlugin(char const* name, PluginFieldCollection const* fc,
                                  TensorRTPhase phase) noexcept = 0;
  virtual PluginFieldCollection const* getFieldNames() noexcept = 0;
  virtual char const* getPluginName() const noexcept = 0;
  virtual char const* getPluginVersion() const noexcept = 0;
  virtual char const* getPluginNamespace() const noexcept = 0;
};

}  // namespace v_1_0

using v_1_0::IPluginCapability;
using v_1_0::IPluginCreatorInterface;
using v_1_0::IPluginCreatorV3One;
using v_1_0::IPluginV3;
using v_1_0::IPluginV3OneBuild;
using v_1_0::IPluginV3OneCore;
using v_1_0::IPluginV3OneRuntime;

}  // namespace nvinfer1

// The logger that TensorRT hands to a plugin library. TensorRT 11 made it a versioned interface, which moved log() and
// findLogger() down by the inherited functions. Objects of these classes are only called, never made, by us.
namespace trtconvert::abi {

enum class Severity : int32_t { kINTERNAL_ERROR = 0, kERROR = 1, kWARNING = 2, kINFO = 3, kVERBOSE = 4 };

namespace v10 {

class ILogger {
 public:
  virtual void log(Severity severity, char const* message) noexcept = 0;

 protected:
  virtual ~ILogger() = default;
};

class ILoggerFinder {
 public:
  virtual ILogger* findLogger() = 0;

 protected:
  virtual ~ILoggerFinder() = default;
};

}  // namespace v10

namespace v11 {

class ILogger : public nvinfer1::IVersionedInterface {
 public:
  virtual void log(Severity severity, char const* message) noexcept = 0;
};

class ILoggerFinder : public nvinfer1::IVersionedInterface {
 public:
  virtual ILogger* findLogger() = 0;
};

}  // namespace v11

}  // namespace trtconvert::abi
