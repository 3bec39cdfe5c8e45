// The C API of INT8 linear layers: every check at the boundary, then the launch. Nothing here throws.
#include "trtconvert/int8_linear.h"

#include "common/device.h"
#include "common/layer_modes.h"
#include "common/report.h"
#include "common/sm90/tensor_map.h"
#include "linear/few_rows.h"
#include "linear/kernel_mma.h"
#include "linear/sm90/int8_launch.h"

namespace trtconvert::linear {
namespace {

constexpr long long kMostRows = 1LL << 24;  // with as many channels tiles are still counted in int32
constexpr int kMostChannels = 65536;
constexpr int kVector = 16;  // INT8 channels of 16 bytes: the copy engine takes rows of whole vectors

// Checks of calls with rows that are changes.
TrtConvertStatus check_changes(const TrtConvertInt8LinearParams& c, Report& report) {
  if (c.mode_set != TRTCONVERT_MODE_BIT(TRTCONVERT_STATIC))
    return report.invalid_int("mode_set", "8 (static) where rows are changes", c.mode_set);
  if (c.activation) return report.invalid_int("activation", "0 (none) where rows are changes", c.activation);
  if (c.out_table.mode_set)
    return report.invalid_int("out_table.mode_set", "0 (none) where rows are changes", c.out_table.mode_set);
  return TRTCONVERT_OK;
}

int parts_of(const TrtConvertInt8LinearParams& c) { return c.parts > 1 ? c.parts : 1; }

// Checks of calls whose result has several parts.
TrtConvertStatus check_parts(const TrtConvertInt8LinearParams& c, Report& report) {
  if (c.parts < 0 || c.parts > TRTCONVERT_MOST_PARTS) return report.invalid_int("parts", "0..8", c.parts);
  if (c.parts < 2) return TRTCONVERT_OK;
  if (c.mode_set != TRTCONVERT_MODE_BIT(TRTCONVERT_WEIGHT_ONLY))
    return report.invalid_int("mode_set", "2 (weight_only) with several parts", c.mode_set);
  if (c.rows > kFewRows) return report.invalid_int("rows", "1..16 with several parts", c.rows);
  if (c.activation) return report.invalid_int("activation", "0 (none) with several parts", c.activation);
  if (c.out_channels % (8 * c.parts))
    return report.invalid_int("out_channels", "8..65536 in steps of 8 times the parts", c.out_channels);
  return TRTCONVERT_OK;
}

TrtConvertStatus check(const TrtConvertInt8LinearParams* c, Report& report) {
  if (!c) return report.fail(TRTCONVERT_INVALID_ARGUMENT, "params: expected a pointer, got null");
  if (report.check_caller(*c, TRTCONVERT_INT8_LINEAR_VERSION, "int8_linear.h")) return report.status;
  if (c->rows < 1 || c->rows > kMostRows) return report.invalid_int("rows", "1..2^24", c->rows);
  if (c->in_channels < kVector || c->in_channels > kMostChannels || c->in_channels % kVector)
    return report.invalid_int("in_channels", "16..65536 in steps of 16", c->in_channels);
  if (c->out_channels < 8 || c->out_channels > kMostChannels || c->out_channels % 8)
    return report.invalid_int("out_channels", "8..65536 in steps of 8", c->out_channels);
  if (report.check_data_type(c->data_type)) return report.status;
  if (c->activation < TRTCONVERT_NO_ACTIVATION || c->activation > TRTCONVERT_GELU_TANH)
    return report.invalid_int("activation", "0 (none), 1 (GEGLU), 2 (GELU) or 3 (GELU by tanh)", c->activation);
  if (check_mode_set(c->mode_set, report)) return report.status;
  if (c->target_arch != 0 && c->target_arch != 80) return report.invalid_int("target_arch", "0 or 80", c->target_arch);
  if (report.check_flag("changes", c->changes) || check_parts(*c, report)) return report.status;
  if (c->changes) return check_changes(*c, report);
  if (!c->out_table.mode_set) return TRTCONVERT_OK;
  if (c->out_table.mode_set != TRTCONVERT_MODE_BIT(TRTCONVERT_STATIC))
    return report.invalid_int("out_table.mode_set", "0 (none) or 8 (static)", c->out_table.mode_set);
  if (has_mode(c->mode_set, TRTCONVERT_WEIGHT_ONLY))
    return report.invalid_int("mode_set", "a sum of 4 (dynamic) and 8 (static) where quantised rows are wanted", c->mode_set);
  if (c->out_channels % kVector)
    return report.invalid_int("out_channels", "16..65536 in steps of 16 where quantised rows are wanted", c->out_channels);
  return check_table(c->out_table, c->rows, report);
}

TrtConvertStatus check_tensors(const TrtConvertInt8LinearParams& c, Report& report) {
  const bool quantises = c.out_table.mode_set, scaled = c.mode_set != TRTCONVERT_MODE_BIT(TRTCONVERT_WEIGHT_ONLY);
  if (report.check_tensors({{"x", c.x}, {"row_scale", c.row_scale, !scaled}, {"weight", c.weight}, {"weight_scale", c.weight_scale},
                            {"bias", c.bias, true}, {"residual", c.residual, !c.changes}, {"y", c.y, quantises}}))
    return report.status;
  for (int part = 1; part < parts_of(c); ++part)
    if (report.check_pointer("more_y", c.more_y[part - 1], 16)) return report.status;
  if (c.residual && parts_of(c) > 1)
    return report.fail(TRTCONVERT_INVALID_ARGUMENT, "residual: expected null with several parts, got %p", c.residual);
  if (c.residual && (c.activation || quantises))
    return report.fail(TRTCONVERT_INVALID_ARGUMENT, "residual: expected null with an activation or quantised rows, got %p", c.residual);
  if (!quantises) return TRTCONVERT_OK;
  if (c.y) return report.fail(TRTCONVERT_INVALID_ARGUMENT, "y: expected null where quantised rows are wanted, got %p", c.y);
  if (report.check_tensors({{"out_factor", c.out_factor, true}, {"out_offset", c.out_offset, true}, {"out_payload", c.out_payload},
                            {"out_row_scale", c.out_row_scale}}))
    return report.status;
  return check_table_tensors(c.out_table, report);
}

// Rows of x whose tiles run together, for all columns: concurrent thread blocks share operands, which stay in the L2 cache until the
// last of these thread blocks has read them.
constexpr int kGroupRows = 2048;

int tiles(int64_t size, int tile) { return static_cast<int>((size + tile - 1) / tile); }

bool is_geglu(const TrtConvertInt8LinearParams& c) { return c.activation == TRTCONVERT_GEGLU; }
bool is_bf16(const TrtConvertInt8LinearParams& c) { return c.data_type == TRTCONVERT_BFLOAT16; }

// For tiles of this number of rows, columns and channels.
Int8Params params_of(const TrtConvertInt8LinearParams& c, int tile_rows, int tile_columns, int tile_depth) {
  Int8Params p = {};
  p.row_scale = c.row_scale;
  p.weight_scale = reinterpret_cast<const float2*>(c.weight_scale);
  p.bias = reinterpret_cast<const float2*>(c.bias);
  p.residual = static_cast<const uint32_t*>(c.residual);
  p.rows = static_cast<int>(c.rows);
  p.columns = c.out_channels;
  p.row_tiles = tiles(c.rows, tile_rows);
  p.column_tiles = tiles(c.out_channels, tile_columns);
  p.depth_tiles = tiles(c.in_channels, tile_depth);
  p.group_rows = kGroupRows / tile_rows;
  p.activation = static_cast<TrtConvertActivation>(c.activation);
  p.may_be_16bit = has_mode(c.mode_set, TRTCONVERT_WEIGHT_ONLY);
  p.changes = c.changes;
  if (!c.out_table.mode_set) return p;
  p.out_table = c.out_table;
  p.out_factor = reinterpret_cast<const float2*>(c.out_factor);
  p.out_offset = reinterpret_cast<const float2*>(c.out_offset);
  p.out_row_scale = c.out_row_scale;
  p.out_sample_rows = static_cast<int>(c.rows / c.out_table.batch);
  return p;
}

constexpr cudaError_t kNotDescribed = cudaErrorNotSupported;

cudaError_t run_few_rows(const TrtConvertInt8LinearParams& c, const Device& device) {
  FewRowsParams p = {};
  p.x = static_cast<const uint4*>(c.x);
  p.row_scale = c.row_scale;
  p.weight = static_cast<const uint4*>(c.weight);
  p.weight_scale = c.weight_scale;
  p.bias = c.bias;
  p.residual = static_cast<const uint16_t*>(c.residual);
  p.y[0] = static_cast<uint16_t*>(c.y);
  for (int part = 1; part < parts_of(c); ++part) p.y[part] = static_cast<uint16_t*>(c.more_y[part - 1]);
  p.part_columns = c.out_channels / parts_of(c);
  p.rows = static_cast<int>(c.rows);
  p.columns = c.out_channels;
  p.depth = c.in_channels;
  p.activation = static_cast<TrtConvertActivation>(c.activation);
  return launch_few_rows(p, is_bf16(c), device.multiprocessors, device.starts_early(), static_cast<cudaStream_t>(c.stream));
}

cudaError_t run_mma(const TrtConvertInt8LinearParams& c, const Device& device, bool rows_16bit) {
  MmaParams p = {};
  static_cast<Int8Params&>(p) = params_of(c, kMmaRows, kMmaColumns / (is_geglu(c) ? 2 : 1), kMmaDepth);
  p.x = static_cast<const uint8_t*>(c.x);
  p.weight = static_cast<const uint8_t*>(c.weight);
  p.y = static_cast<uint8_t*>(p.out_row_scale ? c.out_payload : c.y);
  p.depth = c.in_channels;
  return launch_mma(p, rows_16bit, is_bf16(c), device.starts_early(), static_cast<cudaStream_t>(c.stream));
}

#ifdef TRTCONVERT_SM90

// Describes x, the weight and the outputs, in the boxes of a tile; false if the driver cannot.
bool describe(const TrtConvertInt8LinearParams& c, CUtensorMapDataType x_type, int x_rows, int depth, int weight_rows,
              CUtensorMapSwizzle weight_swizzle, int y_rows, Maps& maps) {
  using sm90::describe_rows, sm90::kInt8Bytes;
  const int layers = is_geglu(c) ? 2 : 1;
  if (!describe_rows(maps.x, x_type, c.x, c.rows, c.in_channels, x_rows, depth, CU_TENSOR_MAP_SWIZZLE_128B) ||
      !describe_rows(maps.weight, kInt8Bytes, c.weight, int64_t{layers} * c.out_channels, c.in_channels, weight_rows, depth,
                     weight_swizzle))
    return false;
  return c.out_table.mode_set ? describe_rows(maps.y, kInt8Bytes, c.out_payload, c.rows, c.out_channels, y_rows,
                                              kQuantisedColumns, CU_TENSOR_MAP_SWIZZLE_32B)
                              : describe_rows(maps.y, sm90::float16_type(is_bf16(c)), c.y, c.rows, c.out_channels, y_rows,
                                              kStoreColumns, CU_TENSOR_MAP_SWIZZLE_64B);
}

cudaError_t run_int8_rows(const TrtConvertInt8LinearParams& c, const Device& device) {
  const Int8Instance instance =
      choose_int8_instance(c.rows, c.out_channels, c.in_channels, is_geglu(c), is_bf16(c), device.multiprocessors);
  const Int8Params p = params_of(c, kTileRows, instance.out_columns(), kRowBytes);
  Maps maps;
  if (!describe(c, sm90::kInt8Bytes, kTileRows, kRowBytes, instance.out_columns(), CU_TENSOR_MAP_SWIZZLE_128B,
                kBlockRows, maps))
    return kNotDescribed;
  return launch_int8_linear(p, maps, instance, device.multiprocessors, static_cast<cudaStream_t>(c.stream));
}

cudaError_t run_16bit_rows(const TrtConvertInt8LinearParams& c, const Device& device) {
  const WeightOnlyInstance instance =
      choose_weight_only_instance(c.rows, c.out_channels, is_geglu(c), is_bf16(c), device.multiprocessors);
  WeightOnlyParams p = {};
  static_cast<Int8Params&>(p) = params_of(c, instance.rows, instance.out_columns(), kTileDepth);
  Maps maps;
  if (!describe(c, sm90::float16_type(is_bf16(c)), instance.rows, kTileDepth, instance.out_columns(), CU_TENSOR_MAP_SWIZZLE_64B,
                instance.step_rows(), maps))
    return kNotDescribed;
  return launch_weight_only(p, maps, instance, device.multiprocessors, static_cast<cudaStream_t>(c.stream));
}

#endif

// The kernel for INT8 rows, or the kernel for 16-bit rows.
cudaError_t run_one(const TrtConvertInt8LinearParams& c, const Device& device, bool rows_16bit) {
  if (rows_16bit && c.rows <= kFewRows) return run_few_rows(c, device);
#ifdef TRTCONVERT_SM90
  if (device.runs_sm90() && c.target_arch == 0) return rows_16bit ? run_16bit_rows(c, device) : run_int8_rows(c, device);
#endif
  return run_mma(c, device, rows_16bit);
}

TrtConvertStatus run(const TrtConvertInt8LinearParams& c, const Device& device, Report& report) {
  for (const bool rows_16bit : {false, true}) {
    const bool wanted = rows_16bit ? has_mode(c.mode_set, TRTCONVERT_WEIGHT_ONLY)
                                   : c.mode_set != TRTCONVERT_MODE_BIT(TRTCONVERT_WEIGHT_ONLY);
    if (!wanted) continue;
    const cudaError_t error = run_one(c, device, rows_16bit);
    if (error == kNotDescribed)
      return report.fail(TRTCONVERT_CUDA_ERROR, "int8 linear: expected a driver that describes tensors to the copy engine, got none");
    if (report.launched(error, "int8 linear")) return report.status;
  }
  return TRTCONVERT_OK;
}

}  // namespace
}  // namespace trtconvert::linear

using namespace trtconvert;

extern "C" {

TrtConvertStatus trtconvert_int8_linear_check(const TrtConvertInt8LinearParams* params, char* message, size_t message_size) {
  Report report(message, message_size);
  return linear::check(params, report);
}

TrtConvertStatus trtconvert_int8_linear_run(const TrtConvertInt8LinearParams* params, char* message, size_t message_size) {
  Report report(message, message_size);
  if (linear::check(params, report) || linear::check_tensors(*params, report)) return report.status;
  Device device;
  if (const cudaError_t error = device.read()) return report.no_device(error);
  return linear::run(*params, device, report);
}

}  // extern "C"
