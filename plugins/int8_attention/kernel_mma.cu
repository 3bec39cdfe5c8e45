// Picks the instance of the portable kernel for the padded head dims.
#include "launch.h"

namespace trtconvert::attention {

namespace mma {
template <int kDimQk, int kDimPv>
cudaError_t launch(const Params& params, cudaStream_t stream);  // kernel_mma.cuh, one translation unit each
}

cudaError_t launch_attention_mma(const Params& params, cudaStream_t stream) {
  return with_dims(params.dims, [&](auto dims) {
    using Dims = decltype(dims);
    return mma::launch<Dims::qk, Dims::pv>(params, stream);
  });
}

}  // namespace trtconvert::attention
