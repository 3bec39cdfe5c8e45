// The attention kernel for sm_90a (Hopper): the copy engine fills a ring of key tiles, wgmma computes both products.
//
// A thread block takes two or three query blocks of 64 rows, one consumer warpgroup each, and all or some of the keys, then the
// next query blocks, until all are taken (schedule.h). In its producer warpgroup three threads feed the ring, and one warp finds
// the next task. The consumers take turns at the tensor cores: while one multiplies, the others compute their softmax. A consumer
// that runs its second product under its own next softmax (S::kPipelined) takes no turns, or turns at the exponentials
// (S::kPromoteFirst).
#pragma once

#include "sm90/consume_16bit.cuh"
#include "sm90/consume_fp8.cuh"
#include "sm90/consume_int8.cuh"
#include "sm90/producer.cuh"

namespace trtconvert::attention::sm90 {

// Called by one thread.
template <typename S>
__device__ __forceinline__ void init_barriers(uint8_t* shared) {
  Barriers& all = barriers_in<S>(shared);
  all.address = shared_address(shared);
  const BarrierAddresses barriers(shared_address(&all));
  for (int w = 0; w < S::kConsumers; ++w) {
    mbarrier_init(barriers.query_full(w), 1);
    mbarrier_init(barriers.query_empty(w), kWarpgroup);
  }
  for (int s = 0; s < S::kStages; ++s) {
    mbarrier_init(barriers.key_full(s), 1);
    mbarrier_init(barriers.value_full(s), 1);
    mbarrier_init(barriers.key_empty(s), S::kConsumers * kWarpgroup);
    mbarrier_init(barriers.value_empty(s), S::kConsumers * kWarpgroup);
  }
  for (int n = 0; n < kTaskSlots; ++n) mbarrier_init(barriers.task_full(n), 1);
  mbarrier_init(barriers.task_wanted(), 2);  // of queries and of keys
  mbarrier_init(barriers.task_done(), S::kConsumers * kWarpgroup + kProducers);
  fence_barrier_init();
}

// The thread block's work in one mode, which all its threads share. Results of the pre-pass are read behind
// wait_for_previous_kernel() only: before, this kernel runs beside the pre-pass.
template <int kMode, bool kBf16, int kDimQk, int kDimPv>
__device__ __forceinline__ void attend(const Params& p, const Schedule& schedule, const ValueMaps& values, uint8_t* shared,
                                       int warpgroup, const Share& share) {
  using S = Shape<kMode, kDimQk, kDimPv>;
  using C = Config<kDimQk, kDimPv>;
  constexpr int kIdle = C::kWarpgroups - 1 - S::kConsumers;
  // Registers per thread: a sum of 512 over the warpgroups takes the 65536 registers of the multiprocessor.
  constexpr int kProducerRegisters = S::kConsumers == 3 ? 32 : 24;
  constexpr int kConsumerRegisters = S::kConsumers == 3 ? 160 : kIdle ? 232 : 240;

  if (threadIdx.x == 0) init_barriers<S>(shared);
  if constexpr (S::kOnesBytes > 0) {
    // Every chunk of 16 bytes: the swizzle may move any chunk to the front.
    for (int i = threadIdx.x; i < S::kOnesBytes / 16; i += C::kThreads)
      reinterpret_cast<uint4*>(shared + S::kOnesBlock)[i] = make_uint4(kBf16 ? 0x3f80 : 0x3c00, 0, 0, 0);
    fence_async_proxy();
  } else if constexpr (S::kOnes > 0 && !S::kFp8Pv) {
    for (int i = threadIdx.x; i < S::kStages * S::kKeys; i += C::kThreads) {
      const int stage = i / S::kKeys, half = i % S::kKeys / kHalfTile, row = i % kHalfTile;
      uint8_t* const ones = shared + stage * S::kStageBytes + (half + 1) * S::kHalfBytes - kHalfTile * 2 * S::kOnes + row * 16;
      *reinterpret_cast<uint4*>(ones) = make_uint4(kBf16 ? 0x3f80 : 0x3c00, 0, 0, 0);
    }
    fence_async_proxy();
  }
  __syncthreads();

  if (warpgroup == 0 || warpgroup > S::kConsumers) {
    lower_registers<kProducerRegisters>();
    if (threadIdx.x == 0) {
      produce_keys<kMode, kDimQk, kDimPv>(p, shared);
    } else if (threadIdx.x / 32 == 1) {
      schedule_tasks<kMode, S>(p, schedule, share, shared);
    } else if (threadIdx.x == 64) {
      produce_values<kMode, kDimQk, kDimPv>(p, values, shared);
    } else if (threadIdx.x == 96) {
      produce_queries<kMode, kDimQk, kDimPv>(p, shared);
    }
  } else {
    raise_registers<kConsumerRegisters>();
    wait_for_previous_kernel();
    if constexpr (S::kFp8Pv) {
      consume_fp8<kDimQk, kDimPv>(p, shared, warpgroup - 1);
    } else if constexpr (S::kInt8Pv) {
      consume_int8<kMode, kDimQk, kDimPv>(p, shared, warpgroup - 1);
    } else {
      consume_16bit<kMode, kBf16, kDimQk, kDimPv>(p, shared, warpgroup - 1);
    }
  }
}

// Grid: one dimension, at most as many thread blocks as there are units.
template <int kDimQk, int kDimPv>
__global__ void __launch_bounds__(Config<kDimQk, kDimPv>::kThreads, 1)
    attention_kernel(const __grid_constant__ Params p, const __grid_constant__ Schedules schedules,
                     const __grid_constant__ ValueMaps values) {
  extern __shared__ __align__(1024) uint8_t shared[];
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if (swizzled_values(kDimPv) && p.direct_values && threadIdx.x == 0) prefetch_tensor_map(&values.of[0]);
  const Share share = share_of(p, shared);
  const Schedule& schedule = schedules.of[share.mode];
  // The same in every lane, which the shuffle tells the compiler.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  // Outside of the switch: a fifth case would move the code of the others, and at another address mode 2 is up to 15 % slower.
  if constexpr (has_fp8_values(kDimPv))
    if (share.mode == 4) return attend<4, false, kDimQk, kDimPv>(p, schedule, values, shared, warpgroup, share);
  switch (share.mode) {
    case 0:
      p.bf16 ? attend<0, true, kDimQk, kDimPv>(p, schedule, values, shared, warpgroup, share)
             : attend<0, false, kDimQk, kDimPv>(p, schedule, values, shared, warpgroup, share);
      break;
    case 1:
      p.bf16 ? attend<1, true, kDimQk, kDimPv>(p, schedule, values, shared, warpgroup, share)
             : attend<1, false, kDimQk, kDimPv>(p, schedule, values, shared, warpgroup, share);
      break;
    case 2: attend<2, false, kDimQk, kDimPv>(p, schedule, values, shared, warpgroup, share); break;
    default: attend<3, false, kDimQk, kDimPv>(p, schedule, values, shared, warpgroup, share); break;
  }
#endif
}

template <int kMode, int kDimQk, int kDimPv>
Schedule schedule_of(const Params& p) {
  using S = Shape<kMode, kDimQk, kDimPv>;
  if (p.block_mask_heads > 0) return Schedule(p, Schedule::kBlockConsumers, false);
  return Schedule(p, S::kConsumers, S::kCanGather);
}

template <int kDimQk, int kDimPv>
cudaError_t launch(const Params& p, const ValueMaps& values, cudaStream_t stream) {
  using C = Config<kDimQk, kDimPv>;
  constexpr int kSharedBytes = C::kSharedBytes;
  const auto kernel = attention_kernel<kDimQk, kDimPv>;
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes))
    return error;
  if (Schedule::most_units(p) * p.batch > INT32_MAX / 2) return cudaErrorInvalidConfiguration;
  const Schedules schedules = {{schedule_of<0, kDimQk, kDimPv>(p), schedule_of<1, kDimQk, kDimPv>(p),
                                schedule_of<2, kDimQk, kDimPv>(p), schedule_of<3, kDimQk, kDimPv>(p),
                                schedule_of<C::kFp8Mode, kDimQk, kDimPv>(p)}};
  int64_t most = 0;
  for (const Schedule& s : schedules.of) most = std::max(most, int64_t(s.tasks(false)) * (p.batch - 1) + s.tasks(true));
  const dim3 grid(unsigned(std::min(most, int64_t(p.multiprocessors))));
  return launch_kernel(kernel, grid, C::kThreads, kSharedBytes, stream, true, p, schedules, values);
}

}  // namespace trtconvert::attention::sm90
