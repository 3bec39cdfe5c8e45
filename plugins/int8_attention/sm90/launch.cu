// Picks the instance for the padded head dims.
#include "launch.h"

namespace trtconvert::attention {

namespace sm90 {
template <int kDimQk, int kDimPv>
cudaError_t launch(const Params& params, cudaStream_t stream);  // sm90/attention.cuh, one translation unit each
}

cudaError_t launch_attention_sm90(const Params& params, cudaStream_t stream) {
  switch (params.dims.pv) {
    case 48: return sm90::launch<64, 48>(params, stream);
    case 64: return sm90::launch<64, 64>(params, stream);
    case 80: return sm90::launch<96, 80>(params, stream);
    case 96: return sm90::launch<96, 96>(params, stream);
    case 128: return sm90::launch<128, 128>(params, stream);
    case 160: return sm90::launch<160, 160>(params, stream);
    case 192: return sm90::launch<192, 192>(params, stream);
    case 256: return sm90::launch<256, 256>(params, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace trtconvert::attention
