// Attention to at most one tile of keys: the condition for its kernel, and the layout of its shared memory.
#pragma once

#include "params.h"

namespace trtconvert::attention {

// Shared memory of a thread block: raw keys, later overwritten by INT8 values, values in 16 bits, INT8 keys, the scales of mode 2.
// The layout has room for `keys` keys: 128, or 96 if the kernel computes 80, because an INT8 product takes 32 at once.
struct OneTileLayout {
  PaddedDims dims;
  int keys;

  // The pitch of 16-byte chunks of V's rows is one row more than needed, so that the chunks of a token are in different banks.
  TRTCONVERT_HOST_DEVICE constexpr int value_pitch() const { return (keys + 1) * 16; }
  TRTCONVERT_HOST_DEVICE constexpr int values() const { return keys * 2 * dims.qk; }
  TRTCONVERT_HOST_DEVICE constexpr int int8_keys() const { return values() + value_pitch() * (dims.pv / 8); }
  TRTCONVERT_HOST_DEVICE constexpr int log2_v() const { return int8_keys() + keys * dims.qk; }
  TRTCONVERT_HOST_DEVICE constexpr int inverse_v() const { return log2_v() + kKeyTile * int(sizeof(float)); }
  TRTCONVERT_HOST_DEVICE constexpr int bytes() const { return inverse_v() + kKeyTile * int(sizeof(float)); }
};

constexpr int kFewestKeys = 96;  // of a layout

inline OneTileLayout one_tile_layout(const Params& p) { return {p.dims, p.num_keys <= 80 ? kFewestKeys : kKeyTile}; }

// Norms, rotations and keys with an index need the pre-pass, masks other than key masks take too many registers, and the log-sum-exp
// is not computed. The largest numbers of keys with many channels do not fit.
inline bool is_one_tile(const Params& p) {
  return p.num_keys <= kKeyTile && p.mask_kind == TRTCONVERT_MASK_NONE && !p.rotary && !p.q_norm &&
         !p.block_mask_heads && (!p.source_keys || p.has_key_mask) && !p.lse &&
         one_tile_layout(p).bytes() <= kSharedLimit;
}

}  // namespace trtconvert::attention
