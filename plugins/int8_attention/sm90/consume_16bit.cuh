// Modes 0 and 1: the second product in 16 bits.
#pragma once

#include <type_traits>

#include "sm90/epilogue.cuh"

namespace trtconvert::attention::sm90 {

// A thread's scores of 64 keys.
template <typename Score, int N>
__device__ __forceinline__ Score (&half_of(Score (&s)[N], int half))[32] {
  return *reinterpret_cast<Score(*)[32]>(s + half * 32);
}

// Issues the first product of a tile, for kCount registers of S from kFirst on. `query` and `key` are the operands' descriptors.
template <int kMode, bool kBf16, int kDimQk, int kDimPv, int kFirst, int kCount, typename Score, int N>
__device__ __forceinline__ void issue_scores(Score (&s)[N], uint64_t query, uint64_t key) {
#pragma unroll
  for (int half = kFirst / 32; half < (kFirst + kCount) / 32; ++half) pin(half_of(s, half));
  wgmma_fence();
  if constexpr (kMode != 0 && kCount == 64) {
    issue_qk_int8<kDimQk, false>(s, query, key);
  } else if constexpr (kMode != 0) {
    issue_qk_int8<kDimQk, false>(half_of(s, kFirst / 32), query, advance(key, kFirst / 32 * kHalfTile * 16));
  } else {
#pragma unroll
    for (int half = kFirst / 32; half < (kFirst + kCount) / 32; ++half)
#pragma unroll
      for (int k = 0; k < kDimPv / 16; ++k)
        wgmma_16bit<kBf16>(half_of(s, half), advance(query, k * 2 * kQueryBlock * 16),
                           advance(key, half * kHalfTile * 2 * kDimPv + k * 2 * kHalfTile * 16), k > 0);
    wgmma_commit();
  }
}

// exp2(x c - reference) of a tile as the A operand of the second product in 16 bits, and this thread's part of the row sums if the
// second product does not compute them. `value(i)` gives x[i] as a float. x c is exact in the sum, so only the exponent itself is
// rounded, however large the logits are.
template <bool kBf16, bool kSums, int N, typename Value>
__device__ __forceinline__ void weights_16bit(const Value& value, const float (&c)[2], const float (&reference)[2],
                                              uint32_t (&probability)[N / 8][4], float (&sum)[2]) {
  float partial[2] = {};
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const int r = i / 2 % 2;
    const float low = exp2_approx(fmaf(value(i), c[r], -reference[r]));
    const float high = exp2_approx(fmaf(value(i + 1), c[r], -reference[r]));
    probability[i / 8][i % 8 / 4 * 2 + r] = pack_16bit<kBf16>(low, high);
    if constexpr (kSums) partial[r] += low + high;
  }
  if constexpr (kSums) {
    sum[0] += partial[0];
    sum[1] += partial[1];
  }
}

// True if one of this thread's weights exceeds 2^kRescaleThreshold or is NaN. Weights are not negative, so 16-bit weights compare
// like their bits, two at a time. The comparison takes half of the instructions of maxima over the scores, or a quarter (mode 0).
template <bool kBf16, int N>
__device__ __forceinline__ bool too_large(const uint32_t (&probability)[N][4]) {
  constexpr int kExponent = int(kRescaleThreshold), kLimit = kBf16 ? (127 + kExponent) << 7 : (15 + kExponent) << 10;
  static_assert(N % 4 == 0);
  uint32_t chain[4] = {};  // side by side: the next product waits for them
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const uint32_t(&p)[4] = probability[i];
    chain[i % 4] = __vimax3_s16x2(__vimax3_s16x2(chain[i % 4], p[0], p[1]), p[2], p[3]);
  }
  const uint32_t largest = __vmaxs2(__vimax3_s16x2(chain[0], chain[1], chain[2]), chain[3]);
  return int(largest) > (kLimit << 16 | 0xffff) || int(largest & 0xffff) > kLimit;
}

// Clears missing columns of a partial tile in P. Their scores were the lowest possible, but after a tiny scale the lowest score is
// not low enough.
template <int N>
__device__ __forceinline__ void hide_weights(uint32_t (&probability)[N][4], int columns) {
#pragma unroll
  for (int i = 0; i < N * 8; i += 2) {
    uint32_t& pair = probability[i / 8][i % 8 / 2];
    if (column_of(i) >= columns) {
      pair = 0;
    } else if (column_of(i + 1) >= columns) {
      pair &= 0xffff;
    }
  }
}

// Modes 0 and 1: P and V in 16 bits, O in the tensor cores' FP32 accumulators.
//
// A consumer's turn at the tensor cores is the second product of one tile and the first product of the next; its softmax
// runs in the others' turns. S::kAhead registers of the next scores are issued behind the second product, so that the tensor
// cores have work until its end is noticed; without room for them the second product ends in the iteration that computed P.
template <int kMode, bool kBf16, int kDimQk, int kDimPv>
__device__ void consume_16bit(const Params& p, uint8_t* shared, int consumer) {
  using S = Shape<kMode, kDimQk, kDimPv>;
  constexpr int kStages = S::kStages, kKeys = S::kKeys, kScores = S::kScores, kAhead = S::kAhead;
  constexpr int kChunk = S::kChunk, kChunks = S::kChunks;
  constexpr bool kSums = S::kOnes == 0;
  static_assert(!S::kOptimistic || !kSums, "weights that are computed twice must not be summed twice");
  using Score = std::conditional_t<kMode == 0, float, int32_t>;
  const uint32_t ring = kept_address<S>(shared);
  const BarrierAddresses barriers(ring + S::kBarriers);
  const int own = S::kConsumerArea + consumer * S::kConsumerBytes;
  const uint64_t query = matrix_descriptor(ring + own, kQueryBlock * 16, 128);

  Turns turns(consumer, S::kConsumers);
  for (int n = 0;; ++n) {
    mbarrier_wait(barriers.query_full(consumer), n & 1);
    const Task& task = barriers_in<S>(shared).tasks[n % kTaskSlots];
    const ConsumerTask<S> mine(task);
    if (mine.active == 0) break;
    if (!takes_part(p, mine, task, consumer, barriers)) continue;
    turns.begin(consumer, mine.active);
    const uint32_t row_scales = ring + own + S::kQueryBytes + n % 2 * S::kBesideBytes + first_row() * 4;

    Rows rows;
    float o[kChunks][(kChunk + S::kOnes) / 2] = {};
    uint32_t probability[kKeys / 16][4];
    const auto issue_values = [&](int stage) {
      const auto moved = [](int bytes) { return int64_t(bytes >> 4) * (S::kSharedOnes ? 1 - (1 << 16) : 1); };
      const uint64_t value = S::value_descriptor(ring, stage);
      pin(o);
      pin(probability);
      wgmma_fence();
#pragma unroll
      for (int n = 0; n < kChunks; ++n)
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k) {
          const int offset = S::kSwizzled ? n * kChunk / 64 * kSwizzledBlock + k % 4 * 16 * 128
                                          : n * kChunk / 8 * kHalfTile * 16 + k % 4 * 256;
          wgmma_16bit_pv<kBf16, kChunk + S::kOnes>(o[n], probability[k], advance(value + moved(k / 4 * S::kHalfBytes), offset), 1);
        }
      wgmma_commit();
    };

    Cursor<kStages> at(__shfl_sync(0xffffffffu, task.phases, 0));
    if (mine.streams > 1) at.advance(consumer);
    int previous_stage = at.stage;
    if (mine.steps > 0) turns.wait();
    const auto compute_tile = [&](int step, auto is_partial) __attribute__((always_inline)) {
      constexpr bool kPartial = is_partial;
      Score s[kScores];
      if (kAhead > 0 && step > 0) issue_values(previous_stage);
      if (kAhead > 0 || step == 0) mbarrier_wait(barriers.key_full(at.stage), at.parity());
      const uint64_t key = S::key_descriptor(ring, at.stage);
      if constexpr (kAhead > 0) issue_scores<kMode, kBf16, kDimQk, kDimPv, 0, kAhead>(s, query, key);
      if constexpr (kAhead < kScores) {
        if constexpr (kAhead > 0) {
          wgmma_wait<1>();
          pin(o);
          if (step > 0) mbarrier_arrive(barriers.value_empty(previous_stage));
        }
        issue_scores<kMode, kBf16, kDimQk, kDimPv, kAhead, kScores - kAhead>(s, query, key);
      }
      turns.pass();
      // Asked early, because the answer takes some fifty cycles.
      const bool value_ready = mbarrier_test(barriers.value_full(at.stage), at.parity());
      float c[2];
      load_exponents<S>(c, row_scales, ring, at.stage);
      wgmma_wait<0>();
      pin(s);
      pin(o);
      __syncwarp();  // for the compiler's schedule only: every lane arrives at the barriers itself
      mbarrier_arrive(barriers.key_empty(at.stage));
      if ((kAhead == kScores || kAhead == 0) && step > 0) mbarrier_arrive(barriers.value_empty(previous_stage));

      const int columns = kPartial ? mine.last_columns : kKeys;
      if constexpr (kPartial) hide_columns(s, columns);
      float reference[2] = {rows.reference[0], rows.reference[1]};
      const auto score = [&](int i) { return float(s[i]); };
      if constexpr (S::kOptimistic) {
        // The references of the previous tiles mostly suffice. The weights show whether they do, and are computed again otherwise.
        bool settle = step == 0, settled = false;
        do {
          if (settle) {
            settle_references(rows, s, c, reference, o);
            settled = true;
          }
          weights_16bit<kBf16, kSums, kScores>(score, c, reference, probability, rows.sum);
          const bool outgrown = too_large<kBf16>(probability) || too_coarse(rows, kLargestPlainReference);
          settle = __any_sync(0xffffffffu, outgrown & !settled);
        } while (__builtin_expect(settle, 0));
      } else {
        const bool outgrown = outgrows(rows, s, c, kRescaleThreshold, kLargestPlainReference);
        if (__builtin_expect(__any_sync(0xffffffffu, outgrown), 0)) settle_references(rows, s, c, reference, o);
        if constexpr (kSums && kPartial) {
          const auto existing = [&](int i) { return column_of(i) < columns ? float(s[i]) : -INFINITY; };
          weights_16bit<kBf16, kSums, kScores>(existing, c, reference, probability, rows.sum);
        } else {
          weights_16bit<kBf16, kSums, kScores>(score, c, reference, probability, rows.sum);
        }
      }
      if constexpr (!kSums && kPartial) hide_weights(probability, columns);

      if (!value_ready) mbarrier_wait(barriers.value_full(at.stage), at.parity());
      pin(probability);
      turns.wait();
      if constexpr (kAhead == 0) issue_values(at.stage);
      previous_stage = at.stage;
      at.advance(mine.streams);
      if constexpr (kAhead == 0) {
        // The operands of the next first product arrive before the end of this second one.
        if (step + 1 < mine.steps) mbarrier_wait(barriers.key_full(at.stage), at.parity());
        wgmma_wait<0>();
        pin(o);
      }
    };
    compute_steps(mine, compute_tile);
    mbarrier_arrive(barriers.query_empty(consumer));
    if (kAhead > 0 && mine.steps > 0) issue_values(previous_stage);
    wgmma_wait<0>();
    pin(o);
    if (mine.steps > 0) turns.pass();
    if (mine.steps > 0) mbarrier_arrive(barriers.value_empty(previous_stage));
    if constexpr (S::kOnes > 0) {
      // The quad's first thread has the column of ones.
#pragma unroll
      for (int r = 0; r < 2; ++r) rows.sum[r] = lane_id() % 4 == 0 ? o[0][kChunk / 2 + 2 * r] : 0.f;
    }
    const float row_scale[2] = {load_shared(row_scales), load_shared(row_scales + 32)};
    finish<kDimPv>(p, task, barriers_in<S>(shared), consumer, row_scale, rows, o, nullptr, 0.f, kBf16);
    if (!is_ordinary<S>(p, task)) mbarrier_arrive(barriers.task_done());
  }
}

}  // namespace trtconvert::attention::sm90
