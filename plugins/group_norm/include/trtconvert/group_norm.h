/* C API of group norms of images with channels last: plain C, no TensorRT, no torch.
 *
 *   y = x + shift                                                             rounded to the tensors' type; x where there is no shift
 *   normed = (y - mean) / sqrt(variance + epsilon) * weight + bias            (Wu and He 2018, arXiv:1803.08494)
 *   normed = normed * sigmoid(normed)                                         with silu
 *
 * or, in place of normed, the input of a layer with INT8 activations:
 *
 *   payload = round(normed * factor / x_scale), -127 to 127                   of normed as it would be rounded
 *
 * x_scale is the calibrated scale of the sample's timestep bin, as in mode STATIC (layer_modes.h). Images whose sample has no usable
 * scale have undefined codes: the layer turns them into NaN. A NaN or an infinity in a group makes its mean or its variance NaN, and so
 * all of its results. INT8 has no NaN: the payload then has any codes in these channels, and one of the image's marks is not 0. A weight,
 * a bias and a shift that are not finite do the same. int8_conv.h turns a marked image into NaN.
 *
 * Mean and variance (divided by their number) are those of all pixels and all channels of a group, in FP32; groups are neighbouring
 * channels, as many in each. Results are rounded once.
 *
 * A run launches one kernel. It allocates nothing and synchronises nothing, so CUDA graphs capture it. Every function is safe to call
 * from several threads and on several streams at once. Results do not depend on the order of thread blocks.
 */
#ifndef TRTCONVERT_GROUP_NORM_H_
#define TRTCONVERT_GROUP_NORM_H_

#include <stddef.h>
#include <stdint.h>

#include "trtconvert/layer_modes.h"
#include "trtconvert/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever the struct below changes meaning. Fields are only ever appended. */
#define TRTCONVERT_GROUP_NORM_VERSION 2

/* Channels of an image. */
#define TRTCONVERT_GROUP_NORM_MOST_CHANNELS 4096

typedef struct {
  uint32_t struct_size; /* sizeof(TrtConvertGroupNormParams) of the caller */
  uint32_t version;     /* TRTCONVERT_GROUP_NORM_VERSION of the caller */
  int64_t batch;        /* B: 1..65535 */
  int64_t pixels;       /* H·W: 1..2^24 */
  int32_t channels;     /* C: 8..TRTCONVERT_GROUP_NORM_MOST_CHANNELS, in steps of 8 */
  int32_t groups;       /* a divisor of C */
  int32_t data_type;    /* TrtConvertDataType of all tensors */
  int32_t silu;         /* 0 or 1 */
  float epsilon;        /* finite, >= 0 */

  /* Contiguous, 16-byte aligned. */
  const void* x;      /* [B, pixels, C] */
  const void* shift;  /* [B, C], or null */
  const void* weight; /* [C] */
  const void* bias;   /* [C] */
  void* normed;       /* [B, pixels, C]; may be x; null where a payload is wanted */

  void* stream; /* cudaStream_t; null is the default stream */

  /* A payload in place of normed: mode_set that of STATIC alone, its batch a divisor of B. mode_set 0: none. */
  TrtConvertModeTable table;
  const float* factor; /* [C], or null */
  void* payload;       /* INT8 [B, pixels, C]; overlaps none of the others */
  void* marks;         /* bytes [B, TRTCONVERT_IMAGE_MARKS], as layer_modes.h describes; overlaps none of the others */
} TrtConvertGroupNormParams;

/* Whether the current device has thread block clusters, and the library code for it: compute capability 9.0 and later. */
TRTCONVERT_API int trtconvert_group_norm_is_supported(void);

/* All functions below: `message` (may be null) receives a terminated text of at most message_size bytes; empty on success. */

/* Checks everything but pointers and the stream; needs no device and no memory. */
TRTCONVERT_API TrtConvertStatus trtconvert_group_norm_check(const TrtConvertGroupNormParams* params, char* message,
                                                            size_t message_size);

/* Checks everything, and enqueues on `stream`, on the current device. */
TRTCONVERT_API TrtConvertStatus trtconvert_group_norm_run(const TrtConvertGroupNormParams* params, char* message,
                                                          size_t message_size);

#ifdef __cplusplus
}
#endif

#endif /* TRTCONVERT_GROUP_NORM_H_ */
