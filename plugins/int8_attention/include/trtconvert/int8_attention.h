/* C API of the INT8 attention kernels: plain C, no TensorRT, no torch.
 *
 * A run launches two kernels, one more for a norm across heads and one or two more for a block mask. A run allocates nothing,
 * synchronises nothing and reads no device memory on the host, so CUDA graphs capture it.
 * Every function is safe to call from several threads and on several streams at once, as long as each launch in flight
 * has its own workspace.
 *
 * NaN and infinities in q, k, v and an additive mask reach the output, as attention() of trtconvert/attention/reference.py says. A
 * broken query affects its row; a broken key all rows that its tile of 128 keys is computed for, even if a mask hides the key; a broken
 * value one channel or all channels.
 */
#ifndef TRTCONVERT_INT8_ATTENTION_H_
#define TRTCONVERT_INT8_ATTENTION_H_

#include <stddef.h>
#include <stdint.h>

#include "trtconvert/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever the struct below changes meaning. Fields are only ever appended. */
#define TRTCONVERT_ATTENTION_VERSION 6

typedef enum {
  TRTCONVERT_SCALING_CALIBRATED = 0,  /* q_scale and k_scale are used as they are */
  TRTCONVERT_SCALING_DYNAMIC = 1,     /* modes 1, 2 and 4 take Q per token and K per 128 keys from the data */
} TrtConvertScaling;

typedef enum {
  TRTCONVERT_MASK_NONE = 0,
  TRTCONVERT_MASK_BOOL = 1,      /* one byte per element, nonzero = attend */
  TRTCONVERT_MASK_ADDITIVE = 2,  /* in the data type of q, added to the logits (natural units); -inf = do not attend */
} TrtConvertMaskKind;

/* Strides in elements of the tensor itself; the last dimension (head_dim) is contiguous. BNHD and BHND differ only here. */
typedef struct {
  int64_t batch, token, head;
} TrtConvertStrides;

typedef struct {
  uint32_t struct_size; /* sizeof(TrtConvertAttentionParams) of the caller */
  uint32_t version;     /* TRTCONVERT_ATTENTION_VERSION of the caller */

  /* Shapes. */
  int32_t batch;       /* B >= 1 */
  int32_t num_heads;   /* H >= 1, a multiple of num_kv_heads: query head h attends to K/V head h / (H / Hkv) */
  int32_t num_kv_heads;/* Hkv >= 1 */
  int32_t num_queries; /* Nq >= 1 */
  int32_t num_keys;    /* Nk >= 1 */
  int32_t head_dim;    /* D: 32..256 in steps of 8 */
  int32_t num_bins;    /* T >= 1: timestep bins of the tables */

  /* Attributes. */
  int32_t data_type; /* TrtConvertDataType of q, k, v, out */
  int32_t scaling;   /* TrtConvertScaling */
  int32_t smooth_k;  /* nonzero: subtract k_offset before K is quantised (softmax ignores it) */
  int32_t mask_kind; /* TrtConvertMaskKind */
  int32_t target_arch; /* 0: the device's best kernel; 80: the mma.sync kernel wherever it runs (for tests) */
  float softmax_scale; /* finite, > 0 */
  float timestep_max;  /* finite, > 0 */

  /* Tensors, all on the device. 16-byte aligned, strides multiples of 8 elements. */
  const void* q;   /* [B, Nq, H, D] through q_strides */
  const void* k;   /* [B, Nk, Hkv, D] */
  const void* v;   /* [B, Nk, Hkv, D] */
  void* out;       /* [B, Nq, H, D] */
  TrtConvertStrides q_strides, k_strides, v_strides, out_strides;

  /* Timestep and tables, on the device, contiguous, FP32 unless said otherwise; those of a row per channel 16-byte aligned.
   * bin = clamp(floor(timestep[b] * T / timestep_max), 0, T - 1) in FP32. */
  const float* timestep; /* [B] */
  const float* q_scale;  /* [T, H]: calibrated amax / 127 */
  const float* k_scale;  /* [T, Hkv] */
  const float* v_scale;  /* [T, Hkv, D]: amax / 127 per channel */
  const float* k_offset; /* [T, Hkv, D] */
  const float* v_offset; /* [T, Hkv, D] */
  const int32_t* modes;  /* [T]: 0 fp16, 1 INT8 QK, 2 INT8 with token scales, 3 INT8 with calibrated scales only,
                            4 INT8 QK and FP8 PV */

  /* Masks. Boolean masks with strides of 0 over heads and queries leave hidden keys out, unless there is a block mask or a key_index:
   * hidden keys may hold anything, as beyond key_lengths, and cost no time. With layers before attention or tokens in two tensors,
   * this is so on Hopper up to 128 channels; elsewhere such masks are masks like others. */
  const void* mask;            /* broadcastable to [B, H, Nq, Nk], or null when mask_kind is NONE */
  int64_t mask_strides[4];     /* elements, for B, H, Nq, Nk; 0 broadcasts */
  const int32_t* key_lengths;  /* [B] on the device, or null: keys at and after key_lengths[b] do not exist */

  /* Scratch memory, 256-byte aligned; its content before the call is ignored. */
  void* workspace;
  size_t workspace_size;

  void* stream; /* cudaStream_t */

  /* Layers of the network right before attention, computed in the same pass over Q and K if given; FP32, 16-byte
   * aligned. Each layer's result is rounded to the data type. First a root-mean-square norm of each token and head, or of each
   * token across its heads, x * rsqrt(mean(x^2) + norm_epsilon) * weight, then the rotation of neighbouring channels 2 i and
   * 2 i + 1 of a token, (x0 cos - x1 sin, x1 cos + x0 sin). */
  const float* rotary; /* [N, D / 2, 2]: cosine and sine of each token and pair; Nq = Nk = N. Or null */
  const float* q_norm; /* [D], or [H, D] across heads, or [2, D] with norm_split: weights. Null, with k_norm: no norm */
  const float* k_norm; /* [D], or [Hkv, D] across heads, or [2, D] with norm_split */
  float norm_epsilon;  /* finite, >= 0 where there is a norm */
  int32_t norm_across_heads; /* nonzero: the mean is over all heads and channels of a token; 0 where there is no norm */

  /* 0: all tokens share the weights of the norms of each head. s > 0: tokens before s take row 0 of the weights, tokens from s on take
   * row 1, as in joint attention, where text and image have separate norms. s < Nq = Nk; 0 without a norm, or with a norm across
   * heads. */
  int32_t norm_split;

  /* 0: all tokens are in the tensors above. s > 0: the tokens before s are in the tensors above, and the tokens from s on in the
   * separate tensors below, like the projections of text and image in joint attention. s < Nq = Nk, in steps of 128. Shapes are
   * those of all tokens: with Nq = Nk = N, q holds [B, s, H, D] and second_q [B, N - s, H, D]. */
  int32_t token_split;
  const void* second_q; /* null, like the next three, with token_split 0 */
  const void* second_k;
  const void* second_v;
  void* second_out;
  TrtConvertStrides second_q_strides, second_k_strides, second_v_strides, second_out_strides;

  /* Blocks of 128 queries by 128 keys that are computed: one byte for each, nonzero = attend, contiguous, on the device,
   * [block_mask_batch, block_mask_heads, ceil(Nq / 128), ceil(Nk / 128)]. Other blocks are neither read nor computed. A query whose row
   * has no block gets zeros. A mask and key_lengths may also hide keys of these blocks. */
  const void* block_mask; /* null with block_mask_batch 0 */

  /* Rows of k and v to attend to, in any order: [B, Hkv, Nk] on the device. Indices outside of k are clamped. num_keys,
   * mask, block_mask and key_lengths count these rows. Not with layers before attention or tokens in two tensors. */
  const int32_t* key_index; /* null with source_keys 0 */

  /* The natural logarithm of each row's sum of exponentials of its scaled logits, [B, H, Nq] on the device, or null. The sum is the
   * one that divides the output; -inf for a row without a key, NaN if the whole row of the output is NaN. smooth_k does not change
   * the logarithm. */
  float* lse;

  int32_t block_mask_batch; /* 0: no block mask; else 1 or B */
  int32_t block_mask_heads; /* 0: no block mask; else 1 or H */
  int32_t source_keys;      /* tokens of k and v with key_index, else 0 */
} TrtConvertAttentionParams;

/* All functions: `message` (may be null) receives a terminated text of at most message_size bytes; empty on success. */

/* Bytes of workspace that the current device needs. Reads shapes, attributes and the device's properties: no pointer. */
TRTCONVERT_API TrtConvertStatus trtconvert_attention_workspace_size(const TrtConvertAttentionParams* params,
                                                                    size_t* bytes, char* message, size_t message_size);

/* Everything that run() checks, without launching. */
TRTCONVERT_API TrtConvertStatus trtconvert_attention_check(const TrtConvertAttentionParams* params, char* message,
                                                           size_t message_size);

/* Checks, then enqueues the attention on params->stream of the current device. */
TRTCONVERT_API TrtConvertStatus trtconvert_attention_run(const TrtConvertAttentionParams* params, char* message,
                                                         size_t message_size);

/* Version of the library, "major.minor.patch". */
TRTCONVERT_API const char* trtconvert_version(void);

/* Compiled architectures as a comma-separated list, such as "80,86,90a,120". */
TRTCONVERT_API const char* trtconvert_compiled_architectures(void);

#ifdef __cplusplus
}
#endif

#endif /* TRTCONVERT_INT8_ATTENTION_H_ */
