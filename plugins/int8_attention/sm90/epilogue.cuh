// From sums to the output: adds the parts of a query block, divides rows by their sums, and scales channels back.
#pragma once

#include "sm90/rows.cuh"

namespace trtconvert::attention::sm90 {

// A 4 x 4 transpose over the four threads of a quad: thread number `quad` gets word `quad` of each thread, in the order of the
// threads.
__device__ __forceinline__ uint4 quad_transpose(const uint32_t (&x)[4], int quad) {
  const bool odd = quad % 2, upper = quad / 2;
  uint32_t pair[2][2];  // words t % 2 and t % 2 + 2 of the threads 2 (t / 2) and 2 (t / 2) + 1
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t mine = odd ? x[2 * i + 1] : x[2 * i];
    const uint32_t theirs = __shfl_xor_sync(0xffffffffu, odd ? x[2 * i] : x[2 * i + 1], 1);
    pair[i][0] = odd ? theirs : mine;
    pair[i][1] = odd ? mine : theirs;
  }
  uint32_t other[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) other[i] = __shfl_xor_sync(0xffffffffu, upper ? pair[0][i] : pair[1][i], 2);
  return upper ? make_uint4(other[0], other[1], pair[1][0], pair[1][1])
               : make_uint4(pair[0][0], pair[0][1], other[0], other[1]);
}

// Adds to lse the natural logarithm of the sums of a thread's existing rows; the unit of the sums is 2^unit above their references.
__device__ __forceinline__ void store_lse(const Params& p, int batch, int head, int block, const Rows& rows, float unit) {
  const float sum[2] = {quad_sum(rows.sum[0]), quad_sum(rows.sum[1])};
  if (lane_id() % 4 != 0) return;
  float* const lse = p.lse + (int64_t(batch) * p.heads + head) * p.num_queries;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = block * kQueryBlock + first_row() + 8 * r;
    if (row < p.num_queries) lse[row] += (rows.reference[r] + (log2_approx(sum[r]) - unit)) * kLn2;
  }
}

// out = o / sum[row], with `tables` times v_scale plus v_offset (kDimPv of each), for existing rows and columns. Stores 16 bytes if
// four groups of eight columns meet: everything is computed before the first store, without a branch.
template <int kDimPv, int kChunks, int kHalf>
__device__ __forceinline__ void store(const Params& p, int batch, int head, int block, const Rows& rows,
                                      const float (&o)[kChunks][kHalf], const float* tables, bool bf16) {
  constexpr int kGroups = kDimPv / 8, kPerChunk = kGroups / kChunks;
  const int lane = lane_id(), quad = lane % 4;
  float inverse[2];
  bool empty[2];  // no visible key: zeros
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = quad_sum(rows.sum[r]);
    empty[r] = sum == 0.f;
    inverse[r] = empty[r] ? 0.f : reciprocal(sum);
  }
  uint32_t packed[2][kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    float2 scale, offset;
    if (tables) {
      scale = *reinterpret_cast<const float2*>(tables + g * 8 + quad * 2);
      offset = *reinterpret_cast<const float2*>(tables + kDimPv + g * 8 + quad * 2);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* const x = o[g / kPerChunk] + g % kPerChunk * 4 + 2 * r;
      float low = x[0] * inverse[r], high = x[1] * inverse[r];
      if (tables) {
        low = fmaf(low, scale.x, empty[r] ? 0.f : offset.x);
        high = fmaf(high, scale.y, empty[r] ? 0.f : offset.y);
      }
      packed[r][g] = bf16 ? pack_16bit<true>(low, high) : pack_16bit<false>(low, high);
    }
  }
  const int part = part_of(p, block * kQueryBlock), first = first_token(p, part);
  const Tensors& tensors = p.parts[part];
  const TrtConvertStrides& strides = tensors.out_strides;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = block * kQueryBlock + threadIdx.x / 32 % 4 * 16 + lane / 4 + 8 * r;
    uint16_t* const out =
        static_cast<uint16_t*>(tensors.out) + batch * strides.batch + (row - first) * strides.token + head * strides.head;
    const int columns = row < p.num_queries ? p.head_dim : 0;
    constexpr int kQuads = kGroups / 4 * 4;
#pragma unroll
    for (int g = 0; g < kQuads; g += 4) {
      const uint4 eight = quad_transpose({packed[r][g], packed[r][g + 1], packed[r][g + 2], packed[r][g + 3]}, quad);
      const int column = (g + quad) * 8;
      if (column < columns) *reinterpret_cast<uint4*>(out + column) = eight;
    }
#pragma unroll
    for (int g = kQuads; g < kGroups; ++g)
      if (g * 8 < columns) *reinterpret_cast<uint32_t*>(out + g * 8 + quad * 2) = packed[r][g];
  }
}

// Stores this consumer's part of a query block in the workspace. In the consumer that finishes the block's last part, rows and o
// become those of the whole block, summed in the order of the keys by any consumer; returns false in the others.
template <int kChunks, int kHalf>
__device__ __forceinline__ bool merge(const Params& p, const Task& task, Barriers& barriers, int consumer, Rows& rows,
                                      float (&o)[kChunks][kHalf]) {
  constexpr int kOutputs = kChunks * kHalf;
  const int thread = threadIdx.x % kWarpgroup;
  const int64_t part_stride = kMaxConsumers * part_floats(p.dims);
  float* const first = p.unit_parts + int64_t(task.divided) * task.parts * part_stride + consumer * part_floats(p.dims) + thread;
  float* const mine = first + task.part * part_stride;
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) mine[i * kWarpgroup] = o[i / kHalf][i % kHalf];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    mine[(kOutputs + r) * kWarpgroup] = rows.reference[r];
    mine[(kOutputs + 2 + r) * kWarpgroup] = rows.sum[r];
  }

  // Each thread's stores are visible before its warpgroup counts the part; the warpgroup that counts the last part sees all parts.
  __threadfence();
  named_barrier_sync(1 + consumer, kWarpgroup);
  if (thread == 0) {
    barriers.last_part[consumer] = atomicAdd(&p.parts_done[task.divided * kMaxConsumers + consumer], 1) == task.parts - 1;
    __threadfence();
  }
  named_barrier_sync(1 + consumer, kWarpgroup);
  if (!barriers.last_part[consumer]) return false;

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

// Writes a consumer's result of kDimPv columns. `row_scale` is NaN for rows whose output must be NaN; sums are of weights times
// 2^unit.
template <int kDimPv, int kChunks, int kHalf>
__device__ __forceinline__ void finish(const Params& p, const Task& task, Barriers& barriers, int consumer,
                                       const float (&row_scale)[2], Rows& rows, float (&o)[kChunks][kHalf],
                                       const float* tables, float unit, bool bf16) {
  if (task.parts > 1 && !merge(p, task, barriers, consumer, rows, o)) return;
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (isnan(row_scale[r])) rows.sum[r] = row_scale[r];
  if (p.lse) store_lse(p, task.batch, task.head_of(consumer), task.block_of(consumer), rows, unit);
  store<kDimPv>(p, task.batch, task.head_of(consumer), task.block_of(consumer), rows, o, tables, bf16);
}

}  // namespace trtconvert::attention::sm90
