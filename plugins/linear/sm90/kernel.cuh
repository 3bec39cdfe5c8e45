// y = x * weight^T + bias with wgmma, or of two such products the first times the GELU of the second.
//
// One thread feeds tiles of x and weight to a ring in shared memory; two warpgroups, the consumers, multiply, and write y by the copy
// engine. They either share a tile, with half of its rows each, or alternate: each has every other tile to itself, and while one
// rounds and writes, the other multiplies. Thread blocks stay, and take one tile after the other. A tile of two products has half of
// its columns of each.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/arithmetic.cuh"
#include "common/early_launch.cuh"
#include "common/sm90/ptx.cuh"
#include "linear/sm90/launch.h"

namespace trtconvert::linear {

using namespace ::trtconvert::sm90;

constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kSharedLimit = 227 * 1024;
constexpr int kOwnBarrier = 1;    // named barriers: of each consumer's threads,
constexpr int kTurnBarrier = 3;   // and of its turn, where consumers alternate
constexpr int kBoxBytes = kBlockRows * kStoreColumns * 2;  // of y

template <int kColumns_, bool kGeglu_, bool kAlternate_>
struct Shape {
  static constexpr bool kGeglu = kGeglu_, kAlternate = kAlternate_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kOutColumns = kGeglu ? kColumns / 2 : kColumns;
  static constexpr int kBlocks = kAlternate ? 2 : 1;  // of 64 rows, of a consumer's tile
  static constexpr int kRowBytes = kTileDepth * 2;
  static constexpr int kBlockBytes = kBlockRows * kRowBytes;
  static constexpr int kXBytes = kTileRows * kRowBytes;
  static constexpr int kStageBytes = kXBytes + kColumns * kRowBytes;
  static constexpr int kOutBlockBytes = kBlockRows * kOutColumns * 2;
  static constexpr int kOutBytes = kConsumers * kBlocks * kOutBlockBytes;
  static constexpr int kBarrierBytes = 256;
  static constexpr int kAlignment = 1024;  // of the swizzle
  static constexpr int kMostStages = 8;
  static constexpr int kRoom = (kSharedLimit - kAlignment - kOutBytes - kBarrierBytes) / kStageBytes;
  static constexpr int kStages = kRoom < kMostStages ? kRoom : kMostStages;
  static constexpr int kOut = kStages * kStageBytes;
  static constexpr int kBarriers = kOut + kOutBytes;
  static constexpr int kSharedBytes = kAlignment + kBarriers + kBarrierBytes;
  static_assert(kStageBytes % kAlignment == 0 && kOutColumns % kStoreColumns == 0 && kStages >= 3);
  static_assert(2 * kMostStages * sizeof(uint64_t) <= kBarrierBytes && kTileRows == 2 * kBlockRows && kConsumers == 2);
};

// A place in the ring, and how often it came round.
template <int kStages>
struct Cursor {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }

  __device__ __forceinline__ void skip(int count) {
    stage += count;
    parity ^= stage / kStages & 1;
    stage %= kStages;
  }
};

template <bool kBf16>
__device__ __forceinline__ float2 widen(uint32_t pair) {
  if constexpr (kBf16) {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
  } else {
    return __half22float2(reinterpret_cast<const __half2&>(pair));
  }
}

// Two numbers as 16-bit ones, the first lowest.
template <bool kBf16>
__device__ __forceinline__ uint32_t pack(float a, float b) {
  uint32_t result;
  if constexpr (kBf16) {
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(result) : "f"(a), "f"(b));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(result) : "f"(a), "f"(b));
  }
  return result;
}

// x * Phi(x). Phi is off by at most 7.5e-8 (Abramowitz and Stegun 1964, 7.1.26).
__device__ __forceinline__ float gelu(float x) {
  constexpr float kHalfOfLog2E = 0.7213475204f, kP = 0.2316418883f;  // 0.3275911 / sqrt(2)
  const float size = fminf(fabsf(x), 64.f);  // infinity times 0 would be no number
  const float t = reciprocal(fmaf(kP, size, 1.f)), power = exp2_approx(-kHalfOfLog2E * size * size);
  const float tail = t * (0.127414796f + t * (-0.142248368f + t * (0.7107068705f + t * (-0.7265760135f + t * 0.5307027145f)))) * power;
  return 0.5f * (x + fabsf(x)) - size * tail;  // no maximum, which would lose a NaN
}

template <typename S>
struct Ring {
  uint32_t start;

  __device__ __forceinline__ uint32_t x(int stage) const { return start + stage * S::kStageBytes; }
  __device__ __forceinline__ uint32_t weight(int stage) const { return x(stage) + S::kXBytes; }
  __device__ __forceinline__ uint32_t full(int stage) const { return start + S::kBarriers + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(S::kStages + stage); }
};

// One thread.
template <typename S>
__device__ __forceinline__ void produce(const Params& p, const Maps& maps, const Ring<S>& ring) {
  Cursor<S::kStages> at;
  const int tiles = p.row_tiles * p.column_tiles;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int row = tile % p.row_tiles * kTileRows, column = tile / p.row_tiles * S::kOutColumns;
    for (int k = 0; k < p.depth_tiles; ++k) {
      mbarrier_wait(ring.empty(at.stage), at.parity ^ 1);
      mbarrier_arrive_expect(ring.full(at.stage), S::kStageBytes);
      tensor_copy(ring.x(at.stage), &maps.x, {k * kTileDepth, row}, ring.full(at.stage));
      tensor_copy(ring.weight(at.stage), &maps.weight, {k * kTileDepth, column}, ring.full(at.stage));
      if constexpr (S::kGeglu)
        tensor_copy(ring.weight(at.stage) + S::kOutColumns * S::kRowBytes, &maps.weight, {k * kTileDepth, p.columns + column},
                    ring.full(at.stage));
      at.advance();
    }
  }
}

// Rounds a block of a consumer's sums, with what is added to them, and leaves it in shared memory in boxes of 32 columns with the 64-byte
// swizzle: eight rows of a chunk of 16 bytes lie in eight different groups of banks.
template <bool kBf16, typename S>
__device__ __forceinline__ void round_block(const float (&sums)[S::kColumns / 2], const uint32_t (&added)[S::kColumns / 8],
                                            uint32_t out) {
  constexpr int kOut = S::kOutColumns;
  const int warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32;
  const int matrix = lane / 8, row = warp * 16 + matrix % 2 * 8 + lane % 8;
#pragma unroll
  for (int j = 0; j < kOut / 16; ++j) {
    uint32_t pairs[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int eight = 2 * j + half;
      const float* const s = sums + 4 * eight;
      const float2 b = widen<kBf16>(added[eight]);
      float y[4] = {s[0] + b.x, s[1] + b.y, s[2] + b.x, s[3] + b.y};
      if constexpr (S::kGeglu) {
        const float* const gate = sums + kOut / 2 + 4 * eight;
        const float2 c = widen<kBf16>(added[kOut / 8 + eight]);
#pragma unroll
        for (int i = 0; i < 4; ++i) y[i] *= gelu(gate[i] + (i % 2 ? c.y : c.x));
      }
      pairs[2 * half] = pack<kBf16>(y[0], y[1]);
      pairs[2 * half + 1] = pack<kBf16>(y[2], y[3]);
    }
    const int chunk = 2 * j + matrix / 2;
    const uint32_t box = out + chunk / 4 * kBoxBytes;
    stmatrix(box + row * (kStoreColumns * 2) + (chunk % 4 ^ row / 2 % 4) * 16, pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

// One warpgroup.
template <bool kBf16, typename S>
__device__ __forceinline__ void consume(const Params& p, const Maps& maps, const Ring<S>& ring, int consumer) {
  constexpr int kColumns = S::kColumns, kOut = S::kOutColumns;
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
  const uint32_t out = ring.start + S::kOut + consumer * S::kBlocks * S::kOutBlockBytes;
  const int first_block = S::kAlternate ? 0 : consumer;  // of a tile, of 64 rows
  const auto* const bias = static_cast<const uint32_t*>(p.bias);  // in pairs
  Cursor<S::kStages> at;
  if constexpr (S::kAlternate) {
    at.skip(consumer * p.depth_tiles);
    if (consumer == 1) named_barrier_arrive(kTurnBarrier, kConsumers * kWarpgroup);  // the first turn is not its own
  }
  const int tiles = p.row_tiles * p.column_tiles, step = gridDim.x * (S::kAlternate ? kConsumers : 1);
  for (int tile = blockIdx.x + (S::kAlternate ? consumer * gridDim.x : 0); tile < tiles; tile += step) {
    const int row = tile % p.row_tiles * kTileRows + first_block * kBlockRows, column = tile / p.row_tiles * kOut;
    // Asked for here, needed behind the products.
    uint32_t added[kColumns / 8];
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const int first = column + j * 8 % kOut + lane % 4 * 2, product = j * 8 / kOut;
      added[j] = bias && first < p.columns ? bias[(first + product * p.columns) / 2] : 0;
    }

    // The parity of a stage that the other consumer has not seen filled yet would say that it is.
    if (S::kAlternate) named_barrier_sync(kTurnBarrier + consumer, kConsumers * kWarpgroup);
    float sums[S::kBlocks][kColumns / 2];
    int previous = 0;
    for (int k = 0; k < p.depth_tiles; ++k) {
      mbarrier_wait(ring.full(at.stage), at.parity);
      constexpr int kGroup = 8 * S::kRowBytes;
      const uint64_t x = swizzled_descriptor(ring.x(at.stage) + first_block * S::kBlockBytes, 0, kGroup);
      const uint64_t weight = swizzled_descriptor(ring.weight(at.stage), 0, kGroup);
      pin(sums);
      wgmma_fence();
#pragma unroll
      for (int deep = 0; deep < kTileDepth / 16; ++deep)
#pragma unroll
        for (int block = 0; block < S::kBlocks; ++block)
          wgmma_16bit<kBf16>(sums[block], advance(x, block * S::kBlockBytes + deep * 32), advance(weight, deep * 32),
                             k > 0 || deep > 0);
      wgmma_commit();
      if (k > 0) {
        wgmma_wait<1>();
        pin(sums);
        if (thread == 0) mbarrier_arrive(ring.empty(previous));
      }
      previous = at.stage;
      at.advance();
    }
    if (S::kAlternate && tile + int(gridDim.x) < tiles)
      named_barrier_arrive(kTurnBarrier + 1 - consumer, kConsumers * kWarpgroup);
    wgmma_wait<0>();
    pin(sums);
    if (thread == 0) {
      mbarrier_arrive(ring.empty(previous));
      bulk_wait_read();  // the tile before
    }
    if (S::kAlternate) at.skip(p.depth_tiles);  // the other consumer's
    named_barrier_sync(kOwnBarrier + consumer, kWarpgroup);
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block) round_block<kBf16, S>(sums[block], added, out + block * S::kOutBlockBytes);
    fence_async_proxy();
    named_barrier_sync(kOwnBarrier + consumer, kWarpgroup);
    if (thread == 0) {
#pragma unroll
      for (int block = 0; block < S::kBlocks; ++block)
#pragma unroll
        for (int box = 0; box < kOut / kStoreColumns; ++box)
          tensor_store(&maps.y, {column + box * kStoreColumns, row + block * kBlockRows},
                       out + block * S::kOutBlockBytes + box * kBoxBytes);
      bulk_commit();
    }
  }
  if (thread == 0) bulk_wait_read();
}

// Grid: one dimension, at most as many thread blocks as there are tiles or multiprocessors.
template <int kColumns, bool kGeglu, bool kAlternate, bool kBf16>
__global__ void __launch_bounds__(kThreads, 1)
    linear_kernel(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
  extern __shared__ uint8_t shared[];
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using S = Shape<kColumns, kGeglu, kAlternate>;
  const Ring<S> ring = {(shared_address(shared) + S::kAlignment - 1) & ~uint32_t(S::kAlignment - 1)};
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&maps.x);
    prefetch_tensor_map(&maps.weight);
    for (int s = 0; s < S::kStages; ++s) {
      mbarrier_init(ring.full(s), 1);
      mbarrier_init(ring.empty(s), kAlternate ? 1 : kConsumers);
    }
    fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous_kernel();
  // The same in every lane, and through the shuffle the compiler knows.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  if (warpgroup == 0) {
    lower_registers<24>();
    if (threadIdx.x == 0) produce(p, maps, ring);
  } else {
    raise_registers<240>();
    consume<kBf16>(p, maps, ring, warpgroup - 1);
  }
#endif
}

}  // namespace trtconvert::linear
