// Stands in for CUDA's header, of which TensorRT's headers use only these opaque handles.
#pragma once
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
