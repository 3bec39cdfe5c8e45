// The one plain struct from the checks to every kernel, and the workspace's layout.
//
// The pre-pass writes Q, K and V as *tile images*: blocks that are already in the layout the matrix instructions read from
// shared memory, so that a tile is one contiguous copy. One layout serves every operand: 16-byte chunks, rows innermost,
//
//   image[chunk][row][16 bytes]      offset(row, byte) = (byte / 16) * rows * 16 + row * 16 + byte % 16
//
// Eight rows of one chunk are 128 contiguous bytes: the "core matrix" of wgmma without swizzle, and one conflict-free
// ldmatrix row group.
#pragma once

#include <cstddef>
#include <cstdint>

#include "trtconvert/int8_attention.h"

#ifdef __CUDACC__
#define TRTCONVERT_HOST_DEVICE __host__ __device__
#else
#define TRTCONVERT_HOST_DEVICE
#endif

namespace trtconvert::attention {

constexpr int kModes = 5;
constexpr int kKeyTile = 128;      // part of the numerics: P is relative to the maximum of 128 consecutive keys
constexpr int kQueryBlock = 64;    // rows of one Q image
constexpr int kHalfTile = 64;      // keys of one 16-bit K or V image
constexpr int kBlock = 128;        // queries and keys of an entry of a block mask
static_assert(kBlock == kKeyTile && kBlock == 2 * kQueryBlock);
constexpr int kSharedLimit = 99 * 1024;  // bytes of one thread block of the mma.sync kernels: sm_86, 89 and 120 have the fewest
constexpr int kVPermutation = 16;  // keys are permuted within groups of 16, see permuted_key()

// Key (within its group of 16) that is stored at position `slot`. The S accumulator of wgmma and mma.sync gives thread t of
// a quad the columns 2t, 2t+1 of each group of 8; the 8-bit A operand wants 4 consecutive columns 4t..4t+3. Storing V's
// keys in this order makes the one the other without any shuffle.
TRTCONVERT_HOST_DEVICE constexpr int permuted_key(int slot) {
  return ((slot >> 1) & 1) * 8 + (slot >> 2) * 2 + (slot & 1);
}

TRTCONVERT_HOST_DEVICE constexpr int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }
TRTCONVERT_HOST_DEVICE constexpr int ceil_div(int x, int y) { return (x + y - 1) / y; }

// head_dim padded for each product. Both kernels are instantiated for these pairs only.
struct PaddedDims {
  int qk;  // bytes of an INT8 Q or K row: the depth of the first product, a multiple of 32
  int pv;  // columns of V and of the output; depth of the first product in 16-bit; a multiple of 16
};

constexpr PaddedDims padded_dims(int head_dim) {
  if (head_dim <= 48) return {64, 48};
  if (head_dim <= 64) return {64, 64};
  if (head_dim <= 80) return {96, 80};
  if (head_dim <= 96) return {96, 96};
  if (head_dim <= 128) return {128, 128};
  if (head_dim <= 160) return {160, 160};
  if (head_dim <= 192) return {192, 192};
  return {256, 256};
}

// True if the kernel of sm_90a has mode 4 for this number of padded channels; no kernel has mode 4 for at most one tile of keys.
// Otherwise mode 4 is computed as mode 1, which is closer to exact.
TRTCONVERT_HOST_DEVICE constexpr bool has_fp8_values(int columns) { return columns <= 128; }

// Rows of an image of V in FP8: behind the channels one row of ones and seven of zeros.
TRTCONVERT_HOST_DEVICE constexpr int fp8_value_rows(int columns) { return columns + 8; }

// True if the kernel of sm_90a takes 16-bit values of this many padded channels as blocks of 64 keys by 64 channels with the
// 128-byte swizzle: 16-byte chunk c of row r is at position c ^ r % 8.
TRTCONVERT_HOST_DEVICE constexpr bool swizzled_values(int columns) { return columns % 64 == 0; }

// What a key tile carries besides its images. Arrays are in permuted order: slot s of group g is key 16 g + permuted_key(s),
// so thread t of a quad reads its four keys of a group as one float4 at 16 g + 4 t. Value tokens have scales sv in mode 2, and in
// tiles of mode 3 with a small token.
struct TileScales {
  float log2_v[kKeyTile];     // log2(sv), -inf for keys that do not exist. Not written for tokens without scales.
  float inverse_v[kKeyTile];  // 1 / sv, 0 for keys that do not exist. Not written for tokens without scales.
  union {
    float log2_v_max;         // mode 2: extremes of log2_v over the keys that exist; modes 1 and 4: zeros
    float broken_v;           // mode 3: 0, or NaN where a value is not finite
  };
  union {
    float log2_v_min;
    uint32_t scaled_v;        // mode 3: 1 + the index of this tile if its tokens have scales, 0 otherwise
  };
  float k;                    // modes 1..4: scale of K in this tile, NaN where a key is not finite
  float inverse_k;            // and its reciprocal
};

// One per batch element, written by the pre-pass.
struct ElementInfo {
  int32_t mode;      // 0..4. An invalid timestep or mode becomes mode 1 with NaN row scales
  int32_t bin;       // row of the tables
  int32_t num_keys;  // min(Nk, key_lengths[b]), >= 0
  int32_t unused;
};

// A thread block's unit in the kernel of sm_90a under a block mask: a row of blocks of one head.
struct alignas(16) BlockRow {
  int32_t unit;   // head * block_rows + row
  int32_t count;  // of its key tiles
  int32_t last;   // the last of them
  int32_t unused;
};

// Queries, keys, values and output, 16-bit, through strides: of all tokens, or of one part of joint attention.
struct Tensors {
  const void* q;  // [B, Nq, H, D]
  const void* k;  // [B, Nk, Hkv, D]
  const void* v;  // [B, Nk, Hkv, D]
  void* out;      // [B, Nq, H, D]
  TrtConvertStrides q_strides, k_strides, v_strides, out_strides;
};

constexpr int kOnePart = INT32_MAX;

struct Params {
  int batch, heads, kv_heads, group;  // group = heads / kv_heads
  int num_queries, num_keys, head_dim, num_bins;
  int query_blocks;  // ceil(Nq / kQueryBlock)
  int key_tiles;     // ceil(Nk / kKeyTile)
  int multiprocessors;  // for the kernel of sm_90a; 0 elsewhere
  bool direct_values;   // the kernel of sm_90a reads 16-bit values from v, not from v_images
  bool fp8_values;      // the kernel that runs has mode 4
  bool early_launch;    // the kernel of one tile may start before the one in front of it ends
  PaddedDims dims;

  bool bf16, dynamic, smooth_k;
  TrtConvertMaskKind mask_kind;
  float softmax_scale, timestep_max;

  // The tokens from `split` on are those of parts[1]. `split` is a multiple of kKeyTile, so that no tile has tokens of both, or
  // kOnePart.
  Tensors parts[2];
  int split;

  const float* timestep;  // [B]
  const float* q_scale;   // [T, H]
  const float* k_scale;   // [T, Hkv]
  const float* v_scale;   // [T, Hkv, D]
  const float* k_offset;  // [T, Hkv, D]
  const float* v_offset;  // [T, Hkv, D]
  const int32_t* modes;   // [T]

  const void* mask;  // [B, H, Nq, Nk] through strides, one byte or 16-bit
  int64_t mask_strides[4];
  const int32_t* key_lengths;  // [B] or null

  // Block mask: kBlock queries by kBlock keys. 0: none.
  const uint8_t* block_mask;  // [block_mask_batch, block_mask_heads, block_rows, key_tiles]
  int block_mask_batch, block_mask_heads;
  int block_rows;  // ceil(Nq / kBlock)

  // Rows of k and v to attend to, or null: k and v have num_keys rows. With an index they have source_keys rows.
  const int32_t* key_index;  // [B, Hkv or 1, Nk]
  int index_heads;           // Hkv or 1
  int source_keys;

  // Key masks are boolean masks that are the same for all heads and queries. Hidden keys are left out: behind the kernel that lists the
  // visible keys, key_index and key_lengths are visible_keys and visible_counts. mask_kind is TRTCONVERT_MASK_NONE.
  bool has_key_mask;
  const uint8_t* key_mask;  // [B, Nk] through strides
  int64_t key_mask_strides[2];

  float* lse;  // [B, H, Nq] or null. The pre-pass stores the part that smoothing takes from each row's logits, the kernel adds the rest

  // Layers before attention on Q and K; null: none.
  const float* rotary;  // [N, D / 2, 2]: cosine and sine
  const float* q_norm;  // [D], or [H, D] across heads, or [2, D] with norm_split, and k_norm: both or neither
  const float* k_norm;  // [D], or [Hkv, D], or [2, D]
  float norm_epsilon;
  bool norm_across_heads;
  int norm_split;  // tokens from this one on take row 1 of [2, D]; 0: one row for all

  // Workspace, written before the pre-pass, for norms across heads only: 1 / sqrt(mean(x^2) + norm_epsilon) of each token.
  float* q_norm_factors;  // [B, Nq]
  float* k_norm_factors;  // [B, Nk]

  // Workspace, written before the pre-pass, for key masks only.
  int32_t* visible_keys;    // [B, Nk]: the keys that the mask shows, ascending
  int32_t* visible_counts;  // [B]: how many

  // Workspace, written before the pre-pass, for block masks only.
  int32_t* block_tiles;   // [B, block_mask_heads, block_rows][key_tiles]: of each row its key tiles, ascending
  int32_t* block_counts;  // [B, block_mask_heads, block_rows]: how many
  BlockRow* block_order;  // [B, H * block_rows], for the kernel of sm_90a: the longest rows first

  // Workspace, written by the pre-pass. "block" and "tile" are contiguous images of the given size in bytes; a mode uses the
  // part of it that its element size needs.
  ElementInfo* elements;   // [B]
  float* row_scales;       // [B, H, query_blocks * 64]: scale of the row's Q * softmax_scale * log2(e); mode 0: without Q's.
                           // NaN where a table or timestep that the row needs is not usable, or the row is not finite: its output
                           // is NaN
  TileScales* tile_scales; // [B, Hkv, key_tiles]
  uint8_t* q_images;       // [B, H, query_blocks][q_block_bytes]: modes 1..4 INT8 rows of dims.qk bytes, 64 rows;
                           //   mode 0 16-bit rows of dims.pv elements, 64 rows
  uint8_t* k_images;       // [B, Hkv, key_tiles][k_tile_bytes]: modes 1..4 INT8 rows of dims.qk bytes, 128 keys;
                           //   mode 0 two 16-bit images of 64 keys, rows of dims.pv elements
  uint8_t* v_images;       // [B, Hkv, key_tiles][v_tile_bytes]: modes 2, 3 INT8, transposed: dims.pv rows of 128 permuted keys;
                           //   mode 4 the same in FP8, fp8_value_rows() rows;
                           //   modes 0, 1 two 16-bit images of 64 keys, rows of dims.pv elements, not transposed, not permuted;
                           //   for the kernel of sm_90a swizzled where swizzled_values(), and not written with direct_values
  int64_t q_block_bytes, k_tile_bytes, v_tile_bytes;
  // sm_90a, see sm90/schedule.h.
  int32_t* units_taken;    // [kModes], per mode the number of units taken after the first of each thread block: zero
  // Of units that several thread blocks compute.
  int divided_units;       // room for so many
  int32_t* parts_done;     // [divided_units, kMaxConsumers]: zero
  float* unit_parts;       // [units, parts of each, kMaxConsumers][part_floats()]. Not written by the pre-pass
};

// The part of a token, and the first token of this part.
TRTCONVERT_HOST_DEVICE inline int part_of(const Params& p, int token) { return token >= p.split; }
TRTCONVERT_HOST_DEVICE inline int first_token(const Params& p, int part) { return part ? p.split : 0; }

// Position of a row of blocks in the lists of tiles and counts.
TRTCONVERT_HOST_DEVICE inline int64_t block_row_of(const Params& p, int batch, int head, int row) {
  return (int64_t(batch) * p.block_mask_heads + (p.block_mask_heads > 1 ? head : 0)) * p.block_rows + row;
}

constexpr int kMaxConsumers = 3;  // query blocks that a thread block of the sm_90a kernel computes at once

// Of one query block: per thread of a warpgroup its share of O and of the column of row sums, two references, two sums.
TRTCONVERT_HOST_DEVICE constexpr int part_floats(const PaddedDims& dims) { return 128 * (dims.pv / 2 + 8); }

}  // namespace trtconvert::attention
