// y = x * weight^T + bias in 16 bits, or the product of one such layer with the GELU of a second.
#pragma once

#include "linear/sm90/boxes.cuh"
#include "linear/sm90/ring.cuh"

namespace trtconvert::linear {

template <bool kBf16>
struct Float16 {
  static constexpr int kBytes = 2;
  using Sum = float;

  template <int N>
  static __device__ __forceinline__ void multiply(float (&sums)[N], uint64_t x, uint64_t weight, int use_sums) {
    wgmma_16bit<kBf16>(sums, x, weight, use_sums);
  }
};

// A tile is rounded as a whole, and then written.
template <int kColumns, bool kGeglu, bool kAlternate, bool kBf16>
using Shape16 = Shape<Float16<kBf16>, kColumns, kGeglu, kAlternate,
                      (kAlternate ? kConsumers : 1) * kTileRows * (kGeglu ? kColumns / 2 : kColumns) * 2>;

template <bool kBf16, typename S>
class BiasEpilogue {
 public:
  __device__ __forceinline__ BiasEpilogue(const Params& p, const Ring<S>& ring, int consumer)
      : out_(ring.start + S::kOut + consumer * S::kBlocks * kOutBlockBytes),
        bias_(static_cast<const uint32_t*>(p.bias)),
        barrier_(kOwnBarrier + consumer) {}

  // Loaded before the products, needed behind them.
  __device__ __forceinline__ void load(const Params& p, const Place& place) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < S::kColumns / 8; ++j) {
      const int first = place.column + j * 8 % kOut + lane % 4 * 2, product = j * 8 / kOut;
      added_[j] = bias_ && first < p.columns ? bias_[(first + product * p.columns) / 2] : 0;
    }
  }

  __device__ __forceinline__ void prepare(const Params&, const Place&) {}

  __device__ __forceinline__ void make_room() {
    if (threadIdx.x % kWarpgroup == 0) bulk_wait_read();  // until the copy engine has read the previous tile
  }

  __device__ __forceinline__ void store(const Params&, const Maps& maps, const Place& place,
                                        const float (&sums)[S::kBlocks][S::kColumns / 2]) {
    const int thread = threadIdx.x % kWarpgroup;
    named_barrier_sync(barrier_, kWarpgroup);
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block) round_block(sums[block], out_ + block * kOutBlockBytes);
    fence_async_proxy();
    named_barrier_sync(barrier_, kWarpgroup);
    if (thread == 0) {
#pragma unroll
      for (int block = 0; block < S::kBlocks; ++block)
#pragma unroll
        for (int box = 0; box < kOut / kStoreColumns; ++box)
          tensor_store(&maps.y, {place.column + box * kStoreColumns, place.row + block * kBlockRows},
                       out_ + block * kOutBlockBytes + box * kBoxBytes);
      bulk_commit();
    }
  }

 private:
  static constexpr int kOut = S::kOutColumns;
  static constexpr int kOutBlockBytes = kBlockRows * kOut * 2;

  // Rounds a block of a consumer's sums, with bias, and stores it in boxes in shared memory.
  __device__ __forceinline__ void round_block(const float (&sums)[S::kColumns / 2], uint32_t out) const {
    const MatrixRow at = matrix_row();
#pragma unroll
    for (int j = 0; j < kOut / 16; ++j) {
      uint32_t pairs[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int eight = 2 * j + half;
        const float* const s = sums + 4 * eight;
        const float2 b = widen<kBf16>(added_[eight]);
        float y[4] = {s[0] + b.x, s[1] + b.y, s[2] + b.x, s[3] + b.y};
        if constexpr (S::kGeglu) {
          const float* const gate = sums + kOut / 2 + 4 * eight;
          const float2 c = widen<kBf16>(added_[kOut / 8 + eight]);
#pragma unroll
          for (int i = 0; i < 4; ++i) y[i] *= gelu(gate[i] + (i % 2 ? c.y : c.x));
        }
        pairs[2 * half] = pack<kBf16>(y[0], y[1]);
        pairs[2 * half + 1] = pack<kBf16>(y[2], y[3]);
      }
      store_in_boxes(out, j, at, pairs);
    }
  }

  uint32_t out_;
  const uint32_t* bias_;  // in pairs
  int barrier_;
  uint32_t added_[S::kColumns / 8];
};

template <int kColumns, bool kGeglu, bool kAlternate, bool kBf16>
__global__ void __launch_bounds__(kThreads, 1)
    linear_kernel(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
  extern __shared__ uint8_t shared[];
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using S = Shape16<kColumns, kGeglu, kAlternate, kBf16>;
  multiply_tiles<S, BiasEpilogue<kBf16, S>>(p, maps, shared);
#endif
}

}  // namespace trtconvert::linear
