// Mode 4: the first product in INT8, the second in FP8 (E4M3), O in FP32.
#pragma once

#include "sm90/consume_16bit.cuh"

namespace trtconvert::attention::sm90 {

// The largest weight of a tile that set a row's reference is in (2^4, 2^5]: references are integers, so the rounding of a weight
// does not depend on them, except for the smallest weights. Weights of later tiles may be larger, up to 448.
constexpr float kLog2OfLargestWeight = 5.f, kMostGrowth = kLog2Of448 - kLog2OfLargestWeight;

// The tensor cores add with some 13 bits below the largest exponent of the sum. Long sums of one sign lose the last terms: a
// quarter of 17,160 equal weights, four percent of 4,096. So the sums of the weights, a column of the second product, leave the
// accumulators after each tile, and O is added to a sum in FP32 after this number of tiles: the loss for values of one sign is then
// 0.6 %. Twice as many tiles would be 3 % faster and lose 1.4 %.
constexpr int kTilesAtOnce = 8;

// This thread's share of O in FP32, in shared memory: 16 bytes of each thread beside those of the next. The share has its own
// references, those of the tile that was added last.
template <int kHalf>
class Sums {
 public:
  __device__ __forceinline__ explicit Sums(uint32_t first) : address_(first + threadIdx.x % kWarpgroup * 16) {}

  // Adds O and clears it.
  __device__ __forceinline__ void take(float (&o)[kHalf + 4], const float (&reference)[2], bool first) {
    float factor[2];
    change_reference(factor, reference);
#pragma unroll
    for (int i = 0; i < kHalf; i += 4) {
      float4 x = make_float4(o[i], o[i + 1], o[i + 2], o[i + 3]);
      if (!first) add(x, i, factor);
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address_ + i * kWarpgroup * 4), "f"(x.x), "f"(x.y), "f"(x.z),
                   "f"(x.w)
                   : "memory");
    }
#pragma unroll
    for (int i = 0; i < kHalf; ++i) o[i] = 0.f;
  }

  // Adds the sum to O, which is then the sum over all tiles.
  __device__ __forceinline__ void add_to(float (&o)[kHalf + 4], const float (&reference)[2]) {
    float factor[2];
    change_reference(factor, reference);
#pragma unroll
    for (int i = 0; i < kHalf; i += 4) {
      float4 x = make_float4(o[i], o[i + 1], o[i + 2], o[i + 3]);
      add(x, i, factor);
      o[i] = x.x, o[i + 1] = x.y, o[i + 2] = x.z, o[i + 3] = x.w;
    }
  }

 private:
  __device__ __forceinline__ void change_reference(float (&factor)[2], const float (&reference)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factor[r] = reference_[r] == -INFINITY ? 0.f : exp2_approx(reference_[r] - reference[r]);
      reference_[r] = reference[r];
    }
  }

  __device__ __forceinline__ void add(float4& x, int i, const float (&factor)[2]) const {
    float4 sum;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(sum.x), "=f"(sum.y), "=f"(sum.z), "=f"(sum.w)
                 : "r"(address_ + i * kWarpgroup * 4)
                 : "memory");
    x.x = fmaf(sum.x, factor[0], x.x), x.y = fmaf(sum.y, factor[0], x.y);
    x.z = fmaf(sum.z, factor[1], x.z), x.w = fmaf(sum.w, factor[1], x.w);
  }

  uint32_t address_;
  float reference_[2] = {-INFINITY, -INFINITY};
};

// Takes the sums of a tile's weights out of the product's column of ones: the quad's first thread has the sums, the others zeros. A
// constant in place of the difference would get its own register, and wait for each product.
template <int kHalf>
__device__ __forceinline__ void take_weights(Rows& rows, float (&o)[kHalf]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows.sum[r] += o[kHalf - 4 + 2 * r];
    o[kHalf - 4 + 2 * r] -= o[kHalf - 4 + 2 * r];
  }
}

// Beyond this limit the product of a maximum and c has no fraction bits, and may be off by more than one.
constexpr float kLargestWholeReference = 0x1p23f;

// Takes the row maxima of a tile that outgrows(), and rescales O and the sums to the new references. `reference` becomes the new
// reference of the tile's x c.
template <int N, int kAll>
__device__ __forceinline__ void settle_fp8(Rows& rows, int32_t (&x)[N], const float (&c)[2], float (&reference)[2], float (&o)[kAll]) {
  float peak[2], factor[2];
  thread_maxima(x, peak);
  quad_max(peak);
  const float maximum[2] = {peak[0] * c[0], peak[1] * c[1]};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float before = rows.reference[r];
    if (maximum[r] > before + kMostGrowth) rows.reference[r] = ceilf(maximum[r]);
    factor[r] = before == -INFINITY ? 0.f : exp2_approx(before - rows.reference[r]);
    reference[r] = rows.reference[r];
    rows.sum[r] *= factor[r];
  }
#pragma unroll
  for (int i = 0; i < kAll - 4; ++i) o[i] *= factor[i / 2 % 2];
  if (__any_sync(0xffffffffu, too_coarse(rows, kLargestWholeReference))) subtract_maxima(x, peak, maximum, reference);
}

// exp2(x c + shift) of a tile as the A operand of the second product. `value(i)` gives x[i] as a float.
template <typename Value>
__device__ __forceinline__ void weights_fp8(const Value& value, const float (&c)[2], const float (&shift)[2],
                                            uint32_t (&probability)[4][4]) {
#pragma unroll
  for (int g = 0; g < kKeyTile / 16; ++g)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float e[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) e[i] = exp2_approx(fmaf(value(8 * g + i / 2 * 4 + 2 * r + i % 2), c[r], shift[r]));
      probability[g / 2][g % 2 * 2 + r] = pack_e4m3(e[0], e[1], e[2], e[3]);
    }
}

// The consumers take turns as in consume_16bit().
template <int kDimQk, int kDimPv>
__device__ void consume_fp8(const Params& p, uint8_t* shared, int consumer) {
  constexpr int kMode = 4;
  using S = Shape<kMode, kDimQk, kDimPv>;
  constexpr int kStages = S::kStages, kScores = S::kScores, kAhead = S::kAhead, kHalf = kDimPv / 2;
  static_assert(S::kChunks == 1 && kScores == 64 && kAhead > 0);
  const uint32_t ring = kept_address<S>(shared);
  const BarrierAddresses barriers(ring + S::kBarriers);
  const uint32_t own = ring + S::kConsumerArea + consumer * S::kConsumerBytes;
  const uint64_t query = matrix_descriptor(own, kQueryBlock * 16, 128);

  Turns turns(consumer, S::kConsumers);
  for (int n = 0;; ++n) {
    mbarrier_wait(barriers.query_full(consumer), n & 1);
    const Task& task = barriers_in<S>(shared).tasks[n % kTaskSlots];
    const ConsumerTask<S> mine(task);
    if (mine.active == 0) break;
    if (!takes_part(p, mine, task, consumer, barriers)) continue;
    turns.begin(consumer, mine.active);
    const uint32_t row_scales = own + S::kQueryBytes + n % 2 * S::kBesideBytes + first_row() * 4;

    Rows rows;
    Sums<kHalf> sums(own + S::kSums);
    float o[1][kHalf + S::kOnes / 2] = {};
    uint32_t probability[4][4];
    const auto issue_values = [&](int stage) {
      const uint64_t value = S::value_descriptor(ring, stage);
      pin(o);
      pin(probability);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma_e4m3<kDimPv + S::kOnes>(o[0], probability[k], advance(value, k * 2 * S::kValueRows * 16));
      wgmma_commit();
    };
    Cursor<kStages> at(__shfl_sync(0xffffffffu, task.phases, 0));
    if (mine.streams > 1) at.advance(consumer);
    int previous_stage = at.stage, step = 0;
    if (mine.steps > 0) turns.wait();
    // `pending`: the second product of the previous tile has not been issued. `clears`: O is added to the sums before this tile's
    // product.
    const auto compute_tile = [&](bool pending, auto is_partial, auto clears) __attribute__((always_inline)) {
      constexpr bool kPartial = is_partial, kClears = clears;
      int32_t s[kScores];
      if (pending) issue_values(previous_stage);
      mbarrier_wait(barriers.key_full(at.stage), at.parity());
      const uint64_t key = S::key_descriptor(ring, at.stage);
      issue_scores<kMode, false, kDimQk, kDimPv, 0, kAhead>(s, query, key);
      if constexpr (kAhead < kScores) {
        wgmma_wait<1>();
        pin(o);
        take_weights(rows, o[0]);
        if constexpr (kClears) sums.take(o[0], rows.reference, step == kTilesAtOnce);
        if (pending) mbarrier_arrive(barriers.value_empty(previous_stage));
        issue_scores<kMode, false, kDimQk, kDimPv, kAhead, kScores - kAhead>(s, query, key);
      }
      turns.pass();
      // Asked early, because the answer takes some fifty cycles.
      const bool value_ready = mbarrier_test(barriers.value_full(at.stage), at.parity());
      float c[2];
      load_exponents<S>(c, row_scales, ring, at.stage);
      wgmma_wait<0>();
      pin(s);
      pin(o);
      mbarrier_arrive(barriers.key_empty(at.stage));
      if constexpr (kAhead == kScores) {
        take_weights(rows, o[0]);
        if constexpr (kClears) sums.take(o[0], rows.reference, step == kTilesAtOnce);
        if (pending) mbarrier_arrive(barriers.value_empty(previous_stage));
      }

      const int columns = kPartial ? mine.last_columns : kKeyTile;
      if constexpr (kPartial) hide_columns(s, columns);
      float reference[2] = {rows.reference[0], rows.reference[1]};
      const bool outgrown = outgrows(rows, s, c, kMostGrowth, kLargestWholeReference);
      if (__builtin_expect(__any_sync(0xffffffffu, outgrown), 0)) settle_fp8(rows, s, c, reference, o[0]);
      const float shift[2] = {kLog2OfLargestWeight - reference[0], kLog2OfLargestWeight - reference[1]};
      if constexpr (kPartial) {
        const auto existing = [&](int i) { return column_of(i) < columns ? float(s[i]) : -INFINITY; };
        weights_fp8(existing, c, shift, probability);
      } else {
        weights_fp8([&](int i) { return float(s[i]); }, c, shift, probability);
      }

      if (!value_ready) mbarrier_wait(barriers.value_full(at.stage), at.parity());
      pin(probability);
      turns.wait();
      previous_stage = at.stage;
      at.advance(mine.streams);
    };
    const int whole = mine.partial_step < 0 ? mine.steps : mine.partial_step;
    for (int end = min(whole, kTilesAtOnce);;) {
      for (; step < end; ++step) compute_tile(step > 0, Known<false>(), Known<false>());
      if (step == whole) break;
      // Outside of the loop: inside, even skipped code slows the loop down.
      compute_tile(true, Known<false>(), Known<true>());
      ++step;
      end = min(whole, end + kTilesAtOnce);
    }
    if (whole < mine.steps) compute_tile(whole > 0, Known<true>(), Known<false>());
    mbarrier_arrive(barriers.query_empty(consumer));
    if (mine.steps > 0) issue_values(previous_stage);
    wgmma_wait<0>();
    pin(o);
    if (mine.steps > 0) turns.pass();
    if (mine.steps > 0) mbarrier_arrive(barriers.value_empty(previous_stage));
    take_weights(rows, o[0]);
    if (whole > kTilesAtOnce) sums.add_to(o[0], rows.reference);
    const float row_scale[2] = {load_shared(row_scales), load_shared(row_scales + 32)};
    const int beside = S::kConsumerArea + consumer * S::kConsumerBytes + S::kQueryBytes + n % 2 * S::kBesideBytes;
    finish<kDimPv>(p, task, barriers_in<S>(shared), consumer, row_scale, rows, o,
                   reinterpret_cast<const float*>(shared + beside + S::kRowScaleBytes), kLog2OfLargestWeight, p.bf16);
    if (!is_ordinary<S>(p, task)) mbarrier_arrive(barriers.task_done());
  }
}

}  // namespace trtconvert::attention::sm90
