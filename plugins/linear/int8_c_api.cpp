// The C API of INT8 linear layers: every check at the boundary, then the launch. Nothing here throws.
#include "trtconvert/int8_linear.h"

#include "common/device.h"
#include "common/layer_modes.h"
#include "common/report.h"
#include "common/sm90/tensor_map.h"
#include "linear/sm90/int8_launch.h"

namespace trtconvert::linear {
namespace {

constexpr long long kMostRows = 1LL << 24;  // with as many channels tiles are still counted in int32
constexpr int kMostChannels = 65536;
constexpr int kVector = 16;  // INT8 channels of 16 bytes, which the copy engine wants rows in whole numbers of

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
  if (has_mode(c->mode_set, TRTCONVERT_WEIGHT_ONLY))
    return report.invalid_int("mode_set", "a sum of 4 (dynamic) and 8 (static)", c->mode_set);
  return TRTCONVERT_OK;
}

TrtConvertStatus check_tensors(const TrtConvertInt8LinearParams& c, Report& report) {
  if (report.check_tensors({{"x", c.x}, {"row_scale", c.row_scale}, {"weight", c.weight}, {"weight_scale", c.weight_scale},
                            {"bias", c.bias, true}, {"residual", c.residual, true}, {"y", c.y}}))
    return report.status;
  if (c.residual && c.activation)
    return report.fail(TRTCONVERT_INVALID_ARGUMENT, "residual: expected null with an activation, got %p", c.residual);
  return TRTCONVERT_OK;
}

#ifdef TRTCONVERT_SM90

// Row tiles that are taken together: with as many of the columns as thread blocks have at once they read least, and what they read
// stays in the L2 cache until the last of them has read it.
constexpr int kGroupRows = 16;

TrtConvertStatus run(const TrtConvertInt8LinearParams& c, const Device& device, Report& report) {
  const bool bf16 = c.data_type == TRTCONVERT_BFLOAT16, geglu = c.activation == TRTCONVERT_GEGLU;
  const Int8Instance instance =
      choose_int8_instance(c.rows, c.out_channels, c.in_channels, geglu, bf16, device.multiprocessors);
  const int columns = instance.out_columns(), weight_rows = c.out_channels * (geglu ? 2 : 1);
  const int box_rows = (geglu ? columns : instance.columns) / instance.cluster;
  using sm90::kInt8Bytes;
  Maps maps;
  if (!sm90::describe_rows(maps.x, kInt8Bytes, c.x, c.rows, c.in_channels, kTileRows, kRowBytes, CU_TENSOR_MAP_SWIZZLE_128B) ||
      !sm90::describe_rows(maps.weight, kInt8Bytes, c.weight, weight_rows, c.in_channels, box_rows, kRowBytes,
                           CU_TENSOR_MAP_SWIZZLE_128B) ||
      !sm90::describe_rows(maps.y, sm90::float16_type(bf16), c.y, c.rows, c.out_channels, kBlockRows, kStoreColumns,
                           CU_TENSOR_MAP_SWIZZLE_64B))
    return report.fail(TRTCONVERT_CUDA_ERROR, "int8 linear: expected a driver that describes tensors to the copy engine, got none");
  const auto tiles = [](int64_t size, int tile) { return static_cast<int>((size + tile - 1) / tile); };
  Int8Params p = {};
  p.row_scale = c.row_scale;
  p.weight_scale = reinterpret_cast<const float2*>(c.weight_scale);
  p.bias = reinterpret_cast<const float2*>(c.bias);
  p.residual = static_cast<const uint32_t*>(c.residual);
  p.rows = static_cast<int>(c.rows);
  p.columns = c.out_channels;
  p.row_tiles = tiles(c.rows, kTileRows * instance.cluster);
  p.column_tiles = tiles(c.out_channels, columns);
  p.depth_tiles = tiles(c.in_channels, kRowBytes);
  p.group_rows = kGroupRows / instance.cluster;
  p.activation = static_cast<TrtConvertActivation>(c.activation);
  p.may_be_16bit = has_mode(c.mode_set, TRTCONVERT_WEIGHT_ONLY);
  return report.launched(launch_int8_linear(p, maps, instance, device.multiprocessors, static_cast<cudaStream_t>(c.stream)),
                         "int8 linear");
}

#endif

}  // namespace
}  // namespace trtconvert::linear

using namespace trtconvert;

extern "C" {

int trtconvert_int8_linear_is_supported(void) {
  Device device;
  return device.read() == cudaSuccess && device.runs_sm90();
}

TrtConvertStatus trtconvert_int8_linear_check(const TrtConvertInt8LinearParams* params, char* message, size_t message_size) {
  Report report(message, message_size);
  return linear::check(params, report);
}

TrtConvertStatus trtconvert_int8_linear_run(const TrtConvertInt8LinearParams* params, char* message, size_t message_size) {
  Report report(message, message_size);
  if (linear::check(params, report) || linear::check_tensors(*params, report)) return report.status;
  Device device;
  if (const cudaError_t error = device.read())
    return report.no_device(error);
#ifdef TRTCONVERT_SM90
  if (device.runs_sm90()) return linear::run(*params, device, report);
#endif
  return report.fail(TRTCONVERT_UNSUPPORTED_DEVICE,
                     "device: expected compute capability 9.0, and a library compiled for 90a; got %d.%d and %s; build the engine "
                     "again on this GPU",
                     device.major, device.minor, TRTCONVERT_ARCHITECTURES);
}

}  // extern "C"
