// Copies in CUDA graphs: the kernel and its C API. Nothing here throws.
#include "trtconvert/graph_copies.h"

#include <algorithm>

namespace trtconvert::copies {
namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 4;            // loads of a thread before its first store
constexpr int kBlocksPerProcessor = 4;  // 64 KiB in flight on each: more than its share of latency times bandwidth
constexpr uint64_t kBlockBytes = kThreads * kInFlight * sizeof(uint4);

static_assert(sizeof(TrtConvertCopyNode) <= 4096, "the parameters of a kernel may have so many bytes on every GPU");

template <typename Vector>
__device__ __forceinline__ void copy(char* to, const char* from, uint64_t bytes) {
  const uint64_t count = bytes / sizeof(Vector);
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * kThreads;
  auto* const written = reinterpret_cast<Vector*>(to);
  const auto* const read = reinterpret_cast<const Vector*>(from);
  for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += kInFlight * step) {
    Vector held[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k)
      if (i + k * step < count) held[k] = read[i + k * step];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k)
      if (i + k * step < count) written[i + k * step] = held[k];
  }
  const uint64_t rest = count * sizeof(Vector) + threadIdx.x;
  if (blockIdx.x == 0 && rest < bytes) to[rest] = from[rest];
}

// Row y of the grid makes copy y.
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ TrtConvertCopyNode node) {
  const TrtConvertCopy& c = node.copies[blockIdx.y];
  auto* const to = static_cast<char*>(node.outwards ? c.outer : c.buffer);
  const auto* const from = static_cast<const char*>(node.outwards ? c.buffer : c.outer);
  const uint64_t ends = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from);
  if (ends % 16 == 0) return copy<uint4>(to, from, c.bytes);
  if (ends % 8 == 0) return copy<uint64_t>(to, from, c.bytes);
  if (ends % 4 == 0) return copy<uint32_t>(to, from, c.bytes);
  if (ends % 2 == 0) return copy<uint16_t>(to, from, c.bytes);
  copy<char>(to, from, c.bytes);
}

// The runtime keeps an error until it is read, and would report it at the next launch of this library.
int finished(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

// The first use of the library loads its kernels; a capturing thread may load only in this mode.
class MayLoadKernels {
 public:
  MayLoadKernels() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~MayLoadKernels() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  MayLoadKernels(const MayLoadKernels&) = delete;
  MayLoadKernels& operator=(const MayLoadKernels&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

bool usable(const TrtConvertCopyNode* node) {
  if (!node || node->struct_size != sizeof(TrtConvertCopyNode)) return false;
  if (node->count < 1 || node->count > TRTCONVERT_MOST_COPIES) return false;
  return std::all_of(node->copies, node->copies + node->count, [](const auto& c) { return c.buffer || !c.bytes; });
}

// Blocks for each copy: enough for the largest copy, but no more than keep the device busy. A single
// copy among many still gets every multiprocessor.
cudaError_t choose_blocks(TrtConvertCopyNode& node) {
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  uint64_t largest = 1;
  for (int i = 0; i < node.count; ++i) largest = std::max(largest, node.copies[i].bytes);
  const uint64_t most = std::max(processors, kBlocksPerProcessor * processors / node.count);
  node.blocks = static_cast<int32_t>(std::min(most, (largest - 1) / kBlockBytes + 1));
  return cudaSuccess;
}

cudaError_t set_params(cudaGraphExec_t exec, TrtConvertCopyNode& node) {
  void* arguments[] = {&node};
  cudaKernelNodeParams params = {};
  params.func = reinterpret_cast<void*>(copy_kernel);
  params.gridDim = dim3(node.blocks, node.count);
  params.blockDim = dim3(kThreads);
  params.kernelParams = arguments;
  return cudaGraphExecKernelNodeSetParams(exec, static_cast<cudaGraphNode_t>(node.node), &params);
}

// Points the caller's ends of a node to `addresses`.
cudaError_t aim(cudaGraphExec_t exec, TrtConvertCopyNode& node, const uint64_t* addresses) {
  bool moved = false, valid = true;
  for (int i = 0; i < node.count; ++i) {
    TrtConvertCopy& c = node.copies[i];
    if (!c.bytes) continue;
    void* const address = reinterpret_cast<void*>(addresses[i]);
    valid = valid && address;
    moved = moved || address != c.outer;
    c.outer = address;
  }
  if (valid && !moved) return cudaSuccess;
  const cudaError_t error = valid && node.node ? set_params(exec, node) : cudaErrorInvalidValue;
  if (error != cudaSuccess)  // the node's addresses are unknown now
    for (int i = 0; i < node.count; ++i) node.copies[i].outer = nullptr;
  return error;
}

}  // namespace
}  // namespace trtconvert::copies

using namespace trtconvert::copies;

extern "C" {

int trtconvert_record_copies(void* stream, TrtConvertCopyNode* node) {
  if (!usable(node)) return cudaErrorInvalidValue;
  const auto captured = static_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaError_t error = cudaStreamIsCapturing(captured, &status);
  if (error != cudaSuccess) return finished(error);
  if (status == cudaStreamCaptureStatusNone) return cudaErrorStreamCaptureUnmatched;

  const MayLoadKernels scope;
  error = choose_blocks(*node);
  if (error != cudaSuccess) return finished(error);
  cudaFuncAttributes attributes;
  error = cudaFuncGetAttributes(&attributes, copy_kernel);  // loads the kernel
  if (error != cudaSuccess) return finished(error);
  void* arguments[] = {node};
  const dim3 grid(node->blocks, node->count);
  error = cudaLaunchKernel(reinterpret_cast<void*>(copy_kernel), grid, dim3(kThreads), arguments, 0, captured);
  if (error != cudaSuccess) return finished(error);

  // The stream's next work waits for the kernel only.
  const cudaGraphNode_t* last = nullptr;
  size_t count = 0;
#if CUDART_VERSION >= 13000
  error = cudaStreamGetCaptureInfo(captured, &status, nullptr, nullptr, &last, nullptr, &count);
#else
  error = cudaStreamGetCaptureInfo_v2(captured, &status, nullptr, nullptr, &last, &count);
#endif
  if (error != cudaSuccess) return finished(error);
  if (status != cudaStreamCaptureStatusActive || count != 1) return cudaErrorStreamCaptureInvalidated;
  node->node = last[0];
  return cudaSuccess;
}

int trtconvert_launch_copies(const TrtConvertCopyingGraph* graph) {
  if (!graph || !graph->exec || graph->num_nodes < 0) return cudaErrorInvalidValue;
  if (graph->num_nodes && (!graph->nodes || !graph->addresses)) return cudaErrorInvalidValue;
  const auto exec = static_cast<cudaGraphExec_t>(graph->exec);
  const uint64_t* addresses = graph->addresses;
  for (int i = 0; i < graph->num_nodes; ++i) {
    TrtConvertCopyNode& node = graph->nodes[i];
    if (!usable(&node)) return cudaErrorInvalidValue;
    const cudaError_t error = aim(exec, node, addresses);
    if (error != cudaSuccess) return finished(error);
    addresses += node.count;
  }
  return finished(cudaGraphLaunch(exec, static_cast<cudaStream_t>(graph->stream)));
}

}  // extern "C"
