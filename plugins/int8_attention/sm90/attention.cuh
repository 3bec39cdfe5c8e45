// The attention kernel for sm_90a (Hopper): the copy engine fills a ring of key tiles, wgmma computes both products.
//
// A thread block takes two or three query blocks of 64 rows, one consumer warpgroup each, and all or some of the keys
// (schedule.h). A producer warpgroup, of which one thread works, feeds the ring. The consumers take turns at the tensor cores,
// so that while one multiplies the others are in their softmax; where a consumer runs its second product under its own next
// softmax instead (S::kPipelined) they take none.
#pragma once

#include "element.cuh"
#include "sm90/consume_16bit.cuh"
#include "sm90/consume_int8.cuh"
#include "sm90/producer.cuh"

namespace trtconvert::attention::sm90 {

struct Schedules {
  Schedule of[4];  // by mode
};

// One thread.
template <typename S>
__device__ __forceinline__ void init_barriers(Barriers& barriers, const Task& task) {
  for (int w = 0; w < S::kConsumers; ++w) mbarrier_init(&barriers.query[w], 1);
  for (int s = 0; s < S::kStages; ++s) {
    mbarrier_init(&barriers.key_full[s], 1);
    mbarrier_init(&barriers.value_full[s], 1);
    const int warps = (task.streams > 1 ? 1 : task.active) * 4;  // one arrival each
    mbarrier_init(&barriers.key_empty[s], warps);
    mbarrier_init(&barriers.value_empty[s], warps);
  }
  fence_barrier_init();
}

// The thread block's work in one mode, which is the same for all its threads. What the pre-pass wrote is read behind
// wait_for_previous_kernel() only: until then this runs beside it.
template <int kMode, bool kBf16, int kDimQk, int kDimPv>
__device__ __forceinline__ void attend(const Params& p, const Schedules& schedules, const CUtensorMap& values,
                                       uint8_t* shared, int warpgroup, int num_keys) {
  using S = Shape<kMode, kDimQk, kDimPv>;
  constexpr int kWarpgroups = Config<kDimQk, kDimPv>::kWarpgroups;
  constexpr int kIdle = kWarpgroups - 1 - S::kConsumers;
  // Per thread; 512 over the warpgroups are the 65536 of the multiprocessor.
  constexpr int kProducerRegisters = S::kConsumers == 3 ? 32 : 24;
  constexpr int kConsumerRegisters = S::kConsumers == 3 ? 160 : kIdle ? 232 : 240;

  Barriers& barriers = *reinterpret_cast<Barriers*>(shared + S::kBarriers);
  if (threadIdx.x == 0) {
    Task task = {};  // active 0: none
    if (find_task<S::kKeys, S::kConsumers>(p, schedules.of[kMode], num_keys, task)) init_barriers<S>(barriers, task);
    barriers.task = task;
  }
  if constexpr (S::kOnesBytes > 0) {
    // Every chunk of 16 bytes: whatever the swizzle takes for the first one.
    for (int i = threadIdx.x; i < S::kOnesBytes / 16; i += Config<kDimQk, kDimPv>::kThreads)
      reinterpret_cast<uint4*>(shared + S::kOnesBlock)[i] = make_uint4(kBf16 ? 0x3f80 : 0x3c00, 0, 0, 0);
    fence_async_proxy();
  } else if constexpr (S::kOnes > 0) {
    for (int i = threadIdx.x; i < S::kStages * S::kKeys; i += Config<kDimQk, kDimPv>::kThreads) {
      const int stage = i / S::kKeys, half = i % S::kKeys / kHalfTile, row = i % kHalfTile;
      uint8_t* const ones = shared + stage * S::kStageBytes + (half + 1) * S::kHalfBytes - kHalfTile * 2 * S::kOnes + row * 16;
      *reinterpret_cast<uint4*>(ones) = make_uint4(kBf16 ? 0x3f80 : 0x3c00, 0, 0, 0);
    }
    fence_async_proxy();
  }
  __syncthreads();
  if (barriers.task.active == 0) return;

  if (warpgroup == 0 || warpgroup > S::kConsumers) {
    lower_registers<kProducerRegisters>();
    if (threadIdx.x != 0) return;
    wait_for_previous_kernel();
    produce<kMode, kDimQk, kDimPv>(p, values, barriers.task, shared);
  } else {
    raise_registers<kConsumerRegisters>();
    const int consumer = warpgroup - 1;
    if (consumer >= barriers.task.active) return;
    wait_for_previous_kernel();
    if constexpr (kMode <= 1) {
      consume_16bit<kMode, kBf16, kDimQk, kDimPv>(p, barriers.task, shared, consumer);
    } else {
      consume_int8<kMode, kDimQk, kDimPv>(p, barriers.task, shared, consumer);
    }
  }
}

// Grid: (thread blocks of a batch element, batch).
template <int kDimQk, int kDimPv>
__global__ void __launch_bounds__(Config<kDimQk, kDimPv>::kThreads, 1)
    attention_kernel(const __grid_constant__ Params p, const __grid_constant__ Schedules schedules,
                     const __grid_constant__ CUtensorMap values) {
  extern __shared__ __align__(1024) uint8_t shared[];
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if (swizzled_values(kDimPv) && p.direct_values && threadIdx.x == 0) prefetch_tensor_map(&values);
  // The same in every lane, and through the shuffles the compiler knows.
  const Element element = element_of(p, blockIdx.y);
  const int mode = __shfl_sync(0xffffffffu, element.mode, 0), num_keys = __shfl_sync(0xffffffffu, element.num_keys, 0);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  switch (mode) {
    case 0:
      p.bf16 ? attend<0, true, kDimQk, kDimPv>(p, schedules, values, shared, warpgroup, num_keys)
             : attend<0, false, kDimQk, kDimPv>(p, schedules, values, shared, warpgroup, num_keys);
      break;
    case 1:
      p.bf16 ? attend<1, true, kDimQk, kDimPv>(p, schedules, values, shared, warpgroup, num_keys)
             : attend<1, false, kDimQk, kDimPv>(p, schedules, values, shared, warpgroup, num_keys);
      break;
    case 2: attend<2, false, kDimQk, kDimPv>(p, schedules, values, shared, warpgroup, num_keys); break;
    default: attend<3, false, kDimQk, kDimPv>(p, schedules, values, shared, warpgroup, num_keys); break;
  }
#endif
}

template <int kMode, int kDimQk, int kDimPv>
Schedule schedule_of(const Params& p) {
  using S = Shape<kMode, kDimQk, kDimPv>;
  return Schedule(p, S::kConsumers, S::kCanGather);
}

template <int kDimQk, int kDimPv>
cudaError_t launch(const Params& p, const CUtensorMap& values, cudaStream_t stream) {
  using C = Config<kDimQk, kDimPv>;
  constexpr int kSharedBytes = C::kSharedBytes;
  const auto kernel = attention_kernel<kDimQk, kDimPv>;
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes))
    return error;
  if (Schedule::most_units(p) > INT32_MAX / 2) return cudaErrorInvalidConfiguration;
  const Schedules schedules = {{schedule_of<0, kDimQk, kDimPv>(p), schedule_of<1, kDimQk, kDimPv>(p),
                                schedule_of<2, kDimQk, kDimPv>(p), schedule_of<3, kDimQk, kDimPv>(p)}};
  int thread_blocks = 0;
  for (const Schedule& schedule : schedules.of) thread_blocks = std::max(thread_blocks, schedule.thread_blocks());
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
  return cudaLaunchKernelEx(&config, kernel, p, schedules, values);
}

}  // namespace trtconvert::attention::sm90
