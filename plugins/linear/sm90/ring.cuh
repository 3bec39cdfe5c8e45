// The shared part of the linear layers' kernels: a ring of tiles in shared memory, one thread that fills it by tensor copies, and two
// warpgroups, the consumers, that multiply by wgmma.
//
// Consumers either share a tile, with half of its rows each, or alternate: each has every other tile alone, and while one rounds and
// writes, the other multiplies. The kernel is persistent. A tile of two products has half of its columns from each. A consumer's
// epilogue processes the sums; any producer that uses the barriers correctly may fill the ring.
#pragma once

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

// kOutBytes_: shared memory of the epilogues.
template <typename Operand_, int kColumns_, bool kGeglu_, bool kAlternate_, int kOutBytes_>
struct Shape {
  using Operand = Operand_;
  static constexpr bool kGeglu = kGeglu_, kAlternate = kAlternate_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kOutColumns = kGeglu ? kColumns / 2 : kColumns;
  static constexpr int kBlocks = kAlternate ? 2 : 1;  // of 64 rows, of a consumer's tile
  static constexpr int kDepth = kRowBytes / Operand::kBytes;  // elements
  static constexpr int kWeightRowBytes = kRowBytes;
  static constexpr int kBlockBytes = kBlockRows * kRowBytes;
  static constexpr int kXBytes = kTileRows * kRowBytes;
  static constexpr int kStageBytes = kXBytes + kColumns * kRowBytes;
  static constexpr int kOutBytes = kOutBytes_;
  static constexpr int kBarrierBytes = 256;
  static constexpr int kAlignment = 1024;  // of the swizzle
  static constexpr int kMostStages = 8;
  static constexpr int kRoom = (kSharedLimit - kAlignment - kOutBytes - kBarrierBytes) / kStageBytes;
  static constexpr int kStages = kRoom < kMostStages ? kRoom : kMostStages;
  static constexpr int kOut = kStages * kStageBytes;
  static constexpr int kBarriers = kOut + kOutBytes;
  static constexpr int kSharedBytes = kAlignment + kBarriers + kBarrierBytes;
  // Arrivals that empty a stage: of all consumers that read this thread block's copies.
  static constexpr int kReaders = kAlternate ? 1 : kConsumers;
  // Registers of a thread: the kernel starts with the sum over all threads.
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters == (1 + kConsumers) * 168);
  static_assert(kStageBytes % kAlignment == 0 && kOutColumns % kStoreColumns == 0 && kStages >= 3);
  static_assert(2 * kMostStages * sizeof(uint64_t) <= kBarrierBytes && kTileRows == 2 * kBlockRows && kConsumers == 2);
};

// A place in the ring, and the number of completed rounds.
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

template <typename S>
struct Ring {
  uint32_t start;

  __device__ __forceinline__ uint32_t x(int stage) const { return start + stage * S::kStageBytes; }
  __device__ __forceinline__ uint32_t weight(int stage) const { return x(stage) + S::kXBytes; }
  __device__ __forceinline__ uint32_t full(int stage) const { return start + S::kBarriers + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(S::kStages + stage); }

  // Called by a consumer's threads when the stage has been read.
  __device__ __forceinline__ void release(int stage, int thread) const {
    if (thread == 0) mbarrier_arrive(empty(stage));
  }
};

// The first row and column of a tile of y.
struct Place {
  int row, column;
};

// Order of the tiles, from the kernel's parameters: here all tiles of a column, then those of the next.
template <typename S>
__device__ __forceinline__ Place place_of(const Params& p, int tile) {
  return {tile % p.row_tiles * kTileRows, tile / p.row_tiles * S::kOutColumns};
}

// Runs in one thread.
template <typename S, typename P>
__device__ __forceinline__ void produce(const P& p, const Maps& maps, const Ring<S>& ring) {
  Cursor<S::kStages> at;
  const int tiles = p.row_tiles * p.column_tiles;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Place place = place_of<S>(p, tile);
    for (int k = 0; k < p.depth_tiles; ++k) {
      mbarrier_wait(ring.empty(at.stage), at.parity ^ 1);
      mbarrier_arrive_expect(ring.full(at.stage), S::kStageBytes);
      tensor_copy(ring.x(at.stage), &maps.x, {k * S::kDepth, place.row}, ring.full(at.stage));
      tensor_copy(ring.weight(at.stage), &maps.weight, {k * S::kDepth, place.column}, ring.full(at.stage));
      if constexpr (S::kGeglu)
        tensor_copy(ring.weight(at.stage) + S::kOutColumns * S::kWeightRowBytes, &maps.weight,
                    {k * S::kDepth, p.columns + place.column}, ring.full(at.stage));
      at.advance();
    }
  }
}

// Runs in one warpgroup. Its epilogue gets the place of each tile before the products, a notice before the products end, and the sums.
template <typename Epilogue, typename S, typename P>
__device__ __forceinline__ void consume(const P& p, const Maps& maps, const Ring<S>& ring, int consumer) {
  using Operand = typename S::Operand;
  constexpr int kColumns = S::kColumns;
  const int thread = threadIdx.x % kWarpgroup;
  const int first_block = S::kAlternate ? 0 : consumer;  // of a tile, of 64 rows
  Epilogue epilogue(p, ring, consumer);
  Cursor<S::kStages> at;
  if constexpr (S::kAlternate) {
    at.skip(consumer * p.depth_tiles);
    if (consumer == 1) named_barrier_arrive(kTurnBarrier, kConsumers * kWarpgroup);  // the first turn is consumer 0's
  }
  const int tiles = p.row_tiles * p.column_tiles, blocks = gridDim.x, step = blocks * (S::kAlternate ? kConsumers : 1);
  for (int tile = blockIdx.x + (S::kAlternate ? consumer * blocks : 0); tile < tiles; tile += step) {
    Place place = place_of<S>(p, tile);
    place.row += first_block * kBlockRows;
    epilogue.load(p, place);

    // The parity of a stage that the other consumer has not yet seen filled would be misread as filled.
    if (S::kAlternate) named_barrier_sync(kTurnBarrier + consumer, kConsumers * kWarpgroup);
    typename Operand::Sum sums[S::kBlocks][kColumns / 2];
    int previous = 0;
    for (int k = 0; k < p.depth_tiles; ++k) {
      mbarrier_wait(ring.full(at.stage), at.parity);
      constexpr int kGroup = 8 * kRowBytes;
      const uint64_t x = swizzled_descriptor(ring.x(at.stage) + first_block * S::kBlockBytes, 0, kGroup);
      const uint64_t weight = swizzled_descriptor(ring.weight(at.stage), 0, kGroup);
      pin(sums);
      wgmma_fence();
#pragma unroll
      for (int deep = 0; deep < kRowBytes / 32; ++deep)
#pragma unroll
        for (int block = 0; block < S::kBlocks; ++block)
          Operand::multiply(sums[block], advance(x, block * S::kBlockBytes + deep * 32), advance(weight, deep * 32), k > 0 || deep > 0);
      wgmma_commit();
      if (k > 0) {
        wgmma_wait<1>();
        pin(sums);
        ring.release(previous, thread);
      }
      previous = at.stage;
      at.advance();
    }
    if (S::kAlternate && tile + blocks < tiles) named_barrier_arrive(kTurnBarrier + 1 - consumer, kConsumers * kWarpgroup);
    epilogue.prepare(p, place);
    wgmma_wait<0>();
    pin(sums);
    ring.release(previous, thread);
    epilogue.make_room();
    if (S::kAlternate) at.skip(p.depth_tiles);  // the other consumer's
    epilogue.store(p, maps, place, sums);
  }
  if (thread == 0) bulk_wait_read();
}

// True if the data say that a launch is for another kernel. A 16-bit layer has one kernel.
__device__ __forceinline__ bool is_for_another(const Params&) { return false; }

// A kernel's body. Grid: one dimension, at most as many thread blocks as tiles or multiprocessors. consume(ring, consumer)
// is the code of a consumer's warpgroup.
template <typename S, typename P, typename Consume>
__device__ __forceinline__ void run_block(const P& p, const Maps& maps, const uint8_t* shared, Consume consume) {
  const Ring<S> ring = {(shared_address(shared) + S::kAlignment - 1) & ~uint32_t(S::kAlignment - 1)};
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&maps.x);
    prefetch_tensor_map(&maps.weight);
    for (int s = 0; s < S::kStages; ++s) {
      mbarrier_init(ring.full(s), 1);
      mbarrier_init(ring.empty(s), S::kReaders);
    }
    fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous_kernel();
  if (is_for_another(p)) return;
  // The same in every lane, which the shuffle tells the compiler.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  if (warpgroup == 0) {
    lower_registers<S::kProducerRegisters>();
    if (threadIdx.x == 0) produce(p, maps, ring);
  } else {
    raise_registers<S::kConsumerRegisters>();
    consume(ring, warpgroup - 1);
  }
}

// For consumers that multiply operands in shared memory.
template <typename S, typename Epilogue, typename P>
__device__ __forceinline__ void multiply_tiles(const P& p, const Maps& maps, const uint8_t* shared) {
  run_block<S>(p, maps, shared, [&](const Ring<S>& ring, int consumer) { consume<Epilogue>(p, maps, ring, consumer); });
}

}  // namespace trtconvert::linear
