// Lists for the kernels from masks. From a key mask: the visible keys. From a block mask: the key tiles of each row of blocks, and for
// the kernel of sm_90a the order in which thread blocks take the rows.
#include <algorithm>

#include "element.cuh"
#include "launch.h"

namespace trtconvert::attention {
namespace keys {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

// One thread block for each batch element.
__global__ void __launch_bounds__(kThreads) list_kernel(const __grid_constant__ Params p) {
  __shared__ int warp_counts[kWarps];
  const int batch = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint8_t* const mask = p.key_mask + batch * p.key_mask_strides[0];
  const int end = num_keys_of(p, batch);
  int32_t* const visible_keys = p.visible_keys + int64_t(batch) * p.num_keys;
  int count = 0;
  for (int first = 0; first < end; first += kThreads) {
    const int key = first + int(threadIdx.x);
    const bool visible = key < end && mask[key * p.key_mask_strides[1]] != 0;
    const unsigned of_warp = __ballot_sync(0xffffffffu, visible);
    if (lane == 0) warp_counts[warp] = __popc(of_warp);
    __syncthreads();
    int place = count + __popc(of_warp & ((1u << lane) - 1));
    for (int w = 0; w < kWarps; ++w) {
      place += w < warp ? warp_counts[w] : 0;
      count += warp_counts[w];
    }
    if (visible) visible_keys[place] = key;
    __syncthreads();  // before the next keys' counts
  }
  if (threadIdx.x == 0) p.visible_counts[batch] = count;
}

}  // namespace keys

namespace blocks {

constexpr int kListThreads = 128;
constexpr int kListWarps = kListThreads / 32;

// One warp for each row. Tiles with keys beyond the element's length are skipped.
__global__ void __launch_bounds__(kListThreads) list_kernel(const __grid_constant__ Params p) {
  const int64_t rows = int64_t(p.batch) * p.block_mask_heads * p.block_rows;
  const int64_t row = int64_t(blockIdx.x) * kListWarps + threadIdx.x / 32;
  if (row >= rows) return;
  const int64_t of_element = int64_t(p.block_mask_heads) * p.block_rows;
  const int batch = int(row / of_element);
  const int64_t given = p.block_mask_batch > 1 ? row : row % of_element;
  const uint8_t* const mask = p.block_mask + given * p.key_tiles;
  int32_t* const tiles = p.block_tiles + row * p.key_tiles;
  const int end = ceil_div(num_keys_of(p, batch), kKeyTile), lane = threadIdx.x % 32;
  int count = 0;
#pragma unroll 4
  for (int first = 0; first < end; first += 32) {
    const int tile = first + lane;
    const unsigned kept = __ballot_sync(0xffffffffu, tile < end && mask[tile] != 0);
    if (kept >> lane & 1) tiles[count + __popc(kept & ((1u << lane) - 1))] = tile;
    count += __popc(kept);
  }
  if (lane == 0) p.block_counts[row] = count;
}

// One thread block for each batch element sorts the rows of all its heads by length, so that no thread block begins a long row when
// the others are done. Rows are sorted by octaves; the order within an octave stays, because neighbours share keys. The result does
// not depend on the order of threads.
constexpr int kOrderThreads = 512;
constexpr int kOctaves = 16;  // of the number of tiles; the last octave holds all longer rows

__device__ __forceinline__ int octave_of(int count) { return kOctaves - 1 - min(32 - __clz(count), kOctaves - 1); }

__global__ void __launch_bounds__(kOrderThreads) order_kernel(const __grid_constant__ Params p) {
  __shared__ int places[kOctaves * kOrderThreads];  // by octave, then by thread: the number of rows, then the position of the next
  __shared__ int warp_sums[kOrderThreads / 32];
  const int batch = blockIdx.x, thread = threadIdx.x, lane = thread % 32;
  const int units = p.heads * p.block_rows, each = ceil_div(units, kOrderThreads);
  const int first = min(thread * each, units), end = min(first + each, units);
  const auto count_of = [&](int unit) { return p.block_counts[block_row_of(p, batch, unit / p.block_rows, unit % p.block_rows)]; };

#pragma unroll
  for (int octave = 0; octave < kOctaves; ++octave) places[octave * kOrderThreads + thread] = 0;
  for (int unit = first; unit < end; ++unit) ++places[octave_of(count_of(unit)) * kOrderThreads + thread];
  __syncthreads();

  // An exclusive sum over all entries, kOctaves neighbours a thread.
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kOctaves; ++i) {
    const int here = places[thread * kOctaves + i];
    places[thread * kOctaves + i] = sum;
    sum += here;
  }
  int before = sum;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, before, distance);
    if (lane >= distance) before += other;
  }
  if (lane == 31) warp_sums[thread / 32] = before;
  before -= sum;
  __syncthreads();
  for (int warp = 0; warp < thread / 32; ++warp) before += warp_sums[warp];
#pragma unroll
  for (int i = 0; i < kOctaves; ++i) places[thread * kOctaves + i] += before;
  __syncthreads();

  BlockRow* const order = p.block_order + int64_t(batch) * units;
  for (int unit = first; unit < end; ++unit) {
    const int64_t row = block_row_of(p, batch, unit / p.block_rows, unit % p.block_rows);
    const int count = p.block_counts[row];
    const int last = count > 0 ? p.block_tiles[row * p.key_tiles + count - 1] : -1;
    order[places[octave_of(count) * kOrderThreads + thread]++] = {unit, count, last, 0};
  }
}

}  // namespace blocks

// Ordinary launches, like the pre-pass: the previous call may still use the workspace.
cudaError_t launch_key_lists(const Params& p, cudaStream_t stream) {
  keys::list_kernel<<<unsigned(p.batch), keys::kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_block_lists(const Params& p, cudaStream_t stream) {
  const int64_t rows = int64_t(p.batch) * p.block_mask_heads * p.block_rows;
  const int64_t thread_blocks = (rows + blocks::kListWarps - 1) / blocks::kListWarps;
  if (thread_blocks > INT32_MAX || int64_t(p.heads) * p.block_rows > INT32_MAX) return cudaErrorInvalidConfiguration;
  blocks::list_kernel<<<unsigned(thread_blocks), blocks::kListThreads, 0, stream>>>(p);
  if (p.multiprocessors > 0) blocks::order_kernel<<<unsigned(p.batch), blocks::kOrderThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace trtconvert::attention
