// One trip over Q, K and V: writes the tile images, their scales and the per-element information of params.h.
//
// One thread block takes 128 tokens of one head of Q, K or V. All of them are held in registers: every 16-byte load is in
// flight before the first use, and the data is read once although the scales need a reduction first.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <type_traits>

#include "launch.h"

namespace trtconvert::attention {
namespace {

constexpr int kThreads = 256;
constexpr int kTokens = 128;  // per thread block: one key tile, two query blocks
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kRoundMagic = 12582912.f;      // 1.5 * 2^23: adding it rounds to an integer (ties to even) in the low bits
constexpr float kScaleFloor = 0x1p-50f;        // an all-zero row or tile; the product of two still is a normal number
constexpr float kTokenScaleFloor = 0x1p-20f;   // mode 2: the smallest sv, part of the numerics

static_assert(kTokens == kKeyTile && kTokens == 2 * kQueryBlock && kKeyTile == 2 * kHalfTile);

enum class Role { kQuery, kKey, kValue };

__device__ __forceinline__ float nan_max(float a, float b) {  // fmaxf would drop a NaN: it must reach its row's scale
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

template <typename T>
__device__ __forceinline__ void unpack8(const uint4& packed, float (&x)[8]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 pair;
    if constexpr (std::is_same_v<T, __half>) {
      pair = __half22float2(reinterpret_cast<const __half2&>(words[i]));
    } else {
      pair = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(words[i]));
    }
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
}

// rne(x * inverse) clamped to +-127, in the low byte.
__device__ __forceinline__ uint32_t quantise(float x, float inverse) {
  const float rounded = fmaf(x, inverse, kRoundMagic);
  return __float_as_uint(fminf(fmaxf(rounded, kRoundMagic - 127.f), kRoundMagic + 127.f));
}

__device__ __forceinline__ uint32_t pack4(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// Maximum over the Lanes threads that share a row.
template <int Lanes>
__device__ __forceinline__ float row_max(float x) {
#pragma unroll
  for (int offset = Lanes / 2; offset > 0; offset /= 2) x = nan_max(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

__device__ __forceinline__ bool usable_scale(float s) { return isfinite(s) && s > 0.f; }

// What a batch element asks for. An unusable timestep or mode is reported through `valid`.
struct Element {
  int mode, bin, num_keys;
  bool valid;
};

__device__ __forceinline__ Element element_of(const Params& p, int b) {
  const float t = p.timestep[b];
  Element e;
  // The product before the quotient: the edges are exact for integer timesteps, as in the reference.
  const float position = floorf(__fdiv_rn(__fmul_rn(t, float(p.num_bins)), p.timestep_max));
  // The clamp in floating point first: a huge timestep must not overflow the conversion.
  e.bin = min(int(fminf(fmaxf(position, 0.f), float(p.num_bins - 1))), p.num_bins - 1);
  e.mode = p.modes[e.bin];
  e.valid = !isnan(t) && e.mode >= 0 && e.mode <= 3;
  if (!e.valid) e.mode = 1;
  e.num_keys = p.key_lengths ? min(max(p.key_lengths[b], 0), p.num_keys) : p.num_keys;
  return e;
}

// Whether every table entry that this head's mode reads is usable. Called by the whole thread block.
__device__ bool tables_usable(const Params& p, const Element& e, int head) {
  const int kv_head = head / p.group;
  bool bad = false;
  if (e.mode == 3 || (e.mode != 0 && !p.dynamic))
    bad = !usable_scale(p.q_scale[int64_t(e.bin) * p.heads + head]) ||
          !usable_scale(p.k_scale[int64_t(e.bin) * p.kv_heads + kv_head]);
  const int64_t row = (int64_t(e.bin) * p.kv_heads + kv_head) * p.head_dim;
  for (int d = threadIdx.x; d < p.head_dim; d += kThreads) {
    if (e.mode != 0 && p.smooth_k) bad |= !isfinite(p.k_offset[row + d]);
    if (e.mode >= 2) bad |= !isfinite(p.v_offset[row + d]) || !usable_scale(p.v_scale[row + d]);
  }
  return !__syncthreads_or(bad);
}

// Lanes: threads per row, each with 8 channels; lanes beyond head_dim hold zeros.
template <typename T, int Lanes>
__global__ void __launch_bounds__(kThreads) prepass_kernel(const __grid_constant__ Params p) {
  constexpr int kRowsPerPass = kThreads / Lanes;
  constexpr int kPasses = kTokens / kRowsPerPass;
  static_assert(kPasses % 4 == 0);  // V packs four keys of one thread into a word

  cudaTriggerProgrammaticLaunchCompletion();

  // Heads run fastest: with tokens outermost in memory, neighbouring thread blocks read neighbouring bytes.
  const int query_tiles = ceil_div(p.num_queries, kTokens);
  int index = blockIdx.x;
  Role role = Role::kQuery;
  int heads = p.heads, tiles = query_tiles;
  if (index >= heads * tiles) {
    index -= heads * tiles;
    heads = p.kv_heads;
    tiles = p.key_tiles;
    role = Role::kKey;
    if (index >= heads * tiles) {
      index -= heads * tiles;
      role = Role::kValue;
    }
  }
  const int head = index % heads, tile = index / heads, b = blockIdx.y;

  const int lane = threadIdx.x % Lanes;
  const int row0 = threadIdx.x / Lanes;
  // Row of a pass. V: four passes of one thread are the four keys of one word of the transposed image.
  const auto row_of = [&](int pass) {
    if (role != Role::kValue) return pass * kRowsPerPass + row0;
    const int word = pass / 4 * kRowsPerPass + row0;  // 0..31
    return word / 4 * 16 + permuted_key(word % 4 * 4 + pass % 4);
  };

  const T* source = static_cast<const T*>(role == Role::kQuery ? p.q : role == Role::kKey ? p.k : p.v);
  const TrtConvertStrides strides = role == Role::kQuery ? p.q_strides : role == Role::kKey ? p.k_strides : p.v_strides;
  const int num_tokens = role == Role::kQuery ? p.num_queries : p.num_keys;
  source += b * strides.batch + head * strides.head + lane * 8;
  const bool has_channels = lane * 8 < p.head_dim;

  uint4 data[kPasses];
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int token = tile * kTokens + row_of(i);
    data[i] = make_uint4(0, 0, 0, 0);
    if (has_channels && token < num_tokens)
      data[i] = __ldg(reinterpret_cast<const uint4*>(source + int64_t(token) * strides.token));
  }

  const Element e = element_of(p, b);
  if (blockIdx.x == 0 && threadIdx.x == 0) p.elements[b] = {e.mode, e.bin, e.num_keys, 0};

  // Keys that do not exist become zeros here: whatever they hold (NaN, say) goes no further.
  const int valid_tokens = (role == Role::kQuery ? p.num_queries : e.num_keys) - tile * kTokens;
  if (role != Role::kQuery) {
    if (valid_tokens <= 0) return;  // never read by the kernels
#pragma unroll
    for (int i = 0; i < kPasses; ++i)
      if (row_of(i) >= valid_tokens) data[i] = make_uint4(0, 0, 0, 0);
  }

  const int64_t kv_tile = (int64_t(b) * p.kv_heads + head) * p.key_tiles + tile;
  const int64_t table_row = (int64_t(e.bin) * p.kv_heads + head) * p.head_dim + lane * 8;  // K and V only

  // 16-bit copies: Q and K of mode 0, V of modes 0 and 1. Images of 64 tokens, chunk of 16 bytes = this lane's 8 channels.
  if (e.mode == 0 || (e.mode == 1 && role == Role::kValue)) {
    const int image_bytes = kHalfTile * 2 * p.dims.pv;
    uint8_t* image = role == Role::kKey ? p.k_images + kv_tile * p.k_tile_bytes : p.v_images + kv_tile * p.v_tile_bytes;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int row = row_of(i), half = row / kHalfTile;
      uint8_t* base = image + half * image_bytes;
      if (role == Role::kQuery) {
        const int block = tile * 2 + half;
        if (block >= p.query_blocks) continue;
        base = p.q_images + ((int64_t(b) * p.heads + head) * p.query_blocks + block) * p.q_block_bytes;
        if (lane == 0)
          p.row_scales[((int64_t(b) * p.heads + head) * p.query_blocks + block) * kQueryBlock + row % kHalfTile] =
              p.softmax_scale * kLog2e;
      }
      if (lane * 8 < p.dims.pv)
        *reinterpret_cast<uint4*>(base + lane * kHalfTile * 16 + row % kHalfTile * 16) = data[i];
    }
    return;
  }

  const bool from_data = p.dynamic && e.mode != 3;  // Q per token and K per tile from the data
  const bool int8_columns = lane * 8 < p.dims.qk;

  if (role == Role::kQuery) {
    const bool usable = tables_usable(p, e, head) && e.valid;
    const float fixed = from_data ? 0.f : p.q_scale[int64_t(e.bin) * p.heads + head];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      float x[8];
      unpack8<T>(data[i], x);
      float scale = fixed;
      if (from_data) {
        float amax = 0.f;
#pragma unroll
        for (int c = 0; c < 8; ++c) amax = nan_max(amax, fabsf(x[c]));
        scale = nan_max(row_max<Lanes>(amax) * (1.f / 127.f), kScaleFloor);
      }
      const float inverse = __frcp_rn(scale);
      const int row = row_of(i), block = tile * 2 + row / kQueryBlock;
      if (block >= p.query_blocks) continue;
      const int64_t image = (int64_t(b) * p.heads + head) * p.query_blocks + block;
      if (int8_columns) {
        uint32_t q8[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) q8[c] = quantise(x[c], inverse);
        *reinterpret_cast<uint2*>(p.q_images + image * p.q_block_bytes + lane / 2 * kQueryBlock * 16 +
                                  row % kQueryBlock * 16 + lane % 2 * 8) =
            make_uint2(pack4(q8[0], q8[1], q8[2], q8[3]), pack4(q8[4], q8[5], q8[6], q8[7]));
      }
      if (lane == 0)
        p.row_scales[image * kQueryBlock + row % kQueryBlock] =
            usable ? scale * p.softmax_scale * kLog2e : __int_as_float(0x7fffffff);
    }
    return;
  }

  if (role == Role::kKey) {
    float offset[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) offset[c] = p.smooth_k && has_channels ? p.k_offset[table_row + c] : 0.f;
    float scale;
    if (from_data) {
      float amax = 0.f;
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        float x[8];
        unpack8<T>(data[i], x);
        if (row_of(i) < valid_tokens) {
#pragma unroll
          for (int c = 0; c < 8; ++c) amax = nan_max(amax, fabsf(x[c] - offset[c]));
        }
      }
      __shared__ float warp_max[kThreads / 32];
      amax = row_max<32>(amax);
      if (threadIdx.x % 32 == 0) warp_max[threadIdx.x / 32] = amax;
      __syncthreads();
#pragma unroll
      for (int w = 0; w < kThreads / 32; ++w) amax = nan_max(amax, warp_max[w]);
      scale = nan_max(amax * (1.f / 127.f), kScaleFloor);
    } else {
      scale = p.k_scale[int64_t(e.bin) * p.kv_heads + head];
    }
    if (threadIdx.x == 0) p.tile_scales[kv_tile].k = scale;
    if (!int8_columns) return;
    const float inverse = __frcp_rn(scale);
    uint8_t* const image = p.k_images + kv_tile * p.k_tile_bytes + lane / 2 * kKeyTile * 16 + lane % 2 * 8;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      float x[8];
      unpack8<T>(data[i], x);
      const int row = row_of(i);
      uint32_t k8[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) k8[c] = row < valid_tokens ? quantise(x[c] - offset[c], inverse) : 0u;
      *reinterpret_cast<uint2*>(image + row * 16) =
          make_uint2(pack4(k8[0], k8[1], k8[2], k8[3]), pack4(k8[4], k8[5], k8[6], k8[7]));
    }
    return;
  }

  // V of modes 2 and 3, transposed through shared memory. 16 bytes of padding after every 8 rows of the image spread the
  // lanes' words over the banks.
  constexpr int kLaneBytes = 8 * 16 + 16;
  constexpr int kGroupBytes = Lanes * kLaneBytes;  // 16 keys
  __shared__ __align__(16) uint8_t transposed[kKeyTile / 16 * kGroupBytes];
  float offset[8], inverse_channel[8];
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    offset[c] = has_channels ? p.v_offset[table_row + c] : 0.f;
    inverse_channel[c] = has_channels ? __frcp_rn(p.v_scale[table_row + c]) : 0.f;
  }
#pragma unroll
  for (int i = 0; i < kPasses; i += 4) {
    uint32_t v8[4][8];  // [key of the word][channel]
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float x[8];
      unpack8<T>(data[i + j], x);
      const int row = row_of(i + j);
      const bool exists = row < valid_tokens;
#pragma unroll
      for (int c = 0; c < 8; ++c) x[c] = exists ? (x[c] - offset[c]) * inverse_channel[c] : 0.f;
      float inverse = 1.f;
      if (e.mode == 2) {
        float amax = 0.f;
#pragma unroll
        for (int c = 0; c < 8; ++c) amax = nan_max(amax, fabsf(x[c]));
        const float scale = nan_max(row_max<Lanes>(amax) * (1.f / 127.f), kTokenScaleFloor);
        inverse = __frcp_rn(scale);
        if (lane == 0) {
          const int slot = (i / 4 * kRowsPerPass + row0) * 4 + j;
          p.tile_scales[kv_tile].log2_v[slot] = exists ? log2f(scale) : -INFINITY;
          p.tile_scales[kv_tile].inverse_v[slot] = exists ? inverse : 0.f;
        }
      }
#pragma unroll
      for (int c = 0; c < 8; ++c) v8[j][c] = quantise(x[c], inverse);
    }
    const int word = i / 4 * kRowsPerPass + row0;
    uint8_t* const target = transposed + word / 4 * kGroupBytes + lane * kLaneBytes + word % 4 * 4;
#pragma unroll
    for (int c = 0; c < 8; ++c)
      *reinterpret_cast<uint32_t*>(target + c * 16) = pack4(v8[0][c], v8[1][c], v8[2][c], v8[3][c]);
  }
  __syncthreads();
  uint8_t* const image = p.v_images + kv_tile * p.v_tile_bytes;
  for (int c = threadIdx.x; c < kKeyTile / 16 * p.dims.pv; c += kThreads) {
    const int group = c / p.dims.pv, d = c % p.dims.pv;
    *reinterpret_cast<uint4*>(image + c * 16) =
        *reinterpret_cast<const uint4*>(transposed + group * kGroupBytes + d / 8 * kLaneBytes + d % 8 * 16);
  }
}

template <typename T>
cudaError_t launch(const Params& p, cudaStream_t stream) {
  const int64_t blocks =
      int64_t(ceil_div(p.num_queries, kTokens)) * p.heads + int64_t(p.key_tiles) * p.kv_heads * 2;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(blocks), p.batch);
  if (p.dims.qk <= 64) {
    prepass_kernel<T, 8><<<grid, kThreads, 0, stream>>>(p);
  } else if (p.dims.qk <= 128) {
    prepass_kernel<T, 16><<<grid, kThreads, 0, stream>>>(p);
  } else {
    prepass_kernel<T, 32><<<grid, kThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_prepass(const Params& params, cudaStream_t stream) {
  return params.bf16 ? launch<__nv_bfloat16>(params, stream) : launch<__half>(params, stream);
}

}  // namespace trtconvert::attention
