// The C API: every check at the boundary, then the launches. Nothing here throws.
#include <cmath>
#include <cstring>

#include "common/device.h"
#include "common/report.h"
#include "launch.h"
#include "one_tile.h"
#include "workspace.h"

namespace trtconvert::attention {
namespace {

constexpr long long kMaxTokens = 1LL << 30;   // token indices, rounded up to whole tiles, stay within int32
constexpr long long kMaxGridYZ = 65535;       // CUDA's limit: heads and batch are grid dimensions
constexpr int64_t kMostStride = int64_t{1} << 44;  // more than any GPU holds; sizes and offsets in bytes stay far within 64 bits
constexpr double kMostElements = kMostStride;

TrtConvertStatus check_shapes(const TrtConvertAttentionParams* p, Report& report) {
  if (!p) return report.fail(TRTCONVERT_INVALID_ARGUMENT, "params: expected a pointer, got null");
  if (report.check_caller(*p, TRTCONVERT_ATTENTION_VERSION, "int8_attention.h")) return report.status;
  const struct {
    const char* name;
    int32_t value;
    long long limit;
  } sizes[] = {{"batch", p->batch, kMaxGridYZ},
               {"num_heads", p->num_heads, kMaxGridYZ},
               {"num_kv_heads", p->num_kv_heads, kMaxGridYZ},
               {"num_queries", p->num_queries, kMaxTokens},
               {"num_keys", p->num_keys, kMaxTokens},
               {"num_bins", p->num_bins, kMaxTokens}};
  for (const auto& s : sizes)
    if (s.value < 1 || s.value > s.limit)
      return report.fail(TRTCONVERT_INVALID_ARGUMENT, "%s: expected 1..%lld, got %d", s.name, s.limit, s.value);
  if (p->num_heads % p->num_kv_heads)
    return report.fail(TRTCONVERT_INVALID_ARGUMENT, "num_heads: expected a multiple of num_kv_heads (%d), got %d",
                       p->num_kv_heads, p->num_heads);
  if (p->head_dim < 32 || p->head_dim > 256 || p->head_dim % 8)
    return report.invalid_int("head_dim", "32..256 in steps of 8", p->head_dim);
  const struct {
    const char* name;
    double elements;
  } tensors[] = {{"num_queries", double(p->batch) * p->num_heads * p->num_queries * p->head_dim},
                 {"num_keys", double(p->batch) * p->num_kv_heads * p->num_keys * p->head_dim},
                 {"source_keys", double(p->batch) * p->num_kv_heads * p->source_keys * p->head_dim},
                 {"block_mask", double(p->batch) * p->block_mask_heads * ceil_div(p->num_queries, kBlock) *
                                    ceil_div(p->num_keys, kBlock)},
                 {"num_bins", double(p->num_bins) * p->num_heads * p->head_dim}};
  for (const auto& t : tensors)
    if (t.elements > kMostElements)
      return report.fail(TRTCONVERT_INVALID_ARGUMENT,
                         "%s: expected a tensor of at most 2^44 elements with the other sizes, got %.3g", t.name, t.elements);
  if (report.check_data_type(p->data_type)) return report.status;
  if (p->scaling != TRTCONVERT_SCALING_CALIBRATED && p->scaling != TRTCONVERT_SCALING_DYNAMIC)
    return report.invalid_int("scaling", "0 (calibrated) or 1 (dynamic)", p->scaling);
  if (p->mask_kind < TRTCONVERT_MASK_NONE || p->mask_kind > TRTCONVERT_MASK_ADDITIVE)
    return report.invalid_int("mask_kind", "0 (none), 1 (bool) or 2 (additive)", p->mask_kind);
  if (p->block_mask_batch && p->block_mask_batch != 1 && p->block_mask_batch != p->batch)
    return report.fail(TRTCONVERT_INVALID_ARGUMENT, "block_mask_batch: expected 0, 1 or batch (%d), got %d", p->batch,
                       p->block_mask_batch);
  if (p->block_mask_heads && p->block_mask_heads != 1 && p->block_mask_heads != p->num_heads)
    return report.fail(TRTCONVERT_INVALID_ARGUMENT, "block_mask_heads: expected 0, 1 or num_heads (%d), got %d", p->num_heads,
                       p->block_mask_heads);
  if (!p->block_mask_batch != !p->block_mask_heads)
    return report.fail(TRTCONVERT_INVALID_ARGUMENT, "block_mask_heads: expected 0 with block_mask_batch 0 only, got %d and %d",
                       p->block_mask_heads, p->block_mask_batch);
  if (p->source_keys < 0 || p->source_keys > kMaxTokens)
    return report.fail(TRTCONVERT_INVALID_ARGUMENT, "source_keys: expected 0..%lld, got %d", (long long)kMaxTokens, p->source_keys);
  if (p->source_keys) {
    if (p->norm_across_heads) return report.invalid_int("norm_across_heads", "0 with source_keys", p->norm_across_heads);
    if (p->norm_split) return report.invalid_int("norm_split", "0 with source_keys", p->norm_split);
    if (p->token_split) return report.invalid_int("token_split", "0 with source_keys", p->token_split);
  }
  if (p->norm_split) {
    if (p->norm_across_heads) return report.invalid_int("norm_split", "0 with norm_across_heads", p->norm_split);
    if (p->num_queries != p->num_keys)
      return report.fail(TRTCONVERT_INVALID_ARGUMENT, "norm_split: expected as many queries as keys, got %d and %d",
                         p->num_queries, p->num_keys);
    if (p->norm_split < 0 || p->norm_split >= p->num_queries)
      return report.fail(TRTCONVERT_INVALID_ARGUMENT,
                         "norm_split: expected 0, or a token after the first of num_queries (%d), got %d", p->num_queries,
                         p->norm_split);
  }
  if (p->token_split) {
    if (p->num_queries != p->num_keys)
      return report.fail(TRTCONVERT_INVALID_ARGUMENT, "token_split: expected as many queries as keys, got %d and %d",
                         p->num_queries, p->num_keys);
    if (p->token_split < 0 || p->token_split >= p->num_queries || p->token_split % kKeyTile)
      return report.fail(TRTCONVERT_INVALID_ARGUMENT, "token_split: expected a multiple of %d below num_queries (%d), got %d",
                         kKeyTile, p->num_queries, p->token_split);
  }
  return TRTCONVERT_OK;
}

TrtConvertStatus check_tensor(const char* name, const void* pointer, const TrtConvertStrides& s, Report& report) {
  if (report.check_pointer(name, pointer, 16)) return report.status;
  if (s.batch % 8 || s.token % 8 || s.head % 8)
    return report.fail(TRTCONVERT_INVALID_ARGUMENT,
                       "%s: expected strides in multiples of 8 elements (16-byte rows), got batch %lld, token %lld, head "
                       "%lld; make the tensor contiguous",
                       name, static_cast<long long>(s.batch), static_cast<long long>(s.token),
                       static_cast<long long>(s.head));
  for (const int64_t stride : {s.batch, s.token, s.head})
    if (stride < -kMostStride || stride > kMostStride)
      return report.fail(TRTCONVERT_INVALID_ARGUMENT, "%s: expected strides of at most 2^44 elements, got %lld", name,
                         static_cast<long long>(stride));
  return TRTCONVERT_OK;
}

TrtConvertStatus check_second_part(const TrtConvertAttentionParams& c, Report& report) {
  const struct {
    const char* name;
    const void* pointer;
    const TrtConvertStrides& strides;
  } tensors[] = {{"second_q", c.second_q, c.second_q_strides},
                 {"second_k", c.second_k, c.second_k_strides},
                 {"second_v", c.second_v, c.second_v_strides},
                 {"second_out", c.second_out, c.second_out_strides}};
  for (const auto& t : tensors) {
    if (!c.token_split && t.pointer)
      return report.fail(TRTCONVERT_INVALID_ARGUMENT, "%s: expected null with token_split 0, got %p", t.name, t.pointer);
    if (c.token_split && check_tensor(t.name, t.pointer, t.strides, report)) return report.status;
  }
  return TRTCONVERT_OK;
}

TrtConvertStatus check_sparse(const TrtConvertAttentionParams& c, Report& report) {
  if (!c.block_mask_batch && c.block_mask)
    return report.fail(TRTCONVERT_INVALID_ARGUMENT, "block_mask: expected null with block_mask_batch 0, got %p", c.block_mask);
  if (c.block_mask_batch && report.check_pointer("block_mask", c.block_mask, 1)) return report.status;
  if (c.lse && report.check_pointer("lse", c.lse, 4)) return report.status;
  if (!c.source_keys && c.key_index)
    return report.fail(TRTCONVERT_INVALID_ARGUMENT, "key_index: expected null with source_keys 0, got %p",
                       static_cast<const void*>(c.key_index));
  if (!c.source_keys) return TRTCONVERT_OK;
  if (report.check_pointer("key_index", c.key_index, 4)) return report.status;
  const struct {
    const char* name;
    const void* pointer;
  } layers[] = {{"rotary", c.rotary}, {"q_norm", c.q_norm}, {"k_norm", c.k_norm}};
  for (const auto& layer : layers)
    if (layer.pointer)
      return report.fail(TRTCONVERT_INVALID_ARGUMENT, "%s: expected null with source_keys, got %p; compute that layer before",
                         layer.name, layer.pointer);
  return TRTCONVERT_OK;
}

TrtConvertStatus check_layers_before(const TrtConvertAttentionParams& c, Report& report) {
  if (c.rotary) {
    if (report.check_pointer("rotary", c.rotary, 16)) return report.status;
    if (c.num_queries != c.num_keys)
      return report.fail(TRTCONVERT_INVALID_ARGUMENT, "rotary: expected as many queries as keys, got %d and %d", c.num_queries,
                         c.num_keys);
  }
  if (!c.q_norm && !c.k_norm) {
    if (c.norm_across_heads) return report.invalid_int("norm_across_heads", "0 without q_norm and k_norm", c.norm_across_heads);
    if (c.norm_split) return report.invalid_int("norm_split", "0 without q_norm and k_norm", c.norm_split);
    return TRTCONVERT_OK;
  }
  if (report.check_pointer("q_norm", c.q_norm, 16) || report.check_pointer("k_norm", c.k_norm, 16)) return report.status;
  if (!std::isfinite(c.norm_epsilon) || c.norm_epsilon < 0)
    return report.fail(TRTCONVERT_INVALID_ARGUMENT, "norm_epsilon: expected a finite value >= 0, got %g", c.norm_epsilon);
  return TRTCONVERT_OK;
}

// Behind layers, or in two tensors, the pre-pass gathers keys on Hopper alone, whose kernel takes no other masks, and up to 128
// channels. Block masks count all keys. The size of a workspace is asked for without pointers, so that a call with layers may find
// more than it needs. One query may have any stride.
bool has_key_mask(const TrtConvertAttentionParams& c, bool may_use_sm90) {
  const bool is_mask_of_keys = c.mask_kind == TRTCONVERT_MASK_BOOL && c.num_queries > 1 && c.mask_strides[2] == 0 &&
                               (c.num_heads == 1 || c.mask_strides[1] == 0) && !c.block_mask_heads && !c.source_keys;
  if (!c.token_split && !c.rotary && !c.q_norm) return is_mask_of_keys;
  return is_mask_of_keys && may_use_sm90 && padded_dims(c.head_dim).qk <= 128;
}

Params make_params(const TrtConvertAttentionParams& c) {
  Params p = {};
  p.batch = c.batch;
  p.heads = c.num_heads;
  p.kv_heads = c.num_kv_heads;
  p.group = c.num_heads / c.num_kv_heads;
  p.num_queries = c.num_queries;
  p.num_keys = c.num_keys;
  p.head_dim = c.head_dim;
  p.num_bins = c.num_bins;
  p.query_blocks = ceil_div(c.num_queries, kQueryBlock);
  p.key_tiles = ceil_div(c.num_keys, kKeyTile);
  p.dims = padded_dims(c.head_dim);
  p.bf16 = c.data_type == TRTCONVERT_BFLOAT16;
  p.dynamic = c.scaling == TRTCONVERT_SCALING_DYNAMIC;
  p.smooth_k = c.smooth_k != 0;
  p.mask_kind = static_cast<TrtConvertMaskKind>(c.mask_kind);
  p.softmax_scale = c.softmax_scale;
  p.timestep_max = c.timestep_max;
  p.parts[0] = {c.q, c.k, c.v, c.out, c.q_strides, c.k_strides, c.v_strides, c.out_strides};
  p.parts[1] = {c.second_q,         c.second_k,         c.second_v,         c.second_out,
                c.second_q_strides, c.second_k_strides, c.second_v_strides, c.second_out_strides};
  p.split = c.token_split ? c.token_split : kOnePart;
  p.timestep = c.timestep;
  p.q_scale = c.q_scale;
  p.k_scale = c.k_scale;
  p.v_scale = c.v_scale;
  p.k_offset = c.k_offset;
  p.v_offset = c.v_offset;
  p.modes = c.modes;
  p.mask = c.mask;
  std::memcpy(p.mask_strides, c.mask_strides, sizeof(p.mask_strides));
  p.key_lengths = c.key_lengths;
  p.block_mask = static_cast<const uint8_t*>(c.block_mask);
  p.block_mask_batch = c.block_mask_batch;
  p.block_mask_heads = c.block_mask_heads;
  p.block_rows = ceil_div(c.num_queries, kBlock);
  p.key_index = c.key_index;
  p.index_heads = c.num_kv_heads;
  p.source_keys = c.source_keys;
  p.lse = c.lse;
  p.rotary = c.rotary;
  p.q_norm = c.q_norm;
  p.k_norm = c.k_norm;
  p.norm_epsilon = c.norm_epsilon;
  p.norm_across_heads = c.norm_across_heads != 0;
  p.norm_split = c.norm_split;
  return p;
}

// Parameters for a device, without the workspace.
Params make_params(const TrtConvertAttentionParams& c, const Device& device) {
  Params p = make_params(c);
  const bool may_use_sm90 = device.runs_sm90() && c.target_arch == 0;
  if (has_key_mask(c, may_use_sm90)) {
    p.has_key_mask = true;
    p.mask_kind = TRTCONVERT_MASK_NONE;
    p.key_mask = static_cast<const uint8_t*>(c.mask);
    p.key_mask_strides[0] = c.mask_strides[0];
    p.key_mask_strides[1] = c.mask_strides[3];
    p.index_heads = 1;
    p.source_keys = c.num_keys;
  }
  if (may_use_sm90 && p.mask_kind == TRTCONVERT_MASK_NONE) p.multiprocessors = device.multiprocessors;
  return p;
}

TrtConvertStatus check_all(const TrtConvertAttentionParams* c, Device& device, Report& report) {
  if (check_shapes(c, report)) return report.status;
  if (!std::isfinite(c->softmax_scale) || c->softmax_scale <= 0)
    return report.fail(TRTCONVERT_INVALID_ARGUMENT, "softmax_scale: expected a finite value > 0, got %g", c->softmax_scale);
  if (!std::isfinite(c->timestep_max) || c->timestep_max <= 0)
    return report.fail(TRTCONVERT_INVALID_ARGUMENT, "timestep_max: expected a finite value > 0, got %g", c->timestep_max);
  if (check_tensor("q", c->q, c->q_strides, report) || check_tensor("k", c->k, c->k_strides, report) ||
      check_tensor("v", c->v, c->v_strides, report) || check_tensor("out", c->out, c->out_strides, report) ||
      report.check_pointer("timestep", c->timestep, 4) || report.check_pointer("q_scale", c->q_scale, 4) ||
      report.check_pointer("k_scale", c->k_scale, 4) || report.check_pointer("v_scale", c->v_scale, 16) ||
      report.check_pointer("k_offset", c->k_offset, 16) || report.check_pointer("v_offset", c->v_offset, 16) ||
      report.check_pointer("modes", c->modes, 4) || report.check_pointer("workspace", c->workspace, 256))
    return report.status;
  if (c->mask_kind == TRTCONVERT_MASK_NONE) {
    if (c->mask) return report.fail(TRTCONVERT_INVALID_ARGUMENT, "mask: expected null with mask_kind 0, got %p", c->mask);
  } else if (report.check_pointer("mask", c->mask, c->mask_kind == TRTCONVERT_MASK_BOOL ? 1 : 2)) {
    return report.status;
  } else {
    for (const int64_t stride : c->mask_strides)
      if (stride < -kMostStride || stride > kMostStride)
        return report.fail(TRTCONVERT_INVALID_ARGUMENT, "mask_strides: expected at most 2^44 elements, got %lld",
                           static_cast<long long>(stride));
  }
  if (c->key_lengths && report.check_pointer("key_lengths", c->key_lengths, 4)) return report.status;
  if (check_sparse(*c, report) || check_layers_before(*c, report) || check_second_part(*c, report)) return report.status;
  if (c->target_arch != 0 && c->target_arch != 80)
    return report.invalid_int("target_arch", "0 (the device's best) or 80 (mma.sync)", c->target_arch);

  const cudaError_t error = device.read();
  if (error != cudaSuccess) device = {};
  Params p = make_params(*c, device);
  const size_t needed = lay_out_workspace(p, nullptr);
  if (c->workspace_size < needed)
    return report.fail(TRTCONVERT_WORKSPACE_TOO_SMALL, "workspace_size: expected at least %zu bytes, got %zu", needed,
                       c->workspace_size);
  if (needed > UINTPTR_MAX - reinterpret_cast<uintptr_t>(c->workspace))
    return report.fail(TRTCONVERT_INVALID_ARGUMENT, "workspace: expected %zu bytes behind the pointer, got %p", needed, c->workspace);
  if (error != cudaSuccess)
    return report.no_device(error);
  if (device.major < 8)
    return report.fail(TRTCONVERT_UNSUPPORTED_DEVICE,
                       "device: expected compute capability 8.0 or later, got %d.%d; use the native lowering there",
                       device.major, device.minor);
  return TRTCONVERT_OK;
}

}  // namespace
}  // namespace trtconvert::attention

using namespace trtconvert;
using namespace trtconvert::attention;

extern "C" {

TrtConvertStatus trtconvert_attention_workspace_size(const TrtConvertAttentionParams* params, size_t* bytes, char* message,
                                                     size_t message_size) {
  Report report(message, message_size);
  if (!bytes) return report.fail(TRTCONVERT_INVALID_ARGUMENT, "bytes: expected a pointer, got null");
  if (check_shapes(params, report)) return report.status;
  Device device;
  if (device.read() != cudaSuccess) device = {};  // without a device, the size that any other device needs
  Params p = make_params(*params, device);
  *bytes = lay_out_workspace(p, nullptr);
  return TRTCONVERT_OK;
}

TrtConvertStatus trtconvert_attention_check(const TrtConvertAttentionParams* params, char* message, size_t message_size) {
  Report report(message, message_size);
  Device device;
  return check_all(params, device, report);
}

TrtConvertStatus trtconvert_attention_run(const TrtConvertAttentionParams* params, char* message, size_t message_size) {
  Report report(message, message_size);
  Device device;
  if (check_all(params, device, report)) return report.status;
  Params p = make_params(*params, device);
  const auto stream = static_cast<cudaStream_t>(params->stream);
  if (params->target_arch == 0 && is_one_tile(p)) {
    p.early_launch = device.starts_early();
    return report.launched(launch_attention_one_tile(p, device.multiprocessors, stream), "attention (one tile)");
  }
  lay_out_workspace(p, params->workspace);
  ValueMaps values = {};
  // Keys beyond a key length may hold anything, even NaN: the pre-pass clears them, the copy engine would not. The copy engine does
  // not gather either.
  const bool on_sm90 = p.multiprocessors > 0;
  p.direct_values = on_sm90 && !p.key_lengths && !p.source_keys && describe_values(p, values);
  p.fp8_values = on_sm90 && p.num_keys > kKeyTile && has_fp8_values(p.dims.pv);
  if (p.has_key_mask) {
    if (report.launched(launch_key_lists(p, stream), "key mask")) return report.status;
    p.key_index = p.visible_keys;
    p.key_lengths = p.visible_counts;
  }
  if (p.block_mask_heads && report.launched(launch_block_lists(p, stream), "block mask")) return report.status;
  if (report.launched(launch_prepass(p, stream), "pre-pass")) return report.status;
#ifdef TRTCONVERT_SM90
  if (on_sm90) return report.launched(launch_attention_sm90(p, values, stream), "attention (sm_90a)");
#endif
  return report.launched(launch_attention_mma(p, stream), "attention (mma.sync)");
}

const char* trtconvert_version(void) { return TRTCONVERT_VERSION; }

const char* trtconvert_compiled_architectures(void) { return TRTCONVERT_ARCHITECTURES; }

}  // extern "C"
