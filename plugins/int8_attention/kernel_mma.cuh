// The portable kernel: cp.async and mma.sync, for sm_80 and later.
//
// A warp owns 16 query rows, from the first product to the output. Keys come in tiles of 128 (INT8 second product) or steps
// of 64 (16-bit second product); the tile images of K and V travel through a ring in shared memory, in the order
// K0 V0 K1 V1 …, with one thread-block barrier per image. The mode is the batch element's, read on the device, so one
// launch serves a batch of mixed modes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/copies.cuh"
#include "launch.h"
#include "mma.cuh"

namespace trtconvert::attention::mma {

constexpr int kScaleBytes = 2 * kKeyTile * sizeof(float);  // log2_v and inverse_v of one tile

static_assert(offsetof(TileScales, log2_v) == 0 && offsetof(TileScales, inverse_v) == kKeyTile * sizeof(float));

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kRows = kWarps * kRowsPerWarp;
static_assert(kRows == kQueryBlock);  // a thread block takes one Q image

// Shared memory of a multiprocessor, and the part that the system takes for each thread block.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int kSharedPerSm = 100 * 1024;
#else
constexpr int kSharedPerSm = 164 * 1024;
#endif
constexpr int kSharedPerBlock = 1024;

template <int kDimQk, int kDimPv>
struct Config {
  // Images in flight and in use.
  static constexpr int kSlots = kDimPv <= 64 ? 3 : 2;
  // An INT8 image of 128 keys and a 16-bit image of 64 keys have the same size.
  static constexpr int kImageBytes = kKeyTile * (kDimQk > kDimPv ? kDimQk : kDimPv);
  static constexpr int kSlotBytes = kImageBytes + kScaleBytes;
  // INT8 queries stay in shared memory if the registers of three thread blocks cannot hold them.
  static constexpr bool kQueriesInShared = kDimPv >= 80 && kDimPv <= 128;
  static constexpr int kQueryBytes = kQueriesInShared ? kQueryBlock * kDimQk : 0;
  static constexpr int kSharedBytes = kSlots * kSlotBytes + kQueryBytes;
  static_assert(kSharedBytes <= kSharedLimit);

  // Small thread blocks, several to a multiprocessor: while one waits at its barrier, the others compute. On an H200, three
  // of these are 10 to 30 % faster at D 64 and 128 than one or two of 8 warps, although 168 registers spill a few values.
  static constexpr int kWantedBlocks = kDimPv <= 128 ? 3 : 2;
  static constexpr int kFittingBlocks = kSharedPerSm / (kSharedBytes + kSharedPerBlock);
  static constexpr int kBlocksPerSm = kFittingBlocks < kWantedBlocks ? kFittingBlocks : kWantedBlocks;
};

// ---- A thread block's work ----

struct Work {
  int b, head, kv_head;
  int bin, num_keys;
  int row;  // this thread's first query row; the second is row + 8. Rows at and beyond num_queries are not stored
  int64_t kv_tile0;  // index of the head's first key tile
  const uint8_t* q_image;
  float row_scale[2];  // scale of the row's logits * log2(e)
};

__device__ __forceinline__ Work find_work(const Params& p) {
  const int g = threadIdx.x % 32 / 4;
  Work w;
  w.b = blockIdx.z;
  w.head = blockIdx.y;
  w.kv_head = w.head / p.group;
  const ElementInfo element = p.elements[w.b];
  w.bin = element.bin;
  w.num_keys = element.num_keys;
  w.row = blockIdx.x * kRows + threadIdx.x / 32 * kRowsPerWarp + g;
  w.kv_tile0 = (int64_t(w.b) * p.kv_heads + w.kv_head) * p.key_tiles;
  const int64_t image = (int64_t(w.b) * p.heads + w.head) * p.query_blocks + blockIdx.x;
  const int image_row = w.row % kQueryBlock;
  w.q_image = p.q_images + image * p.q_block_bytes;
  w.row_scale[0] = p.row_scales[image * kQueryBlock + image_row];
  w.row_scale[1] = p.row_scales[image * kQueryBlock + image_row + 8];
  return w;
}

// A fragments of the warp's 16 rows, kSteps steps of 32 bytes.
template <int kSteps>
__device__ __forceinline__ void load_queries(uint32_t (&q)[kSteps][4], const Work& w) {
  const uint8_t* const rows = w.q_image + w.row % kQueryBlock * 16 + threadIdx.x % 4 * 4;
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int i = 0; i < 4; ++i)  // rows g, g + 8 of chunk 2s, then of chunk 2s + 1
      q[s][i] = *reinterpret_cast<const uint32_t*>(rows + ((2 * s + i / 2) * kQueryBlock + i % 2 * 8) * 16);
}

// Byte offset, within an image of kImageRows rows, that this lane hands to ldmatrix.x4 for two groups of 8 rows by two
// chunks: registers 0, 1 are the B fragment of the first group, 2, 3 that of the second.
template <int kImageRows>
__device__ __forceinline__ int fragment_offset() {
  const int lane = threadIdx.x % 32;
  return (lane / 8 % 2 * kImageRows + lane / 16 * 8 + lane % 8) * 16;
}

// The same for an A fragment: 16 rows by two chunks of a Q image.
__device__ __forceinline__ int query_offset() {
  const int lane = threadIdx.x % 32;
  return (lane / 16 * kQueryBlock + threadIdx.x / 32 * kRowsPerWarp + lane % 16) * 16;
}

template <int kBytes>
__device__ __forceinline__ void copy_image(uint32_t s_target, const uint8_t* g_source) {
  static_assert(kBytes % 16 == 0);
  for (int i = threadIdx.x * 16; i < kBytes; i += kThreads * 16) copy_async(s_target + i, g_source + i);
}

// The ring of images in shared memory. `copy(slot, image)` enqueues this thread's share of an image's copies.
template <typename C, typename Copy>
struct Ring {
  uint32_t s_slots;
  int num_images;
  Copy copy;

  __device__ __forceinline__ uint32_t slot(int image) const { return s_slots + image % C::kSlots * C::kSlotBytes; }

  __device__ __forceinline__ void fetch(int image) const {
    if (image < num_images) copy(slot(image), image);
    commit_copies();  // beyond the last image too: groups are counted, not named
  }

  __device__ __forceinline__ void start() const {
#pragma unroll
    for (int image = 0; image < C::kSlots - 1; ++image) fetch(image);
  }

  // Waits for an image, lets every warp finish the previous one, and fetches into the freed slot.
  __device__ __forceinline__ uint32_t advance(int image) const {
    wait_copies<C::kSlots - 2>();
    __syncthreads();
    fetch(image + C::kSlots - 1);
    return slot(image);
  }
};

template <typename C, typename Copy>
__device__ __forceinline__ Ring<C, Copy> make_ring(uint32_t s_slots, int num_images, const Copy& copy) {
  return {s_slots, num_images, copy};
}

// ---- Block masks ----

// Tiles of 128 keys for this thread block: all, or those of its row of blocks.
__device__ __forceinline__ int tiles_of(const Params& p, const Work& w) {
  if (p.block_mask_heads == 0) return ceil_div(w.num_keys, kKeyTile);
  return p.block_counts[block_row_of(p, w.b, w.head, blockIdx.x * kRows / kBlock)];
}

// Tile number `n`. Positions are not stored: registers are few.
__device__ __forceinline__ int tile_at(const Params& p, int n) {
  if (p.block_mask_heads == 0) return n;
  return __ldg(p.block_tiles + block_row_of(p, blockIdx.z, blockIdx.y, blockIdx.x * kRows / kBlock) * p.key_tiles + n);
}

// The same in steps of 64 keys. The second half of the last tile may have no key.
__device__ __forceinline__ int steps_of(const Params& p, const Work& w) {
  if (p.block_mask_heads == 0) return ceil_div(w.num_keys, kHalfTile);
  const int tiles = tiles_of(p, w);
  return 2 * tiles - (tiles > 0 && (2 * tile_at(p, tiles - 1) + 1) * kHalfTile >= w.num_keys);
}

// ---- Masks ----

// Hides keys that do not exist and applies the mask to logits in units of log2. Fragment n holds the 8 keys from
// first_key + 8 n. Loads one element at a time: masks may have any strides.
template <int kFragments>
__device__ __forceinline__ void apply_mask(float (&z)[kFragments][4], const Params& p, const Work& w, int first_key) {
  const int key0 = first_key + threadIdx.x % 4 * 2;
  if (first_key + kFragments * 8 > w.num_keys) {
#pragma unroll
    for (int n = 0; n < kFragments; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (key0 + n * 8 + c % 2 >= w.num_keys) z[n][c] = -INFINITY;
  }
  if (p.mask_kind == TRTCONVERT_MASK_NONE) return;
  int64_t base[2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    base[r] = w.b * p.mask_strides[0] + w.head * p.mask_strides[1] +
              int64_t(min(w.row + r * 8, p.num_queries - 1)) * p.mask_strides[2];
#pragma unroll
  for (int n = 0; n < kFragments; ++n)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int64_t at = base[c / 2] + int64_t(min(key0 + n * 8 + c % 2, w.num_keys - 1)) * p.mask_strides[3];
      if (p.mask_kind == TRTCONVERT_MASK_BOOL) {
        if (static_cast<const uint8_t*>(p.mask)[at] == 0) z[n][c] -= INFINITY;  // a NaN stays, as in torch
      } else {
        const float bias = p.bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(p.mask)[at])
                                  : __half2float(static_cast<const __half*>(p.mask)[at]);
        z[n][c] += bias * kLog2e;
      }
    }
}

// ---- Softmax ----

// Running maximum and sum of the two rows of a thread. The sum is this thread's share until the end.
struct RowState {
  float maximum[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.f, 0.f};
};

// Products as the tensor cores give them and, per row, the factor to logits in units of log2: the factor is part of the fused
// multiply-add that also subtracts the maximum. With a mask the factor is applied first.
template <int kFragments>
__device__ __forceinline__ void mask_logits(float (&z)[kFragments][4], float (&factor)[2], const Params& p, const Work& w,
                                            int first_key) {
  if (p.mask_kind == TRTCONVERT_MASK_NONE && first_key + kFragments * 8 <= w.num_keys) return;
#pragma unroll
  for (int n = 0; n < kFragments; ++n)
#pragma unroll
    for (int c = 0; c < 4; ++c) z[n][c] *= factor[c / 2];
  factor[0] = factor[1] = 1.f;
  apply_mask(z, p, w, first_key);
}

// Rescales the output to a new maximum. A test pays, because a new maximum is rare after the first keys.
template <int kFragments>
__device__ __forceinline__ void rescale(float (&o)[kFragments][4], const float (&kept)[2]) {
  if (!__any_sync(0xffffffffu, kept[0] != 1.f || kept[1] != 1.f)) return;
#pragma unroll
  for (int n = 0; n < kFragments; ++n)
#pragma unroll
    for (int c = 0; c < 4; ++c) o[n][c] *= kept[c / 2];
}

// ---- Output ----

// Stores the two rows: value(r, d, accumulator) gives an output element.
template <typename T, int kDimPv, typename Value>
__device__ __forceinline__ void store_rows(const Params& p, const Work& w, const float (&o)[kDimPv / 8][4],
                                           const Value& value) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = w.row + r * 8;
    if (row >= p.num_queries) continue;
    const int part = part_of(p, row);
    const Tensors& tensors = p.parts[part];
    const TrtConvertStrides& strides = tensors.out_strides;
    T* const out = static_cast<T*>(tensors.out) + w.b * strides.batch + w.head * strides.head +
                   int64_t(row - first_token(p, part)) * strides.token;
#pragma unroll
    for (int n = 0; n < kDimPv / 8; ++n) {
      if (n * 8 >= p.head_dim) continue;
      const int d = n * 8 + threadIdx.x % 4 * 2;
      *reinterpret_cast<uint32_t*>(out + d) = pack_pair<T>(value(r, d, o[n][2 * r]), value(r, d + 1, o[n][2 * r + 1]));
    }
  }
}

// Adds to lse the natural logarithm of a row's sum of weights; the weights are relative to 2^maximum.
__device__ __forceinline__ void store_lse(const Params& p, const Work& w, int r, float maximum, float sum) {
  const int row = w.row + r * 8;
  if (threadIdx.x % 4 != 0 || row >= p.num_queries) return;
  float& lse = p.lse[(int64_t(w.b) * p.heads + w.head) * p.num_queries + row];
  lse = isnan(w.row_scale[r]) ? w.row_scale[r] : lse + (maximum + log2_approx(sum)) * kLn2;
}

// ---- Modes 2 and 3: INT8 second product ----

template <int kDimQk, int kDimPv, bool kTokenScales>
__device__ __forceinline__ void attend_int8(const Params& p, uint32_t s_memory) {
  using C = Config<kDimQk, kDimPv>;
  constexpr int kFragments = kKeyTile / 8;
  const Work w = find_work(p);
  const int t = threadIdx.x % 4;
  const int num_tiles = tiles_of(p, w);

  // Image 2 j is tile j of K (with the token scales of V), image 2 j + 1 is tile j of V.
  const auto ring = make_ring<C>(s_memory, 2 * num_tiles, [&](uint32_t slot, int image) {
    const int64_t tile = w.kv_tile0 + tile_at(p, image / 2);
    if (image % 2 == 1) return copy_image<kKeyTile * kDimPv>(slot, p.v_images + tile * p.v_tile_bytes);
    copy_image<kKeyTile * kDimQk>(slot, p.k_images + tile * p.k_tile_bytes);
    if constexpr (kTokenScales)
      copy_image<kScaleBytes>(slot + C::kImageBytes, reinterpret_cast<const uint8_t*>(p.tile_scales + tile));
  });

  const uint32_t s_queries = s_memory + C::kSlots * C::kSlotBytes;
  uint32_t queries[C::kQueriesInShared ? 1 : kDimQk / 32][4];
  if constexpr (C::kQueriesInShared) {
    copy_image<kQueryBlock * kDimQk>(s_queries, w.q_image);  // part of the first image's group
  } else {
    load_queries(queries, w);
  }
  ring.start();

  int32_t zero[4] = {kMagicBits, kMagicBits, kMagicBits, kMagicBits};
  float o[kDimPv / 8][4] = {};
  RowState state;
  for (int n = 0; n < num_tiles; ++n) {
    const uint32_t s_k = ring.advance(2 * n);
    const TileScales& tile_scales = p.tile_scales[w.kv_tile0 + tile_at(p, n)];
    const float k_scale = kTokenScales ? tile_scales.k : tile_scales.k + tile_scales.broken_v;
    // Mode 3 has few tiles whose tokens have scales: their scales stay in global memory.
    const float4* const log2_of_few = reinterpret_cast<const float4*>(tile_scales.log2_v) + t;
    const float4* const inverse_of_few = reinterpret_cast<const float4*>(tile_scales.inverse_v) + t;
    const bool scaled = kTokenScales || tile_scales.scaled_v;

    int32_t s[kFragments][4];
#pragma unroll
    for (int depth = 0; depth < kDimQk / 32; ++depth) {
      uint32_t(&q)[4] = queries[C::kQueriesInShared ? 0 : depth];
      if constexpr (C::kQueriesInShared) load_matrices(q, s_queries + query_offset() + 2 * depth * kQueryBlock * 16);
#pragma unroll
      for (int n = 0; n < kFragments; n += 2) {
        uint32_t k[4];
        load_matrices(k, s_k + fragment_offset<kKeyTile>() + (2 * depth * kKeyTile + n * 8) * 16);
        multiply_s8(s[n], q, k[0], k[1], depth == 0 ? zero : s[n]);
        multiply_s8(s[n + 1], q, k[2], k[3], depth == 0 ? zero : s[n + 1]);
      }
    }

    const float scale[2] = {w.row_scale[0] * k_scale, w.row_scale[1] * k_scale};
    float factor[2] = {scaled ? 1.f : scale[0], scaled ? 1.f : scale[1]};
    const uint32_t s_log2_v = s_k + C::kImageBytes + t * sizeof(float4);
    float z[kFragments][4];
#pragma unroll
    for (int n = 0; n < kFragments; n += 2) {
      float log2_v[4];
      if constexpr (kTokenScales) load_shared(log2_v, s_log2_v + n * 8 * sizeof(float));
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          z[n + i][c] = __int_as_float(s[n + i][c]) - kMagic;
          if constexpr (kTokenScales) z[n + i][c] = fmaf(z[n + i][c], scale[c / 2], log2_v[2 * i + c % 2]);
        }
    }
    if (!kTokenScales && scaled) {
#pragma unroll
      for (int n = 0; n < kFragments; n += 2) {
        const float4 given = log2_of_few[n * 2];
        const float log2_v[4] = {given.x, given.y, given.z, given.w};
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int c = 0; c < 4; ++c) z[n + i][c] = fmaf(z[n + i][c], scale[c / 2], log2_v[2 * i + c % 2]);
      }
    }
    mask_logits(z, factor, p, w, tile_at(p, n) * kKeyTile);

    // Weights are relative to the tile's maximum; the factors `kept` and `added` relate tiles to each other.
    float tile_maximum[2], kept[2], added[2], subtracted[2];
    row_maxima(tile_maximum, z);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Rounded up, so that no weight exceeds one: 255 times that would not fit a byte.
      tile_maximum[r] = __fmul_ru(tile_maximum[r], factor[r]);
      const float maximum = nan_max(state.maximum[r], tile_maximum[r]);
      kept[r] = exp2_approx(state.maximum[r] - finite_or_zero(maximum));
      added[r] = exp2_approx(tile_maximum[r] - finite_or_zero(maximum));
      subtracted[r] = finite_or_zero(tile_maximum[r]);
      state.maximum[r] = maximum;
    }
    uint32_t p8[kFragments / 4][4];
    // The sum of the weights over their tokens' scales, or the sum of P if tokens have no scales.
    float tile_sum[2] = {0.f, 0.f};
    uint32_t integer_sum[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < kFragments; n += 2) {
      float weight[2][4];
      uint32_t bytes[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          weight[i][c] = exp2_approx(fmaf(z[n + i][c], factor[c / 2], -subtracted[c / 2]));
          bytes[i][c] = __float_as_uint(fmaf(weight[i][c], 255.f, kRoundToByte));
        }
      if (scaled) {
        float inverse_v[4];
        if constexpr (kTokenScales) {
          load_shared(inverse_v, s_log2_v + (kKeyTile + n * 8) * sizeof(float));
        } else {
          const float4 given = inverse_of_few[n * 2];
          inverse_v[0] = given.x, inverse_v[1] = given.y, inverse_v[2] = given.z, inverse_v[3] = given.w;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int c = 0; c < 4; ++c) tile_sum[c / 2] = fmaf(weight[i][c], inverse_v[2 * i + c % 2], tile_sum[c / 2]);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t packed = pack4(bytes[0][2 * r], bytes[0][2 * r + 1], bytes[1][2 * r], bytes[1][2 * r + 1]);
        p8[n / 4][n % 4 + r] = packed;
        if constexpr (!kTokenScales) integer_sum[r] = __dp4a(packed, 0x01010101u, integer_sum[r]);
      }
    }
    if (!scaled) {
#pragma unroll
      for (int r = 0; r < 2; ++r) tile_sum[r] = float(integer_sum[r]) / 255.f;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) state.sum[r] = state.sum[r] * kept[r] + tile_sum[r] * added[r];
    rescale(o, kept);

    const uint32_t s_v = ring.advance(2 * n + 1);
#pragma unroll
    for (int n = 0; n < kDimPv / 8; n += 2) {
      int32_t product[2][4];
#pragma unroll
      for (int depth = 0; depth < kKeyTile / 32; ++depth) {
        uint32_t v[4];
        load_matrices(v, s_v + fragment_offset<kDimPv>() + (2 * depth * kDimPv + n * 8) * 16);
        multiply_u8s8(product[0], p8[depth], v[0], v[1], depth == 0 ? zero : product[0]);
        multiply_u8s8(product[1], p8[depth], v[2], v[3], depth == 0 ? zero : product[1]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          o[n + i][c] = fmaf(__int_as_float(product[i][c]) - kMagic, added[c / 2], o[n + i][c]);
    }
  }

  float inverse[2], offset_factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = quad_sum(state.sum[r]);
    if (p.lse) store_lse(p, w, r, state.maximum[r], sum);
    inverse[r] = inverse_sum(sum, w.row_scale[r]) / 255.f;
    offset_factor[r] = sum == 0.f ? 0.f : 1.f;  // a row without a visible key is zero, not the mean value
  }
  const int64_t channel0 = (int64_t(w.bin) * p.kv_heads + w.kv_head) * p.head_dim;
  const auto value = [&](int r, int d, float x) {
    return fmaf(x * inverse[r], p.v_scale[channel0 + d], p.v_offset[channel0 + d] * offset_factor[r]);
  };
  if (p.bf16) {
    store_rows<__nv_bfloat16, kDimPv>(p, w, o, value);
  } else {
    store_rows<__half, kDimPv>(p, w, o, value);
  }
}

// ---- Modes 0 and 1: 16-bit second product ----

template <int kDimQk, int kDimPv, typename T, bool kInt8Logits>
__device__ __forceinline__ void attend_16bit(const Params& p, uint32_t s_memory) {
  using C = Config<kDimQk, kDimPv>;
  constexpr int kFragments = kHalfTile / 8;
  constexpr int kQkSteps = (kInt8Logits ? kDimQk : 2 * kDimPv) / 32;
  constexpr int kHalfImageBytes = kHalfTile * 2 * kDimPv;
  const Work w = find_work(p);
  const int num_steps = steps_of(p, w);

  // Image 2 j is 64 keys of K, image 2 j + 1 the same keys' V.
  const auto ring = make_ring<C>(s_memory, 2 * num_steps, [&](uint32_t slot, int image) {
    const int half = image / 2 % 2;
    const int64_t tile = w.kv_tile0 + tile_at(p, image / 4);
    if (image % 2 == 1) {
      copy_image<kHalfImageBytes>(slot, p.v_images + tile * p.v_tile_bytes + half * kHalfImageBytes);
    } else if constexpr (kInt8Logits) {
      // Half the rows of each chunk of a 128-key image.
      constexpr int kPiece = kHalfTile * 16;
      const uint8_t* const source = p.k_images + tile * p.k_tile_bytes + half * kPiece;
      for (int i = threadIdx.x * 16; i < kHalfTile * kDimQk; i += kThreads * 16)
        copy_async(slot + i, source + i / kPiece * (2 * kPiece) + i % kPiece);
    } else {
      copy_image<kHalfImageBytes>(slot, p.k_images + tile * p.k_tile_bytes + half * kHalfImageBytes);
    }
  });

  uint32_t q[kQkSteps][4];
  load_queries(q, w);
  ring.start();

  // Address of V's transposed fragments for this lane: 16 keys by two chunks of 8 channels.
  const int lane = threadIdx.x % 32;
  const int v_offset = (lane / 16 * kHalfTile + lane / 8 % 2 * 8 + lane % 8) * 16;
  float o[kDimPv / 8][4] = {};
  RowState state;
  for (int step = 0; step < num_steps; ++step) {
    const uint32_t s_k = ring.advance(2 * step) + fragment_offset<kHalfTile>();
    float z[kFragments][4];
    float factor[2] = {w.row_scale[0], w.row_scale[1]};
    if constexpr (kInt8Logits) {
      int32_t zero[4] = {kMagicBits, kMagicBits, kMagicBits, kMagicBits};
      const float k_scale = p.tile_scales[w.kv_tile0 + tile_at(p, step / 2)].k;
      int32_t s[kFragments][4];
#pragma unroll
      for (int depth = 0; depth < kQkSteps; ++depth)
#pragma unroll
        for (int n = 0; n < kFragments; n += 2) {
          uint32_t k[4];
          load_matrices(k, s_k + (2 * depth * kHalfTile + n * 8) * 16);
          multiply_s8(s[n], q[depth], k[0], k[1], depth == 0 ? zero : s[n]);
          multiply_s8(s[n + 1], q[depth], k[2], k[3], depth == 0 ? zero : s[n + 1]);
        }
#pragma unroll
      for (int n = 0; n < kFragments; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) z[n][c] = __int_as_float(s[n][c]) - kMagic;
      factor[0] *= k_scale;
      factor[1] *= k_scale;
    } else {
#pragma unroll
      for (int n = 0; n < kFragments; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) z[n][c] = 0.f;
#pragma unroll
      for (int depth = 0; depth < kQkSteps; ++depth)
#pragma unroll
        for (int n = 0; n < kFragments; n += 2) {
          uint32_t k[4];
          load_matrices(k, s_k + (2 * depth * kHalfTile + n * 8) * 16);
          multiply_16bit<T>(z[n], q[depth], k[0], k[1]);
          multiply_16bit<T>(z[n + 1], q[depth], k[2], k[3]);
        }
    }
    mask_logits(z, factor, p, w, tile_at(p, step / 2) * kKeyTile + step % 2 * kHalfTile);

    float step_maximum[2], kept[2], subtracted[2];
    row_maxima(step_maximum, z);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float maximum = nan_max(state.maximum[r], step_maximum[r] * factor[r]);
      subtracted[r] = finite_or_zero(maximum);
      kept[r] = exp2_approx(state.maximum[r] - subtracted[r]);
      state.maximum[r] = maximum;
      state.sum[r] *= kept[r];
    }
    uint32_t weights[kFragments / 2][4];
#pragma unroll
    for (int n = 0; n < kFragments; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float low = exp2_approx(fmaf(z[n][2 * r], factor[r], -subtracted[r]));
        const float high = exp2_approx(fmaf(z[n][2 * r + 1], factor[r], -subtracted[r]));
        state.sum[r] += low + high;
        weights[n / 2][n % 2 * 2 + r] = pack_pair<T>(low, high);
      }
    rescale(o, kept);

    const uint32_t s_v = ring.advance(2 * step + 1) + v_offset;
#pragma unroll
    for (int depth = 0; depth < kHalfTile / 16; ++depth)
#pragma unroll
      for (int n = 0; n < kDimPv / 8; n += 2) {
        uint32_t v[4];
        load_matrices_transposed(v, s_v + (n * kHalfTile + depth * 16) * 16);
        multiply_16bit<T>(o[n], weights[depth], v[0], v[1]);
        multiply_16bit<T>(o[n + 1], weights[depth], v[2], v[3]);
      }
  }

  float inverse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = quad_sum(state.sum[r]);
    if (p.lse) store_lse(p, w, r, state.maximum[r], sum);
    inverse[r] = inverse_sum(sum, w.row_scale[r]);
  }
  store_rows<T, kDimPv>(p, w, o, [&](int r, int, float x) { return x * inverse[r]; });
}

// ---- Kernel and launch ----

template <int kDimQk, int kDimPv>
__global__ void __launch_bounds__(kThreads, Config<kDimQk, kDimPv>::kBlocksPerSm)
    attention_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t dynamic_shared[];
  const uint32_t s_memory = static_cast<uint32_t>(__cvta_generic_to_shared(dynamic_shared));
  // The same for the whole thread block: one batch element has one mode.
  switch (p.elements[blockIdx.z].mode) {
    case 0:
      return p.bf16 ? attend_16bit<kDimQk, kDimPv, __nv_bfloat16, false>(p, s_memory)
                    : attend_16bit<kDimQk, kDimPv, __half, false>(p, s_memory);
    case 1:
      return p.bf16 ? attend_16bit<kDimQk, kDimPv, __nv_bfloat16, true>(p, s_memory)
                    : attend_16bit<kDimQk, kDimPv, __half, true>(p, s_memory);
    case 2:
      return attend_int8<kDimQk, kDimPv, true>(p, s_memory);
    default:
      return attend_int8<kDimQk, kDimPv, false>(p, s_memory);
  }
}

template <int kDimQk, int kDimPv>
cudaError_t launch(const Params& params, cudaStream_t stream) {
  using C = Config<kDimQk, kDimPv>;
  constexpr auto kernel = attention_kernel<kDimQk, kDimPv>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes);
  if (error != cudaSuccess) return error;
  const dim3 grid(ceil_div(params.num_queries, kRows), params.heads, params.batch);
  kernel<<<grid, kThreads, C::kSharedBytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace trtconvert::attention::mma
