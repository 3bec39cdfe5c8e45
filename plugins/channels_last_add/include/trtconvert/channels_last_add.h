/* C API of the sum of two images with channels last: plain C, no TensorRT, no torch.
 *
 *   sum = x + y                                                               rounded to the tensors' type
 *
 * A run launches one kernel. It allocates nothing and synchronises nothing, so CUDA graphs capture it. Every function is safe to call
 * from several threads and on several streams at once.
 */
#ifndef TRTCONVERT_CHANNELS_LAST_ADD_H_
#define TRTCONVERT_CHANNELS_LAST_ADD_H_

#include <stddef.h>
#include <stdint.h>

#include "trtconvert/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever the struct below changes meaning. Fields are only ever appended. */
#define TRTCONVERT_CHANNELS_LAST_ADD_VERSION 1

typedef struct {
  uint32_t struct_size; /* sizeof(TrtConvertChannelsLastAddParams) of the caller */
  uint32_t version;     /* TRTCONVERT_CHANNELS_LAST_ADD_VERSION of the caller */
  int64_t pixels;       /* of all images, B·H·W: 1..2^31 */
  int32_t channels;     /* C: 8..65536, in steps of 8 */
  int32_t data_type;    /* TrtConvertDataType of all tensors */

  /* Contiguous, 16-byte aligned. */
  const void* x; /* [pixels, C] */
  const void* y; /* [pixels, C] */
  void* sum;     /* [pixels, C]; may be x or y */

  void* stream; /* cudaStream_t; null is the default stream */
} TrtConvertChannelsLastAddParams;

/* All functions: `message` (may be null) receives a terminated text of at most message_size bytes; empty on success. */

/* Checks everything but pointers and the stream; needs no device and no memory. */
TRTCONVERT_API TrtConvertStatus trtconvert_channels_last_add_check(const TrtConvertChannelsLastAddParams* params, char* message,
                                                                   size_t message_size);

/* Checks everything, and enqueues on `stream`, on the current device. */
TRTCONVERT_API TrtConvertStatus trtconvert_channels_last_add_run(const TrtConvertChannelsLastAddParams* params, char* message,
                                                                 size_t message_size);

#ifdef __cplusplus
}
#endif

#endif /* TRTCONVERT_CHANNELS_LAST_ADD_H_ */
