/* C API of quantising deltas of rows between steps (MoDiff, equations 13 to 20): plain C, no TensorRT, no torch.
 *
 *   xhat = activation(x) * factor                                             in FP32, each of a channel; x where there is none
 *   known = a_hat, 0 where the sample is reset
 *   q = clamp(round((xhat - known) * (1 / scale)), -127, 127)                 ties to even
 *   a_next = known + q * scale                                                rounded to the type of a_hat
 *
 * `scale` is the scale of the row's sample, from a column of a table for all layers of a model. Its sign bit resets the sample: then
 * a_hat is ignored. The scale of a row is the sample's with its sign, as int8_linear.h needs it with `changes`. It is NaN if a delta of
 * the row is NaN or infinite, or if the sample's scale is zero or not finite; a NaN is then quantised as -127. a_next is NaN where the
 * delta is not finite, so such rows are NaN until their sample is reset.
 *
 * A run launches one kernel. It allocates nothing and synchronises nothing, so CUDA graphs capture it. Every function is safe to call
 * from several threads and on several streams at once.
 */
#ifndef TRTCONVERT_QUANTISE_CHANGE_H_
#define TRTCONVERT_QUANTISE_CHANGE_H_

#include <stddef.h>
#include <stdint.h>

#include "trtconvert/activation.h"
#include "trtconvert/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever the struct below changes meaning. Fields are only ever appended. */
#define TRTCONVERT_QUANTISE_CHANGE_VERSION 1

typedef struct {
  uint32_t struct_size; /* sizeof(TrtConvertQuantiseChangeParams) of the caller */
  uint32_t version;     /* TRTCONVERT_QUANTISE_CHANGE_VERSION of the caller */
  int64_t rows;         /* M: 1..2^31 - 1 */
  int32_t channels;     /* K: 16..65536, in steps of 16 */
  int32_t data_type;    /* TrtConvertDataType of x, a_hat and a_next */
  int32_t activation;   /* TrtConvertActivation of x before it is quantised: none or one of the GELUs */
  int32_t batch;        /* samples, each with as many rows, one sample behind the other: 1..65536, a divisor of the rows */
  int32_t places;       /* S: 1..65536 columns of scales, */
  int32_t place;        /* and the column of this layer */

  /* Contiguous, 16-byte aligned. No output overlaps another tensor, but a_next may be a_hat. */
  const void* x;       /* [M, K] */
  const float* factor; /* [K], or null */
  const void* a_hat;   /* [M, K] */
  const float* scales; /* [batch, S] */
  void* payload;       /* INT8 [M, K] */
  float* row_scale;    /* [M] */
  void* a_next;        /* [M, K] */

  void* stream; /* cudaStream_t; null is the default stream */
} TrtConvertQuantiseChangeParams;

/* All functions: `message` (may be null) receives a terminated text of at most message_size bytes; empty on success. */

/* Checks everything but pointers and the stream; needs no device and no memory. */
TRTCONVERT_API TrtConvertStatus trtconvert_quantise_change_check(const TrtConvertQuantiseChangeParams* params, char* message,
                                                                 size_t message_size);

/* Checks everything, and enqueues on `stream`, on the current device. */
TRTCONVERT_API TrtConvertStatus trtconvert_quantise_change_run(const TrtConvertQuantiseChangeParams* params, char* message,
                                                               size_t message_size);

#ifdef __cplusplus
}
#endif

#endif /* TRTCONVERT_QUANTISE_CHANGE_H_ */
