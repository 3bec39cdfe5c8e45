// INT8 layers by mma.sync, for GPUs without wgmma: INT8 rows, or 16-bit rows with weights converted to 16 bits in registers.
//
// A thread block has a tile of y. Tiles of x and of the weight come by cp.async through a ring in shared memory; each of eight warps
// multiplies 64 rows by 32 rows of the weight. The results go through shared memory too, so that memory is written 16 bytes at once.
#include "linear/kernel_mma.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "common/activation.cuh"
#include "common/copies.cuh"
#include "common/early_launch.cuh"
#include "common/layer_modes.cuh"
#include "common/mma.cuh"
#include "linear/grouped_tile.cuh"
#include "linear/pairs.cuh"
#include "linear/row_scale.cuh"
#include "linear/widen.cuh"

namespace trtconvert::linear {
namespace {

constexpr int kWarpRows = 64, kWarpColumns = 32;
constexpr int kRowWarps = kMmaRows / kWarpRows, kColumnWarps = kMmaColumns / kWarpColumns;
constexpr int kThreads = 32 * kRowWarps * kColumnWarps;
constexpr int kStages = 4;
constexpr int kVectorBytes = 16;

// kElement: bytes of a channel of x. A row of shared memory has a stage's channels; the order of its vectors of 16 bytes puts eight
// rows of a vector into eight different groups of banks.
template <int kElement>
struct Stage {
  static constexpr int kXRowBytes = kMmaDepth * kElement, kWeightRowBytes = kMmaDepth;
  static constexpr int kXBytes = kMmaRows * kXRowBytes;
  static constexpr int kBytes = kXBytes + kMmaColumns * kWeightRowBytes;
  static constexpr int kSharedBytes = kStages * kBytes;

  template <int kRowBytes>
  static __device__ __forceinline__ uint32_t at(int row, int vector) {
    return row * kRowBytes + (kRowBytes == 64 ? vector ^ row / 2 % 4 : vector ^ row % 8) * kVectorBytes;
  }
};

// y in shared memory: the pitch is one vector more than a row, so that rows are in different banks.
template <int kElement>
constexpr int kOutPitch = kMmaColumns * kElement + kVectorBytes;
static_assert(kMmaRows * kOutPitch<2> <= Stage<1>::kSharedBytes);

// The window of a convolution's pixel; its depth is the depths of its pixels in turn, each in whole tiles.
struct WindowSource {
  int64_t image;  // its first byte
  int y, x;
  bool exists;

  WindowSource() = default;
  __device__ __forceinline__ WindowSource(const MmaConvParams& p, int row) {
    const ConvShape& conv = p.conv;
    const int pixels = conv.out_height * conv.out_width, pixel = row % pixels;
    image = int64_t{row / pixels} * conv.height * conv.width * conv.channels;
    y = pixel / conv.out_width * conv.stride_y - conv.pad_y;
    x = pixel % conv.out_width * conv.stride_x - conv.pad_x;
    exists = row < p.rows;
  }

  // Offset of a byte of a stage's tile; negative for zeros.
  template <int kTileBytes>
  __device__ __forceinline__ int64_t at(const MmaConvParams& p, int k, int byte) const {
    const ConvShape& conv = p.conv;
    const int tap = k / conv.chunks, channel = k % conv.chunks * kTileBytes + byte;
    const int row = y + tap / conv.kernel_width, column = x + tap % conv.kernel_width;
    if (!exists || channel >= conv.channels || row < 0 || row >= conv.height || column < 0 || column >= conv.width) return -1;
    return image + (int64_t{row} * conv.width + column) * conv.channels + channel;
  }
};

// Offset in a weight row of a byte of a stage's tile; negative if there is none.
__device__ __forceinline__ int weight_byte(const MmaParams& p, int k, int byte) {
  const int at = k * kMmaDepth + byte;
  return at < p.depth ? at : -1;
}
__device__ __forceinline__ int weight_byte(const MmaConvParams& p, int k, int byte) {
  const int channel = k % p.conv.chunks * kMmaDepth + byte;
  return channel < p.conv.channels ? k / p.conv.chunks * p.conv.channels + channel : -1;
}

template <typename P, bool kBf16, bool kGeglu, bool kRows16bit>
__global__ void __launch_bounds__(kThreads) mma_kernel(const __grid_constant__ P p) {
  constexpr bool kConv = std::is_same_v<P, MmaConvParams>;
  using T = std::conditional_t<kBf16, __nv_bfloat16, __half>;
  using S = Stage<kRows16bit ? 2 : 1>;
  using Sum = std::conditional_t<kRows16bit, float, int32_t>;
  constexpr int kOut = kMmaColumns / (kGeglu ? 2 : 1);
  extern __shared__ __align__(128) uint8_t shared[];
  wait_for_previous_kernel();
  if constexpr (!kConv) {
    if (kRows16bit ? p.row_scale && !signbit(p.row_scale[0]) : p.may_be_16bit && signbit(p.row_scale[0])) return;
  }
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int row_warp = warp / kColumnWarps, column_warp = warp % kColumnWarps;
  const GroupedTile tile(p, blockIdx.x);
  const int first_row = tile.row * kMmaRows, first_column = tile.column * kOut;

  constexpr int kXVectors = S::kXRowBytes / kVectorBytes, kWeightVectors = S::kWeightRowBytes / kVectorBytes;
  constexpr int kThreadRows = kMmaRows * kXVectors / kThreads;  // rows of x whose vectors a thread copies
  const auto row_of = [&](int i) { return first_row + (i * kThreads + static_cast<int>(threadIdx.x)) / kXVectors; };
  WindowSource windows[kConv ? kThreadRows : 1];  // found once: they take divisions
  if constexpr (kConv) {
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) windows[i] = WindowSource(p, row_of(i));
  }
  const auto x_byte = [&](int i, int k, int byte) {
    if constexpr (kConv) {
      return windows[i].at<S::kXRowBytes>(p, k, byte);
    } else {
      const int in_row = k * S::kXRowBytes + byte;
      const int64_t row = row_of(i), row_bytes = int64_t{p.depth} * (kRows16bit ? 2 : 1);
      return row < p.rows && in_row < row_bytes ? row * row_bytes + in_row : int64_t{-1};
    }
  };

  const auto copy_stage = [&](int k) {
    const uint32_t stage = ring + k % kStages * S::kBytes;
    if (k < p.depth_tiles) {
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i) {
        const int at = i * kThreads + threadIdx.x, in_tile = at / kXVectors, vector = at % kXVectors;
        const int64_t from = x_byte(i, k, vector * kVectorBytes);
        copy_async(stage + S::template at<S::kXRowBytes>(in_tile, vector), from >= 0 ? p.x + from : p.x, from >= 0);
      }
#pragma unroll
      for (int i = 0; i < kMmaColumns * kWeightVectors / kThreads; ++i) {
        const int at = i * kThreads + threadIdx.x, in_tile = at / kWeightVectors, vector = at % kWeightVectors;
        const int column = first_column + in_tile % kOut, byte = weight_byte(p, k, vector * kVectorBytes);
        const int64_t row = int64_t{in_tile / kOut} * p.columns + column;
        const bool exists = column < p.columns && byte >= 0;
        copy_async(stage + S::kXBytes + S::template at<S::kWeightRowBytes>(in_tile, vector),
                   exists ? p.weight + row * p.depth + byte : p.weight, exists);
      }
    }
    commit_copies();
  };

  // A warp's first row of the weight in the tile, per 16 rows: with GEGLU the first 16 belong to the value's layer, the others to the
  // gate's.
  const auto weight_row = [&](int sixteen) {
    return kGeglu ? sixteen * kOut + column_warp * 16 : column_warp * kWarpColumns + sixteen * 16;
  };

  Sum sums[kWarpRows / 16][kWarpColumns / 8][4] = {};
  const auto multiply_stage = [&](int k) {
    const uint32_t x = ring + k % kStages * S::kBytes, weight = x + S::kXBytes;
    constexpr int kSteps = S::kXRowBytes / 32;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t b[kWarpColumns / 8][2];
#pragma unroll
      for (int sixteen = 0; sixteen < 2; ++sixteen) {
        if constexpr (kRows16bit) {
#pragma unroll
          for (int eight = 0; eight < 2; ++eight) {
            const int row = weight_row(sixteen) + eight * 8 + group;
            const auto* const channels =
                reinterpret_cast<const uint16_t*>(shared + (weight - ring) + S::template at<S::kWeightRowBytes>(row, step));
#pragma unroll
            for (int part = 0; part < 2; ++part) b[2 * sixteen + eight][part] = widen_two<kBf16>(channels[4 * part + quad]);
          }
        } else {
          const int row = weight_row(sixteen) + lane / 16 * 8 + lane % 8;
          uint32_t found[4];
          load_matrices(found, weight + S::template at<S::kWeightRowBytes>(row, 2 * step + lane / 8 % 2));
#pragma unroll
          for (int i = 0; i < 4; ++i) b[2 * sixteen + i / 2][i % 2] = found[i];
        }
      }
#pragma unroll
      for (int block = 0; block < kWarpRows / 16; ++block) {
        uint32_t a[4];
        const int row = row_warp * kWarpRows + block * 16 + lane % 16;
        load_matrices(a, x + S::template at<S::kXRowBytes>(row, 2 * step + lane / 16));
#pragma unroll
        for (int eight = 0; eight < kWarpColumns / 8; ++eight) {
          auto& sum = sums[block][eight];
          if constexpr (kRows16bit) {
            multiply_16bit<T>(sum, a, b[eight][0], b[eight][1]);
          } else {
            multiply_s8(sum, a, b[eight][0], b[eight][1], sum);
          }
        }
      }
    }
  };

#pragma unroll
  for (int k = 0; k < kStages - 1; ++k) copy_stage(k);
  for (int k = 0; k < p.depth_tiles; ++k) {
    wait_copies<kStages - 2>();
    __syncthreads();  // all copies have arrived, and all threads have read the stage that is filled next
    copy_stage(k + kStages - 1);
    multiply_stage(k);
  }
  wait_copies<0>();
  __syncthreads();

  // The residual is loaded to the position of the results, so that each thread reads and writes the same place.
  constexpr int kVectors = kOut * 2 / kVectorBytes;
  const auto for_each_vector = [&](int row_vectors, auto action) {
    for (int at = threadIdx.x; at < kMmaRows * row_vectors; at += kThreads) {
      const int in_tile = at / row_vectors, vector = at % row_vectors;
      if (first_row + in_tile < p.rows) action(in_tile, vector);
    }
  };
  if (!kGeglu && p.residual) {
    for_each_vector(kVectors, [&](int in_tile, int vector) {
      const int column = first_column + vector * 8;
      const auto* const residual = reinterpret_cast<const uint16_t*>(p.residual) + int64_t{first_row + in_tile} * p.columns + column;
      if (column < p.columns)
        *reinterpret_cast<uint4*>(shared + in_tile * kOutPitch<2> + vector * kVectorBytes) = *reinterpret_cast<const uint4*>(residual);
    });
    __syncthreads();
  }

  const bool quantises = !kRows16bit && p.out_row_scale;
  [[maybe_unused]] SampleScale sample_scale;
#pragma unroll
  for (int block = 0; block < kWarpRows / 16; ++block) {
    float row_scales[2];
    uint2 marks[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + row_warp * kWarpRows + block * 16 + half * 8 + group;
      row_scales[half] = 1.f;
      if constexpr (kConv) {
        if (row < p.rows) {
          marks[half] = marks_of(p.conv, row);
          row_scales[half] = sample_scale.of(p.conv, row);
        }
      } else {
        if (row < p.rows && p.row_scale) row_scales[half] = row_scale_of(p, row);
      }
    }
    if constexpr (kConv) break_marked(marks, row_scales);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int in_tile = row_warp * kWarpRows + block * 16 + half * 8 + group, row = first_row + in_tile;
      const float row_scale = row_scales[half];
      const bool begins = !kConv && p.changes && row < p.rows && signbit(p.row_scale[row]);
      const bool adds_bias = p.bias && (begins || !p.changes), adds_residual = p.residual && !begins;
      float out_scale = 1.f;
      if (quantises && row < p.rows) {
        const Sample sample = sample_of(p.out_table, {TRTCONVERT_STATIC, true}, row / p.out_sample_rows);
        out_scale = sample.usable ? sample.x_scale : NAN;
        if (first_column == 0 && column_warp == 0 && quad == 0) p.out_row_scale[row] = isnan(row_scale) ? NAN : out_scale;
      }
#pragma unroll
      for (int eight = 0; eight < kWarpColumns / 8 / (kGeglu ? 2 : 1); ++eight) {
        const int in_columns = (kGeglu ? column_warp * 16 : column_warp * kWarpColumns) + eight * 8 + quad * 2;
        const int column = first_column + in_columns;
        if (column >= p.columns) continue;
        const auto scaled = [&](int product, float(&y)[2]) {
          const int pair = (product * p.columns + column) / 2;
          const float2 scale = p.weight_scale[pair], bias = adds_bias ? p.bias[pair] : float2{};
          const auto& sum = sums[block][product * 2 + eight];
          y[0] = fmaf(static_cast<float>(sum[2 * half]), row_scale * scale.x, bias.x);
          y[1] = fmaf(static_cast<float>(sum[2 * half + 1]), row_scale * scale.y, bias.y);
        };
        float y[2];
        scaled(0, y);
        auto* const out = reinterpret_cast<uint32_t*>(shared + in_tile * kOutPitch<2> + in_columns * 2);
        if constexpr (kGeglu) {
          float gate[2];
          scaled(1, gate);
          y[0] *= gelu(gate[0]);
          y[1] *= gelu(gate[1]);
        } else {
          y[0] = activated(p.activation, y[0]);
          y[1] = activated(p.activation, y[1]);
          if (adds_residual) {
            const float2 residual = widen<kBf16>(*out);
            y[0] += residual.x;
            y[1] += residual.y;
          }
        }
        const uint32_t rounded = pack<kBf16>(y[0], y[1]);
        if (!quantises) {
          *out = rounded;
          continue;
        }
        const float2 wide = widen<kBf16>(rounded);
        const float2 factor = p.out_factor ? p.out_factor[column / 2] : make_float2(1.f, 1.f);
        const float2 offset = p.out_offset ? p.out_offset[column / 2] : float2{};
        const float inverse = 1.f / out_scale;
        const uint32_t first = quantise_quotient<true>((wide.x - offset.x) * factor.x, out_scale, inverse);
        const uint32_t second = quantise_quotient<true>((wide.y - offset.y) * factor.y, out_scale, inverse);
        *reinterpret_cast<uint16_t*>(shared + in_tile * kOutPitch<1> + in_columns) =
            static_cast<uint16_t>(__byte_perm(first, second, 0x0040));
      }
    }
  }
  __syncthreads();
  const int element = quantises ? 1 : 2, pitch = quantises ? kOutPitch<1> : kOutPitch<2>;
  for_each_vector(kOut * element / kVectorBytes, [&](int in_tile, int vector) {
    const int column = first_column + vector * kVectorBytes / element;
    if (column < p.columns)
      *reinterpret_cast<uint4*>(p.y + (int64_t{first_row + in_tile} * p.columns + column) * element) =
          *reinterpret_cast<const uint4*>(shared + in_tile * pitch + vector * kVectorBytes);
  });
}

template <bool kBf16, bool kGeglu, bool kRows16bit, typename P>
cudaError_t launch(const P& p, bool early, cudaStream_t stream) {
  constexpr int kSharedBytes = Stage<kRows16bit ? 2 : 1>::kSharedBytes;
  const auto kernel = mma_kernel<P, kBf16, kGeglu, kRows16bit>;
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes))
    return error;
  const dim3 grid(static_cast<unsigned>(p.row_tiles * p.column_tiles));
  return launch_kernel(kernel, grid, kThreads, kSharedBytes, stream, early, p);
}

}  // namespace

cudaError_t launch_mma(const MmaParams& p, bool rows_16bit, bool bf16, bool early, cudaStream_t stream) {
  using std::false_type, std::true_type;
  const auto with = [&](auto is_bf16, auto geglu) {
    return rows_16bit ? launch<is_bf16(), geglu(), true>(p, early, stream) : launch<is_bf16(), geglu(), false>(p, early, stream);
  };
  if (p.activation == TRTCONVERT_GEGLU) return bf16 ? with(true_type(), true_type()) : with(false_type(), true_type());
  return bf16 ? with(true_type(), false_type()) : with(false_type(), false_type());
}

cudaError_t launch_mma_conv(const MmaConvParams& p, bool bf16, bool early, cudaStream_t stream) {
  return bf16 ? launch<true, false, false>(p, early, stream) : launch<false, false, false>(p, early, stream);
}

}  // namespace trtconvert::linear
