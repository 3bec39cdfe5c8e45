// Picks the instance for the padded head dims.
#include "launch.h"

namespace trtconvert::attention {

namespace sm90 {
// sm90/attention.cuh, one translation unit each
template <int kDimQk, int kDimPv>
cudaError_t launch(const Params& params, const ValueMaps& values, cudaStream_t stream);
}

cudaError_t launch_attention_sm90(const Params& params, const ValueMaps& values, cudaStream_t stream) {
  return with_dims(params.dims, [&](auto dims) {
    using Dims = decltype(dims);
    return sm90::launch<Dims::qk, Dims::pv>(params, values, stream);
  });
}

}  // namespace trtconvert::attention
