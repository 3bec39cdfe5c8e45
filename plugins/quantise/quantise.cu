// Quantised rows for INT8 layers: the kernel and its C API. Nothing here throws.
#include "trtconvert/quantise.h"

#include <type_traits>

#include "common/device.h"
#include "common/early_launch.cuh"
#include "common/layer_modes.cuh"
#include "common/layer_modes.h"
#include "common/quantised_row.cuh"
#include "common/report.h"
#include "common/vector.cuh"

namespace trtconvert::quantise_rows {
namespace {

struct Params {
  TrtConvertModeTable table;
  const uint4* x;        // [rows, vectors]
  const float4* factor;  // [vectors, 2], or null
  const float4* offset;  // [vectors, 2], or null
  QuantisedRows out;
  int rows;
  int sample_rows;
  int vectors;  // K / kVector
};

// Threads of a thread block: the threads of one row, or of several rows.
template <int kLanes>
constexpr int kThreads = kLanes < 128 ? 128 : kLanes;

// kLanes threads have a row in registers, up to kVectors vectors each: one pass over memory, with every load in flight before the
// first is used.
template <typename T, int kLanes, int kVectors>
__global__ void __launch_bounds__(kThreads<kLanes>) quantise_rows_kernel(const __grid_constant__ Params p) {
  let_next_kernel_start();  // a layer's thread blocks find room where these end
  wait_for_previous_kernel();
  constexpr int kRows = kThreads<kLanes> / kLanes;
  const int row = blockIdx.x * kRows + threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  if (row >= p.rows) return;
  const int64_t first = int64_t{row} * p.vectors;
  Vector<T> x[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = i * kLanes + lane;
    x[i].words = at < p.vectors ? p.x[first + at] : uint4{};
  }
  const CallMode call = call_mode(p.table);
  const Sample sample = sample_of(p.table, call, row / p.sample_rows);
  const auto values_of = [&](int i, float(&xhat)[kVector]) {
    unpack<T>(x[i], xhat);
    const int at = i * kLanes + lane;
    equalise(xhat, p.factor, p.offset, at);
  };

  if (call.mode == TRTCONVERT_WEIGHT_ONLY) {
    if (lane == 0) p.out.scale[row] = unquantised_scale(sample.usable);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = i * kLanes + lane;
      if (at >= p.vectors) continue;
      if (p.factor || p.offset) {
        float xhat[kVector];
        values_of(i, xhat);
        round<T>(xhat, x[i]);
      }
      p.out.store_16bit(first + at, x[i].words);
    }
    return;
  }

  float amax = 0.f;
  if (p.factor || p.offset) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (i * kLanes + lane >= p.vectors) continue;
      float xhat[kVector];
      values_of(i, xhat);
#pragma unroll
      for (int c = 0; c < kVector; ++c) amax = nan_max(amax, fabsf(xhat[c]));
    }
  } else {
    typename Pair<T>::Type largest = Pair<T>::round(0.f, 0.f);
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
#pragma unroll
      for (int c = 0; c < kVector / 2; ++c) largest = __hmax2_nan(largest, __habs2(x[i].pairs[c]));
    const float2 both = Pair<T>::widen(largest);
    amax = nan_max(both.x, both.y);
  }
  const RowScale scale = row_scale(call, sample, group_max<kLanes>(amax));
  if (lane == 0) p.out.scale[row] = scale.stored();
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = i * kLanes + lane;
    if (at >= p.vectors) continue;
    float xhat[kVector];
    values_of(i, xhat);
    p.out.store_int8(first + at, scale.quantised(xhat));
  }
}

template <typename T>
cudaError_t launch(const Params& p, bool early, cudaStream_t stream) {
  const auto with = [&](auto lanes, auto vectors) {
    constexpr int kLanes = lanes(), kRows = kThreads<kLanes> / kLanes;
    const dim3 grid(static_cast<unsigned>((p.rows - 1) / kRows + 1));
    return launch_kernel(quantise_rows_kernel<T, kLanes, vectors()>, grid, kThreads<kLanes>, 0, stream, early, p);
  };
  const auto fits = [&](int lanes, int vectors) { return p.vectors <= lanes * vectors; };
  using std::integral_constant;
#define TRTCONVERT_ROWS_OF(lanes, vectors) \
  if (fits(lanes, vectors)) return with(integral_constant<int, lanes>(), integral_constant<int, vectors>())
  TRTCONVERT_ROWS_OF(32, 2);
  TRTCONVERT_ROWS_OF(32, 3);
  TRTCONVERT_ROWS_OF(32, 5);
  TRTCONVERT_ROWS_OF(32, 8);
  TRTCONVERT_ROWS_OF(128, 3);
  TRTCONVERT_ROWS_OF(128, 5);
  TRTCONVERT_ROWS_OF(128, 8);
  TRTCONVERT_ROWS_OF(128, 12);
  TRTCONVERT_ROWS_OF(512, 5);
  TRTCONVERT_ROWS_OF(512, 8);
  TRTCONVERT_ROWS_OF(512, 12);
#undef TRTCONVERT_ROWS_OF
  return with(integral_constant<int, 512>(), integral_constant<int, 16>());
}

constexpr long long kMostRows = (1LL << 31) - 1;
constexpr int kLeastChannels = 16, kMostChannels = 65536;
static_assert(512 * 16 * kVector == kMostChannels);

TrtConvertStatus check(const TrtConvertQuantiseParams* c, Report& report) {
  if (!c) return report.fail(TRTCONVERT_INVALID_ARGUMENT, "params: expected a pointer, got null");
  if (report.check_caller(*c, TRTCONVERT_QUANTISE_VERSION, "quantise.h")) return report.status;
  if (c->rows < 1 || c->rows > kMostRows) return report.invalid_int("rows", "1..2^31 - 1", c->rows);
  if (c->channels < kLeastChannels || c->channels > kMostChannels || c->channels % kLeastChannels)
    return report.invalid_int("channels", "16..65536 in steps of 16", c->channels);
  if (report.check_data_type(c->data_type)) return report.status;
  if (check_table(c->table, c->rows, report)) return report.status;
  return report.check_flag("starts_early", c->starts_early);
}

TrtConvertStatus check_tensors(const TrtConvertQuantiseParams& c, Report& report) {
  if (report.check_tensors({{"x", c.x}, {"factor", c.factor, true}, {"offset", c.offset, true}, {"payload", c.payload},
                            {"row_scale", c.row_scale}}))
    return report.status;
  return check_table_tensors(c.table, report);
}

}  // namespace
}  // namespace trtconvert::quantise_rows

using namespace trtconvert;

extern "C" {

TrtConvertStatus trtconvert_quantise_check(const TrtConvertQuantiseParams* params, char* message, size_t message_size) {
  Report report(message, message_size);
  return quantise_rows::check(params, report);
}

TrtConvertStatus trtconvert_quantise_run(const TrtConvertQuantiseParams* params, char* message, size_t message_size) {
  using namespace quantise_rows;
  Report report(message, message_size);
  if (check(params, report) || check_tensors(*params, report)) return report.status;
  Device device;
  if (const cudaError_t error = device.read()) return report.no_device(error);
  const int rows = static_cast<int>(params->rows);
  const Params p = {params->table,
                    static_cast<const uint4*>(params->x),
                    reinterpret_cast<const float4*>(params->factor),
                    reinterpret_cast<const float4*>(params->offset),
                    {params->payload, params->row_scale},
                    rows,
                    rows / params->table.batch,
                    params->channels / kVector};
  const auto stream = static_cast<cudaStream_t>(params->stream);
  const bool early = params->starts_early && device.starts_early();
  return report.launched(params->data_type == TRTCONVERT_BFLOAT16 ? quantise_rows::launch<__nv_bfloat16>(p, early, stream)
                                                                  : quantise_rows::launch<__half>(p, early, stream),
                         "quantise rows");
}

}  // extern "C"
