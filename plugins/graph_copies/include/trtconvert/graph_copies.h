/* C API of copies in CUDA graphs: plain C, no TensorRT, no torch.
 *
 * A CUDA graph keeps its recorded addresses. A graph with inputs and outputs at other addresses in every launch works on its own
 * buffers: one kernel node copies all inputs into the buffers, another copies all outputs out of them. A launch sets the
 * addresses of the caller's tensors in a node, by value, in one call of the driver; copy nodes would take one call per tensor.
 *
 * Streams, graphs and nodes are the driver's handles, whichever CUDA runtime of the process made them. Functions return a
 * cudaError_t, 0 for success, and work on the current device, which is that of the stream. Different structs may be used by
 * several threads at once, one struct by one thread at a time.
 */
#ifndef TRTCONVERT_GRAPH_COPIES_H_
#define TRTCONVERT_GRAPH_COPIES_H_

#include <stdint.h>

#include "trtconvert/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Copies of one node. Few models have more inputs, and the device is sent the whole struct with every launch. */
#define TRTCONVERT_MOST_COPIES 32

/* Both ends are memory that kernels on the device can use, at any alignment, and do not overlap. */
typedef struct {
  void* buffer;   /* the graph's end; null where bytes is 0 at most */
  void* outer;    /* the caller's end: null when recorded, set by launches, null again where a launch failed */
  uint64_t bytes; /* 0: nothing is copied */
} TrtConvertCopy;

typedef struct {
  uint32_t struct_size; /* sizeof(TrtConvertCopyNode) of the caller */
  int32_t outwards;     /* nonzero: from the buffers to the caller (outputs); 0: into the buffers (inputs) */
  int32_t count;        /* copies: 1..TRTCONVERT_MOST_COPIES */
  int32_t blocks;       /* set when recorded: thread blocks for each copy */
  void* node;           /* set when recorded: cudaGraphNode_t */
  TrtConvertCopy copies[TRTCONVERT_MOST_COPIES];
} TrtConvertCopyNode;

typedef struct {
  void* exec;                /* cudaGraphExec_t */
  void* stream;              /* cudaStream_t to launch on; null is the default stream */
  TrtConvertCopyNode* nodes; /* recorded; the graph that exec was instantiated from still exists */
  const uint64_t* addresses; /* the caller's end of every copy, those without bytes too: node by node, in their order */
  int32_t num_nodes;         /* >= 0 */
} TrtConvertCopyingGraph;

/* Adds a kernel that makes the node's copies to a stream that is being captured, and sets `blocks` and `node`.
 *
 * cudaErrorInvalidValue: a null pointer, or a struct_size or count out of range.
 * cudaErrorStreamCaptureUnmatched: the stream is not being captured. */
TRTCONVERT_API int trtconvert_record_copies(void* stream, TrtConvertCopyNode* node);

/* Sets the addresses in the nodes that changed since the previous launch, and launches. Launches in flight keep their addresses.
 * After an error nothing was launched, and the next launch sets the failed node's addresses anew.
 *
 * cudaErrorInvalidValue: a null pointer, also among the addresses of copies that have bytes; or a node that cannot have been recorded. */
TRTCONVERT_API int trtconvert_launch_copies(const TrtConvertCopyingGraph* graph);

#ifdef __cplusplus
}
#endif

#endif /* TRTCONVERT_GRAPH_COPIES_H_ */
