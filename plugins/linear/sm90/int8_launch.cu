// Picks a tile and its instance of the INT8 kernel.
#include "linear/sm90/int8_launch.h"

#include <algorithm>

#include "linear/sm90/int8_kernel.cuh"
#include "linear/sm90/int8_tiles.h"

namespace trtconvert::linear {
namespace {

// Calls `with` with each of the tiles, the first ones preferred.
template <bool kGeglu, typename With>
void for_each_tile(With with) {
  with(Tile<256, false>());
  with(Tile<128, true>());
  if constexpr (kGeglu) {
    with(Tile<192, false>());
    with(Tile<64, true>());
  } else {
    with(Tile<192, false>());
    with(Tile<160, false>());
    with(Tile<96, false>());
    with(Tile<64, false>());
  }
}

template <int kColumns, bool kGeglu, bool kAlternate, bool kBf16>
cudaError_t launch(const Int8Params& p, const Maps& maps, int multiprocessors, cudaStream_t stream) {
  constexpr int kSharedBytes = Int8Shape<kColumns, kGeglu, kAlternate>::kSharedBytes;
  const auto kernel = int8_linear_kernel<kColumns, kGeglu, kAlternate, kBf16>;
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes))
    return error;
  const dim3 grid(static_cast<unsigned>(std::min(p.row_tiles * p.column_tiles, multiprocessors)));
  return launch_kernel(kernel, grid, kThreads, kSharedBytes, stream, true, p, maps);
}

template <bool kGeglu>
cudaError_t launch_chosen(const Int8Params& p, const Maps& maps, const Int8Instance& instance, int multiprocessors,
                          cudaStream_t stream) {
  cudaError_t result = cudaErrorInvalidValue;
  for_each_tile<kGeglu>([&](auto tile) {
    if (tile.columns != instance.columns || tile.alternate != instance.alternate) return;
    result = instance.bf16
                 ? launch<tile.columns, kGeglu, tile.alternate, true>(p, maps, multiprocessors, stream)
                 : launch<tile.columns, kGeglu, tile.alternate, false>(p, maps, multiprocessors, stream);
  });
  return result;
}

}  // namespace

Int8Instance choose_int8_instance(int64_t rows, int out_columns, int depth, bool geglu, bool bf16, int multiprocessors) {
  return choose_tile(
      [&](auto with) {
        if (geglu) {
          for_each_tile<true>(with);
        } else {
          for_each_tile<false>(with);
        }
      },
      rows, out_columns, depth, geglu, bf16, multiprocessors);
}

cudaError_t launch_int8_linear(const Int8Params& p, const Maps& maps, const Int8Instance& instance, int multiprocessors,
                               cudaStream_t stream) {
  return instance.geglu ? launch_chosen<true>(p, maps, instance, multiprocessors, stream)
                        : launch_chosen<false>(p, maps, instance, multiprocessors, stream);
}

}  // namespace trtconvert::linear
