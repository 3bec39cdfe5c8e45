// Random attributes to every plugin creator, and random tensors to the plugins that they make, in the way of TensorRT.
#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "calls.h"
#include "cuda_stand_in.h"
#include "tensorrt/abi.h"
#include "trtconvert/layer_modes.h"

using namespace nvinfer1;

// What TensorRT looks up by name.
extern "C" IPluginCreatorInterface* const* getCreators(int32_t& count);
extern "C" void* const* getPluginCreators(int32_t& count);
extern "C" void setLoggerFinder(void* finder);

namespace trtconvert::calls {
namespace {

// What a plugin logs has an end, and is read to it.
class Logger final : public abi::v10::ILogger {
 public:
  void log(abi::Severity severity, char const* message) noexcept override {
    require(severity >= abi::Severity::kERROR && severity <= abi::Severity::kVERBOSE, "a severity of %d", int(severity));
    characters += std::string_view(message).size();
  }
  size_t characters = 0;
};

class LoggerFinder final : public abi::v10::ILoggerFinder {
 public:
  abi::v10::ILogger* findLogger() override { return &logger; }
  Logger logger;
};

// Expressions are addresses that nobody reads, and never null.
class Expressions final : public apiv::VExprBuilder {
 public:
  IDimensionExpr const* constant(int64_t value) override { return reinterpret_cast<IDimensionExpr const*>(value | 1); }
  IDimensionExpr const* operation(DimensionOperation, IDimensionExpr const&, IDimensionExpr const&) override { return constant(7); }
};
class Builder final : public IExprBuilder {
 public:
  Builder() { mImpl = &expressions_; }

 private:
  Expressions expressions_;
};

// Fields with their data, each in memory of exactly its size.
class FieldList {
 public:
  void add(std::string const& name, PluginFieldType type, int32_t length, std::vector<unsigned char> data) {
    fields.push_back({keep(name)->c_str(), data.empty() ? nullptr : keep(std::move(data))->data(), type, length});
  }
  void add(std::string const& name, int64_t value, bool wide) {
    auto const narrow = static_cast<int32_t>(value);
    wide ? add(name, PluginFieldType::kINT64, 1, bytes_of(value)) : add(name, PluginFieldType::kINT32, 1, bytes_of(narrow));
  }
  void add(std::string const& name, double value, bool wide) {
    wide ? add(name, PluginFieldType::kFLOAT64, 1, bytes_of(value))
         : add(name, PluginFieldType::kFLOAT32, 1, bytes_of(static_cast<float>(value)));
  }
  void add(std::string const& name, std::string const& text) {
    add(name, PluginFieldType::kCHAR, static_cast<int32_t>(text.size()), {text.begin(), text.end()});
  }
  PluginFieldCollection collection() const { return {static_cast<int32_t>(fields.size()), fields.data()}; }

  std::vector<PluginField> fields;

  template <typename T>
  static std::vector<unsigned char> bytes_of(T value) {
    auto const* const first = reinterpret_cast<unsigned char const*>(&value);
    return {first, first + sizeof(value)};
  }

 private:
  template <typename T>
  T* keep(T value) {
    auto kept = std::make_shared<T>(std::move(value));
    kept_.push_back(kept);
    return kept.get();
  }
  std::vector<std::shared_ptr<void>> kept_;
};

size_t bytes_of(PluginFieldType type) {
  return type == PluginFieldType::kFLOAT64 || type == PluginFieldType::kINT64 ? 8 : type == PluginFieldType::kCHAR ? 1 : 4;
}

// A value that an attribute of this name and type may have.
void add_usual(FieldList& list, PluginField const& named, Random& random) {
  std::string const name = named.name;
  bool const wide = random.one_in(4);
  if (named.type == PluginFieldType::kCHAR) {
    list.add(name, name == "layout" ? random.one_of<std::string>({"BNHD", "BHND"})
                                    : random.one_of<std::string>({"calibrated", "dynamic"}));
  } else if (named.type == PluginFieldType::kFLOAT32) {
    list.add(name, name == "timestep_max" ? 1000.0 : random.one_of<double>({1e-6, 0.125, 1.0}), wide);
  } else if (name == "mode_set") {
    list.add(name, random.one_of<int64_t>({2, 4, 8, 6, 10, 12, 14}), wide);
  } else if (name == "groups") {
    list.add(name, random.one_of<int64_t>({1, 2, 8, 32}), wide);
  } else if (name == "activation") {
    list.add(name, random.between(0, 3), wide);
  } else if (name == "stride_y" || name == "stride_x") {
    list.add(name, random.between(1, 3), wide);
  } else if (name == "place") {
    list.add(name, random.between(0, 3), wide);
  } else if (name == "changes") {  // seldom fits what else is drawn, see add_changes()
    list.add(name, int64_t{random.one_in(8)}, wide);
  } else if (name == "parts") {
    list.add(name, random.one_in(4) ? int64_t{2} : int64_t{1}, wide);
  } else if (name == "norm_split" || name == "kv_heads" || name == "k_head" || name == "v_head") {
    list.add(name, random.one_in(3) ? random.size(INT32_MAX) : 0, wide);
  } else {
    list.add(name, random.between(0, 1), wide);
  }
}

// Attributes of an Int8Linear of changes, which want others.
void add_changes(FieldList& list, Random& random) {
  list.add("mode_set", int64_t{8}, random.one_in(4));
  for (char const* name : {"residual", "changes"}) list.add(name, int64_t{1}, random.one_in(4));
  for (char const* name : {"bias", "bfloat16"}) list.add(name, random.between(0, 1), random.one_in(4));
}

// A field of any name, type, length and value; of more elements than one its data is as long as it says.
void add_odd(FieldList& list, PluginFieldCollection const& names, Random& random) {
  std::string name = "x";
  if (names.nbFields > 0 && !random.one_in(5)) name = names.fields[random.between(0, names.nbFields - 1)].name;
  if (random.one_in(10)) name = random.one_of<std::string>({"", "serialization_version", std::string(3000, 'a'), "epsilon\n%s%n", "é"});
  switch (random.between(0, 4)) {
    case 0:
      return list.add(name, random.odd_integer(), random.one_in(2));
    case 1:
      return list.add(name, random.odd_real(), random.one_in(2));
    case 2:
      return list.add(name, std::string(static_cast<size_t>(random.between(0, 200)), static_cast<char>(random.between(-128, 127))));
    case 3: {  // without data, of any length
      auto const type = static_cast<PluginFieldType>(random.one_in(3) ? random.between(-1, 12) : random.one_of({1, 2, 5, 6, 10}));
      return list.add(name, type, static_cast<int32_t>(random.odd_integer()), {});
    }
    default: {
      auto const type = static_cast<PluginFieldType>(random.one_of({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}));
      auto const length = random.between(0, 70);
      return list.add(name, type, static_cast<int32_t>(random.one_in(4) ? -length : length),
                      std::vector<unsigned char>(static_cast<size_t>(length) * bytes_of(type), static_cast<unsigned char>(random.between(0, 255))));
    }
  }
}

// What its capability of a kind is.
template <typename Capability>
Capability* capability(IPluginV3* plugin, PluginCapabilityType type) {
  auto* const found = plugin->getCapabilityInterface(type);
  require(found != nullptr, "a plugin without capability %d", int(type));
  return static_cast<Capability*>(found);
}

using Tensors = std::vector<PluginTensorDesc>;

PluginTensorDesc tensor(std::initializer_list<int64_t> shape, DataType type, TensorFormat format = TensorFormat::kLINEAR) {
  PluginTensorDesc desc = {};
  desc.dims.nbDims = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), desc.dims.d);
  desc.type = type, desc.format = format;
  return desc;
}

// A plugin's attributes as numbers, from its serialised fields.
int64_t attribute(IPluginV3OneRuntime* runtime, std::string_view name) {
  PluginFieldCollection const* const fields = runtime->getFieldsToSerialize();
  for (int32_t i = 0; i < fields->nbFields; ++i) {
    PluginField const& field = fields->fields[i];
    if (name != field.name) continue;
    if (field.type == PluginFieldType::kINT32) return *static_cast<int32_t const*>(field.data);
    return std::string_view(static_cast<char const*>(field.data), static_cast<size_t>(field.length)) == "BHND";
  }
  return 0;
}

// Inputs and outputs that a plugin of this name takes, of any size.
Tensors inputs_of(std::string_view name, IPluginV3OneRuntime* runtime, Random& random) {
  auto const has = [&](char const* of) { return attribute(runtime, of); };
  DataType const half = random.one_in(2) ? DataType::kHALF : DataType::kBF16;
  constexpr auto kFloat = DataType::kFLOAT, kInt = DataType::kINT32;
  int64_t const most = random.one_in(3) ? INT32_MAX : 4096, rows = random.size(most), channels = random.size(most, 16);
  int64_t const mode_set = has("mode_set"), batch = random.one_in(2) ? 1 : random.size(65536), bins = random.size(65536);
  Tensors inputs;
  auto const add = [&](PluginTensorDesc const& desc) { inputs.push_back(desc); };
  auto const add_tables = [&] {
    if (has("factor")) add(tensor({channels}, kFloat));
    if (has("offset")) add(tensor({channels}, kFloat));
    int64_t const given = has("timestep") ? bins : 1;
    if (has("timestep")) add(tensor({batch}, kFloat));
    if (mode_set & (mode_set - 1)) add(tensor({given}, kInt));
    if (mode_set & 8) add(tensor({given}, kFloat));
  };
  if (name == "ChannelsLastAdd") {
    int64_t const height = random.size(most), width = random.size(most);
    add(tensor({batch, channels, height, width}, half, TensorFormat::kHWC8));
    add(tensor({batch, height, width, channels}, half));
  } else if (name == "GroupNorm") {
    add(tensor({batch, channels, rows, random.size(most)}, half, TensorFormat::kHWC8));
    add(tensor({channels}, half)), add(tensor({channels}, half));
    if (random.one_in(2)) add(tensor({batch, channels}, half));
  } else if (name == "Int8GroupNorm") {
    add(tensor({batch, channels, rows, random.size(most)}, half, TensorFormat::kHWC8));
    add(tensor({channels}, half)), add(tensor({channels}, half));
    if (has("shift")) add(tensor({batch, channels}, half));
    if (has("factor")) add(tensor({channels}, kFloat));
    if (has("timestep")) add(tensor({batch}, kFloat));
    add(tensor({has("timestep") ? bins : 1}, kFloat));
  } else if (name == "Int8Conv") {
    int64_t const out = random.size(most, 8), most_pixels = random.one_in(4) ? most : 256;
    int64_t const height = random.size(most_pixels), width = random.size(most_pixels);
    int64_t const kernel_h = random.size(random.one_in(4) ? most : 5), kernel_w = random.size(random.one_in(4) ? most : 5);
    add(tensor({batch, height, width, channels / 4}, kInt));
    add(tensor({batch, TRTCONVERT_IMAGE_MARKS / 4}, kInt));
    add(tensor({out, kernel_h, kernel_w, channels / 4}, kInt));
    add(tensor({out}, kFloat));
    if (has("bias")) add(tensor({out}, kFloat));
    auto const size = [&](int64_t of, int64_t kernel, char const* stride, char const* pad) {
      return (of + 2 * has(pad) - kernel) / std::max<int64_t>(has(stride), 1) + 1;
    };
    if (has("residual"))
      add(tensor({batch, out, size(height, kernel_h, "stride_y", "pad_y"), size(width, kernel_w, "stride_x", "pad_x")},
                 has("bfloat16") ? DataType::kBF16 : DataType::kHALF, TensorFormat::kHWC8));
    if (has("timestep")) add(tensor({batch}, kFloat));
    add(tensor({has("timestep") ? bins : 1}, kFloat));
  } else if (name == "Linear") {
    int64_t const out = random.size(most, 8);
    add(tensor({batch, rows, channels}, half));
    add(has("geglu") ? tensor({2, out, channels}, half) : tensor({out, channels}, half));
    if (random.one_in(2)) add(has("geglu") ? tensor({2, out}, half) : tensor({out}, half));
  } else if (name == "ResidualNorm" || name == "Int8ResidualNorm") {
    add(tensor({batch, rows, channels}, half)), add(tensor({batch, rows, channels}, half));
    add(tensor({channels}, half)), add(tensor({channels}, half));
    if (name == "Int8ResidualNorm") add_tables();
  } else if (name == "QuantiseRows") {
    add(tensor({batch, rows, channels}, half));
    add_tables();
  } else if (name == "QuantiseChangedRows") {
    for (int i = 0; i < 2; ++i) add(tensor({batch, rows, channels}, half));
    add(tensor({batch, has("place") + random.size(65536)}, kFloat));
    if (has("factor")) add(tensor({channels}, kFloat));
  } else if (name == "Int8Linear") {
    int64_t const out = random.size(most, 16);
    bool const geglu = has("activation") == 1, quantised = has("quantised");
    DataType const of_rows = has("bfloat16") ? DataType::kBF16 : DataType::kHALF;
    add(mode_set == 2 ? tensor({batch, rows, channels}, of_rows) : tensor({batch, rows, channels / (mode_set & 2 ? 2 : 4)}, kInt));
    if (mode_set != 2) add(tensor({batch, rows, 1}, kFloat));
    add(geglu ? tensor({2, out, channels / 4}, kInt) : tensor({out, channels / 4}, kInt));
    add(geglu ? tensor({2, out}, kFloat) : tensor({out}, kFloat));
    if (has("bias")) add(geglu ? tensor({2, out}, kFloat) : tensor({out}, kFloat));
    if (has("residual")) add(tensor({batch, rows, out}, of_rows));
    if (quantised && has("out_factor")) add(tensor({out}, kFloat));
    if (quantised && has("out_offset")) add(tensor({out}, kFloat));
    if (quantised && has("timestep")) add(tensor({batch}, kFloat));
    if (quantised) add(tensor({has("timestep") ? bins : 1}, kFloat));
  } else {
    require(name == "Int8Attention", "a plugin %s that nothing here knows", std::string(name).c_str());
    bool const heads_first = has("layout"), parts = has("parts") == 2, packed = parts || (!heads_first && random.one_in(3));
    bool const shared = has("kv_heads") > 0;
    int64_t const heads = random.size(random.one_in(4) ? most : 64), dim = random.one_in(8) ? random.size(most) : random.between(4, 32) * 8;
    int64_t const samples = random.size(random.one_in(4) ? most : 16), queries = random.size(most, parts ? 128 : 1);
    int64_t const keys = packed || has("rotary") || has("norm_split") ? queries : random.size(most);
    int64_t kv_heads = heads, in_k = heads, second = random.size(most);
    if (shared) {
      kv_heads = has("kv_heads");
      in_k = std::max(has("k_head"), has("v_head")) + kv_heads;
    }
    auto const of = [&](int64_t tokens, int64_t of_heads) {
      if (packed) return tensor({samples, tokens, 3, of_heads, dim}, half);
      return heads_first ? tensor({samples, of_heads, tokens, dim}, half) : tensor({samples, tokens, of_heads, dim}, half);
    };
    add(of(queries, heads));
    for (int i = 0; i < 2; ++i) add(of(parts ? second : keys, in_k));
    add(tensor({samples}, kFloat)), add(tensor({bins, heads}, kFloat)), add(tensor({bins, kv_heads}, kFloat));
    for (int i = 0; i < 3; ++i) add(tensor({bins, kv_heads, dim}, kFloat));
    add(tensor({bins}, kInt));
    int64_t const all_queries = queries + (parts ? second : 0), kept = random.size(most);
    int64_t const all_keys = has("key_index") ? kept : parts ? all_queries : keys;
    if (random.one_in(2)) {
      auto const one_or = [&](int64_t size) { return random.one_in(2) ? 1 : size; };
      add(tensor({one_or(samples), one_or(heads), one_or(all_queries), one_or(all_keys)}, random.one_in(2) ? DataType::kBOOL : half));
    }
    if (has("block_mask"))
      add(tensor({random.one_in(2) ? 1 : samples, random.one_in(2) ? 1 : heads, (all_queries + 127) / 128, (all_keys + 127) / 128},
                 DataType::kBOOL));
    if (has("key_index")) add(tensor({samples, kv_heads, kept}, kInt));
    if (has("rotary")) add(tensor({all_queries, dim / 2, 2}, kFloat));
    if (has("norm"))
      add(has("norm_split") ? tensor({2, 2, dim}, kFloat) : random.one_in(2) ? tensor({2, dim}, kFloat) : tensor({2, heads, dim}, kFloat));
  }
  return inputs;
}

// Another size, rank, type or format of one of them, or another number of them.
void spoil(Tensors& tensors, Random& random) {
  if (tensors.empty() || random.one_in(12)) {
    if (!tensors.empty() && random.one_in(2)) {
      tensors.pop_back();
    } else {
      tensors.push_back(tensor({1}, DataType::kFLOAT));
    }
    return;
  }
  PluginTensorDesc& desc = tensors[random.between(0, static_cast<int64_t>(tensors.size()) - 1)];
  switch (random.between(0, 3)) {
    case 0:
      desc.dims.nbDims = static_cast<int32_t>(random.between(-1, Dims::MAX_DIMS));
      break;
    case 1:
      desc.type = static_cast<DataType>(random.between(-1, 12));
      break;
    case 2:
      desc.format = static_cast<TensorFormat>(random.between(-1, 12));
      break;
    default:
      desc.dims.d[random.between(0, Dims::MAX_DIMS - 1)] = random.odd_integer();
  }
}

std::vector<DynamicPluginTensorDesc> dynamic(Tensors const& smallest, Tensors const& largest) {
  std::vector<DynamicPluginTensorDesc> descs;
  for (size_t i = 0; i < smallest.size(); ++i)
    descs.push_back({smallest[i], smallest[i].dims, largest[i].dims, smallest[i].dims});
  return descs;
}

// Everything that TensorRT calls.
void use(std::string const& name, IPluginV3* plugin, Random& random, Counts& counts) {
  auto* const build = capability<IPluginV3OneBuild>(plugin, PluginCapabilityType::kBUILD);
  auto* const runtime = capability<IPluginV3OneRuntime>(plugin, PluginCapabilityType::kRUNTIME);
  auto& outcomes = counts[name + " of tensors"];
  Tensors inputs = inputs_of(name, runtime, random), largest = inputs;
  for (int64_t spoiled = random.between(0, 2); spoiled > 0; --spoiled) spoil(random.one_in(2) ? inputs : largest, random);
  if (inputs.size() != largest.size()) largest = inputs;
  auto const num_inputs = static_cast<int32_t>(inputs.size());
  int32_t const num_outputs = random.one_in(12) ? static_cast<int32_t>(random.between(-1, 6)) : build->getNbOutputs();
  size_t const in_memory = static_cast<size_t>(std::max(num_outputs, 0));
  Tensors const outputs(in_memory, inputs.empty() ? tensor({1}, DataType::kHALF) : inputs[0]);
  auto const in = dynamic(inputs, largest), out = dynamic(outputs, outputs);
  auto both = in;
  both.insert(both.end(), out.begin(), out.end());

  for (int32_t position = 0; position < num_inputs + num_outputs; ++position) {
    // What lies behind the position is not filled in.
    std::vector<DynamicPluginTensorDesc> const known(both.begin(), both.begin() + position + 1);
    if (build->supportsFormatCombination(position, known.data(), num_inputs, num_outputs)) ++outcomes["formats that are taken"];
  }
  std::vector<DataType> types(in_memory), input_types;
  for (auto const& input : inputs) input_types.push_back(input.type);
  static_cast<void>(build->getOutputDataTypes(types.data(), num_outputs, input_types.data(), num_inputs));
  Builder builder;
  std::vector<DimsExprs> expressions(inputs.size()), output_expressions(in_memory);
  for (size_t i = 0; i < inputs.size(); ++i) {
    expressions[i].nbDims = inputs[i].dims.nbDims;
    for (int32_t d = 0; d < inputs[i].dims.nbDims; ++d) expressions[i].d[d] = builder.constant(inputs[i].dims.d[d]);
  }
  static_cast<void>(build->getOutputShapes(expressions.data(), num_inputs, nullptr, 0, output_expressions.data(), num_outputs, builder));

  bool const configured = build->configurePlugin(in.data(), num_inputs, out.data(), num_outputs) == 0;
  ++outcomes[configured ? "configured" : "not configured"];
  size_t const workspace = build->getWorkspaceSize(in.data(), num_inputs, out.data(), num_outputs);
  require(workspace < (size_t{1} << 60), "%s: a workspace of %zu bytes", name.c_str(), workspace);
  bool const shaped = runtime->onShapeChange(inputs.data(), num_inputs, outputs.data(), num_outputs) == 0;
  ++outcomes[shaped ? "shapes taken" : "shapes refused"];
  // TensorRT goes no further where shapes are refused.
  if (!shaped) return;
  std::vector<void const*> in_addresses;
  std::vector<void*> out_addresses;
  for (size_t i = 0; i < inputs.size(); ++i) in_addresses.push_back(random.one_in(50) ? nullptr : random.address());
  for (size_t i = 0; i < in_memory; ++i) out_addresses.push_back(random.one_in(50) ? nullptr : random.address());
  int32_t const enqueued = runtime->enqueue(inputs.data(), outputs.data(), in_addresses.data(), out_addresses.data(),
                                            random.one_in(50) ? nullptr : random.address(), nullptr);
  ++outcomes[enqueued == 0 ? "enqueued" : "not enqueued"];
}

// What an engine keeps of a plugin makes the same one again, and with any of it changed none or another.
void reload(std::string const& name, IPluginCreatorV3One* creator, IPluginV3* plugin, Random& random, Counts& counts) {
  auto* const runtime = capability<IPluginV3OneRuntime>(plugin, PluginCapabilityType::kRUNTIME);
  PluginFieldCollection const* const kept = runtime->getFieldsToSerialize();
  std::unique_ptr<IPluginV3> const again(creator->createPlugin("layer", kept, TensorRTPhase::kRUNTIME));
  require(again != nullptr, "%s: an engine's plugin is not made again", name.c_str());
  FieldList changed;
  for (int32_t i = 0; i < kept->nbFields; ++i) {
    PluginField const& field = kept->fields[i];
    if (random.one_in(40)) continue;
    auto const* const first = static_cast<unsigned char const*>(field.data);
    changed.add(field.name, field.type, field.length, {first, first + static_cast<size_t>(field.length) * bytes_of(field.type)});
  }
  if (random.one_in(2)) add_odd(changed, *creator->getFieldNames(), random);
  PluginFieldCollection const collection = changed.collection();
  std::unique_ptr<IPluginV3> const other(creator->createPlugin("layer", &collection, TensorRTPhase::kRUNTIME));
  ++counts[name + " of an engine"][other ? "made" : "refused"];
}

void call_creator(IPluginCreatorV3One* creator, Random& random, long long rounds, Counts& counts) {
  std::string const name = creator->getPluginName();
  PluginFieldCollection const& names = *creator->getFieldNames();
  for (long long round = 0; round < rounds; ++round) {
    choose_device(random);
    FieldList list;
    if (name == "Int8Linear" && random.one_in(4)) {
      add_changes(list, random);
    } else {
      for (int32_t i = 0; i < names.nbFields; ++i)
        if (!random.one_in(8)) add_usual(list, names.fields[i], random);
    }
    for (int64_t odd = random.one_in(2) ? random.between(0, 3) : 0; odd > 0; --odd) add_odd(list, names, random);
    PluginFieldCollection collection = list.collection();
    if (random.one_in(100)) collection.nbFields = -static_cast<int32_t>(random.size(INT32_MAX));
    if (random.one_in(100)) collection.fields = nullptr;
    if (!list.fields.empty() && random.one_in(100)) list.fields[0].name = nullptr;
    auto const phase = static_cast<TensorRTPhase>(random.one_in(10) ? random.between(-1, 2) : 0);
    std::unique_ptr<IPluginV3> const plugin(
        creator->createPlugin(random.one_in(50) ? nullptr : "layer", random.one_in(100) ? nullptr : &collection, phase));
    ++counts[name][plugin ? "made" : "refused"];
    if (!plugin) continue;
    require(plugin->getCapabilityInterface(static_cast<PluginCapabilityType>(3)) == nullptr, "%s: a fourth capability", name.c_str());
    reload(name, creator, plugin.get(), random, counts);
    use(name, plugin.get(), random, counts);
    std::unique_ptr<IPluginV3> const clone(plugin->clone());
    auto* const runtime = capability<IPluginV3OneRuntime>(clone.get(), PluginCapabilityType::kRUNTIME);
    std::unique_ptr<IPluginV3> const attached(runtime->attachToContext(nullptr));
    use(name, attached.get(), random, counts);
  }
}

}  // namespace

void call_plugins(Random& random, long long rounds, Counts& counts) {
  static LoggerFinder finder;
  setLoggerFinder(&finder);
  int32_t count = -1;
  static_cast<void>(getPluginCreators(count));
  require(count == 0, "%d creators of older plugins", count);
  IPluginCreatorInterface* const* const creators = getCreators(count);
  for (int32_t i = 0; i < count; ++i) call_creator(static_cast<IPluginCreatorV3One*>(creators[i]), random, rounds, counts);
  require(finder.logger.characters > 0, "nothing was logged");
  setLoggerFinder(nullptr);
}

}  // namespace trtconvert::calls
