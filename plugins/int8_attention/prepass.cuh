// One pass over Q, K and V (V only if the attention kernel does not read it itself) writes the tile images, their scales and the
// per-element information of params.h.
//
// One thread block takes 128 tokens of one head of Q, K or V, and holds them all in registers: every 16-byte load is in flight
// before the first use, and the data is read once although the scales need a reduction first. A thread block has one head of a
// token: a small kernel (prepass.cu) computes the factors of norms across heads before.
#pragma once

#include <algorithm>

#include "launch.h"
#include "quantise.cuh"

namespace trtconvert::attention::prepass {

constexpr int kTokens = 128;  // per thread block: one key tile, two query blocks
static_assert(kTokens == kKeyTile && kTokens == 2 * kQueryBlock && kKeyTile == 2 * kHalfTile);

// Largest magnitudes of two rows, over the Lanes threads that share each: exact in 16 bits, so that two travel in a word.
template <typename T, int Lanes>
__device__ __forceinline__ float2 largest_of_rows(const uint4& first, const uint4& second) {
  PairOf<T> m{largest8<T>(first), largest8<T>(second)};
#pragma unroll
  for (int offset = Lanes / 2; offset > 0; offset /= 2) m = __hmax2_nan(m, __shfl_xor_sync(0xffffffffu, m, offset));
  return to_float2(m);
}

__device__ __forceinline__ float squares_of(const float (&x)[8]) {
  float sum = 0.f;
#pragma unroll
  for (int c = 0; c < 8; ++c) sum = fmaf(x[c], x[c], sum);
  return sum;
}

// A thread block's work.
struct Tile {
  Element element;
  int head, tile, batch;
  int64_t index;      // of the tile among all of its kind: (batch, head, tile) for K and V, (batch, head) * query_blocks for Q
  int64_t table_row;  // of [T, Hkv, D] tables, K and V only

  // Of K and V.
  template <int Lanes>
  __device__ __forceinline__ void set_key_rows(const Params& p) {
    index = (int64_t(batch) * p.kv_heads + head) * p.key_tiles + tile;
    table_row = (int64_t(element.bin) * p.kv_heads + head) * p.head_dim + threadIdx.x % Lanes * 8;
  }
};

constexpr int kMostBlocksPerSm = 4;

// Mapping of threads to rows: Lanes threads per row with 8 channels each; lanes beyond head_dim hold zeros.
template <int Lanes>
struct Map {
  // A trade-off between registers for loads in flight and warps that hide them: four rows a thread, eight for the longest kind.
  static constexpr int kThreads = Lanes == 8 ? 256 : 512;
  static constexpr int kBlocksPerSm = Lanes == 8 ? kMostBlocksPerSm : Lanes == 16 ? 2 : 1;
  static constexpr int kRowsPerPass = kThreads / Lanes;
  static constexpr int kPasses = kTokens / kRowsPerPass;
  static_assert(kPasses % 4 == 0);  // V packs four keys of one thread into a word
  static_assert(kQueryBlock % kRowsPerPass == 0);  // a pass lies in one query block
};

// The rows of a thread: its first row, and the step between passes.
template <int Lanes, bool kPermuted>
__device__ __forceinline__ int first_row() {
  const int row0 = threadIdx.x / Lanes;
  // V: four passes of one thread are the four keys of one word of the transposed image.
  return kPermuted ? row0 / 4 * 16 + permuted_key(row0 % 4 * 4) : row0;
}
template <int Lanes, bool kPermuted>
__device__ constexpr int row_offset(int pass) {
  constexpr int kRows = Map<Lanes>::kRowsPerPass;
  return kPermuted ? pass / 4 * (kRows / 4 * 16) + permuted_key(pass % 4) : pass * kRows;
}
template <int Lanes, bool kPermuted>
__device__ __forceinline__ int row_of(int pass) {
  return first_row<Lanes, kPermuted>() + row_offset<Lanes, kPermuted>(pass);
}

// Where the key index names the rows of the tile, from the thread's `first` row on.
__device__ __forceinline__ const int32_t* index_of(const Params& p, const Tile& at, int first) {
  const int head = p.index_heads > 1 ? at.head : 0;
  return p.key_index + (int64_t(at.batch) * p.index_heads + head) * p.num_keys + int64_t(at.tile) * kTokens + first;
}

__device__ __forceinline__ int source_key(const Params& p, const int32_t* index) {
  return min(max(__ldg(index), 0), p.source_keys - 1);
}

// Loads all existing rows of the tile, 16 bytes per thread and pass; zeros elsewhere. The rows are in one part. Gathered rows are
// those that p.key_index names in tensors of p.source_keys rows, in either part.
template <typename T, int Lanes, bool kPermuted, bool kGathered>
__device__ __forceinline__ void load(uint4 (&data)[Map<Lanes>::kPasses], const Params& p, const Tile& at,
                                     const void* Tensors::*tensor, TrtConvertStrides Tensors::*strides_of, int tokens) {
  const int lane = threadIdx.x % Lanes, first = first_row<Lanes, kPermuted>();
  const int rows = lane * 8 < p.head_dim ? tokens - at.tile * kTokens - first : 0;
  // The place of a token of its part.
  const auto source = [&](int part, int64_t token) {
    const Tensors& tensors = p.parts[part];
    const TrtConvertStrides& strides = tensors.*strides_of;
    return static_cast<const T*>(tensors.*tensor) + at.batch * strides.batch + at.head * strides.head + token * strides.token +
           lane * 8;
  };
  if constexpr (kGathered) {
    const int32_t* const index = index_of(p, at, first);
    int keys[Map<Lanes>::kPasses];
#pragma unroll
    for (int i = 0; i < Map<Lanes>::kPasses; ++i) {
      const int row = row_offset<Lanes, kPermuted>(i);
      keys[i] = row < rows ? source_key(p, index + row) : 0;
    }
#pragma unroll
    for (int i = 0; i < Map<Lanes>::kPasses; ++i) {
      const int part = part_of(p, keys[i]);
      data[i] = make_uint4(0, 0, 0, 0);
      if (row_offset<Lanes, kPermuted>(i) < rows)
        data[i] = __ldg(reinterpret_cast<const uint4*>(source(part, keys[i] - first_token(p, part))));
    }
  } else {
    const int part = part_of(p, at.tile * kTokens);
    const T* const start = source(part, int64_t(at.tile) * kTokens - first_token(p, part) + first);
    const int64_t stride = (p.parts[part].*strides_of).token;
#pragma unroll
    for (int i = 0; i < Map<Lanes>::kPasses; ++i) {
      const int row = row_offset<Lanes, kPermuted>(i);
      data[i] = make_uint4(0, 0, 0, 0);
      if (row < rows) data[i] = __ldg(reinterpret_cast<const uint4*>(start + row * stride));
    }
  }
}

// Layers before attention. A rotation combines with either norm; a rotation alone uses the first instance.
enum class Layers { kNone, kNormOfHeads, kNormAcrossHeads, kNormOfParts };

// RMS norm and rotation of the tile's rows, in place. Across heads, norm has a row per head, and factors cover all tokens. With two
// parts, norm has a row for the tokens before norm_split and one for the others. Gathered keys keep the tokens' norms and angles.
template <typename T, int Lanes, Layers kLayers, bool kRotary, bool kGathered>
__device__ __forceinline__ void normalise_and_rotate(uint4 (&data)[Map<Lanes>::kPasses], const Params& p, const Tile& at,
                                                     const float* norm, const float* factors, int tokens) {
  constexpr bool kAcrossHeads = kLayers == Layers::kNormAcrossHeads, kOfParts = kLayers == Layers::kNormOfParts;
  const int lane = threadIdx.x % Lanes, last = tokens - at.tile * kTokens - 1;
  // Missing rows and channels are zeros and stay zeros under any factor: they load what other rows load, so that no load depends on
  // a condition.
  const int channel = lane * 8 < p.head_dim ? lane * 8 : 0;
  const int start = kGathered ? 0 : at.tile * kTokens;  // tokens count from here
  const auto existing = [&](int i) {
    const int row = min(row_of<Lanes, false>(i), last);
    return kGathered ? source_key(p, index_of(p, at, row)) : row;
  };
  float weight[8], given[kAcrossHeads ? Map<Lanes>::kPasses : 1];
  if constexpr (kAcrossHeads) {
    norm += at.head * p.head_dim;
    factors += int64_t(at.batch) * tokens + start;
#pragma unroll
    for (int i = 0; i < Map<Lanes>::kPasses; ++i) given[i] = __ldg(factors + existing(i));
  }
  // Where the second part begins, perhaps outside of the tile. A thread's tokens ascend: the first one selects the weights, and only
  // in a tile with both parts the thread switches to the other weights, once.
  const int second_part = kOfParts ? p.norm_split - start : 0;
  const auto is_second = [&](int i) { return (kGathered ? existing(i) : row_of<Lanes, false>(i)) >= second_part; };
  if (kOfParts || norm) load_channels(weight, norm, (kOfParts && is_second(0) ? p.head_dim : 0) + channel, true);
  const float* const rotary = p.rotary + int64_t(start) * p.head_dim + channel;
  const float dim = p.head_dim, inverse_dim = refined_reciprocal(dim);
  float turns[2][8];  // cosine and sine of four pairs, of a row and of the next: they come from L2, mostly
  const auto load_turn = [&](int i) {
    load_channels(turns[i % 2], rotary, kGathered ? int64_t(existing(i)) * p.head_dim : existing(i) * p.head_dim, true);
  };
  if constexpr (kRotary) load_turn(0);
#pragma unroll
  for (int i = 0; i < Map<Lanes>::kPasses; ++i) {
    if (kRotary && i + 1 < Map<Lanes>::kPasses) load_turn(i + 1);
    float x[8];
    unpack8<T>(data[i], x);
    if (kAcrossHeads || kOfParts || norm) {
      if (kOfParts && i > 0 && is_second(i) && !is_second(i - 1)) load_channels(weight, norm, p.head_dim + channel, true);
      float factor;
      if constexpr (kAcrossHeads) {
        factor = given[i];
      } else {
        const float squares = lane_sum<Lanes>(squares_of(x));
        factor = rsqrtf(quotient(squares, dim, inverse_dim) + p.norm_epsilon);
      }
#pragma unroll
      for (int c = 0; c < 8; ++c) x[c] = x[c] * factor * weight[c];
      data[i] = pack8<T>(x);
    }
    if constexpr (kRotary) {
      const float(&turn)[8] = turns[i % 2];
      if (kAcrossHeads || kOfParts || norm) unpack8<T>(data[i], x);
#pragma unroll
      for (int c = 0; c < 8; c += 2) {
        const float first = x[c], second = x[c + 1], cosine = turn[c], sine = turn[c + 1];
        x[c] = first * cosine - second * sine;
        x[c + 1] = second * cosine + first * sine;
      }
      data[i] = pack8<T>(x);
    }
  }
}

template <typename T, int Lanes, Layers kLayers, bool kGathered>
__device__ __forceinline__ void compute_layers(uint4 (&data)[Map<Lanes>::kPasses], const Params& p, const Tile& at,
                                               const float* norm, const float* factors, int tokens) {
  if (p.rotary) {
    normalise_and_rotate<T, Lanes, kLayers, true, kGathered>(data, p, at, norm, factors, tokens);
  } else {
    normalise_and_rotate<T, Lanes, kLayers, false, kGathered>(data, p, at, norm, factors, tokens);
  }
}

// Missing keys become zeros here: their content (NaN, say) goes no further.
template <int Lanes, bool kPermuted>
__device__ __forceinline__ void clear_beyond(uint4 (&data)[Map<Lanes>::kPasses], int valid) {
#pragma unroll
  for (int i = 0; i < Map<Lanes>::kPasses; ++i)
    if (row_of<Lanes, kPermuted>(i) >= valid) data[i] = make_uint4(0, 0, 0, 0);
}

// NaN for each eight channels with a number that is not finite. An infinite key of mode 0 could have a logit of minus infinity, and
// no weight.
template <typename T, int N>
__device__ __forceinline__ void mark_broken(uint4 (&data)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    FiniteCheck<T> check;
    check.take(data[i]);
    if (!check.passed()) data[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
  }
}

// 16-bit copies of two images of 64 tokens: Q and K of mode 0, V of modes 0 and 1.
template <int Lanes, bool kPermuted>
__device__ __forceinline__ void copy_images(const uint4 (&data)[Map<Lanes>::kPasses], uint8_t* first, uint8_t* second,
                                            int columns, bool swizzled = false) {
  const int lane = threadIdx.x % Lanes;
  if (lane * 8 >= columns) return;
#pragma unroll
  for (int i = 0; i < Map<Lanes>::kPasses; ++i) {
    const int row = row_of<Lanes, kPermuted>(i);
    uint8_t* const image = row < kHalfTile ? first : second;
    const int offset = swizzled ? lane / 8 * kHalfTile * 128 + row % kHalfTile * 128 + (lane % 8 ^ row % 8) * 16
                                : lane * kHalfTile * 16 + row % kHalfTile * 16;
    if (image) *reinterpret_cast<uint4*>(image + offset) = data[i];
  }
}

// Stores in lse the part that smoothing takes from each row's logits, in natural units.
template <typename T, int Lanes>
__device__ __forceinline__ void leave_smoothed(const Params& p, const Tile& at, const uint4 (&data)[Map<Lanes>::kPasses]) {
  const Element& e = at.element;
  const int lane = threadIdx.x % Lanes;
  const int64_t table_row = (int64_t(e.bin) * p.kv_heads + at.head / p.group) * p.head_dim + lane * 8;
  float offset[8];
  load_channels(offset, p.k_offset, table_row, p.smooth_k && e.mode != 0 && lane * 8 < p.head_dim);
  float* const lse = p.lse + (int64_t(at.batch) * p.heads + at.head) * p.num_queries;
#pragma unroll
  for (int i = 0; i < Map<Lanes>::kPasses; ++i) {
    float x[8], sum = 0.f;
    unpack8<T>(data[i], x);
#pragma unroll
    for (int c = 0; c < 8; ++c) sum = fmaf(x[c], offset[c], sum);
    sum = lane_sum<Lanes>(sum);
    const int row = at.tile * kTokens + row_of<Lanes, false>(i);
    if (lane == 0 && row < p.num_queries) lse[row] = sum * p.softmax_scale;
  }
}

template <typename T, int Lanes>
__device__ __forceinline__ void quantise_queries(const Params& p, const Tile& at, const uint4 (&data)[Map<Lanes>::kPasses]) {
  const Element& e = at.element;
  const int lane = threadIdx.x % Lanes;
  const int64_t block = at.index + at.tile * 2;
  const bool second = at.tile * 2 + 1 < p.query_blocks;  // the last 64 rows of the tile may not exist at all
  const float logits = p.softmax_scale * kLog2e;
  const int first = first_row<Lanes, false>();
  float* const row_scales = p.row_scales + block * kQueryBlock + first;
  if (e.mode == 0) {
    uint8_t* const image = p.q_images + block * p.q_block_bytes;
    copy_images<Lanes, false>(data, image, second ? image + p.q_block_bytes : nullptr, p.dims.pv);
#pragma unroll
    for (int i = 0; i < Map<Lanes>::kPasses; i += 2) {
      const float2 largest = largest_of_rows<T, Lanes>(data[i], data[i + 1]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = row_offset<Lanes, false>(i + j);
        if (lane == 0 && (second || row < kQueryBlock)) row_scales[row] = logits + broken_mark(j ? largest.y : largest.x);
      }
    }
    return;
  }
  const bool usable = tables_usable(p, e, at.head) && e.valid;
  const bool from_data = p.dynamic && e.mode != 3;
  const float fixed = from_data ? 0.f : p.q_scale[int64_t(e.bin) * p.heads + at.head];
  const float fixed_factor = reciprocal(fixed);
  // Scales of the tables whose product underflows are raised: kernels divide by it. The logits are zero either way.
  const float smallest = from_data ? 0.f : kProductFloor / p.k_scale[int64_t(e.bin) * p.kv_heads + at.head / p.group];
  uint8_t* const image = p.q_images + block * p.q_block_bytes + lane / 2 * kQueryBlock * 16 + lane % 2 * 8 + first * 16;
#pragma unroll
  for (int i = 0; i < Map<Lanes>::kPasses; i += 2) {
    const float2 largest = largest_of_rows<T, Lanes>(data[i], data[i + 1]);
    const float amax[2] = {largest.x, largest.y};
    float scale[2], factor[2] = {fixed_factor, fixed_factor};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      scale[j] = from_data ? query_scale(amax[j]) : fixed + broken_mark(amax[j]);
      if (from_data) factor[j] = reciprocal(scale[j]);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = row_offset<Lanes, false>(i + j), in_second = row / kQueryBlock;
      float x[8];
      unpack8<T>(data[i + j], x);
      const uint2 q8 = from_data ? quantise8<false>(x, factor[j]) : quantise8<true>(x, factor[j]);
      if (in_second && !second) continue;
      if (lane * 8 < p.dims.qk)
        *reinterpret_cast<uint2*>(image + in_second * p.q_block_bytes + row % kQueryBlock * 16) = q8;
      if (lane == 0) row_scales[row] = usable ? nan_max(scale[j] * logits, smallest) : __int_as_float(0x7fffffff);
    }
  }
}

// V is transposed through shared memory. 16 bytes of padding after every 8 rows of the image spread the lanes' words over
// the banks.
template <int Lanes>
struct Shared {
  static constexpr int kLaneBytes = 8 * 16 + 16;
  static constexpr int kGroupBytes = Lanes * kLaneBytes;  // 16 keys
  alignas(16) uint8_t transposed[kKeyTile / 16 * kGroupBytes];
  float warp_values[2][Map<Lanes>::kThreads / 32];
};

// kFull: every key of the tile exists.
template <typename T, int Lanes, bool kFull>
__device__ __forceinline__ void quantise_keys(const Params& p, const Tile& at, uint4 (&data)[Map<Lanes>::kPasses], int valid,
                                              Shared<Lanes>& shared) {
  const Element& e = at.element;
  const int lane = threadIdx.x % Lanes;
  uint8_t* const image = p.k_images + at.index * p.k_tile_bytes;
  if (e.mode == 0) {
    mark_broken<T>(data);
    return copy_images<Lanes, false>(data, image, image + kHalfTile * 2 * p.dims.pv, p.dims.pv);
  }
  const bool has_channels = lane * 8 < p.head_dim;
  float offset[8];
  load_channels(offset, p.k_offset, at.table_row, p.smooth_k && has_channels);
  float scale, factor, mark;
  const bool from_data = p.dynamic && e.mode != 3;
  if (from_data) {
    // Rounding x - offset keeps order, so the extremes of x per channel give the largest |x - offset|.
    PairOf<T> high[4], low[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) high[c] = low[c] = pair<T>(data[0], c);
#pragma unroll
    for (int i = 1; i < Map<Lanes>::kPasses; ++i)
      if (kFull || row_of<Lanes, false>(i) < valid) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          high[c] = __hmax2_nan(high[c], pair<T>(data[i], c));
          low[c] = __hmin2_nan(low[c], pair<T>(data[i], c));
        }
      }
    float amax = 127.f * kScaleFloor;
    const bool some = kFull || row_of<Lanes, false>(0) < valid;
#pragma unroll
    for (int c = 0; c < 4 && some; ++c) {
      const float2 h = to_float2(high[c]), l = to_float2(low[c]);
      amax = nan_max(amax, nan_max(fabsf(h.x - offset[2 * c]), fabsf(l.x - offset[2 * c])));
      amax = nan_max(amax, nan_max(fabsf(h.y - offset[2 * c + 1]), fabsf(l.y - offset[2 * c + 1])));
    }
    amax = block_max(amax, shared.warp_values[0]);
    scale = amax * (1.f / 127.f);
    mark = broken_mark(amax);
  } else {
    scale = p.k_scale[int64_t(e.bin) * p.kv_heads + at.head];
    FiniteCheck<T> check;
#pragma unroll
    for (int i = 0; i < Map<Lanes>::kPasses; ++i) check.take(data[i]);
    mark = __syncthreads_or(!check.passed()) ? __int_as_float(0x7fffffff) : 0.f;
  }
  factor = reciprocal(scale);
  if (threadIdx.x == 0) {
    p.tile_scales[at.index].k = scale + mark;
    p.tile_scales[at.index].inverse_k = 1.f / scale;
    if (e.mode == 1 || e.mode == 4) p.tile_scales[at.index].log2_v_max = p.tile_scales[at.index].log2_v_min = 0.f;
  }
  if (lane * 8 >= p.dims.qk) return;
  uint8_t* const rows = image + lane / 2 * kKeyTile * 16 + lane % 2 * 8 + first_row<Lanes, false>() * 16;
#pragma unroll
  for (int i = 0; i < Map<Lanes>::kPasses; ++i) {
    float x[8];
    unpack8<T>(data[i], x);
#pragma unroll
    for (int c = 0; c < 8; ++c) x[c] -= offset[c];
    uint2 k8 = from_data ? quantise8<false>(x, factor) : quantise8<true>(x, factor);
    if (!kFull && row_of<Lanes, false>(i) >= valid) k8 = make_uint2(0, 0);
    *reinterpret_cast<uint2*>(rows + row_offset<Lanes, false>(i) * 16) = k8;
  }
}

template <typename T, int Lanes, bool kFull>
__device__ __forceinline__ void quantise_values(const Params& p, const Tile& at, const uint4 (&data)[Map<Lanes>::kPasses],
                                                int valid, Shared<Lanes>& shared) {
  const Element& e = at.element;
  const int lane = threadIdx.x % Lanes;
  uint8_t* const image = p.v_images + at.index * p.v_tile_bytes;
  if (e.mode <= 1) {
    const bool swizzled = p.multiprocessors > 0 && swizzled_values(p.dims.pv);
    return copy_images<Lanes, true>(data, image, image + kHalfTile * 2 * p.dims.pv, p.dims.pv, swizzled);
  }

  TileScales& scales = p.tile_scales[at.index];
  const bool has_channels = lane * 8 < p.head_dim;
  // (v - offset) * factor, in this order: the factor of a channel that hardly varies is huge, and v * factor would not cancel.
  float factor[8], offset[8];
  load_channels(factor, p.v_scale, at.table_row, has_channels);
  load_channels(offset, p.v_offset, at.table_row, has_channels);
#pragma unroll
  for (int c = 0; c < 8; ++c) factor[c] = has_channels ? reciprocal(factor[c]) : 0.f;
  const auto equalise = [&](float (&x)[8], int i) {
    unpack8<T>(data[i], x);
#pragma unroll
    for (int c = 0; c < 8; ++c) x[c] = (x[c] - offset[c]) * factor[c];
  };
  bool scaled = e.mode == 2;
  if (e.mode == 3) {
    bool small = false;
#pragma unroll
    for (int i = 0; i < Map<Lanes>::kPasses; ++i) {
      float v[8];
      unpack8<T>(data[i], v);
      const bool is_small = is_small_token<Lanes>(v, factor);
      small |= is_small && (kFull || row_of<Lanes, true>(i) < valid);
    }
    scaled = __syncthreads_or(small);
  }
  float largest = -INFINITY, negated_smallest = -INFINITY;  // of log2(sv)
  FiniteCheck<T> check;
#pragma unroll
  for (int i = 0; i < Map<Lanes>::kPasses; i += 4) {
    const int word = i / 4 * Map<Lanes>::kRowsPerPass + threadIdx.x / Lanes;
    uint32_t v8[4][8];  // [key of the word][channel]
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool exists = kFull || row_of<Lanes, true>(i + j) < valid;
      float x[8];
      equalise(x, i + j);
#pragma unroll
      for (int c = 0; c < 8; ++c) x[c] = exists ? x[c] : 0.f;
      if (e.mode == 3) check.take(data[i + j]);
      if (scaled) {
        const float scale = token_scale<Lanes>(x);
        const float inverse = reciprocal(scale);
        if (exists) {
          const float log2_scale = log2_approx(scale);
          largest = nan_max(largest, log2_scale);
          negated_smallest = nan_max(negated_smallest, -log2_scale);
          if (lane == 0) {
            scales.log2_v[word * 4 + j] = log2_scale;
            scales.inverse_v[word * 4 + j] = inverse;
          }
        } else if (lane == 0) {
          scales.log2_v[word * 4 + j] = -INFINITY;
          scales.inverse_v[word * 4 + j] = 0.f;
        }
#pragma unroll
        for (int c = 0; c < 8; ++c) v8[j][c] = quantise<false>(x[c], inverse);
      } else if (e.mode == 3) {
#pragma unroll
        for (int c = 0; c < 8; ++c) v8[j][c] = quantise<true>(x[c], 1.f);
      } else {
#pragma unroll
        for (int c = 0; c < 8; ++c) v8[j][c] = quantise_e4m3(x[c] + broken_mark(x[c]));  // which else saturates infinity
      }
    }
    uint8_t* const target =
        shared.transposed + word / 4 * Shared<Lanes>::kGroupBytes + lane * Shared<Lanes>::kLaneBytes + word % 4 * 4;
#pragma unroll
    for (int c = 0; c < 8; ++c)
      *reinterpret_cast<uint32_t*>(target + c * 16) = pack4(v8[0][c], v8[1][c], v8[2][c], v8[3][c]);
  }
  if (e.mode == 2) {
    const float log2_v_max = block_max(largest, shared.warp_values[0]);
    const float log2_v_min = -block_max(negated_smallest, shared.warp_values[1]);
    if (threadIdx.x == 0) {
      scales.log2_v_max = log2_v_max;
      scales.log2_v_min = log2_v_min;
    }
  }
  const bool broken = __syncthreads_or(!check.passed());
  if (e.mode == 3 && threadIdx.x == 0) {
    scales.broken_v = broken ? __int_as_float(0x7fffffff) : 0.f;
    scales.scaled_v = scaled ? uint32_t(at.index) + 1 : 0;
  }
  const int rows = e.mode == 4 ? fp8_value_rows(p.dims.pv) : p.dims.pv;
  for (int d = threadIdx.x; d < p.dims.pv; d += Map<Lanes>::kThreads) {
    const uint8_t* const column = shared.transposed + d / 8 * Shared<Lanes>::kLaneBytes + d % 8 * 16;
#pragma unroll
    for (int group = 0; group < kKeyTile / 16; ++group)
      *reinterpret_cast<uint4*>(image + (group * rows + d) * 16) =
          *reinterpret_cast<const uint4*>(column + group * Shared<Lanes>::kGroupBytes);
  }
  if (e.mode == 4 && threadIdx.x < kKeyTile / 16 * 8) {
    const uint32_t ones = threadIdx.x % 8 == 0 ? kFourOnes : 0;
    *reinterpret_cast<uint4*>(image + (threadIdx.x / 8 * rows + p.dims.pv + threadIdx.x % 8) * 16) =
        make_uint4(ones, ones, ones, ones);
  }
}

// One tile of V at the position `at`. The load precedes the lookup of the element's mode.
template <typename T, int Lanes, bool kGathered>
__device__ __forceinline__ void prepare_values(const Params& p, Tile& at, Shared<Lanes>& shared) {
  uint4 data[Map<Lanes>::kPasses];
  load<T, Lanes, true, kGathered>(data, p, at, &Tensors::v, &Tensors::v_strides, p.num_keys);
  at.element = element_of(p, at.batch);
  at.set_key_rows<Lanes>(p);
  const int valid = at.element.num_keys - at.tile * kTokens;
  if (valid <= 0) return;  // the attention kernels do not read this tile
  if (valid >= kTokens) return quantise_values<T, Lanes, true>(p, at, data, valid, shared);
  clear_beyond<Lanes, true>(data, valid);
  quantise_values<T, Lanes, false>(p, at, data, valid, shared);
}

// kGathered: the rows of K and V are those of an index.
template <typename T, int Lanes, Layers kLayers, bool kGathered>
__global__ void __launch_bounds__(Map<Lanes>::kThreads, Map<Lanes>::kBlocksPerSm)
    prepass_kernel(const __grid_constant__ Params p) {
  constexpr bool kComputed = kLayers != Layers::kNone;
#ifdef __CUDA_ARCH__
  if constexpr (kGathered && kComputed && __CUDA_ARCH__ != 900) return;  // never launched, see has_key_mask()
#endif
  __shared__ Shared<Lanes> shared;
#if __CUDA_ARCH__ >= 900  // programmatic dependent launch begins with Hopper
  cudaTriggerProgrammaticLaunchCompletion();
#endif

  // Heads run fastest: with tokens outermost in memory, neighbouring thread blocks read neighbouring bytes.
  const int query_work = p.heads * ceil_div(p.num_queries, kTokens), key_work = p.kv_heads * p.key_tiles;
  const bool is_query = blockIdx.x < query_work;
  const bool is_key = !is_query && blockIdx.x - query_work < key_work;
  const int index = blockIdx.x - (is_query ? 0 : is_key ? query_work : query_work + key_work);
  const int heads = is_query ? p.heads : p.kv_heads;
  Tile at;
  at.batch = blockIdx.y;

  if (!is_query && !is_key) {
    // If the mode may skip all of V, few thread blocks check the mode first.
    if (p.direct_values && element_of(p, at.batch).mode <= 1) return;
    const int value_blocks = gridDim.x - query_work - key_work;
    for (int work = index; work < key_work; work += value_blocks) {
      if (work != index) __syncthreads();  // the previous tile has left shared memory
      at.head = work % heads;
      at.tile = work / heads;
      prepare_values<T, Lanes, kGathered>(p, at, shared);
    }
    return;
  }

  // The loads come first: the element's mode takes two more trips to memory.
  at.head = index % heads;
  at.tile = index / heads;
  uint4 data[Map<Lanes>::kPasses];
  if (is_query) {
    load<T, Lanes, false, false>(data, p, at, &Tensors::q, &Tensors::q_strides, p.num_queries);
    if constexpr (kComputed)
      compute_layers<T, Lanes, kLayers, false>(data, p, at, p.q_norm, p.q_norm_factors, p.num_queries);
  } else {
    load<T, Lanes, false, kGathered>(data, p, at, &Tensors::k, &Tensors::k_strides, p.num_keys);
    if constexpr (kComputed)
      compute_layers<T, Lanes, kLayers, kGathered>(data, p, at, p.k_norm, p.k_norm_factors, p.num_keys);
  }
  at.element = element_of(p, at.batch);
  if (blockIdx.x == 0 && blockIdx.y == 0) {
    if (p.units_taken && threadIdx.x < kModes) p.units_taken[threadIdx.x] = 0;
    for (int i = threadIdx.x; i < p.divided_units * kMaxConsumers; i += blockDim.x) p.parts_done[i] = 0;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0)
    p.elements[at.batch] = {at.element.mode, at.element.bin, at.element.num_keys, 0};

  if (is_query) {
    at.index = (int64_t(at.batch) * p.heads + at.head) * p.query_blocks;
    if (p.lse) leave_smoothed<T, Lanes>(p, at, data);
    quantise_queries<T, Lanes>(p, at, data);
    return;
  }
  at.set_key_rows<Lanes>(p);
  const int valid = at.element.num_keys - at.tile * kTokens;
  if (valid <= 0) return;  // the attention kernels do not read this tile
  if (valid >= kTokens) return quantise_keys<T, Lanes, true>(p, at, data, valid, shared);
  clear_beyond<Lanes, false>(data, valid);
  quantise_keys<T, Lanes, false>(p, at, data, valid, shared);
}

// ---- Launch ----

template <typename T, int Lanes, Layers kLayers, bool kGathered>
cudaError_t launch_kernel(const Params& p, cudaStream_t stream) {
  const int64_t query_work = int64_t(ceil_div(p.num_queries, kTokens)) * p.heads, key_work = int64_t(p.key_tiles) * p.kv_heads;
  // Idle thread blocks for V cost their launches: no more than run at once up to 64 channels.
  const int at_once = kMostBlocksPerSm * p.multiprocessors;
  const int64_t blocks = query_work + key_work + (p.direct_values ? std::min(key_work, int64_t(at_once)) : key_work);
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(blocks), p.batch);
  prepass_kernel<T, Lanes, kLayers, kGathered><<<grid, Map<Lanes>::kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

template <typename T, int Lanes, Layers kLayers>
cudaError_t launch_layers(const Params& p, cudaStream_t stream) {
  if (p.source_keys == 0) return launch_kernel<T, Lanes, kLayers, false>(p, stream);
  if constexpr (kLayers == Layers::kNone || Lanes <= 16) return launch_kernel<T, Lanes, kLayers, true>(p, stream);
  return cudaErrorInvalidConfiguration;
}

template <typename T, int Lanes>
cudaError_t launch_type(const Params& p, cudaStream_t stream) {
  if (p.norm_split > 0) return launch_layers<T, Lanes, Layers::kNormOfParts>(p, stream);
  if (p.norm_across_heads) return launch_layers<T, Lanes, Layers::kNormAcrossHeads>(p, stream);
  return p.rotary || p.q_norm ? launch_layers<T, Lanes, Layers::kNormOfHeads>(p, stream)
                              : launch_layers<T, Lanes, Layers::kNone>(p, stream);
}

template <int Lanes>
cudaError_t launch(const Params& p, cudaStream_t stream) {
  return p.bf16 ? launch_type<__nv_bfloat16, Lanes>(p, stream) : launch_type<__half, Lanes>(p, stream);
}

}  // namespace trtconvert::attention::prepass
