// Modes 0 and 1: the second product in 16 bits.
#pragma once

#include <type_traits>

#include "sm90/epilogue.cuh"

namespace trtconvert::attention::sm90 {

// Modes 0 and 1: issues the first product of a tile. `query` and `key` are the operands' descriptors.
template <int kMode, bool kBf16, int kDimQk, int kDimPv, typename Score, int kRegisters>
__device__ __forceinline__ void issue_scores(Score (&s)[kRegisters], uint64_t query, uint64_t key) {
  if constexpr (kMode == 1) {
    issue_qk_int8<kDimQk, false>(s, query, key);
  } else {
#pragma unroll
    for (int half = 0; half < kRegisters / 32; ++half) {
      float(&part)[32] = *reinterpret_cast<float(*)[32]>(s + half * 32);
#pragma unroll
      for (int k = 0; k < kDimPv / 16; ++k)
        wgmma_16bit<kBf16>(part, advance(query, k * 2 * kQueryBlock * 16),
                           advance(key, half * kHalfTile * 2 * kDimPv + k * 2 * kHalfTile * 16), k > 0);
    }
    wgmma_commit();
  }
}

// exp2(x c + shift) of a tile as the A operand of the second product in 16 bits, and this thread's part of the row sums where
// the second product does not compute them. `value(i)` gives x[i] as a float.
template <bool kBf16, bool kSums, int N, typename Value>
__device__ __forceinline__ void weights_16bit(const Value& value, const float (&c)[2], const float (&shift)[2],
                                              uint32_t (&probability)[N / 8][4], float (&sum)[2]) {
  float partial[2][2] = {};
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const int r = i / 2 % 2;
    const float low = exp2_approx(fmaf(value(i), c[r], shift[r]));
    const float high = exp2_approx(fmaf(value(i + 1), c[r], shift[r]));
    probability[i / 8][i % 8 / 4 * 2 + r] = pack_16bit<kBf16>(low, high);
    if constexpr (kSums) {
      partial[r][0] += low;
      partial[r][1] += high;
    }
  }
  if constexpr (kSums) {
    sum[0] += partial[0][0] + partial[0][1];
    sum[1] += partial[1][0] + partial[1][1];
  }
}

// Modes 0 and 1: P and V in 16 bits, O in the tensor cores' FP32 accumulators.
//
// A consumer's turn at the tensor cores is the second product of one tile and the first product of the next; its softmax
// runs in the others' turns.
template <int kMode, bool kBf16, int kDimQk, int kDimPv>
__device__ void consume_16bit(const Params& p, const Task& task, uint8_t* shared, int consumer) {
  using S = Shape<kMode, kDimQk, kDimPv>;
  constexpr int kStages = S::kStages;
  constexpr int kChunk = S::kChunk, kChunks = S::kChunks, kKeys = S::kKeys;
  constexpr int kRegisters = kKeys / 2;  // of S per thread
  using Score = std::conditional_t<kMode == 0, float, int32_t>;
  Barriers& barriers = *reinterpret_cast<Barriers*>(shared);
  const uint32_t queries = shared_address(shared) + kBarrierBytes;
  uint8_t* const ring = shared + kBarrierBytes + S::kConsumers * S::kConsumerBytes;
  // Descriptors of the first stage: the others' lie a multiple of the stage's size further on.
  const uint64_t query = matrix_descriptor(queries + consumer * S::kConsumerBytes, kQueryBlock * 16, 128);
  const uint64_t first_key = matrix_descriptor(shared_address(ring), (kMode == 0 ? kHalfTile : kKeyTile) * 16, 128);
  const uint64_t first_value =
      matrix_descriptor(shared_address(ring) + S::kKeyBytes + int(sizeof(TileScales)), 128, kHalfTile * 16);
  const int lane = lane_id();

  const float* const scale_of_row = p.row_scales + (task.q_block(p) + consumer) * kQueryBlock + first_row();
  const float row_scale[2] = {scale_of_row[0], scale_of_row[8]};
  const int last_columns = task.num_keys - (task.first_step + task.steps - 1) * kKeys;
  const int partial_step = last_columns < kKeys ? task.steps - 1 : -1;

  Rows rows;
  float o[kChunks][(kChunk + S::kOnes) / 2] = {};
  Turns turns(consumer, task.active);
  Cursor<kStages> at;
  mbarrier_wait(&barriers.query[consumer], 0);
  if (task.steps > 0) turns.wait();
  for (int step = 0; step < task.steps; ++step) {
    mbarrier_wait(&barriers.key_full[at.stage], at.parity);
    Score s[kRegisters];
    pin(s);
    wgmma_fence();
    issue_scores<kMode, kBf16, kDimQk, kDimPv>(s, query, advance(first_key, at.stage * S::kStageBytes));
    turns.pass();
    // Asked now, needed later: an answer takes some fifty cycles.
    const bool value_ready = mbarrier_test(&barriers.value_full[at.stage], at.parity);
    float c[2] = {row_scale[0], row_scale[1]};  // base-2 exponent per unit of the score
    if constexpr (kMode == 1) {
      const float k = reinterpret_cast<const TileScales*>(ring + at.stage * S::kStageBytes + S::kKeyBytes)->k;
      c[0] *= k;
      c[1] *= k;
    }
    wgmma_wait<0>();
    pin(s);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&barriers.key_empty[at.stage]);

    const int columns = step == partial_step ? last_columns : kKeys;
    if (__builtin_expect(columns < kKeys, 0)) hide_columns(s, columns);
    float peak[2], maximum[2], shift[2];
    row_maxima(s, peak);
#pragma unroll
    for (int r = 0; r < 2; ++r) maximum[r] = peak[r] * c[r];
    take_maxima(rows, maximum, o);

    uint32_t probability[kKeys / 16][4];
    const bool large = fmaxf(fabsf(maximum[0]), fabsf(maximum[1])) > kLargestPlainMaximum;
    if (__builtin_expect(columns < kKeys || __any_sync(0xffffffffu, large), 0)) {
      // Columns that do not exist; or logits so large that the rounding of their maximum shows: subtracting before
      // multiplying is exact where it counts.
#pragma unroll
      for (int r = 0; r < 2; ++r) shift[r] = maximum[r] - rows.reference[r];
      const auto value = [&](int i) { return column_of(i) < columns ? float(s[i]) - peak[i / 2 % 2] : -INFINITY; };
      weights_16bit<kBf16, S::kOnes == 0, kRegisters>(value, c, shift, probability, rows.sum);
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) shift[r] = fmaf(-peak[r], c[r], maximum[r] - rows.reference[r]);
      weights_16bit<kBf16, S::kOnes == 0, kRegisters>([&](int i) { return float(s[i]); }, c, shift, probability, rows.sum);
    }

    if (!value_ready) mbarrier_wait(&barriers.value_full[at.stage], at.parity);
    const uint64_t value = advance(first_value, at.stage * S::kStageBytes);
#pragma unroll
    for (int n = 0; n < kChunks; ++n) pin(o[n]);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) pin(probability[k]);
    turns.wait();
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < kChunks; ++n)
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k) {
        const int offset = k / 4 * kHalfTile * 2 * (kDimPv + S::kOnes) + n * kChunk / 8 * kHalfTile * 16 + k % 4 * 256;
        wgmma_16bit_pv<kBf16, kChunk + S::kOnes>(o[n], probability[k], advance(value, offset), 1);
      }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < kChunks; ++n) pin(o[n]);
    if (lane == 0) mbarrier_arrive(&barriers.value_empty[at.stage]);
    at.advance();
  }
  turns.pass();
  if constexpr (S::kOnes > 0) {
    // The column of ones: the quad's first thread has it.
#pragma unroll
    for (int r = 0; r < 2; ++r) rows.sum[r] = lane % 4 == 0 ? o[0][kChunk / 2 + 2 * r] : 0.f;
  }
  finish(p, task, shared, consumer, row_scale, rows, o, nullptr);
}

}  // namespace trtconvert::attention::sm90
