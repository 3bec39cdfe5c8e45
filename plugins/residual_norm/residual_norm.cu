// A residual connection and the layer norm behind it: the kernel and its C API. Nothing here throws.
#include "trtconvert/residual_norm.h"

#include <type_traits>

#include "common/arithmetic.cuh"
#include "common/device.h"
#include "common/early_launch.cuh"
#include "common/layer_modes.h"
#include "common/quantised_row.cuh"
#include "common/report.h"
#include "common/vector.cuh"

namespace trtconvert::residual_norm {
namespace {

constexpr int kWarps = 4;  // of a thread block, with a row each
constexpr int kWarpVectors = 32;

struct Params {
  const uint4* x;         // [rows, vectors]
  const uint4* residual;  // [rows, vectors]
  const uint4* weight;    // [vectors]
  const uint4* bias;      // [vectors]
  uint4* sum;             // [rows, vectors]
  uint4* normed;          // [rows, vectors]
  int64_t rows;
  int vectors;          // C / kVector
  float epsilon;
  float inverse_count;  // 1 / C
};

// Quantised rows beside normed, or in its place: it may be null.
struct QuantisingParams : Params {
  TrtConvertModeTable table;
  const float4* factor;  // [vectors, 2], or null
  const float4* offset;  // [vectors, 2], or null
  QuantisedRows out;
  int sample_rows;
};

// A row's remaining work: a warp has the row in registers, up to kVectors vectors a lane.
template <typename T, int kVectors>
__device__ __forceinline__ void quantise_row(const QuantisingParams& p, const Vector<T> (&normed)[kVectors], int64_t row) {
  const int lane = threadIdx.x % 32;
  const int64_t first = row * p.vectors;
  const CallMode call = call_mode(p.table);
  const Sample sample = sample_of(p.table, call, static_cast<int>(row) / p.sample_rows);
  const auto values_of = [&](int i, float(&xhat)[kVector]) {
    unpack<T>(normed[i], xhat);
    equalise(xhat, p.factor, p.offset, i * kWarpVectors + lane);
  };
  if (call.mode == TRTCONVERT_WEIGHT_ONLY) {
    if (lane == 0) p.out.scale[row] = unquantised_scale(sample.usable);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = i * kWarpVectors + lane;
      if (at >= p.vectors) continue;
      float xhat[kVector];
      values_of(i, xhat);
      Vector<T> rounded;
      round<T>(xhat, rounded);
      p.out.store_16bit(first + at, rounded.words);
    }
    return;
  }
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (i * kWarpVectors + lane >= p.vectors) continue;
    float xhat[kVector];
    values_of(i, xhat);
#pragma unroll
    for (int c = 0; c < kVector; ++c) amax = nan_max(amax, fabsf(xhat[c]));
  }
  const RowScale scale = row_scale(call, sample, row_max<32>(amax));
  if (lane == 0) p.out.scale[row] = scale.stored();
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = i * kWarpVectors + lane;
    if (at >= p.vectors) continue;
    float xhat[kVector];
    values_of(i, xhat);
    p.out.store_int8(first + at, scale.quantised(xhat));
  }
}

// A warp has a row in registers, up to kVectors vectors a lane: one pass over memory, with every load in flight before the first is
// used.
template <typename T, int kVectors, typename P>
__global__ void __launch_bounds__(kWarps * 32) residual_norm_kernel(const __grid_constant__ P p) {
  constexpr bool kQuantises = std::is_same_v<P, QuantisingParams>;
  let_next_kernel_start();  // a linear layer's thread blocks find room where these end
  wait_for_previous_kernel();
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= p.rows) return;
  const int lane = threadIdx.x % 32;
  const int64_t first = row * p.vectors;
  Vector<T> sums[kVectors], residual[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = i * kWarpVectors + lane;
    sums[i].words = residual[i].words = uint4{};
    if (at >= p.vectors) continue;
    sums[i].words = p.x[first + at];
    residual[i].words = p.residual[first + at];
  }
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
#pragma unroll
    for (int c = 0; c < kVector / 2; ++c) {
      sums[i].pairs[c] = sum_of<T>(sums[i].pairs[c], residual[i].pairs[c]);
      const float2 sum = Pair<T>::widen(sums[i].pairs[c]);
      total += sum.x + sum.y;
    }
    if (i * kWarpVectors + lane < p.vectors) p.sum[first + i * kWarpVectors + lane] = sums[i].words;
  }
  const float mean = lane_sum<32>(total) * p.inverse_count;
  // From the differences, not from a sum of squares, which would cancel for a row far from zero.
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (i * kWarpVectors + lane >= p.vectors) continue;
#pragma unroll
    for (int c = 0; c < kVector / 2; ++c) {
      const float2 sum = Pair<T>::widen(sums[i].pairs[c]);
      squares += (sum.x - mean) * (sum.x - mean) + (sum.y - mean) * (sum.y - mean);
    }
  }
  const float factor = 1.f / sqrtf(lane_sum<32>(squares) * p.inverse_count + p.epsilon);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = i * kWarpVectors + lane;
    if (at >= p.vectors) continue;
    Vector<T> weight, bias, normed;
    weight.words = p.weight[at];
    bias.words = p.bias[at];
#pragma unroll
    for (int c = 0; c < kVector / 2; ++c) {
      const float2 sum = Pair<T>::widen(sums[i].pairs[c]);
      const float2 w = Pair<T>::widen(weight.pairs[c]), b = Pair<T>::widen(bias.pairs[c]);
      normed.pairs[c] = Pair<T>::round((sum.x - mean) * factor * w.x + b.x, (sum.y - mean) * factor * w.y + b.y);
    }
    if (!kQuantises || p.normed) p.normed[first + at] = normed.words;
    if constexpr (kQuantises) sums[i].words = normed.words;
  }
  if constexpr (kQuantises) quantise_row<T, kVectors>(p, sums, row);
}

template <typename T, typename P>
cudaError_t launch(const P& p, bool early, cudaStream_t stream) {
  const auto with = [&](auto kernel) {
    return launch_kernel(kernel, dim3(static_cast<unsigned>((p.rows + kWarps - 1) / kWarps)), kWarps * 32, 0, stream, early, p);
  };
  const int per_lane = (p.vectors + kWarpVectors - 1) / kWarpVectors;
  if (per_lane <= 2) return with(residual_norm_kernel<T, 2, P>);
  if (per_lane == 3) return with(residual_norm_kernel<T, 3, P>);
  if (per_lane <= 5) return with(residual_norm_kernel<T, 5, P>);
  if (per_lane <= 8) return with(residual_norm_kernel<T, 8, P>);
  if (per_lane <= 12) return with(residual_norm_kernel<T, 12, P>);
  return with(residual_norm_kernel<T, 16, P>);
}
static_assert(16 * kWarpVectors * kVector == TRTCONVERT_RESIDUAL_NORM_MOST_CHANNELS);

constexpr long long kMostRows = 1LL << 31;  // the grid has at most 2^31 - 1 thread blocks

TrtConvertStatus check(const TrtConvertResidualNormParams* c, Report& report) {
  if (!c) return report.fail(TRTCONVERT_INVALID_ARGUMENT, "params: expected a pointer, got null");
  if (report.check_caller(*c, TRTCONVERT_RESIDUAL_NORM_VERSION, "residual_norm.h")) return report.status;
  if (c->rows < 1 || c->rows > kMostRows) return report.invalid_int("rows", "1..2^31", c->rows);
  if (c->channels < kVector || c->channels > TRTCONVERT_RESIDUAL_NORM_MOST_CHANNELS || c->channels % kVector)
    return report.invalid_int("channels", "8..4096 in steps of 8", c->channels);
  if (report.check_data_type(c->data_type)) return report.status;
  if (report.check_epsilon(c->epsilon)) return report.status;
  if (report.check_flag("starts_early", c->starts_early)) return report.status;
  if (!c->table.mode_set) return TRTCONVERT_OK;
  if (c->rows >= kMostRows) return report.invalid_int("rows", "1..2^31 - 1 with quantised rows", c->rows);
  if (c->channels % 16) return report.invalid_int("channels", "16..4096 in steps of 16 with quantised rows", c->channels);
  return check_table(c->table, c->rows, report);
}

TrtConvertStatus check_tensors(const TrtConvertResidualNormParams& c, Report& report) {
  const bool quantises = c.table.mode_set;
  if (report.check_tensors({{"x", c.x}, {"residual", c.residual}, {"weight", c.weight}, {"bias", c.bias}, {"sum", c.sum},
                            {"normed", c.normed, quantises}}))
    return report.status;
  if (c.sum == c.normed)
    return report.fail(TRTCONVERT_INVALID_ARGUMENT, "normed: expected another tensor than sum, got both at %p", c.normed);
  if (!quantises) return TRTCONVERT_OK;
  if (report.check_tensors({{"factor", c.factor, true}, {"offset", c.offset, true}, {"payload", c.payload},
                            {"row_scale", c.row_scale}}))
    return report.status;
  return check_table_tensors(c.table, report);
}

}  // namespace
}  // namespace trtconvert::residual_norm

using namespace trtconvert;

extern "C" {

TrtConvertStatus trtconvert_residual_norm_check(const TrtConvertResidualNormParams* params, char* message, size_t message_size) {
  Report report(message, message_size);
  return residual_norm::check(params, report);
}

TrtConvertStatus trtconvert_residual_norm_run(const TrtConvertResidualNormParams* params, char* message, size_t message_size) {
  using namespace residual_norm;
  Report report(message, message_size);
  if (check(params, report) || check_tensors(*params, report)) return report.status;
  const auto at = [](const void* tensor) { return static_cast<const uint4*>(tensor); };
  const Params p = {at(params->x),
                    at(params->residual),
                    at(params->weight),
                    at(params->bias),
                    static_cast<uint4*>(params->sum),
                    static_cast<uint4*>(params->normed),
                    params->rows,
                    params->channels / kVector,
                    params->epsilon,
                    1.f / static_cast<float>(params->channels)};
  const auto stream = static_cast<cudaStream_t>(params->stream);
  Device device;
  if (const cudaError_t error = device.read()) return report.no_device(error);
  const bool early = params->starts_early && device.starts_early();
  const auto launched = [&](const auto& given) {
    return report.launched(params->data_type == TRTCONVERT_BFLOAT16 ? residual_norm::launch<__nv_bfloat16>(given, early, stream)
                                                                    : residual_norm::launch<__half>(given, early, stream),
                           "residual norm");
  };
  if (!params->table.mode_set) return launched(p);
  return launched(QuantisingParams{p,
                                   params->table,
                                   reinterpret_cast<const float4*>(params->factor),
                                   reinterpret_cast<const float4*>(params->offset),
                                   {params->payload, params->row_scale},
                                   static_cast<int>(params->rows / params->table.batch)});
}

}  // extern "C"
