// Picks the instance of the kernel of one tile for the padded head dims.
#include "launch.h"
#include "one_tile.h"

namespace trtconvert::attention {

namespace one_tile {
// kernel_one_tile.cuh, one translation unit each
template <int kDimQk, int kDimPv>
cudaError_t launch(const Params& params, int multiprocessors, cudaStream_t stream);
}

cudaError_t launch_attention_one_tile(const Params& params, int multiprocessors, cudaStream_t stream) {
  return with_dims(params.dims, [&](auto dims) {
    using Dims = decltype(dims);
    if constexpr (OneTileLayout{{Dims::qk, Dims::pv}, kFewestKeys}.bytes() <= kSharedLimit)
      return one_tile::launch<Dims::qk, Dims::pv>(params, multiprocessors, stream);
    else
      return cudaErrorInvalidValue;  // is_one_tile() excludes this many channels
  });
}

}  // namespace trtconvert::attention
