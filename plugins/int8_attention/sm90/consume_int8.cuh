// Modes 2 and 3: both products in INT8.
#pragma once

#include "sm90/epilogue.cuh"

namespace trtconvert::attention::sm90 {

// Extremes of the scales of the warp's rows.
__device__ __forceinline__ void find_extremes(Extremes& extremes, const float* row_scales) {
  const int row = first_row(), warp = threadIdx.x / 32 % 4;
  const float scale[2] = {row_scales[row], row_scales[row + 8]};
  float largest = fmaxf(scale[0], scale[1]), smallest = fminf(scale[0], scale[1]);
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    smallest = fminf(smallest, __shfl_xor_sync(0xffffffffu, smallest, offset));
  }
  if (threadIdx.x % 32 == 0) {
    extremes.largest[warp] = largest;
    extremes.smallest[warp] = smallest;
  }
  __syncwarp();
}

// A thread's factors for a tile's scores, known before the scores; all but c and offset are for mode 2 only.
struct TileState {
  float c[2];                  // base-2 exponent per unit of S
  float inverse[2], start[2];  // accumulators start at log2_v * inverse + start
  float offset;                // base-2 exponent that the whole tile shares
  bool fast;                   // the scores are kMagic + S (+ the token's scale), ready to use; the same in a warp
};

template <int kDimQk>
__device__ __forceinline__ TileState prepare_tile(const TileScales& scales, const float* row_scales, const Extremes& extremes,
                                                  int row) {
  // Limit beside |S| <= 127^2 D within 2^22. Rows of tiny scale against tiny tokens may exceed the limit, and take the slow path.
  constexpr float kRoom = float((1 << 22) - 127 * 127 * kDimQk - 64);
  const float4 tile = *reinterpret_cast<const float4*>(&scales.log2_v_max);  // max, min, k, 1 / k
  TileState state;
  state.offset = tile.x;
  // `start` below is kMagic plus the largest log2(sv) in units of S: beyond 2^22 units kMagic would lose its meaning.
  const float smallest = extremes.smallest[row / 16] * tile.z;
  state.fast = extremes.largest[row / 16] * tile.z <= kLargestFastScale && tile.x - tile.y <= kRoom * smallest &&
               fabsf(tile.x) <= 0x1p22f * smallest;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float scale = row_scales[row + 8 * r];
    state.c[r] = scale * tile.z;
    state.inverse[r] = state.fast ? reciprocal(scale) * tile.w : 0.f;
    state.start[r] = fmaf(-tile.x, state.inverse[r], kMagic);
  }
  return state;
}

// Mode 2: starts the accumulators of a tile at kMagic plus log2(sv) in units of S, relative to the tile's largest: exp2(S c)
// then already carries the token's scale. `quad` is the lane's place among four.
__device__ __forceinline__ void start_scores(int32_t (&s)[64], const TileScales& scales, const TileState& state, int quad) {
#pragma unroll
  for (int g = 0; g < kKeyTile / 16; ++g) {
    const float4 v = *reinterpret_cast<const float4*>(&scales.log2_v[16 * g + 4 * quad]);
    const float bias[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float start;
      asm volatile("fma.rn.f32 %0, %1, %2, %3;"
                   : "=f"(start)
                   : "f"(bias[i / 4 * 2 + i % 2]), "f"(state.inverse[i / 2 % 2]), "f"(state.start[i / 2 % 2]));
      s[8 * g + i] = __float_as_int(start);
    }
  }
}

// Row maxima of a tile: of S (with its token's scale) in `top`, and the corresponding x in `peak`. The weight of an x, relative to
// the maximum, is exp2((x - peak) c).
struct Maxima {
  float top[2], peak[2];
};

// The slow path of tokens with scales: x becomes S plus log2(sv), in units of S and relative to `offset`, less its row maximum
// `top`. Missing keys have the scale 0, whose log2 is -infinity.
__device__ __forceinline__ void add_token_scales(float (&x)[64], float (&top)[2], const float (&c)[2], float offset,
                                                 const TileScales& scales, int quad, int columns) {
  const float* const bias = scales.log2_v + 4 * quad;
  const float inverse[2] = {reciprocal(c[0]), reciprocal(c[1])};
#pragma unroll
  for (int i = 0; i < 64; ++i) x[i] = fmaf(bias[i / 8 * 16 + i % 8 / 4 * 2 + i % 2] - offset, inverse[i / 2 % 2], x[i]);
  if (columns < kKeyTile) hide_columns(x, columns);
  thread_maxima(x, top);
  quad_max(top);
#pragma unroll
  for (int i = 0; i < 64; ++i) x[i] -= top[i / 2 % 2];  // exact for the maximum, however large c is
}

// Missing keys have the token scale 0, whose log2 is -infinity: accumulators that start with -infinity stay there. The slow path
// hides columns beyond `columns` itself.
__device__ __forceinline__ Maxima take_scores(float (&x)[64], const TileState& state, const TileScales& scales, int quad,
                                              int columns) {
  Maxima maxima;
  if (__builtin_expect(state.fast, 1)) {
    int32_t top[4] = {__float_as_int(x[0]), __float_as_int(x[2]), __float_as_int(x[4]), __float_as_int(x[6])};
#pragma unroll
    for (int i = 0; i < 64; i += 4) {
      const int chain = i / 2 % 4;
      top[chain] = __vimax3_s32(top[chain], __float_as_int(x[i]), __float_as_int(x[i + 1]));
      top[chain + 1] = __vimax3_s32(top[chain + 1], __float_as_int(x[i + 2]), __float_as_int(x[i + 3]));
    }
    maxima.peak[0] = __int_as_float(max(top[0], top[2]));
    maxima.peak[1] = __int_as_float(max(top[1], top[3]));
    quad_max(maxima.peak);
#pragma unroll
    for (int r = 0; r < 2; ++r) maxima.top[r] = maxima.peak[r] - kMagic;
  } else {
#pragma unroll
    for (int i = 0; i < 64; ++i) x[i] -= kMagic;
    add_token_scales(x, maxima.top, state.c, state.offset, scales, quad, columns);
    maxima.peak[0] = maxima.peak[1] = 0.f;
  }
  return maxima;
}

// P = 255 exp(w - tile maximum) of a tile, the exponents being value(i) * c + shift: the A operand of the second product in u8, and
// this thread's part of the row sums: of P, or, if tokens have scales, of the unrounded P over sv. `meanwhile(group)` runs between
// the groups of 16 keys: the exponential unit takes 8 cycles per instruction, and a warp issues in order.
template <bool kTokenScales, typename Value, typename Meanwhile>
__device__ __forceinline__ void weights(const Value& value, const float (&c)[2], const float (&shift)[2],
                                        const TileScales& scales, int quad, uint32_t (&probability)[4][4],
                                        float (&sum)[2], const Meanwhile& meanwhile) {
  float partial[2][2] = {};
  uint32_t integers[2] = {};
#pragma unroll
  for (int g = 0; g < kKeyTile / 16; ++g) {
    float inverse[4];
    if constexpr (kTokenScales) {
      const float4 v = *reinterpret_cast<const float4*>(&scales.inverse_v[16 * g + 4 * quad]);
      inverse[0] = v.x, inverse[1] = v.y, inverse[2] = v.z, inverse[3] = v.w;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float e[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        e[i] = exp2_approx(fmaf(value(8 * g + i / 2 * 4 + 2 * r + i % 2), c[r], shift[r]));
        if constexpr (kTokenScales) partial[r][i % 2] = fmaf(e[i], inverse[i], partial[r][i % 2]);
      }
      const uint32_t packed = pack_u8(e[0], e[1], e[2], e[3]);
      probability[g / 2][g % 2 * 2 + r] = packed;
      if constexpr (!kTokenScales) integers[r] = __dp4a(packed, 0x01010101u, integers[r]);
    }
    meanwhile(g);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) sum[r] = kTokenScales ? partial[r][0] + partial[r][1] : float(integers[r]);
}

// Issues product = P V for the columns of one chunk; `value` describes the transposed V image from the chunk's first row on.
template <int kChunk, int kDimPv>
__device__ __forceinline__ void issue_pv_int8(int32_t (&product)[kChunk / 2], uint32_t (&probability)[4][4], uint64_t value) {
  pin(product);
#pragma unroll
  for (int k = 0; k < 4; ++k) pin(probability[k]);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma_u8s8<kChunk>(product, probability[k], advance(value, k * 2 * kDimPv * 16), k > 0);
  wgmma_commit();
}

// Modes 2 and 3: u8 P times s8 V, in tiles of 128 keys whose integer sums are promoted with the tile's row factor.
template <int kMode, int kDimQk, int kDimPv>
__device__ void consume_int8(const Params& p, uint8_t* shared, int consumer) {
  using S = Shape<kMode, kDimQk, kDimPv>;
  constexpr int kStages = S::kStages;
  constexpr int kChunk = S::kChunk, kChunks = S::kChunks;
  const uint32_t ring = kept_address<S>(shared);
  const BarrierAddresses barriers(ring + S::kBarriers);
  uint8_t* const own = shared + S::kConsumerArea + consumer * S::kConsumerBytes;
  const uint64_t query = matrix_descriptor(ring + S::kConsumerArea + consumer * S::kConsumerBytes, kQueryBlock * 16, 128);
  const int quad = lane_id() % 4;
  const int row = first_row();
  Extremes& extremes = *reinterpret_cast<Extremes*>(own + S::kExtremes);

  Turns turns(consumer, S::kConsumers);
  for (int n = 0;; ++n) {
    mbarrier_wait(barriers.query_full(consumer), n & 1);
    const Task& task = barriers_in<S>(shared).tasks[n % kTaskSlots];
    const float* const row_scales = reinterpret_cast<const float*>(own + S::kQueryBytes + n % 2 * S::kBesideBytes);
    const ConsumerTask<S> mine(task);
    if (mine.active == 0) break;
    if (!takes_part(p, mine, task, consumer, barriers)) continue;
    turns.begin(consumer, mine.active);
    if constexpr (kMode == 2) find_extremes(extremes, row_scales);

    Rows rows;
    float o[kChunks][kChunk / 2] = {};
    // State of the tile whose second product is in flight: P, the integer sums, row maxima and sums, and the factors of the sums.
    uint32_t probability[4][4] = {};
    int32_t product[kChunk / 2];
    float maximum[2], sum[2], factor[2] = {0.f, 0.f};
    const auto take_tile = [&] {
      take_maxima(rows, maximum, o);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        factor[r] = exp2_approx(maximum[r] - rows.reference[r]);
        rows.sum[r] = fmaf(sum[r], factor[r], rows.sum[r]);
      }
    };
    const auto promote = [&](int chunk, int first, int count) {
#pragma unroll
      for (int i = first; i < first + count; ++i)
        o[chunk][i] = fmaf(factor[i / 2 % 2], __int2float_rn(product[i]), o[chunk][i]);
    };

    Cursor<kStages> at(__shfl_sync(0xffffffffu, task.phases, 0));
    if (mine.streams > 1) at.advance(consumer);
    int previous_stage = at.stage;
    bool key_ready = false;
    const auto compute_tile = [&](int step, auto is_partial) __attribute__((always_inline)) {
      const bool partial = is_partial;
      const TileScales& scales = *reinterpret_cast<const TileScales*>(shared + S::tile_scales_at(at.stage));
      if (!key_ready) mbarrier_wait(barriers.key_full(at.stage), at.parity());
      int32_t s[64];
      TileState state;
      if constexpr (kMode == 2) {
        state = prepare_tile<kDimQk>(scales, row_scales, extremes, row);
        start_scores(s, scales, state, quad);
      }
      // The second product of the previous tile: it runs behind this tile's first product and under this tile's maxima, or before.
      // Before the first tile P is zero, so any V serves.
      const auto issue_previous = [&] {
        issue_pv_int8<kChunk, kDimPv>(product, probability, S::value_descriptor(ring, previous_stage));
      };
      if constexpr (S::kPromoteFirst) issue_previous();
      pin(s);
      if constexpr (S::kPromoteBetween) {
#pragma unroll
        for (int k = 0; k < 4; ++k) pin(probability[k]);
      }
      wgmma_fence();
      issue_qk_int8<kDimQk, kMode == 2>(s, query, S::key_descriptor(ring, at.stage));
      if constexpr (S::kPromoteBetween) issue_previous();
      // Asked now, needed later: an answer takes some fifty cycles.
      Cursor<kStages> next = at;
      next.advance(mine.streams);
      const bool value_ready = mbarrier_test(barriers.value_full(at.stage), at.parity());
      // If the previous stage belongs to another consumer, the turn must come first: S::kCanGather.
      key_ready = (S::kPipelined || mine.streams == 1) && mbarrier_test(barriers.key_full(next.stage), next.parity());
      if constexpr (kMode == 3) {
#pragma unroll
        for (int r = 0; r < 2; ++r) state.c[r] = fmaf(row_scales[row + 8 * r], scales.k, scales.broken_v);
        state.offset = 0.f;
      }
      if constexpr (S::kPromoteFirst) {
        wgmma_wait<1>();
        pin(product);
        if (step > 0) mbarrier_arrive(barriers.value_empty(previous_stage));
        promote(0, 0, kChunk / 2);
        wgmma_wait<0>();
        turns.wait();
      } else if constexpr (S::kPromoteBetween) {
        if (step > 0) take_tile();
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      pin(s);

      const auto meanwhile = [&](int g) {
        if constexpr (S::kPromoteBetween) promote(0, g * kChunk / 16, kChunk / 16);
      };
      // The second product of the previous tile; then P may be overwritten.
      const auto previous_done = [&] {
        if constexpr (S::kPromoteBetween) {
          wgmma_wait<0>();
          pin(product);
        }
      };
      // P is 255 at most: shift is rounded towards smaller P. The maximum compensates the rounding.
      float shift[2];
      const auto take_shift = [&](const float(&top)[2], const float(&peak)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          shift[r] = __fsub_rd(kLog2Of255, __fmul_ru(peak[r], state.c[r]));
          maximum[r] = fmaf(top[r], state.c[r], state.offset) + (kLog2Of255 - fmaf(peak[r], state.c[r], shift[r]));
        }
      };
      if constexpr (kMode == 2) {
        float x[64];
#pragma unroll
        for (int i = 0; i < 64; ++i) x[i] = __int_as_float(s[i]);
        const Maxima maxima = take_scores(x, state, scales, quad, partial ? mine.last_columns : kKeyTile);
        take_shift(maxima.top, maxima.peak);
        previous_done();
        weights<true>([&](int i) { return x[i]; }, state.c, shift, scales, quad, probability, sum, meanwhile);
      } else if (__builtin_expect(scales.scaled_v != 0, 0)) {
        // Few tiles have token scales: the scales stay in global memory. The previous sums are promoted first, for their registers.
        const TileScales& of_tokens = p.tile_scales[scales.scaled_v - 1];
        previous_done();
        if constexpr (S::kPromoteBetween) promote(0, 0, kChunk / 2);
        float x[64], top[2];
#pragma unroll
        for (int i = 0; i < 64; ++i) x[i] = float(s[i]);
        add_token_scales(x, top, state.c, 0.f, of_tokens, quad, partial ? mine.last_columns : kKeyTile);
        take_shift(top, {0.f, 0.f});
        weights<true>([&](int i) { return x[i]; }, state.c, shift, of_tokens, quad, probability, sum, [](int) {});
      } else {
        if (__builtin_expect(partial, 0)) hide_columns(s, mine.last_columns);
        float peak[2];
        thread_maxima(s, peak);
        quad_max(peak);
        const float largest = fmaxf(fabsf(peak[0] * state.c[0]), fabsf(peak[1] * state.c[1]));
        previous_done();
        if (__builtin_expect(partial || __any_sync(0xffffffffu, largest > kLargestPlainMaximum), 0)) {
          // For missing columns, or logits so large that the rounding of their maximum matters: subtraction before multiplication
          // is exact there.
          take_shift(peak, {0.f, 0.f});
          const int columns = partial ? mine.last_columns : kKeyTile;
          weights<false>(
              [&](int i) { return column_of(i) < columns ? float(s[i]) - peak[i / 2 % 2] : -INFINITY; }, state.c, shift,
              scales, quad, probability, sum, meanwhile);
        } else {
          take_shift(peak, peak);
          weights<false>([&](int i) { return float(s[i]); }, state.c, shift, scales, quad, probability, sum, meanwhile);
        }
      }
      if constexpr (S::kPromoteFirst) {
        turns.pass();
        take_tile();
      }
      if (!value_ready) mbarrier_wait(barriers.value_full(at.stage), at.parity());
      if constexpr (!S::kPipelined) {
        turns.wait();
#pragma unroll
        for (int n = 0; n < kChunks; ++n) {
          issue_pv_int8<kChunk, kDimPv>(product, probability, advance(S::value_descriptor(ring, at.stage), n * kChunk * 16));
          if (n == 0) take_tile();
          wgmma_wait<0>();
          if (n == kChunks - 1) turns.pass();
          pin(product);
          promote(n, 0, kChunk / 2);
        }
      }
      __syncwarp();  // not for the barriers, where every lane arrives: without the test the compiler schedules worse
      mbarrier_arrive(barriers.key_empty(at.stage));
      if constexpr (!S::kPipelined) mbarrier_arrive(barriers.value_empty(at.stage));
      if (S::kPromoteBetween && step > 0) mbarrier_arrive(barriers.value_empty(previous_stage));
      previous_stage = at.stage;
      at = next;
    };
    if constexpr (S::kPeelsPartial) {
      compute_steps(mine, compute_tile);
    } else {
      for (int step = 0; step < mine.steps; ++step) compute_tile(step, step == mine.partial_step);
    }
    mbarrier_arrive(barriers.query_empty(consumer));
    if constexpr (S::kPipelined) {
      issue_pv_int8<kChunk, kDimPv>(product, probability, S::value_descriptor(ring, previous_stage));
      if (!S::kPromoteFirst && mine.steps > 0) take_tile();
      wgmma_wait<0>();
      pin(product);
      promote(0, 0, kChunk / 2);
      if (mine.steps > 0) mbarrier_arrive(barriers.value_empty(previous_stage));
    }
    const float row_scale[2] = {row_scales[row], row_scales[row + 8]};
    finish<kDimPv>(p, task, barriers_in<S>(shared), consumer, row_scale, rows, o, row_scales + kQueryBlock, kLog2Of255,
                   p.bf16);
    if (!is_ordinary<S>(p, task)) mbarrier_arrive(barriers.task_done());
  }
}

}  // namespace trtconvert::attention::sm90
