/* C API of linear layers, and of pairs of them as gated MLPs have, on Hopper: plain C, no TensorRT, no torch.
 *
 *   y = x * weight^T + bias
 *   y = (x * weight_0^T + bias_0) * GELU(x * weight_1^T + bias_1)              GEGLU (Shazeer 2020, arXiv:2002.05202)
 *
 * Products are summed in FP32 over all of K, the rest follows there, and y is rounded once. GELU(z) = z Phi(z) is exact to 4e-7.
 *
 * A run launches one kernel. It allocates nothing and synchronises nothing, so CUDA graphs capture it. Every function is safe to call
 * from several threads and on several streams at once.
 */
#ifndef TRTCONVERT_LINEAR_H_
#define TRTCONVERT_LINEAR_H_

#include <stddef.h>
#include <stdint.h>

#include "trtconvert/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever the struct below changes meaning. Fields are only ever appended. */
#define TRTCONVERT_LINEAR_VERSION 1

typedef struct {
  uint32_t struct_size; /* sizeof(TrtConvertLinearParams) of the caller */
  uint32_t version;     /* TRTCONVERT_LINEAR_VERSION of the caller */
  int64_t rows;         /* M: 1..2^24 */
  int32_t in_channels;  /* K: 8..65536, in steps of 8 */
  int32_t out_channels; /* N: likewise */
  int32_t data_type;    /* TrtConvertDataType of all tensors */
  int32_t geglu;        /* 0: one linear layer. 1: GEGLU of two, the gate's behind the other */

  /* Contiguous, 16-byte aligned. */
  const void* x;      /* [M, K] */
  const void* weight; /* [N, K]; with geglu [2, N, K] */
  const void* bias;   /* [N], with geglu [2, N]; or null */
  void* y;            /* [M, N]; overlaps none of the others */

  void* stream; /* cudaStream_t; null is the default stream */
} TrtConvertLinearParams;

/* Whether there is a kernel for the current device: compute capability 9.0, and compiled into the library. */
TRTCONVERT_API int trtconvert_linear_is_supported(void);

/* All other functions: `message` (may be null) receives a terminated text of at most message_size bytes; empty on success. */

/* Checks everything but pointers and the stream; needs no device and no memory. */
TRTCONVERT_API TrtConvertStatus trtconvert_linear_check(const TrtConvertLinearParams* params, char* message, size_t message_size);

/* Checks everything, and enqueues on `stream`, on the current device. */
TRTCONVERT_API TrtConvertStatus trtconvert_linear_run(const TrtConvertLinearParams* params, char* message, size_t message_size);

#ifdef __cplusplus
}
#endif

#endif /* TRTCONVERT_LINEAR_H_ */
