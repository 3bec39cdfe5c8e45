// The weighted sum of tensors: the kernel and its C API. Nothing here throws.
#include "trtconvert/weighted_sum.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>

#include "common/device.h"
#include "common/early_launch.cuh"
#include "common/report.h"

namespace trtconvert::weighted_sum {
namespace {

constexpr int kThreads = 256;
constexpr int kAtOnce = 4;  // numbers of a thread and a term that are loaded together
constexpr int kBlocksPerMultiprocessor = 8;

struct Terms {
  TrtConvertTerm of[TRTCONVERT_MOST_TERMS];
};

__device__ __forceinline__ float load(const TrtConvertTerm& term, int64_t at) {
  if (term.data_type == TRTCONVERT_FLOAT32) return static_cast<const float*>(term.x)[at];
  if (term.data_type == TRTCONVERT_BFLOAT16) return __bfloat162float(static_cast<const __nv_bfloat16*>(term.x)[at]);
  return __half2float(static_cast<const __half*>(term.x)[at]);
}

__device__ __forceinline__ void store(float* sum, float value) { *sum = value; }
__device__ __forceinline__ void store(__half* sum, float value) { *sum = __float2half_rn(value); }
__device__ __forceinline__ void store(__nv_bfloat16* sum, float value) { *sum = __float2bfloat16_rn(value); }

// The sum may be a term, so nothing is read through the read-only cache. A thread reads and writes its own numbers alone.
template <typename T>
__global__ void __launch_bounds__(kThreads) sum_kernel(Terms terms, int num_terms, T* sum, int64_t count) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x; first < count; first += kAtOnce * step) {
    float total[kAtOnce] = {};
#pragma unroll
    for (int t = 0; t < TRTCONVERT_MOST_TERMS; ++t) {
      if (t >= num_terms) break;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (first + i * step < count) total[i] = fmaf(terms.of[t].factor, load(terms.of[t], first + i * step), total[i]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (first + i * step < count) store(sum + first + i * step, total[i]);
  }
}

constexpr long long kMostNumbers = 1LL << 40;

size_t bytes_of(int32_t type) { return type == TRTCONVERT_FLOAT32 ? 4 : 2; }

TrtConvertStatus check_type(const char* field, int32_t type, Report& report) {
  if (type >= TRTCONVERT_FLOAT16 && type <= TRTCONVERT_FLOAT32) return TRTCONVERT_OK;
  return report.invalid_int(field, "0 (float16), 1 (bfloat16) or 2 (float32)", type);
}

TrtConvertStatus check(const TrtConvertWeightedSumParams* c, Report& report) {
  if (!c) return report.fail(TRTCONVERT_INVALID_ARGUMENT, "params: expected a pointer, got null");
  if (report.check_caller(*c, TRTCONVERT_WEIGHTED_SUM_VERSION, "weighted_sum.h")) return report.status;
  if (c->count < 1 || c->count > kMostNumbers) return report.invalid_int("count", "1..2^40", c->count);
  if (c->num_terms < 1 || c->num_terms > TRTCONVERT_MOST_TERMS) return report.invalid_int("num_terms", "1..4", c->num_terms);
  if (check_type("data_type", c->data_type, report)) return report.status;
  for (int t = 0; t < c->num_terms; ++t) {
    const TrtConvertTerm& term = c->terms[t];
    if (check_type("terms: data_type", term.data_type, report)) return report.status;
    if (!std::isfinite(term.factor))
      return report.fail(TRTCONVERT_INVALID_ARGUMENT, "terms: factor: expected a finite number, got %g", term.factor);
  }
  return TRTCONVERT_OK;
}

TrtConvertStatus check_pointers(const TrtConvertWeightedSumParams& c, Report& report) {
  for (int t = 0; t < c.num_terms; ++t)
    if (report.check_pointer("terms: x", c.terms[t].x, bytes_of(c.terms[t].data_type))) return report.status;
  return report.check_pointer("sum", c.sum, bytes_of(c.data_type));
}

template <typename T>
cudaError_t launch(const TrtConvertWeightedSumParams& c, unsigned blocks) {
  Terms terms = {};
  std::copy_n(c.terms, c.num_terms, terms.of);
  return launch_kernel(sum_kernel<T>, dim3(blocks), kThreads, 0, static_cast<cudaStream_t>(c.stream), false, terms,
                       static_cast<int>(c.num_terms), static_cast<T*>(c.sum), c.count);
}

}  // namespace
}  // namespace trtconvert::weighted_sum

using namespace trtconvert;

extern "C" {

TrtConvertStatus trtconvert_weighted_sum_check(const TrtConvertWeightedSumParams* params, char* message, size_t message_size) {
  Report report(message, message_size);
  return weighted_sum::check(params, report);
}

TrtConvertStatus trtconvert_weighted_sum_run(const TrtConvertWeightedSumParams* params, char* message, size_t message_size) {
  using namespace weighted_sum;
  Report report(message, message_size);
  if (check(params, report) || check_pointers(*params, report)) return report.status;
  Device device;
  if (const cudaError_t error = device.read()) return report.no_device(error);
  const int64_t needed = (params->count + kThreads - 1) / kThreads, room = int64_t{device.multiprocessors} * kBlocksPerMultiprocessor;
  const unsigned blocks = static_cast<unsigned>(std::min(needed, room));
  const auto launched = params->data_type == TRTCONVERT_FLOAT32    ? launch<float>
                        : params->data_type == TRTCONVERT_BFLOAT16 ? launch<__nv_bfloat16>
                                                                   : launch<__half>;
  return report.launched(launched(*params, blocks), "weighted sum");
}

}  // extern "C"
