// Picks the instance of the portable kernel for the padded head dims.
#include "launch.h"

namespace trtconvert::attention {

namespace mma {
template <int kDimQk, int kDimPv>
cudaError_t launch(const Params& params, cudaStream_t stream);  // kernel_mma.cuh, one translation unit each
}

cudaError_t launch_attention_mma(const Params& params, cudaStream_t stream) {
  switch (params.dims.pv) {
    case 48: return mma::launch<64, 48>(params, stream);
    case 64: return mma::launch<64, 64>(params, stream);
    case 80: return mma::launch<96, 80>(params, stream);
    case 96: return mma::launch<96, 96>(params, stream);
    case 128: return mma::launch<128, 128>(params, stream);
    case 160: return mma::launch<160, 160>(params, stream);
    case 192: return mma::launch<192, 192>(params, stream);
    case 256: return mma::launch<256, 256>(params, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace trtconvert::attention
