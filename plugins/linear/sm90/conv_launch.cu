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
  with(Tile<256, false, 1>());
  with(Tile<256, false, 2>());
  with(Tile<128, true, 1>());
  with(Tile<128, true, 2>());
  with(Tile<160, false, 1>());
  with(Tile<160, false, 2>());
  with(Tile<64, false, 1>());
}

template <int kColumns, bool kAlternate, int kCluster, bool kBf16>
cudaError_t launch(const ConvParams& p, const Maps& maps, int multiprocessors, cudaStream_t stream) {
  constexpr int kSharedBytes = ConvTile<kColumns, kAlternate, kCluster>::kSharedBytes;
  const auto kernel = int8_conv_kernel<kColumns, kAlternate, kCluster, kBf16>;
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes))
    return error;
  const int clusters = std::min(p.row_tiles * p.column_tiles, multiprocessors / kCluster);
  return launch_clusters(kernel, kCluster, dim3(static_cast<unsigned>(clusters * kCluster)), kThreads, kSharedBytes, stream, true, p,
                         maps);
}

}  // namespace

Int8Instance choose_int8_conv_instance(int64_t rows, int out_columns, int depth, bool bf16, int multiprocessors) {
  return choose_tile([](auto with) { for_each_tile(with); }, rows, out_columns, depth, false, bf16, multiprocessors);
}

cudaError_t launch_int8_conv(const ConvParams& p, const Maps& maps, const Int8Instance& instance, int multiprocessors,
                             cudaStream_t stream) {
  cudaError_t result = cudaErrorInvalidValue;
  for_each_tile([&](auto tile) {
    if (tile.columns != instance.columns || tile.alternate != instance.alternate || tile.cluster != instance.cluster) return;
    result = instance.bf16 ? launch<tile.columns, tile.alternate, tile.cluster, true>(p, maps, multiprocessors, stream)
                           : launch<tile.columns, tile.alternate, tile.cluster, false>(p, maps, multiprocessors, stream);
  });
  return result;
}

}  // namespace trtconvert::linear
