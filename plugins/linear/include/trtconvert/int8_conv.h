/* C API of two-dimensional convolutions in INT8 of images that lie with their channels last: plain C, no TensorRT, no torch.
 *
 *   y[b, p, q, n] = (sum over r, s, c of x[b, p stride_y + r - pad_y, q stride_x + s - pad_x, c] * weight[n, r, s, c])
 *                   * (x_scale * weight_scale[n]) + bias[n]
 *   y = y + residual                                                          where wanted
 *
 * x is zero outside of the image. The product is exact in INT32, the rest is FP32, and y is rounded once. x_scale is the calibrated
 * scale of the sample's timestep bin, as in mode STATIC (layer_modes.h). Images are NaN if the scale of their sample is not usable, or
 * if they are marked (group_norm.h).
 *
 * A run launches one kernel. It allocates nothing and synchronises nothing, so CUDA graphs capture it. Every function is safe to call
 * from several threads and on several streams at once.
 */
#ifndef TRTCONVERT_INT8_CONV_H_
#define TRTCONVERT_INT8_CONV_H_

#include <stddef.h>
#include <stdint.h>

#include "trtconvert/layer_modes.h"
#include "trtconvert/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever the struct below changes meaning. Fields are only ever appended. */
#define TRTCONVERT_INT8_CONV_VERSION 2

typedef struct {
  uint32_t struct_size;   /* sizeof(TrtConvertInt8ConvParams) of the caller */
  uint32_t version;       /* TRTCONVERT_INT8_CONV_VERSION of the caller */
  int64_t batch;          /* B images: 1..65536 */
  int32_t height, width;  /* of x: 1..16384; B P Q at most 2^24, where P = (height + 2 pad_y - kernel_h) / stride_y + 1, Q likewise */
  int32_t in_channels;    /* C: 16..16384, in steps of 16 */
  int32_t out_channels;   /* N: 8..65536, in steps of 8 */
  int32_t kernel_h, kernel_w; /* 1..15 */
  int32_t stride_y, stride_x; /* 1..8 */
  int32_t pad_y, pad_x;       /* 0..15, less than the kernel */
  int32_t data_type;          /* TrtConvertDataType of residual and y */
  TrtConvertModeTable table;  /* of x: mode_set STATIC alone; its batch is a divisor of B */

  /* Contiguous, 16-byte aligned. */
  const void* x;             /* INT8 [B, height, width, C] */
  const void* weight;        /* INT8 [N, kernel_h, kernel_w, C] */
  const float* weight_scale; /* [N] */
  const float* bias;         /* [N], or null */
  const void* residual;      /* [B, P, Q, N], or null */
  void* y;                   /* [B, P, Q, N]; may be residual, overlaps none of the others */

  void* stream;        /* cudaStream_t; null is the default stream */
  int32_t target_arch; /* 0: the device's best kernels; 80: those of mma.sync wherever they run (for tests) */

  const void* marks; /* of x: bytes [B, TRTCONVERT_IMAGE_MARKS], as layer_modes.h describes; contiguous, 16-byte aligned */
} TrtConvertInt8ConvParams;

/* All functions: `message` (may be null) receives a terminated text of at most message_size bytes; empty on success. */

/* Checks everything but pointers and the stream; needs no device and no memory. */
TRTCONVERT_API TrtConvertStatus trtconvert_int8_conv_check(const TrtConvertInt8ConvParams* params, char* message, size_t message_size);

/* Checks everything, and enqueues on `stream`, on the current device. */
TRTCONVERT_API TrtConvertStatus trtconvert_int8_conv_run(const TrtConvertInt8ConvParams* params, char* message, size_t message_size);

#ifdef __cplusplus
}
#endif

#endif /* TRTCONVERT_INT8_CONV_H_ */
