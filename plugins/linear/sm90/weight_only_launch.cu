// Picks an instance of the kernel for 16-bit rows.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "linear/sm90/int8_launch.h"
#include "linear/sm90/weight_only_kernel.cuh"

namespace trtconvert::linear {
namespace {

// Calls `with` with the rows of each tile, the first ones preferred.
template <typename With>
void for_each_tile(With with) {
  with(std::integral_constant<int, 256>());
  with(std::integral_constant<int, 192>());
  with(std::integral_constant<int, 160>());
  with(std::integral_constant<int, 128>());
  with(std::integral_constant<int, 64>());
}

template <int kRows, bool kGeglu, bool kBf16>
cudaError_t launch(const WeightOnlyParams& p, const Maps& maps, int multiprocessors, cudaStream_t stream) {
  constexpr int kSharedBytes = WeightOnlyShape<kRows, kGeglu>::kSharedBytes;
  const auto kernel = weight_only_kernel<kRows, kGeglu, kBf16>;
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes))
    return error;
  const dim3 grid(static_cast<unsigned>(std::min(p.row_tiles * p.column_tiles, multiprocessors)));
  return launch_kernel(kernel, grid, kThreads, kSharedBytes, stream, true, p, maps);
}

}  // namespace

WeightOnlyInstance choose_weight_only_instance(int64_t rows, int out_columns, bool geglu, bool bf16, int multiprocessors) {
  const auto in = [](int64_t size, int tile) { return (size + tile - 1) / tile; };
  WeightOnlyInstance best = {};
  int64_t least = INT64_MAX;
  for_each_tile([&](auto of_tile) {
    const WeightOnlyInstance candidate = {of_tile, geglu, bf16};
    const int64_t tiles = in(in(rows, of_tile) * in(out_columns, candidate.out_columns()), multiprocessors);
    const int64_t time = tiles * (of_tile + kWeightOnlyColumns / 4);  // narrow tiles take as long as their weights to come
    if (time >= least) return;
    least = time;
    best = candidate;
  });
  return best;
}

cudaError_t launch_weight_only(const WeightOnlyParams& p, const Maps& maps, const WeightOnlyInstance& instance, int multiprocessors,
                               cudaStream_t stream) {
  cudaError_t result = cudaErrorInvalidValue;
  const auto with = [&](auto rows, auto geglu) {
    return instance.bf16 ? launch<rows(), geglu(), true>(p, maps, multiprocessors, stream)
                         : launch<rows(), geglu(), false>(p, maps, multiprocessors, stream);
  };
  for_each_tile([&](auto rows) {
    if (rows == instance.rows) result = instance.geglu ? with(rows, std::true_type()) : with(rows, std::false_type());
  });
  return result;
}

}  // namespace trtconvert::linear
