// Shared code of kernels that write quantised rows (layer_modes.h), in vectors of eight channels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/layer_modes.cuh"
#include "common/vector.cuh"

namespace trtconvert {

struct QuantisedRows {
  void* payload;  // rows, INT8 or 16-bit
  float* scale;   // [rows]

  // The vector with this number among the vectors of all rows.
  __device__ __forceinline__ void store_int8(int64_t vector, uint2 bytes) const { static_cast<uint2*>(payload)[vector] = bytes; }
  __device__ __forceinline__ void store_16bit(int64_t vector, uint4 words) const { static_cast<uint4*>(payload)[vector] = words; }
};

template <typename T>
__device__ __forceinline__ void unpack(const Vector<T>& vector, float (&channels)[kVector]) {
#pragma unroll
  for (int c = 0; c < kVector / 2; ++c) {
    const float2 pair = Pair<T>::widen(vector.pairs[c]);
    channels[2 * c] = pair.x;
    channels[2 * c + 1] = pair.y;
  }
}

template <typename T>
__device__ __forceinline__ void round(const float (&channels)[kVector], Vector<T>& vector) {
#pragma unroll
  for (int c = 0; c < kVector / 2; ++c) vector.pairs[c] = Pair<T>::round(channels[2 * c], channels[2 * c + 1]);
}

// (x - offset) * factor of a vector's channels; either may be absent.
__device__ __forceinline__ void equalise(float (&x)[kVector], const float4* factor, const float4* offset, int vector) {
  if (offset) {
    const float4 low = offset[2 * vector], high = offset[2 * vector + 1];
    x[0] -= low.x, x[1] -= low.y, x[2] -= low.z, x[3] -= low.w;
    x[4] -= high.x, x[5] -= high.y, x[6] -= high.z, x[7] -= high.w;
  }
  if (factor) {
    const float4 low = factor[2 * vector], high = factor[2 * vector + 1];
    x[0] *= low.x, x[1] *= low.y, x[2] *= low.z, x[3] *= low.w;
    x[4] *= high.x, x[5] *= high.y, x[6] *= high.z, x[7] *= high.w;
  }
}

struct RowScale {
  float scale, inverse;
  bool clamps;  // the scale does not come from the row
  bool usable;

  __device__ __forceinline__ float stored() const { return usable ? scale : __int_as_float(0x7fc00000); }

  __device__ __forceinline__ uint2 quantised(const float (&xhat)[kVector]) const {
    return clamps ? quantise8_quotients<true>(xhat, scale, inverse) : quantise8_quotients<false>(xhat, scale, inverse);
  }
};

// Scale of a row in an INT8 mode, from its largest magnitude.
__device__ __forceinline__ RowScale row_scale(const CallMode& call, const Sample& sample, float amax) {
  const bool dynamic = call.mode == TRTCONVERT_DYNAMIC;
  const float scale = dynamic ? fmaxf(amax / 127.f, kLeastScale) : sample.x_scale;
  return {scale, 1.f / scale, !dynamic, sample.usable && isfinite(amax)};
}

// Scale of a row that stays in 16 bits.
__device__ __forceinline__ float unquantised_scale(bool usable) { return __int_as_float(usable ? 0xbf800000 : 0xffc00000); }

// Maximum over the threads that share a row: some lanes of a warp, or a whole thread block; every thread gets the maximum.
template <int kLanes>
__device__ __forceinline__ float group_max(float x) {
  x = row_max<(kLanes < 32 ? kLanes : 32)>(x);
  if constexpr (kLanes > 32) {
    __shared__ float of_warps[kLanes / 32];
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = row_max<kLanes / 32>(of_warps[threadIdx.x % (kLanes / 32)]);
  }
  return x;
}

}  // namespace trtconvert
