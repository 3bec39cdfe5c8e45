// Picks the instance for the padded head dims.
#include "launch.h"

namespace trtconvert::attention {

namespace sm90 {
// sm90/attention.cuh, one translation unit each
template <int kDimQk, int kDimPv>
cudaError_t launch(const Params& params, const CUtensorMap& values, cudaStream_t stream);
}

cudaError_t launch_attention_sm90(const Params& params, const CUtensorMap& values, cudaStream_t stream) {
  switch (params.dims.pv) {
    case 48: return sm90::launch<64, 48>(params, values, stream);
    case 64: return sm90::launch<64, 64>(params, values, stream);
    case 80: return sm90::launch<96, 80>(params, values, stream);
    case 96: return sm90::launch<96, 96>(params, values, stream);
    case 128: return sm90::launch<128, 128>(params, values, stream);
    case 160: return sm90::launch<160, 160>(params, values, stream);
    case 192: return sm90::launch<192, 192>(params, values, stream);
    case 256: return sm90::launch<256, 256>(params, values, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace trtconvert::attention
