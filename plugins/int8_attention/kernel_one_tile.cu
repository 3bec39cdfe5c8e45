// Picks the instance of the kernel of one tile for the padded head dims.
#include "launch.h"

namespace trtconvert::attention {

namespace one_tile {
// kernel_one_tile.cuh, one translation unit each
template <int kDimQk, int kDimPv>
cudaError_t launch(const Params& params, int multiprocessors, cudaStream_t stream);
}

cudaError_t launch_attention_one_tile(const Params& params, int multiprocessors, cudaStream_t stream) {
  switch (params.dims.pv) {
    case 48: return one_tile::launch<64, 48>(params, multiprocessors, stream);
    case 64: return one_tile::launch<64, 64>(params, multiprocessors, stream);
    case 80: return one_tile::launch<96, 80>(params, multiprocessors, stream);
    case 96: return one_tile::launch<96, 96>(params, multiprocessors, stream);
    case 128: return one_tile::launch<128, 128>(params, multiprocessors, stream);
    case 160: return one_tile::launch<160, 160>(params, multiprocessors, stream);
    case 192: return one_tile::launch<192, 192>(params, multiprocessors, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace trtconvert::attention
