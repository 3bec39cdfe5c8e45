// Attention to at most 128 keys, one tile: no pre-pass and no workspace, on sm_80 and later.
//
// Latency dominates such calls, for example attention to a prompt. A thread block quantises the keys and values of its head, which
// fit in shared memory, and then computes its share of the queries. Each warp takes 16 rows, quantises them in registers and keeps
// all their logits there, so softmax needs one pass and no running maximum. The reference and the other kernels define the
// arithmetic; only the order of sums differs.
//
// In a network the code is in no cache when the kernel starts, and a warp runs most of it once. Loops over keys and over the
// output's channels are not unrolled, which halves the code of mode 1.
//
// The depth of the first product is permuted, for queries and keys alike: thread t of a quad multiplies channels 8 t to 8 t + 7 of
// each group of 32. A query row is one load of 16 bytes, a key one read of 8 (INT8) or 16 bytes from shared memory, and threads
// exchange nothing. Names are those of mma.cuh.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/copies.cuh"
#include "common/early_launch.cuh"
#include "launch.h"
#include "mma.cuh"
#include "one_tile.h"
#include "quantise.cuh"

namespace trtconvert::attention::one_tile {

using mma::kMagic;
using mma::kMagicBits;
using mma::kRowsPerWarp;

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kRows = kWarps * kRowsPerWarp;  // queries that a thread block computes at once
constexpr int kKeyGroup = 16;                 // keys of a step of the second product in 16 bits

template <int kDimQk>
constexpr int kBlocksPerSm = kDimQk <= 96 ? 3 : 2;

template <int kDimQk>
constexpr int kLanes = kDimQk <= 64 ? 8 : kDimQk <= 128 ? 16 : 32;  // threads that share a row of K or V, 8 channels each

// A thread block's work.
struct Work {
  int b, head, kv_head;
  int num_keys;
  int row;  // this thread's first query row of the 64 that are computed now; the second is row + 8
  Element element;
  OneTileLayout layout;
  uint32_t s_memory;
  uint8_t* memory;
  const uint8_t* visible;  // with a key mask, the keys that it shows, in shared memory
};

// A prefetch hint, so it may precede wait_for_previous_kernel().
__device__ __forceinline__ void prefetch(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

constexpr int kCacheLine = 128;

// Prefetches a table with `bytes` bytes for each bin from `first` on, with a distance of `stride` bytes, for all bins: the
// timestep selects the bin later. Called by the whole thread block; if there are very many bins, only the first ones are
// prefetched.
__device__ __forceinline__ void prefetch_bins(const void* first, int bins, int64_t stride, int bytes) {
  const int lines = (bytes - 1) / kCacheLine + 2, bin = threadIdx.x / lines;  // a bin's bytes may begin within a line
  if (bin < bins) prefetch(static_cast<const uint8_t*>(first) + bin * stride + min(int(threadIdx.x) % lines * kCacheLine, bytes - 1));
}

// Prefetches the tables into L2 before the bin is known: in a network they come from DRAM, and the loads of the timestep, the mode
// and a bin's scales would be sequential.
__device__ __forceinline__ void prefetch_tables(const Params& p, const Work& w) {
  if (threadIdx.x == 0) prefetch(p.timestep + w.b);
  prefetch_bins(p.modes, 1, 0, p.num_bins * int(sizeof(int32_t)));
  prefetch_bins(p.q_scale + w.head, p.num_bins, p.heads * sizeof(float), sizeof(float));
  prefetch_bins(p.k_scale + w.kv_head, p.num_bins, p.kv_heads * sizeof(float), sizeof(float));
  const int channels = p.head_dim * int(sizeof(float));
  prefetch_bins(p.k_offset + int64_t(w.kv_head) * p.head_dim, p.num_bins, int64_t(p.kv_heads) * channels, channels);
}

// 16 bytes from global to shared memory, or zeros.
__device__ __forceinline__ void copy_or_clear(uint32_t s_target, const void* g_source, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(s_target), "l"(g_source), "r"(exists ? 16 : 0) : "memory");
}

// Offset of 16-byte chunk `chunk` of a key's 16-bit row: groups of 32 channels, each with all keys, so that a fragment reads eight
// keys contiguously.
__device__ __forceinline__ int raw_key_offset(int keys, int key, int chunk) {
  return ((chunk / 4 * keys + key) * 4 + chunk % 4) * 16;
}

// Lists the keys that the key mask shows, one key a thread; returns their number. Called by the whole thread block.
__device__ __forceinline__ int list_visible_keys(const Params& p, int b, uint8_t (&visible)[kKeyTile]) {
  static_assert(kThreads == kKeyTile);
  __shared__ int warp_counts[kWarps];
  const int key = threadIdx.x, lane = key % 32, warp = key / 32;
  const bool is_visible = key < num_keys_of(p, b) && p.key_mask[b * p.key_mask_strides[0] + key * p.key_mask_strides[1]] != 0;
  const unsigned of_warp = __ballot_sync(0xffffffffu, is_visible);
  if (lane == 0) warp_counts[warp] = __popc(of_warp);
  __syncthreads();
  int place = __popc(of_warp & ((1u << lane) - 1)), count = 0;
  for (int w = 0; w < kWarps; ++w) {
    place += w < warp ? warp_counts[w] : 0;
    count += warp_counts[w];
  }
  if (is_visible) visible[place] = uint8_t(key);
  __syncthreads();
  return count;
}

// Enqueues the copies of K, of V in another group. Keys that do not exist become zeros, whatever their memory holds, and
// channels of K beyond head_dim.
template <int kDimQk, int kDimPv>
__device__ __forceinline__ void copy_keys_and_values(const Params& p, const Work& w) {
  constexpr int Lanes = kLanes<kDimQk>;
  const int lane = threadIdx.x % Lanes;
  const int64_t element_size = 2;
  const auto source = [&](const void* tensor, const TrtConvertStrides& strides) {
    return static_cast<const uint8_t*>(tensor) +
           (w.b * strides.batch + w.kv_head * strides.head + lane * 8) * element_size;
  };
  const auto from = [&](int key) { return int64_t(w.visible ? w.visible[key] : key); };
  const bool has_channels = lane * 8 < p.head_dim;
  const Tensors& tensors = p.parts[0];  // so few keys are all of them
  const uint8_t* const k = source(tensors.k, tensors.k_strides);
  if (lane * 8 < kDimQk)
#pragma unroll 1
    for (int key = threadIdx.x / Lanes; key < w.layout.keys; key += kThreads / Lanes) {
      const bool exists = has_channels && key < w.num_keys;
      copy_or_clear(w.s_memory + raw_key_offset(w.layout.keys, key, lane),
                    exists ? k + from(key) * tensors.k_strides.token * element_size : tensors.k, exists);
    }
  commit_copies();
  const uint8_t* const v = source(tensors.v, tensors.v_strides);
  if (lane * 8 < kDimPv)
#pragma unroll 1
    for (int key = threadIdx.x / Lanes; key < w.layout.keys; key += kThreads / Lanes) {
      const bool exists = has_channels && key < w.num_keys;
      copy_or_clear(w.s_memory + w.layout.values() + lane * w.layout.value_pitch() + key * 16,
                    exists ? v + from(key) * tensors.v_strides.token * element_size : tensors.v, exists);
    }
  commit_copies();
}

// This thread's 16-bit channels of two rows, first_row and first_row + 8: 8 t to 8 t + 7 of each group of 32. Missing rows and
// channels are zeros.
template <int kDimQk>
__device__ __forceinline__ void load_queries(uint4 (&data)[kDimQk / 32][2], const Params& p, const Work& w, int first_row) {
  const TrtConvertStrides& strides = p.parts[0].q_strides;
  const uint16_t* const head = static_cast<const uint16_t*>(p.parts[0].q) + w.b * strides.batch + w.head * strides.head;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + r * 8;
    const uint16_t* const source = head + row * strides.token;
#pragma unroll
    for (int group = 0; group < kDimQk / 32; ++group) {
      const int channel = group * 32 + threadIdx.x % 4 * 8;
      data[group][r] = make_uint4(0, 0, 0, 0);
      if (row < p.num_queries && channel < p.head_dim)
        data[group][r] = *reinterpret_cast<const uint4*>(source + channel);
    }
  }
}

// True if the raw keys that this thread has copied are finite.
template <typename T, int kDimQk>
__device__ __forceinline__ bool finite_keys(const Work& w) {
  constexpr int Lanes = kLanes<kDimQk>;
  const int lane = threadIdx.x % Lanes;
  FiniteCheck<T> check;
  if (lane * 8 < kDimQk)
#pragma unroll 2
    for (int key = threadIdx.x / Lanes; key < w.layout.keys; key += kThreads / Lanes)
      check.take(*reinterpret_cast<const uint4*>(w.memory + raw_key_offset(w.layout.keys, key, lane)));
  return check.passed();
}

// Quantises the raw keys to INT8; returns their scale. Called by the whole thread block, when all of K has arrived. `check` covers
// the keys of this thread.
template <typename T, int kDimQk>
__device__ __forceinline__ float quantise_keys(const Params& p, const Work& w, bool from_data, FiniteCheck<T>& check) {
  constexpr int Lanes = kLanes<kDimQk>;
  __shared__ float warp_values[kWarps];
  const int lane = threadIdx.x % Lanes, first_key = threadIdx.x / Lanes;
  const bool has_channels = lane * 8 < p.head_dim;
  const int64_t table_row = (int64_t(w.element.bin) * p.kv_heads + w.kv_head) * p.head_dim + lane * 8;
  float offset[8];
  load_channels(offset, p.k_offset, table_row, p.smooth_k && has_channels);
  const auto centred = [&](float (&x)[8], int key) {
    unpack8<T>(*reinterpret_cast<const uint4*>(w.memory + raw_key_offset(w.layout.keys, key, lane)), x);
#pragma unroll
    for (int c = 0; c < 8; ++c) x[c] -= offset[c];
  };
  float scale = p.k_scale[int64_t(w.element.bin) * p.kv_heads + w.kv_head];
  if (from_data) {
    float amax = 127.f * kScaleFloor;
#pragma unroll 1
    for (int key = first_key; key < w.num_keys && has_channels; key += kThreads / Lanes) {
      float x[8];
      centred(x, key);
#pragma unroll
      for (int c = 0; c < 8; ++c) amax = nan_max(amax, fabsf(x[c]));
    }
    scale = block_max(amax, warp_values) * (1.f / 127.f);
  }
  const float factor = reciprocal(scale);
  if (lane * 8 < kDimQk)
#pragma unroll 1
    for (int key = first_key; key < w.layout.keys; key += kThreads / Lanes) {
      uint2 k8 = make_uint2(0, 0);
      if (key < w.num_keys) {
        float x[8];
        check.take(*reinterpret_cast<const uint4*>(w.memory + raw_key_offset(w.layout.keys, key, lane)));
        centred(x, key);
        k8 = from_data ? quantise8<false>(x, factor) : quantise8<true>(x, factor);
      }
      *reinterpret_cast<uint2*>(w.memory + w.layout.int8_keys() + (lane / 4 * w.layout.keys + key) * 32 + lane % 4 * 8) = k8;
    }
  return scale;
}

// This thread's eight equalised channels of a value token of 16 bits.
template <typename T>
__device__ __forceinline__ void equalise(float (&x)[8], const uint4& raw, const float (&factor)[8], const float (&offset)[8]) {
  unpack8<T>(raw, x);
#pragma unroll
  for (int c = 0; c < 8; ++c) x[c] = (x[c] - offset[c]) * factor[c];
}

// This thread's channels of the factors and offsets that equalise values.
__device__ __forceinline__ void load_value_tables(float (&factor)[8], float (&offset)[8], const Params& p, const Work& w, int lane) {
  const bool has_channels = lane * 8 < p.head_dim;
  const int64_t table_row = (int64_t(w.element.bin) * p.kv_heads + w.kv_head) * p.head_dim + lane * 8;
  load_channels(factor, p.v_scale, table_row, has_channels);
  load_channels(offset, p.v_offset, table_row, has_channels);
#pragma unroll
  for (int c = 0; c < 8; ++c) factor[c] = has_channels ? reciprocal(factor[c]) : 0.f;
}

// True if a value token is small. Called by the whole thread block, when all of V has arrived.
template <typename T, int kDimQk>
__device__ __forceinline__ bool has_small_token(const Params& p, const Work& w) {
  constexpr int Lanes = kLanes<kDimQk>;
  const int lane = threadIdx.x % Lanes;
  float factor[8], offset[8];
  load_value_tables(factor, offset, p, w, lane);  // the offset is not needed
  bool small = false;
#pragma unroll 1
  for (int first = 0; first < w.num_keys; first += kThreads / Lanes) {
    const int key = first + threadIdx.x / Lanes;
    float v[8] = {};
    if (key < w.num_keys && lane * 8 < p.head_dim)
      unpack8<T>(*reinterpret_cast<const uint4*>(w.memory + w.layout.values() + lane * w.layout.value_pitch() + key * 16), v);
    const bool is_small = is_small_token<Lanes>(v, factor);  // by whole warps
    small |= is_small && key < w.num_keys;
  }
  return __syncthreads_or(small);
}

// Writes INT8 values, transposed, over the raw keys: groups of 16 permuted keys, each with kDimPv rows of 16 bytes. Called by the
// whole thread block, when all of V has arrived and no thread needs the raw keys. `check` covers the values of this thread, if tokens
// have no scales that show values that are not finite.
template <typename T, int kDimQk, int kDimPv, bool kTokenScales>
__device__ __forceinline__ void quantise_values(const Params& p, const Work& w, FiniteCheck<T>& check) {
  constexpr int Lanes = kLanes<kDimQk>;
  const int lane = threadIdx.x % Lanes;
  const bool has_channels = lane * 8 < p.head_dim;
  float* const log2_v = reinterpret_cast<float*>(w.memory + w.layout.log2_v());
  float* const inverse_v = reinterpret_cast<float*>(w.memory + w.layout.inverse_v());
  float factor[8], offset[8];
  load_value_tables(factor, offset, p, w, lane);
  for (int word = threadIdx.x / Lanes; word < w.layout.keys / 4; word += kThreads / Lanes) {
    uint32_t v8[4][8];  // [key of the word][channel]
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int key = word / 4 * 16 + permuted_key(word % 4 * 4 + j);
      const bool exists = key < w.num_keys;
      float x[8] = {};
      if (exists && has_channels) {
        const uint4& raw = *reinterpret_cast<const uint4*>(w.memory + w.layout.values() + lane * w.layout.value_pitch() + key * 16);
        if constexpr (!kTokenScales) check.take(raw);
        equalise<T>(x, raw, factor, offset);
      }
      float inverse = 1.f;
      if constexpr (kTokenScales) {
        const float scale = token_scale<Lanes>(x);
        inverse = reciprocal(scale);
        if (lane == 0) {
          log2_v[word * 4 + j] = exists ? log2_approx(scale) : -INFINITY;
          inverse_v[word * 4 + j] = exists ? inverse : 0.f;
        }
      }
#pragma unroll
      for (int c = 0; c < 8; ++c) v8[j][c] = quantise<!kTokenScales>(x[c], inverse);
    }
    if (lane * 8 >= kDimPv) continue;
    uint8_t* const target = w.memory + (word / 4 * kDimPv + lane * 8) * 16 + word % 4 * 4;
#pragma unroll
    for (int c = 0; c < 8; ++c)
      *reinterpret_cast<uint32_t*>(target + c * 16) = pack4(v8[0][c], v8[1][c], v8[2][c], v8[3][c]);
  }
}

// INT8 fragments of this thread's two rows, and their scales; a row that is not finite has the scale NaN.
template <typename T, int kDimQk>
__device__ __forceinline__ void quantise_queries(uint32_t (&q)[kDimQk / 32][4], float (&scale)[2],
                                                 const uint4 (&data)[kDimQk / 32][2], float fixed, bool from_data) {
  PairOf<T> largest{largest8<T>(data[0][0]), largest8<T>(data[0][1])};
#pragma unroll
  for (int group = 1; group < kDimQk / 32; ++group)
    largest = __hmax2_nan(largest, PairOf<T>{largest8<T>(data[group][0]), largest8<T>(data[group][1])});
#pragma unroll
  for (int offset = 2; offset > 0; offset /= 2)
    largest = __hmax2_nan(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  const float2 amax = to_float2(largest);
  scale[0] = from_data ? query_scale(amax.x) : fixed + broken_mark(amax.x);
  scale[1] = from_data ? query_scale(amax.y) : fixed + broken_mark(amax.y);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float factor = reciprocal(scale[r]);
#pragma unroll
    for (int group = 0; group < kDimQk / 32; ++group) {
      float x[8];
      unpack8<T>(data[group][r], x);
      const uint2 q8 = from_data ? quantise8<false>(x, factor) : quantise8<true>(x, factor);
      q[group][r] = q8.x;
      q[group][2 + r] = q8.y;
    }
  }
}

__device__ __forceinline__ void start_sums(int32_t (&sums)[2][4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) sums[i][c] = kMagicBits;
}

__device__ __forceinline__ uint2 load_shared_8(uint32_t s_address) {
  uint2 x;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(s_address) : "memory");
  return x;
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t s_address) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(s_address)
               : "memory");
  return x;
}

// Two fragments of a row, 16 neighbouring channels of the output: pairs are exchanged within the quad, so that each thread stores
// 8 bytes and a row 32.
template <typename T>
__device__ __forceinline__ void store_channels(T* target, float low0, float low1, float high0, float high1, bool row_exists,
                                               bool second_exists) {
  const int t = threadIdx.x % 4;
  const uint32_t low = mma::pack_pair<T>(low0, low1), high = mma::pack_pair<T>(high0, high1);
  // First across the quad's halves: the lower half takes all of the lower fragment, the upper half of the upper one.
  const uint32_t other = __shfl_xor_sync(0xffffffffu, t < 2 ? high : low, 2);
  const uint32_t first = t < 2 ? low : other, second = t < 2 ? other : high;  // pairs t % 2 and t % 2 + 2 of the fragment
  // Then between neighbours: the even one takes pairs 0 and 1, the odd one 2 and 3.
  const uint32_t neighbour = __shfl_xor_sync(0xffffffffu, t % 2 ? first : second, 1);
  const uint2 four = t % 2 ? make_uint2(neighbour, second) : make_uint2(first, neighbour);
  if (row_exists && (t < 2 || second_exists)) *reinterpret_cast<uint2*>(target + t * 4) = four;
}

// The part of the kernel that depends on the arithmetic, `kMode`: mode 3 has the arithmetic of mode 2 if a value token is small.
// `data` holds the first queries, in flight. All kKeyGroups groups of keys are computed, even missing ones: behind branches, loads of
// one group could not move before products of another.
template <int kDimQk, int kDimPv, int kKeyGroups, typename T, int kMode>
__device__ __forceinline__ void attend(const Params& p, Work& w, uint4 (&data)[kDimQk / 32][2], int steps) {
  constexpr int kFragments = kKeyGroups * 2;
  constexpr bool kInt8Logits = kMode != 0, kInt8Values = kMode >= 2, kTokenScales = kMode == 2;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, keys = w.layout.keys, num_keys = w.num_keys;
  const bool from_data = p.dynamic && w.element.mode != 3;
  bool usable = w.element.valid, broken;  // a key of this thread's is not finite
  float k_scale = 1.f, q_scale = 1.f;
  if constexpr (kInt8Logits) {
    usable = tables_usable(p, w.element, w.head) && usable;
    q_scale = p.q_scale[int64_t(w.element.bin) * p.heads + w.head];
    wait_copies<1>();
    __syncthreads();
    FiniteCheck<T> check;
    k_scale = quantise_keys<T, kDimQk>(p, w, from_data, check);
    broken = !check.passed();
  } else {
    wait_copies<1>();
    broken = !finite_keys<T, kDimQk>(w);
  }
  wait_copies<0>();
  usable = !__syncthreads_or(broken) && usable;
  if constexpr (kInt8Values) {
    FiniteCheck<T> check;
    quantise_values<T, kDimQk, kDimPv, kTokenScales>(p, w, check);
    usable = !__syncthreads_or(!check.passed()) && usable;
  }

  const uint32_t s_keys = w.s_memory + (kInt8Logits ? w.layout.int8_keys() + g * 32 + t * 8 : g * 64 + t * 16);
  const int lane = threadIdx.x % 32;
  const uint32_t s_values = kInt8Values
                                ? w.s_memory + (lane / 8 % 2 * kDimPv + lane / 16 * 8 + lane % 8) * 16
                                : w.s_memory + w.layout.values() + lane / 16 * w.layout.value_pitch() + lane % 16 * 16;
  const uint32_t s_log2_v = w.s_memory + w.layout.log2_v() + t * 16;
  const uint32_t s_inverse_v = w.s_memory + w.layout.inverse_v() + t * 16;
  const float logits = p.softmax_scale * kLog2e;
  const int64_t channel0 = (int64_t(w.element.bin) * p.kv_heads + w.kv_head) * p.head_dim;

  for (int step = 0; step < steps && w.row - g < p.num_queries; ++step) {
    uint32_t q8[kInt8Logits ? kDimQk / 32 : 1][4];
    uint4 q16[kInt8Logits ? 1 : kDimQk / 32][2];
    float scale[2] = {logits, logits};
    if constexpr (kInt8Logits) {
      quantise_queries<T, kDimQk>(q8, scale, data, q_scale, from_data);
#pragma unroll
      for (int r = 0; r < 2; ++r) scale[r] *= logits;
    } else {
#pragma unroll
      for (int group = 0; group < kDimQk / 32; ++group)
#pragma unroll
        for (int r = 0; r < 2; ++r) q16[group][r] = data[group][r];
    }
    if (step + 1 < steps) load_queries<kDimQk>(data, p, w, w.row + kRows);

    // Logits of the existing keys.
    float z[kFragments][4];
#pragma unroll
    for (int n = 0; n < kFragments; n += 2) {
      if constexpr (kInt8Logits) {
        int32_t s[2][4];
        start_sums(s);
#pragma unroll
        for (int group = 0; group < kDimQk / 32; ++group)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint2 k = load_shared_8(s_keys + (group * keys + (n + i) * 8) * 32);
            mma::multiply_s8(s[i], q8[group], k.x, k.y, s[i]);
          }
        float log2_v[4];
        if constexpr (kTokenScales) mma::load_shared(log2_v, s_log2_v + n * 8 * sizeof(float));
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            z[n + i][c] = __int_as_float(s[i][c]) - kMagic;
            if constexpr (kTokenScales) z[n + i][c] = fmaf(z[n + i][c], scale[c / 2] * k_scale, log2_v[2 * i + c % 2]);
          }
      } else {
#pragma unroll
        for (int i = n; i < n + 2; ++i)
#pragma unroll
          for (int c = 0; c < 4; ++c) z[i][c] = 0.f;
#pragma unroll
        for (int group = 0; group < kDimQk / 32; ++group)
#pragma unroll
          for (int i = n; i < n + 2; ++i) {
            const uint4 k = load_shared_16(s_keys + (group * keys + i * 8) * 64);
            const uint4 &low = q16[group][0], &high = q16[group][1];
            const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
            mma::multiply_16bit<T>(z[i], first, k.x, k.y);
            mma::multiply_16bit<T>(z[i], second, k.z, k.w);
          }
      }
    }
    float factor[2] = {1.f, 1.f};
    if constexpr (!kTokenScales) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        factor[r] = scale[r] * k_scale;
        // Scales of tables may underflow, and minus infinity, the logit of missing keys, times zero would be NaN.
        if (factor[r] < kProductFloor) factor[r] = kProductFloor;
      }
    }
    if (num_keys < kKeyGroups * kKeyGroup) {
#pragma unroll
      for (int n = 0; n < kFragments; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) z[n][c] = n * 8 + t * 2 + c % 2 < num_keys ? z[n][c] : -INFINITY;
    }

    float maximum[2], subtracted[2], sum[2] = {0.f, 0.f};
    mma::row_maxima(maximum, z);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      // Rounded up for 8-bit weights, so that no weight exceeds one: 255 times such a weight would not fit a byte.
      subtracted[r] = mma::finite_or_zero(kInt8Values ? __fmul_ru(maximum[r], factor[r]) : maximum[r] * factor[r]);

    // Weights, as A fragments of 16 keys in 16 bits or of 32 in 8.
    uint32_t weights[kInt8Values ? (kKeyGroups + 1) / 2 : kKeyGroups][4] = {};
    uint32_t integer_sum[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < kFragments; n += 2) {
      float inverse_v[4];
      if constexpr (kTokenScales) mma::load_shared(inverse_v, s_inverse_v + n * 8 * sizeof(float));
      float weight[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          weight[i][c] = exp2_approx(fmaf(z[n + i][c], factor[c / 2], -subtracted[c / 2]));
          if constexpr (kTokenScales) {
            sum[c / 2] = fmaf(weight[i][c], inverse_v[2 * i + c % 2], sum[c / 2]);
          } else if constexpr (!kInt8Values) {
            sum[c / 2] += weight[i][c];
          }
        }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if constexpr (kInt8Values) {
          uint32_t bytes[2][2];
#pragma unroll
          for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int c = 0; c < 2; ++c) bytes[i][c] = __float_as_uint(fmaf(weight[i][2 * r + c], 255.f, mma::kRoundToByte));
          const uint32_t packed = pack4(bytes[0][0], bytes[0][1], bytes[1][0], bytes[1][1]);
          weights[n / 4][n % 4 + r] = packed;
          if constexpr (!kTokenScales) integer_sum[r] = __dp4a(packed, 0x01010101u, integer_sum[r]);
        } else {
#pragma unroll
          for (int i = 0; i < 2; ++i) weights[n / 2][2 * i + r] = mma::pack_pair<T>(weight[i][2 * r], weight[i][2 * r + 1]);
        }
      }
    }
    float inverse[2], offset_factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (kMode == 3) sum[r] = float(integer_sum[r]) / 255.f;
      const float total = mma::quad_sum(sum[r]);
      // All logits of an infinite 16-bit query may be minus infinity.
      const bool lost = kMode == 0 && total == 0.f && num_keys > 0;
      inverse[r] = usable && !lost ? mma::inverse_sum(total, scale[r]) : __int_as_float(0x7fffffff);
      if constexpr (kInt8Values) inverse[r] /= 255.f;
      offset_factor[r] = total == 0.f ? 0.f : 1.f;  // a row without a visible key is zero, not the mean value
    }

    const TrtConvertStrides& strides = p.parts[0].out_strides;
    T* const out = static_cast<T*>(p.parts[0].out) + w.b * strides.batch + w.head * strides.head + w.row * strides.token;
#pragma unroll 2
    for (int n = 0; n < kDimPv / 8; n += 2) {
      if (n * 8 >= p.head_dim) continue;
      float o[2][4] = {};
      if constexpr (kInt8Values) {
        int32_t product[2][4];
        start_sums(product);
#pragma unroll
        for (int depth = 0; depth < (kKeyGroups + 1) / 2; ++depth) {
          uint32_t v[4];
          mma::load_matrices(v, s_values + (2 * depth * kDimPv + n * 8) * 16);
          mma::multiply_u8s8(product[0], weights[depth], v[0], v[1], product[0]);
          mma::multiply_u8s8(product[1], weights[depth], v[2], v[3], product[1]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int c = 0; c < 4; ++c) o[i][c] = __int_as_float(product[i][c]) - kMagic;
      } else {
#pragma unroll
        for (int depth = 0; depth < kKeyGroups; ++depth) {
          uint32_t v[4];
          mma::load_matrices_transposed(v, s_values + n * w.layout.value_pitch() + depth * kKeyGroup * 16);
          mma::multiply_16bit<T>(o[0], weights[depth], v[0], v[1]);
          mma::multiply_16bit<T>(o[1], weights[depth], v[2], v[3]);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float2 v_scale = make_float2(1.f, 1.f), v_offset = make_float2(0.f, 0.f);
        const int channel = (n + i) * 8 + t * 2;
        if (kInt8Values && channel < p.head_dim) {
          v_scale = *reinterpret_cast<const float2*>(p.v_scale + channel0 + channel);
          v_offset = *reinterpret_cast<const float2*>(p.v_offset + channel0 + channel);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          o[i][c] *= inverse[c / 2];
          if constexpr (kInt8Values)
            o[i][c] = fmaf(o[i][c], c % 2 ? v_scale.y : v_scale.x, (c % 2 ? v_offset.y : v_offset.x) * offset_factor[c / 2]);
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r)
        store_channels<T>(out + r * 8 * strides.token + n * 8, o[0][2 * r], o[0][2 * r + 1], o[1][2 * r], o[1][2 * r + 1],
                          w.row + r * 8 < p.num_queries, (n + 1) * 8 < p.head_dim);
    }
    w.row += kRows;
  }
}

// A thread block takes `steps` times 64 queries of a head, and up to 16 * kKeyGroups keys.
template <int kDimQk, int kDimPv, int kKeyGroups>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<kDimQk>)
    attention_kernel(const __grid_constant__ Params p, int keys, int steps) {
  extern __shared__ __align__(128) uint8_t dynamic_shared[];
  Work w;
  w.memory = dynamic_shared;
  w.s_memory = static_cast<uint32_t>(__cvta_generic_to_shared(dynamic_shared));
  w.layout = {{kDimQk, kDimPv}, keys};
  w.b = blockIdx.z;
  w.head = blockIdx.y;
  w.row = blockIdx.x * steps * kRows + threadIdx.x / 32 * kRowsPerWarp + threadIdx.x % 32 / 4;
  w.kv_head = w.head / p.group;
  prefetch_tables(p, w);
  wait_for_previous_kernel();
  __shared__ uint8_t visible[kKeyTile];
  w.visible = p.has_key_mask ? visible : nullptr;
  w.num_keys = p.has_key_mask ? list_visible_keys(p, w.b, visible) : num_keys_of(p, w.b);

  // The loads come first: the element's mode takes two more trips to memory.
  copy_keys_and_values<kDimQk, kDimPv>(p, w);
  uint4 data[kDimQk / 32][2];
  load_queries<kDimQk>(data, p, w, w.row);
  w.element = element_of(p, w.b);
  const auto attend_in = [&](auto mode) {
    return p.bf16 ? attend<kDimQk, kDimPv, kKeyGroups, __nv_bfloat16, decltype(mode)::value>(p, w, data, steps)
                  : attend<kDimQk, kDimPv, kKeyGroups, __half, decltype(mode)::value>(p, w, data, steps);
  };
  int arithmetic = w.element.mode;
  if (arithmetic == 3) {
    wait_copies<0>();
    __syncthreads();
    if (p.bf16 ? has_small_token<__nv_bfloat16, kDimQk>(p, w) : has_small_token<__half, kDimQk>(p, w)) arithmetic = 2;
  }
  switch (arithmetic) {
    case 0: return attend_in(std::integral_constant<int, 0>());
    case 1: return attend_in(std::integral_constant<int, 1>());
    case 2: return attend_in(std::integral_constant<int, 2>());
    default: return attend_in(std::integral_constant<int, 3>());
  }
}

template <int kDimQk, int kDimPv>
cudaError_t launch(const Params& params, int multiprocessors, cudaStream_t stream) {
  const OneTileLayout layout = one_tile_layout(params);
  auto kernel = attention_kernel<kDimQk, kDimPv, 5>;
  if constexpr (OneTileLayout{{kDimQk, kDimPv}, kKeyTile}.bytes() <= kSharedLimit)  // is_one_tile() allows no others
    if (layout.keys == kKeyTile) kernel = attention_kernel<kDimQk, kDimPv, 8>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, layout.bytes());
  if (error != cudaSuccess) return error;
  // Each thread block quantises K and V itself: no more thread blocks than run at once, as far as the number of heads allows.
  const int groups = ceil_div(params.num_queries, kRows);
  const int64_t heads = int64_t(params.batch) * params.heads, at_once = int64_t(multiprocessors) * kBlocksPerSm<kDimQk>;
  const int wanted = static_cast<int>(std::clamp<int64_t>(at_once / heads, 1, groups));
  const int steps = ceil_div(groups, wanted);
  const dim3 grid(ceil_div(groups, steps), params.heads, params.batch);
  return launch_kernel(kernel, grid, kThreads, layout.bytes(), stream, params.early_launch, params, layout.keys, steps);
}

}  // namespace trtconvert::attention::one_tile
