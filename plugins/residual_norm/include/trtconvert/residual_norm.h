/* C API of a residual connection and the layer norm behind it: plain C, no TensorRT, no torch.
 *
 *   sum = x + residual                                                        rounded to the tensors' type
 *   normed = (sum - mean) / sqrt(variance + epsilon) * weight + bias          (Ba, Kiros and Hinton 2016, arXiv:1607.06450)
 *
 * Quantised rows for an INT8 layer may be written beside normed or in its place, equal to the rows and scales of quantise.h on normed.
 *
 * Mean and variance (divided by C) are those of each row of C channels of the rounded sum, in FP32, like two consecutive operators.
 *
 * A run launches one kernel. It allocates nothing and synchronises nothing, so CUDA graphs capture it. Every function is safe to call
 * from several threads and on several streams at once.
 */
#ifndef TRTCONVERT_RESIDUAL_NORM_H_
#define TRTCONVERT_RESIDUAL_NORM_H_

#include <stddef.h>
#include <stdint.h>

#include "trtconvert/layer_modes.h"
#include "trtconvert/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever the struct below changes meaning. Fields are only ever appended. */
#define TRTCONVERT_RESIDUAL_NORM_VERSION 3

/* Channels of a row: a warp holds it in registers. */
#define TRTCONVERT_RESIDUAL_NORM_MOST_CHANNELS 4096

typedef struct {
  uint32_t struct_size; /* sizeof(TrtConvertResidualNormParams) of the caller */
  uint32_t version;     /* TRTCONVERT_RESIDUAL_NORM_VERSION of the caller */
  int64_t rows;         /* 1..2^31 */
  int32_t channels;     /* C: 8..TRTCONVERT_RESIDUAL_NORM_MOST_CHANNELS, in steps of 8 */
  int32_t data_type;    /* TrtConvertDataType of all tensors */
  float epsilon;        /* finite, >= 0 */

  /* Contiguous, 16-byte aligned. An output may be an input that it has the shape of, not the other output. */
  const void* x;        /* [rows, C] */
  const void* residual; /* [rows, C] */
  const void* weight;   /* [C] */
  const void* bias;     /* [C] */
  void* sum;            /* [rows, C] */
  void* normed;         /* [rows, C]; null where only quantised rows are wanted */

  void* stream; /* cudaStream_t; null is the default stream */

  /* 1: the kernel may start before the previous kernel ends, if the device supports it; 0: not before. Its thread blocks wait in free
   * room: use 1 behind kernels that leave little room, as in linear.h; other kernels are slowed down by more than the gain. */
  int32_t starts_early;

  /* Quantised rows of normed (layer_modes.h): of at most 2^31 - 1 rows, with channels in steps of 16. mode_set 0: none. */
  TrtConvertModeTable table;
  const float* factor; /* [C], or null: of quantise.h, as offset */
  const float* offset; /* [C], or null */
  void* payload;       /* rows * C bytes, twice as many where mode_set has WEIGHT_ONLY; overlaps no other tensor, as row_scale */
  float* row_scale;    /* [rows] */
} TrtConvertResidualNormParams;

/* All functions: `message` (may be null) receives a terminated text of at most message_size bytes; empty on success. */

/* Checks everything but pointers and the stream; needs no device and no memory. */
TRTCONVERT_API TrtConvertStatus trtconvert_residual_norm_check(const TrtConvertResidualNormParams* params, char* message,
                                                               size_t message_size);

/* Checks everything, and enqueues on `stream`, on the current device. */
TRTCONVERT_API TrtConvertStatus trtconvert_residual_norm_run(const TrtConvertResidualNormParams* params, char* message,
                                                             size_t message_size);

#ifdef __cplusplus
}
#endif

#endif /* TRTCONVERT_RESIDUAL_NORM_H_ */
