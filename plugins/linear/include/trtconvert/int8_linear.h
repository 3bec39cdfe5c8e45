/* C API of linear layers with INT8 weights: plain C, no TensorRT, no torch.
 *
 *   y = (x * weight^T) * (row_scale * weight_scale) + bias                    rows in INT8 (layer_modes.h)
 *   y = GELU(y)                                                               where wanted
 *   y = y_0 * GELU(y_1)                                                       GEGLU of two layers (Shazeer 2020, arXiv:2002.05202)
 *   y = y + residual                                                          where wanted
 *   y = (x * weight^T) * (|row_scale| * weight_scale) + known                 of rows that are changes (quantise_change.h)
 *   known = bias where row_scale < 0, else residual
 *
 * The product of INT8 rows is exact in INT32, the rest is FP32, and y is rounded once. 16-bit rows, of mode WEIGHT_ONLY, are multiplied
 * by the INT8 weights as 16-bit numbers, which is exact, and summed in FP32. Rows with the scale NaN have NaN results.
 *
 * A run launches a kernel for INT8 rows, one for 16-bit rows, or both if mode_set allows both: the rows carry their format, and the
 * other kernel ends at once. A run allocates nothing and synchronises nothing, so CUDA graphs capture it. Every function is
 * safe to call from several threads and on several streams at once.
 */
#ifndef TRTCONVERT_INT8_LINEAR_H_
#define TRTCONVERT_INT8_LINEAR_H_

#include <stddef.h>
#include <stdint.h>

#include "trtconvert/activation.h"
#include "trtconvert/layer_modes.h"
#include "trtconvert/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever the struct below changes meaning. Fields are only ever appended. */
#define TRTCONVERT_INT8_LINEAR_VERSION 2

#define TRTCONVERT_MOST_PARTS 8
#define TRTCONVERT_MORE_PARTS 7 /* beside the first */

typedef struct {
  uint32_t struct_size; /* sizeof(TrtConvertInt8LinearParams) of the caller */
  uint32_t version;     /* TRTCONVERT_INT8_LINEAR_VERSION of the caller */
  int64_t rows;         /* M: 1..2^24 */
  int32_t in_channels;  /* K: 16..65536, in steps of 16 */
  int32_t out_channels; /* N: 8..65536, in steps of 8 */
  int32_t data_type;    /* TrtConvertDataType of residual and y */
  int32_t activation;   /* TrtConvertActivation */
  int32_t mode_set;     /* of the rows (layer_modes.h) */

  /* Contiguous, 16-byte aligned. */
  const void* x;             /* the payload of M quantised rows of K channels */
  const float* row_scale;    /* [M]; may be null where mode_set has WEIGHT_ONLY alone: none is NaN */
  const void* weight;        /* INT8 [N, K]; with GEGLU [2, N, K] */
  const float* weight_scale; /* [N]; with GEGLU [2, N] */
  const float* bias;         /* [N]; with GEGLU [2, N]; or null */
  const void* residual;      /* [M, N], or null, as with any activation */
  void* y;                   /* [M, N]; may be residual, overlaps none of the others; null where quantised rows are wanted */

  void* stream; /* cudaStream_t; null is the default stream */

  /* Quantised rows in place of y, for the next layer, of INT8 rows only: N in steps of 16. Equal to quantise.h on y in mode STATIC, except
   * that a NaN among numbers is -127 and an infinity 127 with its sign. Rows that are NaN as a whole have the scale NaN. mode_set 0: none,
   * else that of STATIC alone. */
  TrtConvertModeTable out_table;
  const float* out_factor; /* [N], or null */
  const float* out_offset; /* [N], or null */
  void* out_payload;       /* INT8 [M, N]; overlaps none of the others, as out_row_scale */
  float* out_row_scale;    /* [M] */

  int32_t target_arch; /* 0: the device's best kernels; 80: those of mma.sync wherever they run (for tests) */

  /* 1: rows are deltas since the previous step, and the residual is the previous y: the residual is added where the scale is positive,
   * and the bias alone where the sign bit of the scale resets the sample. With mode_set 8 (static), without an activation or quantised rows. */
  int32_t changes;

  /* Several parts, such as the shifts, scales and gates of a modulation: y has the first N / parts columns, more_y the others. Of 1 to 16
   * rows with mode_set 2 (WEIGHT_ONLY), without an activation or a residual; N / parts in steps of 8. 0 is 1. */
  int32_t parts;                           /* 0..TRTCONVERT_MOST_PARTS */
  void* more_y[TRTCONVERT_MORE_PARTS]; /* [M, N / parts] each, as y; null beyond the parts */
} TrtConvertInt8LinearParams;

/* All functions: `message` (may be null) receives a terminated text of at most message_size bytes; empty on success. */

/* Checks everything but pointers and the stream; needs no device and no memory. */
TRTCONVERT_API TrtConvertStatus trtconvert_int8_linear_check(const TrtConvertInt8LinearParams* params, char* message,
                                                             size_t message_size);

/* Checks everything, and enqueues on `stream`, on the current device. */
TRTCONVERT_API TrtConvertStatus trtconvert_int8_linear_run(const TrtConvertInt8LinearParams* params, char* message,
                                                           size_t message_size);

#ifdef __cplusplus
}
#endif

#endif /* TRTCONVERT_INT8_LINEAR_H_ */
