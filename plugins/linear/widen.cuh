// INT8 numbers as 16-bit numbers, exactly.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace trtconvert::linear {

// The two low bytes of a word, without conversion instructions, which are slow.
template <bool kBf16>
__device__ __forceinline__ uint32_t widen_two(uint32_t bytes) {
  if constexpr (kBf16) {
    // 128 + the low seven bits, minus 128, or minus 256 where the sign bit counts as another 128.
    const uint32_t spread = __byte_perm(bytes, 0, 0x4140);
    const uint32_t low = (spread & 0x007f007f) | 0x43004300, sign = (spread & 0x00800080) | 0x43004300;
    const __nv_bfloat162 result =
        __hsub2(reinterpret_cast<const __nv_bfloat162&>(low), reinterpret_cast<const __nv_bfloat162&>(sign));
    return reinterpret_cast<const uint32_t&>(result);
  } else {
    // 1024 + the byte as if it had no sign, plus 128; minus both.
    constexpr uint32_t kBoth = 0x64806480;
    const uint32_t moved = __byte_perm(bytes ^ 0x8080, 0x64646464, 0x4140);
    const __half2 result = __hsub2(reinterpret_cast<const __half2&>(moved), reinterpret_cast<const __half2&>(kBoth));
    return reinterpret_cast<const uint32_t&>(result);
  }
}

}  // namespace trtconvert::linear
