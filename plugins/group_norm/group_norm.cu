// Group norms of images with channels last: the kernel and its C API. Nothing here throws.
//
// A cluster of thread blocks computes a slab of an image: some groups, all pixels. Each thread block has some of the pixels, and
// keeps them in shared memory from the sums to the results, so memory is read once. At a U-Net's sizes all thread blocks fit on the
// device together. Clusters exchange the mean and the squares of each group by distributed shared memory.
#include "trtconvert/group_norm.h"

#include <algorithm>
#include <mutex>
#include <numeric>
#include <type_traits>

#include "common/arithmetic.cuh"
#include "common/cluster.cuh"
#include "common/copies.cuh"
#include "common/device.h"
#include "common/layer_modes.cuh"
#include "common/layer_modes.h"
#include "common/report.h"
#include "common/vector.cuh"

namespace trtconvert::group_norm {
namespace {

constexpr int kThreads = 256;
constexpr int kMostThreads = 512;  // if a slab has more vectors than kThreads
constexpr int kMostBlocks = 8;     // of a cluster: the number that every device with clusters supports
constexpr int kAtOnce = 4;         // vectors of a thread that are computed together
constexpr int kAhead = 3;          // multiple of kAtOnce that is copied to shared memory ahead
constexpr int kWideSlab = 512;     // channels; wider slabs only if the narrowest is wider
static_assert(kMostThreads * kVector == TRTCONVERT_GROUP_NORM_MOST_CHANNELS);

// Numbers of vectors for the threads of each row: the first rows have one more than the others.
struct Share {
  int least, rows_with_more;
  float pixels;  // for all pixels
};

struct Params {
  const uint4* x;       // [B, pixels, vectors]
  const uint4* shift;   // [B, vectors], or null
  const uint4* weight;  // [vectors]
  const uint4* bias;    // [vectors]
  uint4* normed;        // [B, pixels, vectors]
  int vectors;          // of a pixel, C / kVector
  int slab_vectors;     // of a pixel, in a cluster
  int of_slab;          // thread * of_slab / 2^20 is thread / slab_vectors
  int thread_rows;      // pixels that a thread block's threads cover at once, one vector a thread
  int rows;             // pixels that the thread block uses
  int kept;             // of a thread's vectors, the number that stays in shared memory
  int parts;            // of the rows, each summed by one thread
  int groups;           // of a cluster
  int group_channels;
  float of_elements;    // weight of one element of a group in the mean
  float epsilon;
  int64_t pixels;       // of an image
  int block_pixels;     // of each first thread block of a cluster; the next one has the rest, the others have none
  int whole_blocks;
  Share whole, rest;

  // INT8 output in place of normed.
  uint2* payload;        // [B, pixels, vectors]
  const float4* factor;  // [2 vectors], or null
  TrtConvertModeTable table;
  int sample_images;
  uint8_t* marks;        // [B, TRTCONVERT_IMAGE_MARKS]
};

// Shared memory of a thread block, in order.
struct Layout {
  int kept_vectors;  // uint4: pixels, as they were read
  int columns;       // float4, four times: sums and squares of two channels in a row of threads
  int channels;      // float: the first pixel
  int sums;          // float2: of each channel sum and squares, for each part of the rows
  int groups;        // float2, for each thread block of the cluster: mean and squares there; float2: mean and factor of all
                     // and uint64: the barrier of data from other thread blocks

  __host__ __device__ explicit Layout(const Params& p)
      : kept_vectors(p.kept * p.rows * p.slab_vectors),
        columns(p.rows * p.slab_vectors),
        channels(p.slab_vectors * kVector),
        sums(channels * p.parts),
        groups(p.groups) {}

  __host__ __device__ int64_t bytes() const {
    return int64_t{16} * (kept_vectors + kVector / 2 * columns) + int64_t{4} * channels +
           int64_t{8} * (sums + groups * (kMostBlocks + 1) + 1);
  }
};

template <typename T>
__device__ __forceinline__ void widen(uint4 words, float (&channels)[kVector]) {
  Vector<T> vector;
  vector.words = words;
#pragma unroll
  for (int c = 0; c < kVector / 2; ++c) {
    const float2 pair = Pair<T>::widen(vector.pairs[c]);
    channels[2 * c] = pair.x;
    channels[2 * c + 1] = pair.y;
  }
}

template <typename T>
__device__ __forceinline__ uint4 round(const float (&channels)[kVector]) {
  Vector<T> vector;
#pragma unroll
  for (int c = 0; c < kVector / 2; ++c) vector.pairs[c] = Pair<T>::round(channels[2 * c], channels[2 * c + 1]);
  return vector.words;
}

template <typename T>
__device__ __forceinline__ uint4 sum_of_vectors(uint4 a, uint4 b) {
  Vector<T> x, y;
  x.words = a;
  y.words = b;
#pragma unroll
  for (int c = 0; c < kVector / 2; ++c) x.pairs[c] = sum_of<T>(x.pairs[c], y.pairs[c]);
  return x.words;
}

// x * sigmoid(x) of two numbers with one reciprocal: reciprocals and powers of 2 are the bottleneck. Powers are clamped where the
// product of two would overflow; the error of results beyond is less than 1e-17.
__device__ __forceinline__ void silu(float& a, float& b) {
  constexpr float kMost = 63.f;
  const float of_a = 1.f + exp2_approx(fminf(-kLog2e * a, kMost)), of_b = 1.f + exp2_approx(fminf(-kLog2e * b, kMost));
  const float of_both = reciprocal(of_a * of_b);
  a *= of_both * of_b;
  b *= of_both * of_a;
}

// Two thread blocks to a multiprocessor, as `cycles` counts on.
template <typename T, bool kSilu, bool kQuantises>
__global__ void __launch_bounds__(kMostThreads, 2) group_norm_kernel(const __grid_constant__ Params p) {
  extern __shared__ uint4 shared[];
  const Layout layout(p);
  auto* const columns = reinterpret_cast<float4*>(shared + layout.kept_vectors);
  auto* const pivots = reinterpret_cast<float*>(columns + kVector / 2 * layout.columns);
  auto* const sums = reinterpret_cast<float2*>(pivots + layout.channels);
  auto* const of_blocks = sums + layout.sums;
  auto* const normals = of_blocks + layout.groups * kMostBlocks;

  const int block = blockIdx.x, slab = blockIdx.y, image = blockIdx.z, blocks = gridDim.x;
  const ClusterMail mail(reinterpret_cast<uint64_t*>(normals + layout.groups), blocks);
  mail.open(static_cast<uint32_t>(sizeof(float2)) * layout.groups * blocks);

  const auto pixels_of = [&](int of_block) {
    return of_block < p.whole_blocks ? p.whole.pixels : of_block == p.whole_blocks ? p.rest.pixels : 0.f;
  };
  const Share share = block < p.whole_blocks ? p.whole : block == p.whole_blocks ? p.rest : Share{};
  const int thread = threadIdx.x, row = thread * p.of_slab >> 20, column = thread - row * p.slab_vectors;
  const int count = row < p.rows ? share.least + (row < share.rows_with_more ? 1 : 0) : 0;  // of this thread's vectors
  const int vector = slab * p.slab_vectors + column;                                         // of a pixel
  const uint4* const x = p.x + (image * p.pixels + int64_t{block} * p.block_pixels + row) * p.vectors + vector;
  const int64_t step = int64_t{p.rows} * p.vectors;
  uint4* const kept = shared + thread;
  const int kept_step = layout.columns, in_shared = min(count, p.kept);

  // The slabs of an image share its marks. A slab whose groups are not finite sets its first mark at the end.
  if constexpr (kQuantises) {
    const int mark = slab + thread * static_cast<int>(gridDim.y);
    if (block == 0 && mark < TRTCONVERT_IMAGE_MARKS) p.marks[image * TRTCONVERT_IMAGE_MARKS + mark] = 0;
  }

  int copied = 0;
  const uint4* source = x;
  uint32_t s_target = static_cast<uint32_t>(__cvta_generic_to_shared(kept));
  const auto copy = [&] {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i, ++copied, source += step, s_target += 16 * kept_step)
      if (copied < in_shared) copy_async(s_target, source);
    commit_copies();
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) copy();
  uint4 shift = {};
  if (count > 0 && p.shift) shift = p.shift[int64_t{image} * p.vectors + vector];
  if (thread < p.slab_vectors) {
    float values[kVector] = {};
    if (count > 0) widen<T>(sum_of_vectors<T>(x[0], shift), values);
#pragma unroll
    for (int c = 0; c < kVector; ++c) pivots[thread * kVector + c] = values[c];
  }
  __syncthreads();

  // Sums differences to the first channel of each group in this thread block's first pixel: plain sums of squares would cancel for
  // values far from zero.
  const int first_group = column * kVector / p.group_channels, in_first_group = column * kVector - first_group * p.group_channels;
  const auto for_each_group = [&](auto action) {
    int group = first_group, in_group = in_first_group;
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      action(c, group);
      if (++in_group == p.group_channels) ++group, in_group = 0;
    }
  };
  float sum[kVector] = {}, squares[kVector] = {}, pivot[kVector] = {};
  if (count > 0) for_each_group([&](int c, int group) { pivot[c] = pivots[group * p.group_channels]; });
  const auto add = [&](uint4 words) {
    float values[kVector];
    widen<T>(sum_of_vectors<T>(words, shift), values);
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      const float difference = values[c] - pivot[c];
      sum[c] += difference;
      squares[c] += difference * difference;
    }
  };
  // Sums vectors that are not kept. A shared function of both loops takes 12 % longer: the compiler then has fewer kept vectors in
  // flight from shared memory.
  const auto load = [&](int first, uint4(&words)[kAtOnce]) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (first + i < count) words[i] = x[(first + i) * step];
  };
  int done = 0;
  for (; done + kAtOnce <= in_shared; done += kAtOnce) {
    copy();
    wait_copies<kAhead>();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) add(kept[(done + i) * kept_step]);
  }
  wait_copies<0>();
  for (; done < in_shared; ++done) add(kept[done * kept_step]);
  for (; done < count; done += kAtOnce) {
    uint4 words[kAtOnce];
    load(done, words);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (done + i < count) add(words[i]);
  }
  if (row < p.rows) {
#pragma unroll
    for (int c = 0; c < kVector / 2; ++c)
      columns[c * layout.columns + thread] = make_float4(sum[2 * c], squares[2 * c], sum[2 * c + 1], squares[2 * c + 1]);
  }
  uint4 weight = {}, bias = {};
  if (count > 0) {
    weight = p.weight[vector];
    bias = p.bias[vector];
  }
  __syncthreads();

  // Each thread sums two channels over the rows, in parts; then one sums all parts of a group's channels, which are adjacent.
  for (int at = row; at < kVector / 2 * p.parts && row < p.thread_rows; at += p.thread_rows) {
    const int part = at / (kVector / 2), pair = at % (kVector / 2);
    float4 total = {};
#pragma unroll 4
    for (int i = part; i < p.rows; i += p.parts) {
      const float4 found = columns[pair * layout.columns + i * p.slab_vectors + column];
      total.x += found.x;
      total.y += found.y;
      total.z += found.z;
      total.w += found.w;
    }
    float2* const target = sums + (column * kVector + 2 * pair) * p.parts + part;
    target[0] = make_float2(total.x, total.y);
    target[p.parts] = make_float2(total.z, total.w);
  }
  mail.wait_for_others();
  __syncthreads();
  const int lane = thread % 32, warp = thread / 32, warps = blockDim.x / 32, group_sums = p.group_channels * p.parts;
  const float of_number = share.pixels > 0.f ? p.of_elements * reciprocal(share.pixels) : 0.f;
  for (int group = warp; group < layout.groups; group += warps) {
    const float pivot_of_group = pivots[group * p.group_channels];
    float2 total = {};
#pragma unroll 4
    for (int i = lane; i < group_sums; i += 32) {
      const float2 found = sums[group * group_sums + i];
      total.x += found.x;
      total.y += found.y;
    }
    const float of_sum = lane_sum<32>(total.x), of_squares = lane_sum<32>(total.y), offset = of_sum * of_number;
    if (lane < blocks)
      mail.send(&of_blocks[group * kMostBlocks + block], lane,
                make_float2(pivot_of_group + offset, nan_max(of_squares - of_sum * offset, 0.f)));
  }
  const int other = lane % kMostBlocks;
  const float of_all = pixels_of(other);
  mail.wait();

  // Eight lanes combine a group's results of the thread blocks (Chan, Golub and LeVeque 1983).
  for (int at = thread; at - lane < layout.groups * kMostBlocks; at += blockDim.x) {
    const bool is_there = at < layout.groups * kMostBlocks && other < blocks;
    const float2 found = is_there ? of_blocks[at] : float2{};
    const float of_first = __shfl_sync(0xffffffffu, found.x, 0, kMostBlocks);
    const float mean = of_first + lane_sum<kMostBlocks>(is_there ? of_all * (found.x - of_first) : 0.f), difference = found.x - mean;
    const float variance = lane_sum<kMostBlocks>(is_there ? found.y * p.of_elements + of_all * difference * difference : 0.f);
    if (is_there && other == 0) normals[at / kMostBlocks] = make_float2(mean, rsqrtf(variance + p.epsilon));
  }
  __syncthreads();

  if (count == 0) return;
  float factor[kVector], offset[kVector];
  widen<T>(weight, factor);
  widen<T>(bias, offset);
  for_each_group([&](int c, int group) {
    const float2 normal = normals[group];
    factor[c] *= normal.y;
    offset[c] -= normal.x * factor[c];
  });
  const auto norm = [&](uint4 words) {
    float values[kVector];
    widen<T>(sum_of_vectors<T>(words, shift), values);
#pragma unroll
    for (int c = 0; c < kVector; ++c) values[c] = values[c] * factor[c] + offset[c];
    if constexpr (kSilu) {
#pragma unroll
      for (int c = 0; c < kVector; c += 2) silu(values[c], values[c + 1]);
    }
    return round<T>(values);
  };
  const auto write = [&](auto result, auto* target) {
    int i = 0;
#pragma unroll 2
    for (; i < in_shared; ++i) target[i * step] = result(norm(kept[i * kept_step]));
    for (; i < count; i += kAtOnce) {
      uint4 words[kAtOnce];
      load(i, words);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (i + k < count) target[(i + k) * step] = result(norm(words[k]));
    }
  };
  if constexpr (!kQuantises) {
    write([](uint4 normed) { return normed; }, p.normed + (x - p.x));
  } else {
    const Sample sample = sample_of(p.table, {TRTCONVERT_STATIC, true}, image / p.sample_images);
    const float scale = sample.usable ? sample.x_scale : 1.f, inverse = 1.f / scale;
    float4 equaliser[2] = {{1.f, 1.f, 1.f, 1.f}, {1.f, 1.f, 1.f, 1.f}};
    if (p.factor) equaliser[0] = p.factor[2 * vector], equaliser[1] = p.factor[2 * vector + 1];
    const auto quantised = [&](uint4 normed) {
      float values[kVector];
      widen<T>(normed, values);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        values[4 * half] *= equaliser[half].x;
        values[4 * half + 1] *= equaliser[half].y;
        values[4 * half + 2] *= equaliser[half].z;
        values[4 * half + 3] *= equaliser[half].w;
      }
      return quantise8_quotients<true>(values, scale, inverse);
    };
    write(quantised, p.payload + (x - p.x));
    // Read behind the loop, which has no free register.
    bool broken = false;  // a group of this thread, its weight or its bias is not finite
#pragma unroll
    for (int c = 0; c < kVector; ++c) broken |= !isfinite(factor[c]) || !isfinite(offset[c]);
    if (broken && block == 0 && row == 0) p.marks[image * TRTCONVERT_IMAGE_MARKS + slab] = 1;
  }
}

// A launch with the thread blocks along x as one cluster. The launch is not early (early_launch.cuh): its thread blocks would wait, up to
// 97 µs in SDXL, if the previous convolution has thread blocks left to start.
struct Launch {
  cudaLaunchAttribute attribute = {};
  cudaLaunchConfig_t config = {};

  Launch(dim3 grid, int threads, int64_t shared_bytes, cudaStream_t stream) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = grid.x;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  Launch(const Launch&) = delete;
};

struct Plan {
  Params params;
  int images, slabs, blocks, threads;
  int64_t shared_bytes;
};

int64_t whole(int64_t size, int64_t of) { return (size + of - 1) / of; }

// Capacity of a device.
struct Room {
  int block_bytes = 0, shared_bytes = 0, reserved_bytes = 0;  // of a thread block and a multiprocessor, and the overhead of each block
  int clusters[kMostBlocks + 1] = {};  // of this number of thread blocks, each on its own multiprocessor

  // Capacity of the current device, queried until one query succeeds: GPUs of one kind differ in the arrangement of their
  // multiprocessors.
  static cudaError_t read(Room& room) {
    constexpr int kMostDevices = 64;
    static std::mutex mutex;
    static Room rooms[kMostDevices];
    static bool is_known[kMostDevices];
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device)) return error;
    if (device >= kMostDevices) return ask(device, room);
    const std::lock_guard lock(mutex);
    if (!is_known[device]) {
      if (const cudaError_t error = ask(device, rooms[device])) return error;
      is_known[device] = true;
    }
    room = rooms[device];
    return cudaSuccess;
  }

 private:
  static cudaError_t ask(int device, Room& room) {
    const auto kernel = group_norm_kernel<__half, true, false>;
    cudaError_t error = cudaDeviceGetAttribute(&room.block_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (!error) error = cudaDeviceGetAttribute(&room.shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    if (!error) error = cudaDeviceGetAttribute(&room.reserved_bytes, cudaDevAttrReservedSharedMemoryPerBlock, device);
    if (!error) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, room.block_bytes);
    for (int blocks = 1; !error && blocks <= kMostBlocks; ++blocks) {
      Launch launch(dim3(static_cast<unsigned>(blocks)), kThreads, room.block_bytes, nullptr);
      error = cudaOccupancyMaxActiveClusters(&room.clusters[blocks], kernel, &launch.config);
    }
    return error;
  }
};

// One division of the work. `blocks` and `slab_channels` are whole units and groups.
Plan shared_out(const TrtConvertGroupNormParams& c, int slab_channels, int blocks, int64_t most_shared_bytes) {
  Plan plan = {};
  Params& p = plan.params;
  plan.images = static_cast<int>(c.batch);
  plan.slabs = c.channels / slab_channels;
  plan.blocks = blocks;
  p.vectors = c.channels / kVector;
  p.slab_vectors = slab_channels / kVector;
  plan.threads = p.slab_vectors > kThreads ? kMostThreads : kThreads;
  p.of_slab = (1 << 20) / p.slab_vectors + 1;
  p.pixels = c.pixels;
  p.block_pixels = static_cast<int>(whole(c.pixels, blocks));
  p.thread_rows = plan.threads / p.slab_vectors;
  p.rows = std::min(p.thread_rows, p.block_pixels);
  p.parts = std::clamp(p.thread_rows / (kVector / 2), 1, p.rows);
  p.group_channels = c.channels / c.groups;
  p.groups = slab_channels / p.group_channels;
  p.of_elements = 1.f / (static_cast<float>(c.pixels) * static_cast<float>(p.group_channels));
  p.epsilon = c.epsilon;
  p.whole_blocks = static_cast<int>(c.pixels / p.block_pixels);
  const auto share = [&](int64_t pixels) {
    return Share{static_cast<int>(pixels) / p.rows, static_cast<int>(pixels) % p.rows,
                 static_cast<float>(static_cast<double>(pixels) / static_cast<double>(c.pixels))};
  };
  p.whole = share(p.block_pixels);
  p.rest = share(c.pixels % p.block_pixels);
  const int64_t room = most_shared_bytes - Layout(p).bytes();
  p.kept = static_cast<int>(std::clamp<int64_t>(room / (int64_t{16} * p.rows * p.slab_vectors), 0, whole(p.block_pixels, p.rows)));
  plan.shared_bytes = Layout(p).bytes();
  return plan;
}

// Estimated cycles, fitted to all divisions of the images of bench/group_norm.py on H100s.
double cycles(const Plan& plan, const Room& room) {
  const Params& p = plan.params;
  // Thread blocks that a multiprocessor must run, and the number that run together; registers suffice for two.
  const int64_t all = whole(int64_t{plan.images} * plan.slabs, room.clusters[plan.blocks]);
  const int64_t together = std::clamp<int64_t>(room.shared_bytes / (plan.shared_bytes + room.reserved_bytes), 1, std::min<int64_t>(all, 2));
  // Counts the memory lines of a thread's vectors, and whether they are read again.
  const int slab_bytes = static_cast<int>(sizeof(uint4)) * p.slab_vectors, line = 128;
  const double lines = static_cast<double>(slab_bytes % line ? slab_bytes + line - 16 : slab_bytes) / (line * p.slab_vectors);
  const double vectors = static_cast<double>(whole(p.block_pixels, p.rows)), of_vector = 145 + 1680 * lines;
  const double again = 780 * (vectors - p.kept), of_round = 3000 + 120 * plan.blocks;
  const double beside_others = 1 + 0.8 * static_cast<double>(together - 1);
  return static_cast<double>(whole(all, together)) * (of_round + vectors * of_vector * beside_others + again);
}

// Selects the division of the work with the least estimated time. The search takes the host about 1 µs.
Plan plan_of(const TrtConvertGroupNormParams& c, const Room& room) {
  const int unit = std::lcm(c.channels / c.groups, kVector), units = c.channels / unit;  // channels in whole groups and vectors
  const int most_slabs = c.table.mode_set ? TRTCONVERT_IMAGE_MARKS : units;
  int least_width = 1;
  while (units % least_width || units / least_width > most_slabs) ++least_width;
  Plan best = {};
  double least = 0;
  for (int width = least_width; width <= units; ++width) {
    if (units % width || (width > least_width && unit * width > kWideSlab)) continue;
    for (int blocks = 1; blocks <= kMostBlocks && blocks <= c.pixels; ++blocks) {
      if (!room.clusters[blocks]) continue;
      const Plan plan = shared_out(c, unit * width, blocks, room.block_bytes);
      const double time = cycles(plan, room);
      if (best.blocks && time >= least) continue;
      least = time;
      best = plan;
    }
  }
  return best;
}

template <typename T, bool kSilu, bool kQuantises>
cudaError_t launch(const Plan& plan, const Room& room, cudaStream_t stream) {
  const auto kernel = group_norm_kernel<T, kSilu, kQuantises>;
  // Set to the maximum each time: another thread may be about to launch the kernel with more than this call needs.
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, room.block_bytes)) return error;
  const dim3 grid(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(plan.slabs), static_cast<unsigned>(plan.images));
  const Launch launch(grid, plan.threads, plan.shared_bytes, stream);
  return cudaLaunchKernelEx(&launch.config, kernel, plan.params);
}

constexpr int kMostImages = 65535;            // of a grid
constexpr long long kMostPixels = 1LL << 24;  // exact in FP32

TrtConvertStatus check(const TrtConvertGroupNormParams* c, Report& report) {
  if (!c) return report.fail(TRTCONVERT_INVALID_ARGUMENT, "params: expected a pointer, got null");
  if (report.check_caller(*c, TRTCONVERT_GROUP_NORM_VERSION, "group_norm.h")) return report.status;
  if (c->batch < 1 || c->batch > kMostImages) return report.invalid_int("batch", "1..65535", c->batch);
  if (c->pixels < 1 || c->pixels > kMostPixels) return report.invalid_int("pixels", "1..2^24", c->pixels);
  if (c->channels < kVector || c->channels > TRTCONVERT_GROUP_NORM_MOST_CHANNELS || c->channels % kVector)
    return report.invalid_int("channels", "8..4096 in steps of 8", c->channels);
  if (c->groups < 1 || c->channels % c->groups)
    return report.fail(TRTCONVERT_INVALID_ARGUMENT, "groups: expected a divisor of %d channels, got %d", c->channels, c->groups);
  if (report.check_data_type(c->data_type)) return report.status;
  if (report.check_flag("silu", c->silu) || report.check_epsilon(c->epsilon)) return report.status;
  if (!c->table.mode_set) return TRTCONVERT_OK;
  if (c->table.mode_set != TRTCONVERT_MODE_BIT(TRTCONVERT_STATIC))
    return report.invalid_int("table.mode_set", "0 (none) or 8 (static)", c->table.mode_set);
  return check_table(c->table, c->batch, report);
}

TrtConvertStatus check_tensors(const TrtConvertGroupNormParams& c, Report& report) {
  const bool quantises = c.table.mode_set;
  if (report.check_tensors({{"x", c.x}, {"shift", c.shift, true}, {"weight", c.weight}, {"bias", c.bias}, {"normed", c.normed, quantises}}))
    return report.status;
  if (!quantises) return TRTCONVERT_OK;
  if (c.normed)
    return report.fail(TRTCONVERT_INVALID_ARGUMENT, "normed: expected null where a payload is wanted, got %p", c.normed);
  if (report.check_tensors({{"factor", c.factor, true}, {"payload", c.payload}, {"marks", c.marks}})) return report.status;
  return check_table_tensors(c.table, report);
}

}  // namespace
}  // namespace trtconvert::group_norm

using namespace trtconvert;

extern "C" {

int trtconvert_group_norm_is_supported(void) {
  Device device;
  return device.read() == cudaSuccess && device.has_clusters();
}

TrtConvertStatus trtconvert_group_norm_check(const TrtConvertGroupNormParams* params, char* message, size_t message_size) {
  Report report(message, message_size);
  return group_norm::check(params, report);
}

TrtConvertStatus trtconvert_group_norm_run(const TrtConvertGroupNormParams* params, char* message, size_t message_size) {
  using namespace group_norm;
  Report report(message, message_size);
  if (check(params, report) || check_tensors(*params, report)) return report.status;
  Device device;
  Room room;
  if (const cudaError_t error = device.read()) return report.no_device(error);
  if (!device.has_clusters())
    return report.fail(TRTCONVERT_UNSUPPORTED_DEVICE,
                       "device: expected compute capability 9.0 or later, and a library compiled for it; got %d.%d and %s; build the "
                       "engine again on this GPU",
                       device.major, device.minor, TRTCONVERT_ARCHITECTURES);
  if (const cudaError_t error = Room::read(room)) return report.no_device(error);
  Plan plan = plan_of(*params, room);
  const auto at = [](const void* tensor) { return static_cast<const uint4*>(tensor); };
  plan.params.x = at(params->x);
  plan.params.shift = at(params->shift);
  plan.params.weight = at(params->weight);
  plan.params.bias = at(params->bias);
  plan.params.normed = static_cast<uint4*>(params->normed);
  const auto stream = static_cast<cudaStream_t>(params->stream);
  if (params->table.mode_set) {
    plan.params.payload = static_cast<uint2*>(params->payload);
    plan.params.marks = static_cast<uint8_t*>(params->marks);
    plan.params.factor = reinterpret_cast<const float4*>(params->factor);
    plan.params.table = params->table;
    plan.params.sample_images = static_cast<int>(params->batch / params->table.batch);
  }
  const auto of_type = [&](auto silu, auto quantises) {
    return params->data_type == TRTCONVERT_BFLOAT16 ? launch<__nv_bfloat16, silu(), quantises()>(plan, room, stream)
                                                    : launch<__half, silu(), quantises()>(plan, room, stream);
  };
  const auto launched = [&](auto silu) {
    return params->table.mode_set ? of_type(silu, std::true_type()) : of_type(silu, std::false_type());
  };
  return report.launched(params->silu ? launched(std::true_type()) : launched(std::false_type()), "group norm");
}

}  // extern "C"
