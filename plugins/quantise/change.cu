// Deltas of rows between steps for INT8 layers: the kernel and its C API. Nothing here throws.
#include "trtconvert/quantise_change.h"

#include <type_traits>

#include "common/activation.cuh"
#include "common/device.h"
#include "common/early_launch.cuh"
#include "common/layer_modes.h"
#include "common/quantised_row.cuh"
#include "common/report.h"
#include "common/vector.cuh"

namespace trtconvert::quantise_change {
namespace {

struct Params {
  const uint4* x;        // [rows, vectors]
  const float4* factor;  // [vectors, 2], or null
  const uint4* a_hat;    // [rows, vectors]
  const float* scales;   // [batch, places], from the place on
  QuantisedRows out;
  uint4* a_next;  // [rows, vectors]
  TrtConvertActivation activation;
  int rows;
  int sample_rows;
  int places;
  int vectors;  // K / kVector
};

constexpr int kThreads = 128;
constexpr int kMostInFlight = 4;  // vectors of x and of a_hat that a thread loads before it needs the first

// A row belongs to some lanes of a warp, or to a thread block.
template <typename T, int kLanes, int kInFlight>
__global__ void __launch_bounds__(kThreads) quantise_change_kernel(const __grid_constant__ Params p) {
  let_next_kernel_start();  // a layer's thread blocks find room where these end
  wait_for_previous_kernel();
  constexpr int kRows = kThreads / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int64_t row = int64_t{blockIdx.x} * kRows + threadIdx.x / kLanes;
  const bool exists = row < p.rows;  // otherwise the lane only takes part in the warp's maximum
  const int64_t first = row * p.vectors;
  const int vectors = exists ? p.vectors : 0;
  const float signed_scale = exists ? p.scales[row / p.sample_rows * p.places] : 1.f;
  const bool begins = signbit(signed_scale);
  const float scale = fabsf(signed_scale), inverse = 1.f / scale;
  float amax = 0.f;
  for (int from = lane; from < vectors; from += kInFlight * kLanes) {
    Vector<T> x[kInFlight], a[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int at = from + i * kLanes;
      x[i].words = at < vectors ? p.x[first + at] : uint4{};
      a[i].words = at < vectors && !begins ? p.a_hat[first + at] : uint4{};
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int at = from + i * kLanes;
      if (at >= vectors) break;
      float xhat[kVector], known[kVector];
      unpack<T>(x[i], xhat);
      unpack<T>(a[i], known);
      if (p.activation) {
#pragma unroll
        for (int c = 0; c < kVector; ++c) xhat[c] = activated(p.activation, xhat[c]);
      }
      equalise(xhat, p.factor, nullptr, at);
      uint32_t codes[kVector];
      // Each product and sum is rounded, as between tensor operations: results equal those of any implementation.
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        const float change = __fsub_rn(xhat[c], known[c]);
        amax = nan_max(amax, fabsf(change));
        codes[c] = quantise<true>(__fmul_rn(change, inverse), 1.f);
        known[c] = __fadd_rn(known[c], __fmul_rn(__uint_as_float(codes[c]) - kRoundMagic, scale)) + broken_mark(change);
      }
      round<T>(known, a[i]);
      p.out.store_int8(first + at, make_uint2(pack4(codes[0], codes[1], codes[2], codes[3]),
                                              pack4(codes[4], codes[5], codes[6], codes[7])));
      p.a_next[first + at] = a[i].words;
    }
  }
  amax = group_max<kLanes>(amax);
  const bool usable = usable_scale(scale) && isfinite(amax);
  if (exists && lane == 0) p.out.scale[row] = usable ? signed_scale : __int_as_float(0x7fc00000);
}

template <typename T>
cudaError_t launch(const Params& p, cudaStream_t stream) {
  const auto with = [&](auto lanes, auto in_flight) {
    constexpr int kRows = kThreads / lanes();
    const dim3 grid(static_cast<unsigned>((p.rows - 1) / kRows + 1));
    return launch_kernel(quantise_change_kernel<T, lanes(), in_flight()>, grid, kThreads, 0, stream, false, p);
  };
  using std::integral_constant;
#define TRTCONVERT_ROWS_OF(lanes, most) \
  if (p.vectors <= (lanes) * (most)) return with(integral_constant<int, lanes>(), integral_constant<int, most>())
  TRTCONVERT_ROWS_OF(8, 2);
  TRTCONVERT_ROWS_OF(16, 2);
  TRTCONVERT_ROWS_OF(32, 2);
  TRTCONVERT_ROWS_OF(32, 3);
  TRTCONVERT_ROWS_OF(32, 4);
#undef TRTCONVERT_ROWS_OF
  return with(integral_constant<int, kThreads>(), integral_constant<int, kMostInFlight>());
}

constexpr long long kMostRows = (1LL << 31) - 1;
constexpr int kLeastChannels = 16, kMostChannels = 65536;
constexpr int kMostPlaces = 65536;

TrtConvertStatus check(const TrtConvertQuantiseChangeParams* c, Report& report) {
  if (!c) return report.fail(TRTCONVERT_INVALID_ARGUMENT, "params: expected a pointer, got null");
  if (report.check_caller(*c, TRTCONVERT_QUANTISE_CHANGE_VERSION, "quantise_change.h")) return report.status;
  if (c->rows < 1 || c->rows > kMostRows) return report.invalid_int("rows", "1..2^31 - 1", c->rows);
  if (c->channels < kLeastChannels || c->channels > kMostChannels || c->channels % kLeastChannels)
    return report.invalid_int("channels", "16..65536 in steps of 16", c->channels);
  if (report.check_data_type(c->data_type)) return report.status;
  if (c->activation != TRTCONVERT_NO_ACTIVATION && c->activation != TRTCONVERT_GELU && c->activation != TRTCONVERT_GELU_TANH)
    return report.invalid_int("activation", "0 (none), 2 (GELU) or 3 (GELU by tanh)", c->activation);
  if (check_samples(c->batch, c->rows, report)) return report.status;
  if (c->places < 1 || c->places > kMostPlaces) return report.invalid_int("places", "1..65536", c->places);
  if (c->place < 0 || c->place >= c->places)
    return report.fail(TRTCONVERT_INVALID_ARGUMENT, "place: expected one of %d columns of scales, from 0, got %d", c->places, c->place);
  return TRTCONVERT_OK;
}

TrtConvertStatus check_tensors(const TrtConvertQuantiseChangeParams& c, Report& report) {
  return report.check_tensors({{"x", c.x}, {"factor", c.factor, true}, {"a_hat", c.a_hat}, {"scales", c.scales}, {"payload", c.payload},
                               {"row_scale", c.row_scale}, {"a_next", c.a_next}});
}

}  // namespace
}  // namespace trtconvert::quantise_change

using namespace trtconvert;

extern "C" {

TrtConvertStatus trtconvert_quantise_change_check(const TrtConvertQuantiseChangeParams* params, char* message, size_t message_size) {
  Report report(message, message_size);
  return quantise_change::check(params, report);
}

TrtConvertStatus trtconvert_quantise_change_run(const TrtConvertQuantiseChangeParams* params, char* message, size_t message_size) {
  using namespace quantise_change;
  Report report(message, message_size);
  if (check(params, report) || check_tensors(*params, report)) return report.status;
  Device device;
  if (const cudaError_t error = device.read()) return report.no_device(error);
  const int rows = static_cast<int>(params->rows);
  const Params p = {static_cast<const uint4*>(params->x),
                    reinterpret_cast<const float4*>(params->factor),
                    static_cast<const uint4*>(params->a_hat),
                    params->scales + params->place,
                    {params->payload, params->row_scale},
                    static_cast<uint4*>(params->a_next),
                    static_cast<TrtConvertActivation>(params->activation),
                    rows,
                    rows / params->batch,
                    params->places,
                    params->channels / kVector};
  const auto stream = static_cast<cudaStream_t>(params->stream);
  return report.launched(params->data_type == TRTCONVERT_BFLOAT16 ? quantise_change::launch<__nv_bfloat16>(p, stream)
                                                                  : quantise_change::launch<__half>(p, stream),
                         "quantise changes");
}

}  // extern "C"
