// The attention kernel for sm_90a (Hopper): bulk copies into a ring of key tiles, wgmma for both products.
//
// A thread block takes two or three query blocks of 64 rows of one head, one consumer warpgroup each, and all or some of the
// keys (schedule.h). A producer warpgroup, of which one thread works, feeds the ring. The consumers take turns at the tensor
// cores, so that while one multiplies the others are in their softmax.
#pragma once

#include "sm90/consume_16bit.cuh"
#include "sm90/consume_int8.cuh"
#include "sm90/producer.cuh"

namespace trtconvert::attention::sm90 {

struct Schedules {
  Schedule of[kMaxConsumers + 1];  // by number of consumers
};

// The thread block's work in one mode, which is the same for all its threads.
template <int kMode, bool kBf16, int kDimQk, int kDimPv>
__device__ __forceinline__ void attend(const Params& p, const Schedules& schedules, uint8_t* shared, int warpgroup) {
  using S = Shape<kMode, kDimQk, kDimPv>;
  constexpr int kWarpgroups = Config<kDimQk, kDimPv>::kWarpgroups;
  constexpr int kIdle = kWarpgroups - 1 - S::kConsumers;
  // Per thread; 512 over the warpgroups are the 65536 of the multiprocessor.
  constexpr int kProducerRegisters = S::kConsumers == 3 ? 32 : 24;
  constexpr int kConsumerRegisters = S::kConsumers == 3 ? 160 : kIdle ? 232 : 240;

  Task task;
  if (!find_task<S::kKeys, S::kConsumers>(p, schedules.of[S::kConsumers], task)) return;
  Barriers& barriers = *reinterpret_cast<Barriers*>(shared);
  if (threadIdx.x == 0) {
    for (int w = 0; w < S::kConsumers; ++w) mbarrier_init(&barriers.query[w], 1);
    for (int s = 0; s < S::kStages; ++s) {
      mbarrier_init(&barriers.key_full[s], 1);
      mbarrier_init(&barriers.value_full[s], 1);
      mbarrier_init(&barriers.key_empty[s], task.active * 4);  // one arrival per warp
      mbarrier_init(&barriers.value_empty[s], task.active * 4);
    }
    fence_barrier_init();
  }
  if constexpr (S::kOnes > 0) {
    uint8_t* const values = shared + kBarrierBytes + S::kConsumers * S::kConsumerBytes + S::kKeyBytes + sizeof(TileScales);
    for (int i = threadIdx.x; i < S::kStages * S::kKeys; i += Config<kDimQk, kDimPv>::kThreads) {
      const int stage = i / S::kKeys, half = i % S::kKeys / kHalfTile, row = i % kHalfTile;
      uint8_t* const ones = values + stage * S::kStageBytes + (half + 1) * kHalfTile * 2 * (kDimPv + S::kOnes) -
                            kHalfTile * 2 * S::kOnes + row * 16;
      *reinterpret_cast<uint4*>(ones) = make_uint4(kBf16 ? 0x3f80 : 0x3c00, 0, 0, 0);
    }
    fence_async_proxy();
  }
  __syncthreads();

  if (warpgroup == 0 || warpgroup > S::kConsumers) {
    lower_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce<kMode, kDimQk, kDimPv>(p, task, shared);
  } else {
    raise_registers<kConsumerRegisters>();
    const int consumer = warpgroup - 1;
    if (consumer >= task.active) return;
    if constexpr (kMode <= 1) {
      consume_16bit<kMode, kBf16, kDimQk, kDimPv>(p, task, shared, consumer);
    } else {
      consume_int8<kMode, kDimQk, kDimPv>(p, task, shared, consumer);
    }
  }
}

// Grid: (thread blocks of a batch element, batch).
template <int kDimQk, int kDimPv>
__global__ void __launch_bounds__(Config<kDimQk, kDimPv>::kThreads, 1)
    attention_kernel(const __grid_constant__ Params p, const __grid_constant__ Schedules schedules) {
  extern __shared__ __align__(128) uint8_t shared[];
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  wait_for_previous_kernel();
  const int mode = __shfl_sync(0xffffffffu, p.elements[blockIdx.y].mode, 0);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  switch (mode) {
    case 0:
      p.bf16 ? attend<0, true, kDimQk, kDimPv>(p, schedules, shared, warpgroup)
             : attend<0, false, kDimQk, kDimPv>(p, schedules, shared, warpgroup);
      break;
    case 1:
      p.bf16 ? attend<1, true, kDimQk, kDimPv>(p, schedules, shared, warpgroup)
             : attend<1, false, kDimQk, kDimPv>(p, schedules, shared, warpgroup);
      break;
    case 2: attend<2, false, kDimQk, kDimPv>(p, schedules, shared, warpgroup); break;
    default: attend<3, false, kDimQk, kDimPv>(p, schedules, shared, warpgroup); break;
  }
#endif
}

template <int kDimQk, int kDimPv>
cudaError_t launch(const Params& p, cudaStream_t stream) {
  using C = Config<kDimQk, kDimPv>;
  constexpr int kSharedBytes = C::kSharedBytes;
  const auto kernel = attention_kernel<kDimQk, kDimPv>;
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes))
    return error;
  if (Schedule::most_units(p) > INT32_MAX / 2) return cudaErrorInvalidConfiguration;
  Schedules schedules = {};
  int thread_blocks = 0;
  for (int consumers : {Shape<1, kDimQk, kDimPv>::kConsumers, Shape<2, kDimQk, kDimPv>::kConsumers}) {
    const Schedule& schedule = schedules.of[consumers] = Schedule(p, consumers);
    if (schedule.thread_blocks() > thread_blocks) thread_blocks = schedule.thread_blocks();
  }
  cudaLaunchAttribute beside_prepass = {};
  beside_prepass.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  beside_prepass.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(thread_blocks, p.batch);
  config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  config.attrs = &beside_prepass;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p, schedules);
}

}  // namespace trtconvert::attention::sm90
