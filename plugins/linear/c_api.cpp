// The C API of linear layers: every check at the boundary, then the launch. Nothing here throws.
#include "trtconvert/linear.h"

#include "common/device.h"
#include "common/report.h"
#include "common/sm90/tensor_map.h"
#include "linear/sm90/launch.h"

namespace trtconvert::linear {
namespace {

constexpr long long kMostRows = 1LL << 24;  // with as many channels tiles are still counted in int32
constexpr int kMostChannels = 65536;
constexpr int kVector = 8;  // channels of 16 bytes: the copy engine takes rows of whole vectors

TrtConvertStatus check(const TrtConvertLinearParams* c, Report& report) {
  if (!c) return report.fail(TRTCONVERT_INVALID_ARGUMENT, "params: expected a pointer, got null");
  if (report.check_caller(*c, TRTCONVERT_LINEAR_VERSION, "linear.h")) return report.status;
  if (c->rows < 1 || c->rows > kMostRows) return report.invalid_int("rows", "1..2^24", c->rows);
  const struct {
    const char* name;
    int32_t value;
  } channels[] = {{"in_channels", c->in_channels}, {"out_channels", c->out_channels}};
  for (const auto& of : channels)
    if (of.value < kVector || of.value > kMostChannels || of.value % kVector)
      return report.invalid_int(of.name, "8..65536 in steps of 8", of.value);
  if (report.check_data_type(c->data_type)) return report.status;
  return report.check_flag("geglu", c->geglu);
}

TrtConvertStatus check_tensors(const TrtConvertLinearParams& c, Report& report) {
  return report.check_tensors({{"x", c.x}, {"weight", c.weight}, {"bias", c.bias, true}, {"y", c.y}});
}

#ifdef TRTCONVERT_SM90

TrtConvertStatus run(const TrtConvertLinearParams& c, const Device& device, Report& report) {
  const Instance instance = choose_instance(c.rows, c.out_channels, c.in_channels, c.geglu, c.data_type == TRTCONVERT_BFLOAT16,
                                            device.multiprocessors);
  const int columns = instance.out_columns(), weight_rows = c.out_channels * (instance.geglu ? 2 : 1);
  const auto type = sm90::float16_type(instance.bf16);
  Maps maps;
  if (!sm90::describe_rows(maps.x, type, c.x, c.rows, c.in_channels, kTileRows, kTileDepth, CU_TENSOR_MAP_SWIZZLE_128B) ||
      !sm90::describe_rows(maps.weight, type, c.weight, weight_rows, c.in_channels, columns, kTileDepth, CU_TENSOR_MAP_SWIZZLE_128B) ||
      !sm90::describe_rows(maps.y, type, c.y, c.rows, c.out_channels, kBlockRows, kStoreColumns, CU_TENSOR_MAP_SWIZZLE_64B))
    return report.fail(TRTCONVERT_CUDA_ERROR, "linear: expected a driver that describes tensors to the copy engine, got none");
  const auto tiles = [](int64_t size, int tile) { return static_cast<int>((size + tile - 1) / tile); };
  const Params p = {c.bias, c.out_channels, tiles(c.rows, kTileRows), tiles(c.out_channels, columns),
                    tiles(c.in_channels, kTileDepth)};
  return report.launched(launch_linear(p, maps, instance, device.multiprocessors, static_cast<cudaStream_t>(c.stream)), "linear");
}

#endif

}  // namespace
}  // namespace trtconvert::linear

using namespace trtconvert;

extern "C" {

int trtconvert_linear_is_supported(void) {
  Device device;
  return device.read() == cudaSuccess && device.runs_sm90();
}

TrtConvertStatus trtconvert_linear_check(const TrtConvertLinearParams* params, char* message, size_t message_size) {
  Report report(message, message_size);
  return linear::check(params, report);
}

TrtConvertStatus trtconvert_linear_run(const TrtConvertLinearParams* params, char* message, size_t message_size) {
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
