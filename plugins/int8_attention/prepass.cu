// The factors of norms across heads, and the pre-pass: selects its instance for the padded head dims.
#include "prepass.cuh"

namespace trtconvert::attention {
namespace prepass {

// prepass_instance.cu.in
extern template cudaError_t launch<8>(const Params& params, cudaStream_t stream);
extern template cudaError_t launch<16>(const Params& params, cudaStream_t stream);
extern template cudaError_t launch<32>(const Params& params, cudaStream_t stream);

// The factors of a norm across heads, one warp a token.
constexpr int kFactorThreads = 256;
constexpr int kFactorTokens = kFactorThreads / 32;
constexpr int kFactorLoads = 4;  // of 16 bytes, in flight per thread

template <typename T>
__global__ void __launch_bounds__(kFactorThreads) norm_factors_kernel(const __grid_constant__ Params p) {
  const int query_work = ceil_div(p.num_queries, kFactorTokens);
  const bool is_query = blockIdx.x < query_work;
  const int token = (blockIdx.x - (is_query ? 0 : query_work)) * kFactorTokens + threadIdx.x / 32;
  const int tokens = is_query ? p.num_queries : p.num_keys, heads = is_query ? p.heads : p.kv_heads;
  if (token >= tokens) return;
  const int part = part_of(p, token);
  const Tensors& tensors = p.parts[part];
  const TrtConvertStrides& strides = is_query ? tensors.q_strides : tensors.k_strides;
  const T* const source = static_cast<const T*>(is_query ? tensors.q : tensors.k) + blockIdx.y * strides.batch +
                          (token - first_token(p, part)) * strides.token;

  // Neighbouring lanes take neighbouring chunks of a head, and then those of the next head: if a token's heads are adjacent, the
  // warp's bytes are too. Each step moves the warp 32 chunks further, with additions only.
  const int lane = threadIdx.x % 32;
  const unsigned chunks = p.head_dim / 8, further_chunks = 32 % chunks;
  const int64_t further = 32 / chunks * strides.head + further_chunks * 8, to_next_head = strides.head - p.head_dim;
  unsigned chunk = lane % chunks;
  const T* next = source + lane / chunks * strides.head + chunk * 8;
  float squares = 0.f;
  for (int left = heads * chunks; left > 0; left -= 32 * kFactorLoads) {
    uint4 data[kFactorLoads];
#pragma unroll
    for (int i = 0; i < kFactorLoads; ++i) {
      // Beyond the last chunk the first one is loaded again: with a condition, the compiler lets each load wait for the previous
      // one.
      data[i] = __ldg(reinterpret_cast<const uint4*>(lane < left - i * 32 ? next : source));
      next += further;
      chunk += further_chunks;
      if (chunk >= chunks) chunk -= chunks, next += to_next_head;
    }
#pragma unroll
    for (int i = 0; i < kFactorLoads; ++i) {
      float x[8];
      unpack8<T>(data[i], x);
      squares += lane < left - i * 32 ? squares_of(x) : 0.f;
    }
  }
  squares = lane_sum<32>(squares);
  float* const factors = is_query ? p.q_norm_factors : p.k_norm_factors;
  if (lane == 0) factors[int64_t(blockIdx.y) * tokens + token] = rsqrtf(squares / (heads * p.head_dim) + p.norm_epsilon);
}

template <typename T>
cudaError_t launch_norm_factors(const Params& p, cudaStream_t stream) {
  const dim3 grid(ceil_div(p.num_queries, kFactorTokens) + ceil_div(p.num_keys, kFactorTokens), p.batch);
  norm_factors_kernel<T><<<grid, kFactorThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace prepass

// Both kernels are launched without the programmatic attribute, so each begins after all earlier work has ended. The pre-pass finds
// complete factors. The factors' kernel of the next call may overwrite them: this call's attention kernel has ended, and that kernel
// waited for the pre-pass, the last reader of the factors.
cudaError_t launch_prepass(const Params& params, cudaStream_t stream) {
  if (params.norm_across_heads) {
    const cudaError_t error = params.bf16 ? prepass::launch_norm_factors<__nv_bfloat16>(params, stream)
                                          : prepass::launch_norm_factors<__half>(params, stream);
    if (error != cudaSuccess) return error;
  }
  if (params.dims.qk <= 64) return prepass::launch<8>(params, stream);
  if (params.dims.qk <= 128) return prepass::launch<16>(params, stream);
  return prepass::launch<32>(params, stream);
}

}  // namespace trtconvert::attention
