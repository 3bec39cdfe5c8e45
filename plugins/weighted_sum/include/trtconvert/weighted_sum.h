/* C API of the weighted sum of tensors: plain C, no TensorRT, no torch.
 *
 *   sum = factor_0 · x_0 + factor_1 · x_1 + …                       in FP32, rounded once to the sum's type
 *
 * The runtime extrapolates and corrects predictions of skipped denoising steps by such sums. A run launches one kernel. It allocates
 * nothing and synchronises nothing, so CUDA graphs capture it. Every function is safe to call from several threads and on several
 * streams at once.
 */
#ifndef TRTCONVERT_WEIGHTED_SUM_H_
#define TRTCONVERT_WEIGHTED_SUM_H_

#include <stddef.h>
#include <stdint.h>

#include "trtconvert/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever a struct below changes meaning. Fields are only ever appended. */
#define TRTCONVERT_WEIGHTED_SUM_VERSION 1

#define TRTCONVERT_MOST_TERMS 4

typedef struct {
  const void* x;     /* [count], contiguous */
  float factor;      /* finite */
  int32_t data_type; /* TrtConvertDataType of x, or TRTCONVERT_FLOAT32 */
} TrtConvertTerm;

typedef struct {
  uint32_t struct_size; /* sizeof(TrtConvertWeightedSumParams) of the caller */
  uint32_t version;     /* TRTCONVERT_WEIGHTED_SUM_VERSION of the caller */
  int64_t count;        /* numbers of each tensor: 1..2^40 */
  int32_t num_terms;    /* 1..TRTCONVERT_MOST_TERMS */
  int32_t data_type;    /* TrtConvertDataType of the sum, or TRTCONVERT_FLOAT32 */
  TrtConvertTerm terms[TRTCONVERT_MOST_TERMS];
  void* sum;    /* [count], contiguous; may be the tensor of a term of the same type */
  void* stream; /* cudaStream_t; null is the default stream */
} TrtConvertWeightedSumParams;

/* All functions: `message` (may be null) receives a terminated text of at most message_size bytes; empty on success. */

/* Checks everything but pointers and the stream; needs no device and no memory. */
TRTCONVERT_API TrtConvertStatus trtconvert_weighted_sum_check(const TrtConvertWeightedSumParams* params, char* message,
                                                              size_t message_size);

/* Checks everything, and enqueues on `stream`, on the current device. */
TRTCONVERT_API TrtConvertStatus trtconvert_weighted_sum_run(const TrtConvertWeightedSumParams* params, char* message,
                                                            size_t message_size);

#ifdef __cplusplus
}
#endif

#endif /* TRTCONVERT_WEIGHTED_SUM_H_ */
