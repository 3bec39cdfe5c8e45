// The sum of two images with channels last: the kernel and its C API. Nothing here throws.
#include "trtconvert/channels_last_add.h"

#include <algorithm>

#include "common/device.h"
#include "common/early_launch.cuh"
#include "common/report.h"
#include "common/vector.cuh"

namespace trtconvert::channels_last_add {
namespace {

constexpr int kThreads = 256;
constexpr int kAtOnce = 4;  // vectors of a thread that are loaded together
constexpr int kBlocksPerMultiprocessor = 4;  // as many as fit

// The outputs may be the inputs, so nothing is read through the read-only cache.
template <typename T>
__global__ void __launch_bounds__(kThreads) add_kernel(const uint4* x, const uint4* y, uint4* sum, int64_t vectors) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x; first < vectors; first += kAtOnce * step) {
    Vector<T> a[kAtOnce], b[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i * step >= vectors) continue;
      a[i].words = x[first + i * step];
      b[i].words = y[first + i * step];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i * step >= vectors) continue;
#pragma unroll
      for (int c = 0; c < kVector / 2; ++c) a[i].pairs[c] = sum_of<T>(a[i].pairs[c], b[i].pairs[c]);
      sum[first + i * step] = a[i].words;
    }
  }
}

constexpr long long kMostPixels = 1LL << 31;
constexpr int kMostChannels = 65536;

TrtConvertStatus check(const TrtConvertChannelsLastAddParams* c, Report& report) {
  if (!c) return report.fail(TRTCONVERT_INVALID_ARGUMENT, "params: expected a pointer, got null");
  if (report.check_caller(*c, TRTCONVERT_CHANNELS_LAST_ADD_VERSION, "channels_last_add.h")) return report.status;
  if (c->pixels < 1 || c->pixels > kMostPixels) return report.invalid_int("pixels", "1..2^31", c->pixels);
  if (c->channels < kVector || c->channels > kMostChannels || c->channels % kVector)
    return report.invalid_int("channels", "8..65536 in steps of 8", c->channels);
  return report.check_data_type(c->data_type);
}

TrtConvertStatus check_tensors(const TrtConvertChannelsLastAddParams& c, Report& report) {
  return report.check_tensors({{"x", c.x}, {"y", c.y}, {"sum", c.sum}});
}

}  // namespace
}  // namespace trtconvert::channels_last_add

using namespace trtconvert;

extern "C" {

TrtConvertStatus trtconvert_channels_last_add_check(const TrtConvertChannelsLastAddParams* params, char* message,
                                                    size_t message_size) {
  Report report(message, message_size);
  return channels_last_add::check(params, report);
}

TrtConvertStatus trtconvert_channels_last_add_run(const TrtConvertChannelsLastAddParams* params, char* message,
                                                  size_t message_size) {
  using namespace channels_last_add;
  Report report(message, message_size);
  if (check(params, report) || check_tensors(*params, report)) return report.status;
  Device device;
  if (const cudaError_t error = device.read()) return report.no_device(error);
  const int64_t vectors = params->pixels * (params->channels / kVector);
  const int64_t needed = (vectors + kThreads - 1) / kThreads, room = int64_t{device.multiprocessors} * kBlocksPerMultiprocessor;
  const auto kernel = params->data_type == TRTCONVERT_BFLOAT16 ? add_kernel<__nv_bfloat16> : add_kernel<__half>;
  const auto at = [](const void* tensor) { return static_cast<const uint4*>(tensor); };
  return report.launched(launch_kernel(kernel, dim3(static_cast<unsigned>(std::min(needed, room))), kThreads, 0,
                                       static_cast<cudaStream_t>(params->stream), false, at(params->x), at(params->y),
                                       static_cast<uint4*>(params->sum), vectors),
                         "channels last add");
}

}  // extern "C"
