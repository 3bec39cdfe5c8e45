// From sums to the output: parts of a query block are added up, rows divided by their sums, channels scaled back.
#pragma once

#include "sm90/rows.cuh"

namespace trtconvert::attention::sm90 {

// The channel tables of a head, v_scale then v_offset, for store(). A barrier has to follow.
template <int kDimPv>
__device__ __forceinline__ void load_channel_tables(const Params& p, int head, float* tables) {
  const int64_t row = (int64_t(p.elements[blockIdx.y].bin) * p.kv_heads + head / p.group) * p.head_dim;
  for (int d = threadIdx.x % kWarpgroup; d < kDimPv; d += kWarpgroup) {
    tables[d] = d < p.head_dim ? p.v_scale[row + d] : 0.f;
    tables[kDimPv + d] = d < p.head_dim ? p.v_offset[row + d] : 0.f;
  }
}

// out = o / sum[row], with `tables` times v_scale plus v_offset, for the rows and columns that exist.
template <int kChunks, int kHalf>
__device__ __forceinline__ void store(const Params& p, int head, int block, const Rows& rows,
                                      const float (&o)[kChunks][kHalf], const float* tables) {
  constexpr int kDimPv = kChunks * kHalf * 2;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = quad_sum(rows.sum[r]);
    const int row = block * kQueryBlock + warp * 16 + lane / 4 + 8 * r;
    const bool empty = sum == 0.f;  // no visible key: zeros
    const float inverse = empty ? 0.f : 1.f / sum;
    uint16_t* const out = static_cast<uint16_t*>(p.out) + blockIdx.y * p.out_strides.batch + row * p.out_strides.token +
                          head * p.out_strides.head;
    const int columns = row < p.num_queries ? p.head_dim : 0;
#pragma unroll
    for (int n = 0; n < kChunks; ++n)
#pragma unroll
      for (int c = 0; c < kHalf / 4; ++c) {
        const int column = n * kHalf * 2 + c * 8 + lane % 4 * 2;
        float low = o[n][4 * c + 2 * r] * inverse, high = o[n][4 * c + 2 * r + 1] * inverse;
        if (tables) {
          const float2 scale = *reinterpret_cast<const float2*>(tables + column);
          const float2 offset = *reinterpret_cast<const float2*>(tables + kDimPv + column);
          low = fmaf(low, scale.x, empty ? 0.f : offset.x);
          high = fmaf(high, scale.y, empty ? 0.f : offset.y);
        }
        if (column < columns)
          *reinterpret_cast<uint32_t*>(out + column) = p.bf16 ? pack_16bit<true>(low, high) : pack_16bit<false>(low, high);
      }
  }
}

// Leaves this consumer's part of a query block in the workspace. In the consumer that finishes the block's last part, rows and
// o become those of the whole block, summed in the order of the keys whoever it is; false in the others.
template <int kChunks, int kHalf>
__device__ __forceinline__ bool merge(const Params& p, const Task& task, uint8_t* shared, int consumer, Rows& rows,
                                      float (&o)[kChunks][kHalf]) {
  constexpr int kOutputs = kChunks * kHalf;
  const int thread = threadIdx.x % kWarpgroup;
  const int64_t part_stride = kMaxConsumers * part_floats(p.dims);
  float* const first = p.parts + int64_t(task.divided) * task.parts * part_stride + consumer * part_floats(p.dims) + thread;
  float* const mine = first + task.part * part_stride;
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) mine[i * kWarpgroup] = o[i / kHalf][i % kHalf];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    mine[(kOutputs + r) * kWarpgroup] = rows.reference[r];
    mine[(kOutputs + 2 + r) * kWarpgroup] = rows.sum[r];
  }

  // Each thread's stores are visible before its warpgroup counts the part; whoever counts the last one sees all parts.
  __threadfence();
  named_barrier_sync(1 + consumer, kWarpgroup);
  if (thread == 0) {
    last_part(shared, consumer) = atomicAdd(&p.parts_done[task.divided * kMaxConsumers + consumer], 1) == task.parts - 1;
    __threadfence();
  }
  named_barrier_sync(1 + consumer, kWarpgroup);
  if (!last_part(shared, consumer)) return false;

  rows = Rows();
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) o[i / kHalf][i % kHalf] = 0.f;
  for (int n = 0; n < task.parts; ++n) {
    const float* const part = first + n * part_stride;
    float old_factor[2], factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float theirs = __ldcg(part + (kOutputs + r) * kWarpgroup);
      const float reference = fmaxf(rows.reference[r], theirs);
      old_factor[r] = rows.reference[r] == -INFINITY ? 0.f : exp2_approx(rows.reference[r] - reference);
      factor[r] = theirs == -INFINITY ? 0.f : exp2_approx(theirs - reference);
      rows.reference[r] = reference;
      rows.sum[r] = rows.sum[r] * old_factor[r] + factor[r] * __ldcg(part + (kOutputs + 2 + r) * kWarpgroup);
    }
#pragma unroll
    for (int i = 0; i < kOutputs; ++i)
      o[i / kHalf][i % kHalf] =
          o[i / kHalf][i % kHalf] * old_factor[i / 2 % 2] + factor[i / 2 % 2] * __ldcg(part + i * kWarpgroup);
  }
  return true;
}

// What a consumer does with its result. `row_scale` is NaN for rows that have to be NaN.
template <int kChunks, int kHalf>
__device__ __forceinline__ void finish(const Params& p, const Task& task, uint8_t* shared, int consumer,
                                       const float (&row_scale)[2], Rows& rows, float (&o)[kChunks][kHalf],
                                       const float* tables) {
  if (task.parts > 1 && !merge(p, task, shared, consumer, rows, o)) return;
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (isnan(row_scale[r])) rows.sum[r] = row_scale[r];
  store(p, task.head, task.first_block + consumer, rows, o, tables);
}

}  // namespace trtconvert::attention::sm90
