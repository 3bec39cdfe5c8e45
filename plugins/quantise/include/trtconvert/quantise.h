/* C API of quantising the rows that INT8 layers read: plain C, no TensorRT, no torch.
 *
 *   xhat = (x - offset) * factor                                              in FP32, each of a channel; x where there are none
 *   DYNAMIC       scale = max(max |xhat| / 127, 2^-100)                       of each row
 *   STATIC        scale = x_scale of the row's timestep bin
 *                 q = clamp(round(xhat / scale), -127, 127)                   the FP32 quotient to the nearest, ties to even
 *   WEIGHT_ONLY   xhat rounded to the type of x, scale = -1
 *
 * layer_modes.h says which mode a call has, and how rows lie in the payload. A row of INT8 with a NaN
 * or an infinity has the scale NaN.
 *
 * A run launches one kernel. It allocates nothing and synchronises nothing, so CUDA graphs capture it. Every function is safe to call
 * from several threads and on several streams at once.
 */
#ifndef TRTCONVERT_QUANTISE_H_
#define TRTCONVERT_QUANTISE_H_

#include <stddef.h>
#include <stdint.h>

#include "trtconvert/layer_modes.h"
#include "trtconvert/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever the struct below changes meaning. Fields are only ever appended. */
#define TRTCONVERT_QUANTISE_VERSION 1

typedef struct {
  uint32_t struct_size; /* sizeof(TrtConvertQuantiseParams) of the caller */
  uint32_t version;     /* TRTCONVERT_QUANTISE_VERSION of the caller */
  int64_t rows;         /* M: 1..2^31 - 1 */
  int32_t channels;     /* K: 16..65536, in steps of 16 */
  int32_t data_type;    /* TrtConvertDataType of x */

  TrtConvertModeTable table;

  /* Contiguous, 16-byte aligned. No output overlaps another tensor. */
  const void* x;       /* [M, K] */
  const float* factor; /* [K], or null */
  const float* offset; /* [K], or null */
  void* payload;       /* M * K bytes, twice as many where mode_set has WEIGHT_ONLY */
  float* row_scale;    /* [M] */

  void* stream; /* cudaStream_t; null is the default stream */

  /* 1: the kernel may start before the previous kernel ends, if the device supports it; 0: not before. Its thread blocks wait in free
   * room: use 1 behind kernels that leave little room, as in linear.h; other kernels are slowed down by more than the gain. */
  int32_t starts_early;
} TrtConvertQuantiseParams;

/* All functions: `message` (may be null) receives a terminated text of at most message_size bytes; empty on success. */

/* Checks everything but pointers and the stream; needs no device and no memory. */
TRTCONVERT_API TrtConvertStatus trtconvert_quantise_check(const TrtConvertQuantiseParams* params, char* message, size_t message_size);

/* Checks everything, and enqueues on `stream`, on the current device. */
TRTCONVERT_API TrtConvertStatus trtconvert_quantise_run(const TrtConvertQuantiseParams* params, char* message, size_t message_size);

#ifdef __cplusplus
}
#endif

#endif /* TRTCONVERT_QUANTISE_H_ */
