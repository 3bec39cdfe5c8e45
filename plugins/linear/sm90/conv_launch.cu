// Picks a tile and its instance of the kernel for INT8 convolutions.
#include "linear/sm90/conv_launch.h"

#include <algorithm>

#include "linear/sm90/conv_kernel.cuh"
#include "linear/sm90/int8_tiles.h"

namespace trtconvert::linear {
namespace {

// Calls `with` with each of the tiles, the first ones preferred: U-Nets have multiples of 320 channels, VAEs of 128.
template <typename With>
void for_each_tile(With with) {
  with(Tile<256, false>());
  with(Tile<128, true>());
  with(Tile<160, false>());
  with(Tile<64, false>());
}

template <int kColumns, bool kAlternate, bool kBf16>
cudaError_t launch(const ConvParams& p, const Maps& maps, int multiprocessors, cudaStream_t stream) {
  constexpr int kSharedBytes = ConvTile<kColumns, kAlternate>::kSharedBytes;
  const auto kernel = int8_conv_kernel<kColumns, kAlternate, kBf16>;
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes))
    return error;
  const dim3 grid(static_cast<unsigned>(std::min(p.row_tiles * p.column_tiles, multiprocessors)));
  return launch_kernel(kernel, grid, kThreads, kSharedBytes, stream, true, p, maps);
}

}  // namespace

Int8Instance choose_int8_conv_instance(int64_t rows, int out_columns, int depth, bool bf16, int multiprocessors) {
  return choose_tile([](auto with) { for_each_tile(with); }, rows, out_columns, depth, false, bf16, multiprocessors);
}

cudaError_t launch_int8_conv(const ConvParams& p, const Maps& maps, const Int8Instance& instance, int multiprocessors,
                             cudaStream_t stream) {
  cudaError_t result = cudaErrorInvalidValue;
  for_each_tile([&](auto tile) {
    if (tile.columns != instance.columns || tile.alternate != instance.alternate) return;
    result = instance.bf16 ? launch<tile.columns, tile.alternate, true>(p, maps, multiprocessors, stream)
                           : launch<tile.columns, tile.alternate, false>(p, maps, multiprocessors, stream);
  });
  return result;
}

}  // namespace trtconvert::linear
