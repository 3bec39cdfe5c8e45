#include "tensor_map.h"

#include <cuda_runtime_api.h>

namespace trtconvert::attention {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// Through the runtime, which has loaded the driver: the library links neither.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = {};
  constexpr unsigned kSinceCuda12 = 12000;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kSinceCuda12, cudaEnableDefault, &result) !=
          cudaSuccess ||
      result != cudaDriverEntryPointSuccess) {
    cudaGetLastError();  // not an error of the caller's
    return nullptr;
  }
  return reinterpret_cast<Encode>(function);
}

bool describe_part(Encode encode, const Params& p, const Tensors& tensors, int keys, CUtensorMap& map) {
  const TrtConvertStrides& s = tensors.v_strides;
  // A dimension of one element has no stride that matters, but the driver wants a valid one.
  const auto bytes = [&](int64_t stride, int size) { return cuuint64_t(2 * (size > 1 ? stride : p.head_dim)); };
  const cuuint64_t sizes[] = {cuuint64_t(p.head_dim), cuuint64_t(keys), cuuint64_t(p.kv_heads), cuuint64_t(p.batch)};
  const cuuint64_t strides[] = {bytes(s.token, keys), bytes(s.head, p.kv_heads), bytes(s.batch, p.batch)};
  const cuuint32_t box[] = {64, kHalfTile, 1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  return encode(&map, p.bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
                const_cast<void*>(tensors.v), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

bool describe_values(const Params& p, ValueMaps& maps) {
  static const Encode encode = find_encode();
  if (!encode || !swizzled_values(p.dims.pv)) return false;
  const bool two_parts = p.split < p.num_keys;
  return describe_part(encode, p, p.parts[0], two_parts ? p.split : p.num_keys, maps.of[0]) &&
         (!two_parts || describe_part(encode, p, p.parts[1], p.num_keys - p.split, maps.of[1]));
}

}  // namespace trtconvert::attention
