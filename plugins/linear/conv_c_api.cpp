// The C API of INT8 convolutions: every check at the boundary, then the launch. Nothing here throws.
#include "trtconvert/int8_conv.h"

#include "common/device.h"
#include "common/layer_modes.h"
#include "common/report.h"
#include "common/sm90/tensor_map.h"
#include "linear/kernel_mma.h"
#include "linear/sm90/conv_launch.h"

namespace trtconvert::linear {
namespace {

constexpr int64_t kMostPixels = 1LL << 24;
constexpr int kMostSize = 16384, kMostImages = 65536, kMostInputs = 16384, kMostOutputs = 65536;
constexpr int kMostKernel = 15, kMostStride = 8;
constexpr int kVector = 16;  // INT8 channels of 16 bytes

int out_size(int size, int kernel, int stride, int pad) { return (size + 2 * pad - kernel) / stride + 1; }

struct Sizes {
  int height, width;  // of y

  explicit Sizes(const TrtConvertInt8ConvParams& c)
      : height(out_size(c.height, c.kernel_h, c.stride_y, c.pad_y)), width(out_size(c.width, c.kernel_w, c.stride_x, c.pad_x)) {}

  int64_t pixels(const TrtConvertInt8ConvParams& c) const { return c.batch * height * width; }
};

TrtConvertStatus check_direction(const char* const (&names)[4], int size, int kernel, int stride, int pad, Report& report) {
  if (size < 1 || size > kMostSize) return report.invalid_int(names[0], "1..16384", size);
  if (kernel < 1 || kernel > kMostKernel) return report.invalid_int(names[1], "1..15", kernel);
  if (stride < 1 || stride > kMostStride) return report.invalid_int(names[2], "1..8", stride);
  if (pad < 0 || pad >= kernel) return report.invalid_int(names[3], "0 or more, and less than the kernel", pad);
  if (size + 2 * pad >= kernel) return TRTCONVERT_OK;
  return report.fail(TRTCONVERT_INVALID_ARGUMENT, "%s: expected at least a window of %d with the padding of %d, got %d", names[0], kernel, pad,
                     size);
}

TrtConvertStatus check(const TrtConvertInt8ConvParams* c, Report& report) {
  if (!c) return report.fail(TRTCONVERT_INVALID_ARGUMENT, "params: expected a pointer, got null");
  if (report.check_caller(*c, TRTCONVERT_INT8_CONV_VERSION, "int8_conv.h")) return report.status;
  if (c->batch < 1 || c->batch > kMostImages) return report.invalid_int("batch", "1..65536", c->batch);
  if (c->in_channels < kVector || c->in_channels > kMostInputs || c->in_channels % kVector)
    return report.invalid_int("in_channels", "16..16384 in steps of 16", c->in_channels);
  if (c->out_channels < 8 || c->out_channels > kMostOutputs || c->out_channels % 8)
    return report.invalid_int("out_channels", "8..65536 in steps of 8", c->out_channels);
  if (check_direction({"height", "kernel_h", "stride_y", "pad_y"}, c->height, c->kernel_h, c->stride_y, c->pad_y, report) ||
      check_direction({"width", "kernel_w", "stride_x", "pad_x"}, c->width, c->kernel_w, c->stride_x, c->pad_x, report) ||
      report.check_data_type(c->data_type))
    return report.status;
  const int64_t pixels = Sizes(*c).pixels(*c);
  if (pixels > kMostPixels || c->batch * c->height * c->width > kMostPixels)
    return report.fail(TRTCONVERT_INVALID_ARGUMENT, "batch, height, width: expected at most 2^24 pixels of x and of y, got %lld and %lld",
                       static_cast<long long>(c->batch * c->height * c->width), static_cast<long long>(pixels));
  if (c->table.mode_set != TRTCONVERT_MODE_BIT(TRTCONVERT_STATIC))
    return report.invalid_int("table.mode_set", "8 (static)", c->table.mode_set);
  if (c->target_arch != 0 && c->target_arch != 80) return report.invalid_int("target_arch", "0 or 80", c->target_arch);
  return check_table(c->table, c->batch, report);
}

TrtConvertStatus check_tensors(const TrtConvertInt8ConvParams& c, Report& report) {
  if (report.check_tensors({{"x", c.x}, {"weight", c.weight}, {"weight_scale", c.weight_scale}, {"bias", c.bias, true},
                            {"residual", c.residual, true}, {"y", c.y}, {"marks", c.marks}}))
    return report.status;
  return check_table_tensors(c.table, report);
}

int tiles(int64_t size, int tile) { return static_cast<int>((size + tile - 1) / tile); }

bool is_bf16(const TrtConvertInt8ConvParams& c) { return c.data_type == TRTCONVERT_BFLOAT16; }
int window(const TrtConvertInt8ConvParams& c) { return c.kernel_h * c.kernel_w; }

// Rows of x whose tiles run together, see int8_c_api.cpp.
constexpr int kGroupRows = 2048;

// For tiles of this number of rows, columns and channels.
void describe_work(const TrtConvertInt8ConvParams& c, int tile_rows, int tile_columns, int tile_depth, Int8Params& p, ConvShape& conv) {
  const Sizes out(c);
  p.weight_scale = reinterpret_cast<const float2*>(c.weight_scale);
  p.bias = reinterpret_cast<const float2*>(c.bias);
  p.residual = static_cast<const uint32_t*>(c.residual);
  p.rows = static_cast<int>(out.pixels(c));
  p.columns = c.out_channels;
  p.row_tiles = tiles(p.rows, tile_rows);
  p.column_tiles = tiles(c.out_channels, tile_columns);
  conv = {c.height, c.width, c.in_channels, out.height, out.width, c.kernel_w, c.stride_y, c.stride_x, c.pad_y, c.pad_x,
          tiles(c.in_channels, tile_depth), c.table, p.rows / c.table.batch, static_cast<const uint2*>(c.marks)};
  p.depth_tiles = conv.chunks * window(c);
  p.group_rows = kGroupRows / tile_rows;
}

constexpr cudaError_t kNotDescribed = cudaErrorNotSupported;

cudaError_t run_mma(const TrtConvertInt8ConvParams& c, const Device& device) {
  MmaConvParams p = {};
  describe_work(c, kMmaRows, kMmaColumns, kMmaDepth, p, p.conv);
  p.x = static_cast<const uint8_t*>(c.x);
  p.weight = static_cast<const uint8_t*>(c.weight);
  p.y = static_cast<uint8_t*>(c.y);
  p.depth = window(c) * c.in_channels;
  return launch_mma_conv(p, is_bf16(c), device.starts_early(), static_cast<cudaStream_t>(c.stream));
}

#ifdef TRTCONVERT_SM90

cudaError_t run_sm90(const TrtConvertInt8ConvParams& c, const Device& device) {
  using sm90::describe_rows, sm90::kInt8Bytes;
  const int64_t pixels = Sizes(c).pixels(c);
  const Int8Instance instance = choose_int8_conv_instance(pixels, c.out_channels, tiles(c.in_channels, kRowBytes) * kRowBytes * window(c),
                                                          is_bf16(c), device.multiprocessors);
  ConvParams p = {};
  describe_work(c, kTileRows, instance.columns, kRowBytes, p, p.conv);
  Maps maps;
  const sm90::Windows windows = {static_cast<int>(c.batch), c.height, c.width, c.in_channels, c.kernel_h, c.kernel_w,
                                 c.stride_y, c.stride_x, c.pad_y, c.pad_x};
  if (!describe_windows(maps.x, c.x, windows, kTileRows, kRowBytes, CU_TENSOR_MAP_SWIZZLE_128B) ||
      !describe_rows(maps.weight, kInt8Bytes, c.weight, c.out_channels, window(c) * c.in_channels, instance.columns,
                     kRowBytes, CU_TENSOR_MAP_SWIZZLE_128B) ||
      !describe_rows(maps.y, sm90::float16_type(is_bf16(c)), c.y, pixels, c.out_channels, kBlockRows, kStoreColumns,
                     CU_TENSOR_MAP_SWIZZLE_64B))
    return kNotDescribed;
  return launch_int8_conv(p, maps, instance, device.multiprocessors, static_cast<cudaStream_t>(c.stream));
}

#endif

cudaError_t run(const TrtConvertInt8ConvParams& c, const Device& device) {
#ifdef TRTCONVERT_SM90
  if (device.runs_sm90() && c.target_arch == 0) return run_sm90(c, device);
#endif
  return run_mma(c, device);
}

}  // namespace
}  // namespace trtconvert::linear

using namespace trtconvert;

extern "C" {

TrtConvertStatus trtconvert_int8_conv_check(const TrtConvertInt8ConvParams* params, char* message, size_t message_size) {
  Report report(message, message_size);
  return linear::check(params, report);
}

TrtConvertStatus trtconvert_int8_conv_run(const TrtConvertInt8ConvParams* params, char* message, size_t message_size) {
  Report report(message, message_size);
  if (linear::check(params, report) || linear::check_tensors(*params, report)) return report.status;
  Device device;
  if (const cudaError_t error = device.read()) return report.no_device(error);
  const cudaError_t error = linear::run(*params, device);
  if (error == linear::kNotDescribed)
    return report.fail(TRTCONVERT_CUDA_ERROR, "int8 conv: expected a driver that describes tensors to the copy engine, got none");
  return report.launched(error, "int8 conv");
}

}  // extern "C"
