// Picks a tile and its instance of the kernel.
#include "linear/sm90/launch.h"

#include <algorithm>
#include <cstdint>

#include "linear/sm90/kernel.cuh"

namespace trtconvert::linear {
namespace {

template <int kColumns, bool kAlternate>
struct Tile {
  static constexpr int columns = kColumns;
  static constexpr bool alternate = kAlternate;
};

// Calls `with` for each tile, in order of preference. If consumers alternate, sums of more columns do not fit into registers; if
// they share, other tiles would never take less time.
template <bool kGeglu, typename With>
void for_each_tile(With with) {
  with(Tile<128, true>());
  if constexpr (kGeglu) {
    with(Tile<64, true>());
  } else {
    with(Tile<192, false>());
    with(Tile<160, false>());
    with(Tile<96, false>());
    with(Tile<64, false>());
  }
}

template <int kColumns, bool kGeglu, bool kAlternate, bool kBf16>
cudaError_t launch(const Params& p, const Maps& maps, int multiprocessors, cudaStream_t stream) {
  constexpr int kSharedBytes = Shape16<kColumns, kGeglu, kAlternate, kBf16>::kSharedBytes;
  const auto kernel = linear_kernel<kColumns, kGeglu, kAlternate, kBf16>;
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes))
    return error;
  const dim3 grid(static_cast<unsigned>(std::min(p.row_tiles * p.column_tiles, multiprocessors)));
  return launch_kernel(kernel, grid, kThreads, kSharedBytes, stream, true, p, maps);
}

template <bool kGeglu>
Instance choose(int64_t rows, int out_columns, int depth, bool bf16, int multiprocessors) {
  // Measured on an H200: 160 columns take 0.45 µs for each 64 of the depth, others in proportion, but narrow tiles take as long as
  // their operands need to arrive. A tile takes 0.9 µs more for its first operands and its last sums; if consumers alternate, only
  // the last tile does.
  constexpr int64_t kBeside = 320;
  const auto in = [](int64_t size, int tile) { return (size + tile - 1) / tile; };
  Instance best = {};
  int64_t least = INT64_MAX;
  for_each_tile<kGeglu>([&](auto tile) {
    const Instance candidate = {tile.columns, tile.alternate, kGeglu, bf16};
    const int64_t tiles = in(in(rows, kTileRows) * in(out_columns, candidate.out_columns()), multiprocessors);
    const int64_t deep = std::max(tile.columns, (tile.columns + kTileRows) / 2);
    const int64_t time = tiles * deep * in(depth, kTileDepth) + kBeside * (tile.alternate ? 1 : tiles);
    if (time >= least) return;
    least = time;
    best = candidate;
  });
  return best;
}

template <bool kGeglu>
cudaError_t launch_chosen(const Params& p, const Maps& maps, const Instance& instance, int multiprocessors, cudaStream_t stream) {
  cudaError_t result = cudaErrorInvalidValue;
  for_each_tile<kGeglu>([&](auto tile) {
    if (tile.columns != instance.columns || tile.alternate != instance.alternate) return;
    result = instance.bf16 ? launch<tile.columns, kGeglu, tile.alternate, true>(p, maps, multiprocessors, stream)
                           : launch<tile.columns, kGeglu, tile.alternate, false>(p, maps, multiprocessors, stream);
  });
  return result;
}

}  // namespace

Instance choose_instance(int64_t rows, int out_columns, int depth, bool geglu, bool bf16, int multiprocessors) {
  return geglu ? choose<true>(rows, out_columns, depth, bf16, multiprocessors)
               : choose<false>(rows, out_columns, depth, bf16, multiprocessors);
}

cudaError_t launch_linear(const Params& p, const Maps& maps, const Instance& instance, int multiprocessors, cudaStream_t stream) {
  return instance.geglu ? launch_chosen<true>(p, maps, instance, multiprocessors, stream)
                        : launch_chosen<false>(p, maps, instance, multiprocessors, stream);
}

}  // namespace trtconvert::linear
