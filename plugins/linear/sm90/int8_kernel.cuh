// y = (x * weight^T) * (row_scale * weight_scale) + bias, of rows and weights in INT8, and the epilogues.
#pragma once

#include <cmath>
#include <type_traits>

#include "common/layer_modes.cuh"
#include "linear/grouped_tile.cuh"
#include "linear/row_scale.cuh"
#include "linear/sm90/boxes.cuh"
#include "linear/sm90/int8_launch.h"
#include "linear/sm90/ring.cuh"

namespace trtconvert::linear {

struct Int8 {
  static constexpr int kBytes = 1;
  using Sum = int32_t;

  template <int N>
  static __device__ __forceinline__ void multiply(int32_t (&sums)[N], uint64_t x, uint64_t weight, int use_sums) {
    wgmma_s8(sums, x, weight, use_sums);
  }
};

// A consumer writes its tile box by box, and waits until all but the last few boxes are free. Beside them it has scales and biases of
// each pair of columns, and the equalisation of quantised rows. Boxes start where their swizzle does.
constexpr int kOutBoxes = 3;
constexpr int kBoxAlignment = 512;
constexpr int kPairBytes = sizeof(float4);
template <int kColumns, bool kGeglu>
constexpr int kEpilogueBytes =
    (kOutBoxes * kBoxBytes + (kColumns + kColumns / (kGeglu ? 2 : 1)) / 2 * kPairBytes + kBoxAlignment - 1) / kBoxAlignment * kBoxAlignment;

template <int kColumns, bool kGeglu, bool kAlternate>
using Int8Shape = Shape<Int8, kColumns, kGeglu, kAlternate, kConsumers * kEpilogueBytes<kColumns, kGeglu>>;

template <typename S>
__device__ __forceinline__ Place place_of(const Int8Params& p, int tile) {
  const GroupedTile at(p, tile);
  return {at.row * kTileRows, at.column * S::kOutColumns};
}

__device__ __forceinline__ bool is_for_another(const Int8Params& p) { return p.may_be_16bit && signbit(p.row_scale[0]); }

template <bool kBf16, typename S, typename P = Int8Params>
class ScaledEpilogue {
 public:
  __device__ __forceinline__ ScaledEpilogue(const P&, const Ring<S>& ring, int consumer)
      : boxes_(ring.start + S::kOut + consumer * kEpilogueBytes<S::kColumns, S::kGeglu>),
        columns_(boxes_ + kOutBoxes * kBoxBytes),
        equalisers_(columns_ + kPairs * kPairBytes),
        barrier_(kOwnBarrier + consumer) {}

  // Loaded before the products, needed behind them.
  __device__ __forceinline__ void load(const P& p, const Place& place) {
    const int thread = threadIdx.x % kWarpgroup;
    if constexpr (kConv) {
      for_each_row(place, [&](int block, int half, int row) { marks_[block][half] = row < p.rows ? marks_of(p.conv, row) : uint2{}; });
    } else {
      for_each_row(place, [&](int block, int half, int row) {
        row_scales_[block][half] = row >= p.rows ? 0.f : p.changes ? p.row_scale[row] : row_scale_of(p, row);
        if (p.out_row_scale) out_scales_[block][half] = row < p.rows ? out_scale(p, row) : 1.f;
      });
    }
    of_columns_ = {};
    const int in_product = 2 * thread % kOut, product = 2 * thread / kOut;
    if (thread < kPairs && place.column + in_product < p.columns) {
      const int pair = (product * p.columns + place.column + in_product) / 2;
      const float2 scale = p.weight_scale[pair], bias = p.bias ? p.bias[pair] : float2{};
      of_columns_ = make_float4(scale.x, scale.y, bias.x, bias.y);
      if (p.out_row_scale && product == 0) {
        const float2 factor = p.out_factor ? p.out_factor[pair] : make_float2(1.f, 1.f);
        const float2 offset = p.out_offset ? p.out_offset[pair] : float2{};
        equaliser_ = make_float4(factor.x, factor.y, offset.x, offset.y);
      }
    }
    if constexpr (kConv) {  // behind the other loads, because the scale's address depends on the timestep
      SampleScale scale;
      for_each_row(place, [&](int block, int half, int row) {
        row_scales_[block][half] = row < p.rows ? scale.of(p.conv, row) : 0.f;
      });
    }
  }

  __device__ __forceinline__ void prepare(const Int8Params& p, const Place& place) { load_residual(p, place, 0, 0, residual_[0]); }

  __device__ __forceinline__ void make_room() {}

  __device__ __forceinline__ void store(const Int8Params& p, const Maps& maps, const Place& place,
                                        const int32_t (&sums)[S::kBlocks][S::kColumns / 2]) {
    const int thread = threadIdx.x % kWarpgroup;
    // A barrier lies in between: all threads have read the last tile's values.
    if (thread < kPairs) store_shared(columns_ + thread * kPairBytes, of_columns_);
    if constexpr (kConv) {
#pragma unroll
      for (int block = 0; block < S::kBlocks; ++block) break_marked(marks_[block], row_scales_[block]);
    } else if (p.out_row_scale) {
      if (thread < kOut / 2) store_shared(equalisers_ + thread * kPairBytes, equaliser_);
      if (place.column == 0) store_out_scales(p, place);
      return store_boxes<Finish::kQuantised>(p, maps, place, sums);
    }
    if constexpr (!S::kGeglu) {
      if (p.changes) return store_boxes<Finish::kChange>(p, maps, place, sums);
      if (p.residual) return store_boxes<Finish::kResidual>(p, maps, place, sums);
      if (p.activation == TRTCONVERT_GELU) return store_boxes<Finish::kGelu>(p, maps, place, sums);
      if (p.activation == TRTCONVERT_GELU_TANH) return store_boxes<Finish::kGeluTanh>(p, maps, place, sums);
    }
    store_boxes<Finish::kPlain>(p, maps, place, sums);
  }

 private:
  static constexpr bool kConv = std::is_same_v<P, ConvParams>;
  static constexpr int kOut = S::kOutColumns;
  static constexpr int kPairs = S::kColumns / 2;
  static constexpr int kBoxes = kOut / kStoreColumns;  // of a block
  static constexpr int kEights = kStoreColumns / 8;    // of a box
  static_assert(kPairs <= kWarpgroup && kQuantisedColumns == kStoreColumns);

  using Residual = uint32_t[kEights][2];  // of a box: pairs of columns in the rows of both halves

  // A thread's rows of a block, from the block's first.
  static __device__ __forceinline__ int row_of(int block, int half) {
    return block * kBlockRows + threadIdx.x % kWarpgroup / 32 * 16 + half * 8 + threadIdx.x % 32 / 4;
  }

  template <typename Action>
  static __device__ __forceinline__ void for_each_row(const Place& place, Action action) {
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block)
#pragma unroll
      for (int half = 0; half < 2; ++half) action(block, half, place.row + row_of(block, half));
  }

  static __device__ __forceinline__ float out_scale(const Int8Params& p, int row) {
    const Sample sample = sample_of(p.out_table, {TRTCONVERT_STATIC, true}, row / p.out_sample_rows);
    return sample.usable ? sample.x_scale : NAN;
  }

  // Called by the consumer with the first columns of these rows.
  __device__ __forceinline__ void store_out_scales(const Int8Params& p, const Place& place) const {
    if (threadIdx.x % 4) return;
    for_each_row(place, [&](int block, int half, int row) {
      if (row < p.rows) p.out_row_scale[row] = isnan(row_scales_[block][half]) ? NAN : out_scales_[block][half];
    });
  }

  __device__ __forceinline__ void load_residual(const Int8Params& p, const Place& place, int block, int box,
                                                Residual& residual) const {
    if constexpr (!S::kGeglu) {
      if (!p.residual) return;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = place.row + row_of(block, half);
        const uint32_t* const of_row = p.residual + int64_t{row} * (p.columns / 2);
#pragma unroll
        for (int eight = 0; eight < kEights; ++eight) {
          const int column = place.column + box * kStoreColumns + eight * 8 + threadIdx.x % 4 * 2;
          residual[eight][half] = row < p.rows && column < p.columns ? of_row[column / 2] : 0;
        }
      }
    }
  }

  template <Finish kFinish>
  __device__ __forceinline__ void store_boxes(const Int8Params& p, const Maps& maps, const Place& place,
                                              const int32_t (&sums)[S::kBlocks][S::kColumns / 2]) {
    const int thread = threadIdx.x % kWarpgroup;
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block)
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        const int at = block * kBoxes + box;
        if ((kFinish == Finish::kResidual || kFinish == Finish::kChange) && at + 1 < S::kBlocks * kBoxes)
          load_residual(p, place, (at + 1) / kBoxes, (at + 1) % kBoxes, residual_[(at + 1) % 2]);
        const uint32_t out = boxes_ + next_box_ * kBoxBytes;
        next_box_ = next_box_ + 1 == kOutBoxes ? 0 : next_box_ + 1;
        if (thread == 0) bulk_wait_read<kOutBoxes - 1>();
        named_barrier_sync(barrier_, kWarpgroup);
        if constexpr (kFinish == Finish::kQuantised) {
          quantise_box(p, sums[block], row_scales_[block], out_scales_[block], box, out);
        } else {
          round_box<kFinish>(sums[block], row_scales_[block], residual_[at % 2], box, out);
        }
        fence_async_proxy();
        named_barrier_sync(barrier_, kWarpgroup);
        if (thread == 0) {
          tensor_store(&maps.y, {place.column + box * kStoreColumns, place.row + block * kBlockRows}, out);
          bulk_commit();
        }
      }
  }

  template <Finish kFinish>
  __device__ __forceinline__ void round_box(const int32_t (&sums)[S::kColumns / 2], const float (&row_scales)[2],
                                            const Residual& residual, int box, uint32_t out) const {
    const MatrixRow at = matrix_row();
#pragma unroll
    for (int sixteen = 0; sixteen < kEights / 2; ++sixteen) {
      uint32_t pairs[4];
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const int of_box = 2 * sixteen + part;
        float y[4];
        if constexpr (kFinish == Finish::kChange) {
          add_change(sums, row_scales, box * kEights + of_box, residual[of_box], y);
        } else {
          results(sums, row_scales, box * kEights + of_box, y);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (kFinish == Finish::kGelu) y[i] = gelu(y[i]);
          if (kFinish == Finish::kGeluTanh) y[i] = gelu_tanh(y[i]);
        }
        if constexpr (kFinish == Finish::kResidual) {
          const float2 first = widen<kBf16>(residual[of_box][0]), second = widen<kBf16>(residual[of_box][1]);
          y[0] += first.x, y[1] += first.y, y[2] += second.x, y[3] += second.y;
        }
        pairs[2 * part] = pack<kBf16>(y[0], y[1]);
        pairs[2 * part + 1] = pack<kBf16>(y[2], y[3]);
      }
      store_in_boxes(out, sixteen, at, pairs);
    }
  }

  // Rounds to 16 bits first, like two consecutive kernels. Rows of 32 bytes with the 32-byte swizzle: their pairs are in different
  // banks.
  __device__ __forceinline__ void quantise_box(const Int8Params& p, const int32_t (&sums)[S::kColumns / 2],
                                               const float (&row_scales)[2], const float (&out_scales)[2], int box,
                                               uint32_t out) const {
    const float inverses[2] = {1.f / out_scales[0], 1.f / out_scales[1]};
    const int in_quad = threadIdx.x % 4;
#pragma unroll
    for (int of_box = 0; of_box < kEights; ++of_box) {
      const int eight = box * kEights + of_box, chunk = of_box / 2, in_chunk = of_box % 2 * 8 + in_quad * 2;
      float y[4];
      results(sums, row_scales, eight, y);
      if constexpr (!S::kGeglu) {
#pragma unroll
        for (int i = 0; i < 4; ++i) y[i] = activated(p.activation, y[i]);
      }
      const float4 of = load_shared_float4(equalisers_ + (4 * eight + in_quad) * kPairBytes);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 rounded = widen<kBf16>(pack<kBf16>(y[2 * half], y[2 * half + 1]));
        const uint32_t first = quantise_quotient<true>((rounded.x - of.z) * of.x, out_scales[half], inverses[half]);
        const uint32_t second = quantise_quotient<true>((rounded.y - of.w) * of.y, out_scales[half], inverses[half]);
        const int row = row_of(0, half);
        store_shared(out + row * kQuantisedColumns + (chunk ^ row / 4 % 2) * 16 + in_chunk,
                     static_cast<uint16_t>(__byte_perm(first, second, 0x0040)));
      }
    }
  }

  // A thread's four sums of eight columns: two columns of two rows; with GEGLU of both layers.
  __device__ __forceinline__ void results(const int32_t (&sums)[S::kColumns / 2], const float (&row_scales)[2], int eight,
                                          float (&y)[4]) const {
    scale(sums, eight, row_scales, y);
    if constexpr (S::kGeglu) {
      float gate[4];
      scale(sums, kOut / 8 + eight, row_scales, gate);
#pragma unroll
      for (int i = 0; i < 4; ++i) y[i] *= gelu(gate[i]);
    }
  }

  __device__ __forceinline__ void scale(const int32_t (&sums)[S::kColumns / 2], int eight, const float (&row_scales)[2],
                                        float (&y)[4]) const {
    const float4 of = load_shared_float4(columns_ + (4 * eight + threadIdx.x % 4) * kPairBytes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      y[2 * half] = fmaf(float(sums[4 * eight + 2 * half]), row_scales[half] * of.x, of.z);
      y[2 * half + 1] = fmaf(float(sums[4 * eight + 2 * half + 1]), row_scales[half] * of.y, of.w);
    }
  }

  // Adds the previous rows, or the bias where scales are negative: the previous rows are ignored there.
  __device__ __forceinline__ void add_change(const int32_t (&sums)[S::kColumns / 2], const float (&row_scales)[2], int eight,
                                             const uint32_t (&before)[2], float (&y)[4]) const {
    const float4 of = load_shared_float4(columns_ + (4 * eight + threadIdx.x % 4) * kPairBytes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float scale = fabsf(row_scales[half]);
      const float2 known = signbit(row_scales[half]) ? make_float2(of.z, of.w) : widen<kBf16>(before[half]);
      y[2 * half] = fmaf(float(sums[4 * eight + 2 * half]), scale * of.x, known.x);
      y[2 * half + 1] = fmaf(float(sums[4 * eight + 2 * half + 1]), scale * of.y, known.y);
    }
  }

  uint32_t boxes_, columns_, equalisers_;
  int barrier_;
  int next_box_ = 0;
  float row_scales_[S::kBlocks][2], out_scales_[S::kBlocks][2];  // of changes with their signs
  uint2 marks_[S::kBlocks][2];                                   // of a convolution's images
  float4 of_columns_;  // scales and biases of a pair
  float4 equaliser_;   // factors and offsets of a pair
  Residual residual_[2];
};

template <int kColumns, bool kGeglu, bool kAlternate, bool kBf16>
__global__ void __launch_bounds__(kThreads, 1)
    int8_linear_kernel(const __grid_constant__ Int8Params p, const __grid_constant__ Maps maps) {
  extern __shared__ uint8_t shared[];
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using S = Int8Shape<kColumns, kGeglu, kAlternate>;
  multiply_tiles<S, ScaledEpilogue<kBf16, S>>(p, maps, shared);
#endif
}

}  // namespace trtconvert::linear
