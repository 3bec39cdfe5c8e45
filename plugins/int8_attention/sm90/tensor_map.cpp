#include "tensor_map.h"

#include "common/sm90/tensor_map.h"

namespace trtconvert::attention {
namespace {

bool describe_part(const Params& p, const Tensors& tensors, int keys, CUtensorMap& map) {
  const TrtConvertStrides& s = tensors.v_strides;
  // A dimension of one element has no stride that matters, but the driver wants a valid one.
  const auto bytes = [&](int64_t stride, int size) { return cuuint64_t(2 * (size > 1 ? stride : p.head_dim)); };
  const cuuint64_t sizes[] = {cuuint64_t(p.head_dim), cuuint64_t(keys), cuuint64_t(p.kv_heads), cuuint64_t(p.batch)};
  const cuuint64_t strides[] = {bytes(s.token, keys), bytes(s.head, p.kv_heads), bytes(s.batch, p.batch)};
  const cuuint32_t box[] = {64, kHalfTile, 1, 1};
  using namespace ::trtconvert::sm90;
  return describe_tensor(map, float16_type(p.bf16), tensors.v, 4, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
}

}  // namespace

bool describe_values(const Params& p, ValueMaps& maps) {
  if (!swizzled_values(p.dims.pv)) return false;
  const bool two_parts = p.split < p.num_keys;
  return describe_part(p, p.parts[0], two_parts ? p.split : p.num_keys, maps.of[0]) &&
         (!two_parts || describe_part(p, p.parts[1], p.num_keys - p.split, maps.of[1]));
}

}  // namespace trtconvert::attention
