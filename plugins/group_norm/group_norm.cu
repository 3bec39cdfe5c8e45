// Group norms of images whose channels lie last: the kernel and its C API. Nothing here throws.
//
// A cluster of thread blocks has a slab of an image: some groups, all pixels. Each thread block has some of the pixels, and keeps
// them in shared memory from the sums to the results, so that memory is read once. All thread blocks fit on the device together at
// a U-Net's sizes. What a cluster has to exchange are the mean and the squares of each of its groups, by distributed shared memory.
#include "trtconvert/group_norm.h"

#include <algorithm>
#include <numeric>
#include <type_traits>

#include "common/cluster.cuh"
#include "common/device.h"
#include "common/report.h"
#include "common/vector.cuh"

namespace trtconvert::group_norm {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kMostBlocks = 8;  // of a cluster: as many as every device with clusters takes
constexpr int kAtOnce = 4;      // vectors of a thread whose loads are under way together
constexpr int kWideSlab = 512;  // channels; wider ones only where a group is, or what is whole groups and whole vectors

struct Params {
  const uint4* x;       // [B, pixels, vectors]
  const uint4* shift;   // [B, vectors], or null
  const uint4* weight;  // [vectors]
  const uint4* bias;    // [vectors]
  uint4* normed;        // [B, pixels, vectors]
  int pixels;
  int vectors;       // of a pixel, C / kVector
  int slab_vectors;  // of a pixel, that a cluster has
  int block_pixels;  // that a thread block has; the last ones of a cluster may have fewer
  int rows;          // pixels that a thread block takes at once, each thread a vector
  int kept;          // of a thread's vectors, those that stay in shared memory
  int group_channels;
  float epsilon;
};

// Shared memory of a thread block, one after another.
struct Layout {
  int kept_vectors;  // uint4: pixels, as they were read and shifted
  int sums;          // float2: sum and squares of each channel, for each row of threads
  int groups;        // float2, twice: mean and squares in this thread block, then mean and factor of all pixels
  int channels;      // float: what the sums are relative to

  __host__ __device__ explicit Layout(const Params& p)
      : kept_vectors(p.kept * p.rows * p.slab_vectors),
        sums(p.rows * p.slab_vectors * kVector),
        groups(p.slab_vectors * kVector / p.group_channels),
        channels(p.slab_vectors * kVector) {}

  __host__ __device__ int64_t bytes() const {
    return int64_t{16} * kept_vectors + int64_t{8} * sums + int64_t{16} * groups + int64_t{4} * channels;
  }
};

template <typename T>
__device__ __forceinline__ void widen(const Vector<T>& vector, float (&channels)[kVector]) {
#pragma unroll
  for (int c = 0; c < kVector / 2; ++c) {
    const float2 pair = Pair<T>::widen(vector.pairs[c]);
    channels[2 * c] = pair.x;
    channels[2 * c + 1] = pair.y;
  }
}

// x * sigmoid(x). Where the exponential overflows the quotient is zero.
__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

template <typename T, bool kSilu>
__global__ void __launch_bounds__(kThreads) group_norm_kernel(const __grid_constant__ Params p) {
  extern __shared__ uint4 shared[];
  const Layout layout(p);
  uint4* const kept = shared;
  auto* const sums = reinterpret_cast<float2*>(kept + layout.kept_vectors);
  auto* const groups = sums + layout.sums;
  auto* const normals = groups + layout.groups;
  auto* const pivots = reinterpret_cast<float*>(normals + layout.groups);

  const int channels = layout.channels, row_vectors = p.rows * p.slab_vectors;
  const int block = blockIdx.x, slab = blockIdx.y, image = blockIdx.z, blocks = gridDim.x;
  const int first_pixel = block * p.block_pixels;
  const int pixels = max(0, min(p.block_pixels, p.pixels - first_pixel));  // of this thread block
  const int column = threadIdx.x % p.slab_vectors, row = threadIdx.x / p.slab_vectors;
  const int vector = slab * p.slab_vectors + column;  // of a pixel
  const int count = row < p.rows && row < pixels ? (pixels - row + p.rows - 1) / p.rows : 0;  // of this thread's vectors
  const int64_t first = (int64_t{image} * p.pixels + first_pixel + row) * p.vectors + vector;
  const int64_t step = int64_t{p.rows} * p.vectors;

  Vector<T> shift, weight, bias;
  shift.words = weight.words = bias.words = uint4{};
  if (row < p.rows) {
    if (p.shift) shift.words = p.shift[int64_t{image} * p.vectors + vector];
    weight.words = p.weight[vector];  // not wanted until the end, but under way by then
    bias.words = p.bias[vector];
  }
  const auto shifted = [&](uint4 words) {
    Vector<T> x;
    x.words = words;
    if (p.shift) {
#pragma unroll
      for (int c = 0; c < kVector / 2; ++c) x.pairs[c] = sum_of<T>(x.pairs[c], shift.pairs[c]);
    }
    return x.words;
  };

  // Sums of differences to this thread block's first pixel: sums of squares alone would cancel where values are far from zero.
  float sum[kVector] = {}, squares[kVector] = {}, pivot[kVector] = {};
  if (count > 0) {
    uint4 words[kAtOnce], next[kAtOnce];
    const auto load = [&](uint4(&target)[kAtOnce], int i) {
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (i + j < count) target[j] = p.x[first + (i + j) * step];
    };
    load(next, 0);
    Vector<T> x;
    x.words = shifted(p.x[first - int64_t{row} * p.vectors]);
    widen<T>(x, pivot);
    for (int i = 0; i < count; i += kAtOnce) {
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) words[j] = next[j];
      load(next, i + kAtOnce);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (i + j >= count) continue;
        x.words = shifted(words[j]);
        if (i + j < p.kept) kept[(i + j) * row_vectors + threadIdx.x] = x.words;
        float values[kVector];
        widen<T>(x, values);
#pragma unroll
        for (int c = 0; c < kVector; ++c) {
          const float difference = values[c] - pivot[c];
          sum[c] += difference;
          squares[c] += difference * difference;
        }
      }
    }
  }
  if (row < p.rows) {
#pragma unroll
    for (int c = 0; c < kVector; ++c) sums[row * channels + column * kVector + c] = make_float2(sum[c], squares[c]);
    if (row == 0) {
#pragma unroll
      for (int c = 0; c < kVector; ++c) pivots[column * kVector + c] = pivot[c];
    }
  }
  __syncthreads();

  // Of the rows some, by as many threads as there are.
  const int parts = max(1, min(p.rows, kThreads / channels));
  for (int at = threadIdx.x; at < parts * channels; at += kThreads) {
    float2 total = {};
    for (int other = at; other < layout.sums; other += parts * channels) {
      total.x += sums[other].x;
      total.y += sums[other].y;
    }
    sums[at] = total;
  }
  __syncthreads();

  // A warp has a group: of each channel mean and squares of the differences to it, then those of the group.
  const int lane = threadIdx.x % 32;
  const float number = static_cast<float>(pixels);
  for (int group = threadIdx.x / 32; group < layout.groups; group += kWarps) {
    float means = 0.f;
    for (int c = group * p.group_channels + lane; c < (group + 1) * p.group_channels; c += 32) {
      float2 total = {};
      for (int part = 0; part < parts; ++part) {
        total.x += sums[part * channels + c].x;
        total.y += sums[part * channels + c].y;
      }
      const float offset = pixels > 0 ? total.x / number : 0.f;
      sums[c] = make_float2(pivots[c] + offset, fmaxf(total.y - total.x * offset, 0.f));
      means += sums[c].x;
    }
    const float mean = warp_sum(means) / static_cast<float>(p.group_channels);
    float spread = 0.f;
    for (int c = group * p.group_channels + lane; c < (group + 1) * p.group_channels; c += 32) {
      const float difference = sums[c].x - mean;
      spread += sums[c].y + number * difference * difference;
    }
    spread = warp_sum(spread);
    if (lane == 0) groups[group] = make_float2(mean, spread);
  }
  arrive_at_cluster();
  wait_for_cluster();

  const float group_channels = static_cast<float>(p.group_channels), inverse_pixels = 1.f / static_cast<float>(p.pixels);
  for (int group = threadIdx.x; group < layout.groups; group += kThreads) {
    float2 of_block[kMostBlocks];
    float share[kMostBlocks];  // of all pixels
#pragma unroll
    for (int other = 0; other < kMostBlocks; ++other) {
      if (other >= blocks) continue;
      of_block[other] = load_from_block(&groups[group], other);
      share[other] = static_cast<float>(max(0, min(p.block_pixels, p.pixels - other * p.block_pixels))) * inverse_pixels;
    }
    float mean = of_block[0].x, variance = 0.f;
#pragma unroll
    for (int other = 1; other < kMostBlocks; ++other)
      if (other < blocks) mean += share[other] * (of_block[other].x - of_block[0].x);
#pragma unroll
    for (int other = 0; other < kMostBlocks; ++other) {
      if (other >= blocks) continue;
      const float difference = of_block[other].x - mean;
      variance += of_block[other].y * inverse_pixels / group_channels + share[other] * difference * difference;
    }
    normals[group] = make_float2(mean, 1.f / sqrtf(variance + p.epsilon));
  }
  arrive_at_cluster();  // whose thread blocks end when none has to read here any more
  __syncthreads();

  if (count > 0) {
    float mean[kVector], factor[kVector], offset[kVector];
    widen<T>(weight, factor);
    widen<T>(bias, offset);
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      const float2 normal = normals[(column * kVector + c) / p.group_channels];
      mean[c] = normal.x;
      factor[c] *= normal.y;
    }
    for (int i = 0; i < count; i += kAtOnce) {
      Vector<T> x[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (i + j >= count) continue;
        if (i + j < p.kept) {
          x[j].words = kept[(i + j) * row_vectors + threadIdx.x];
        } else {
          x[j].words = shifted(p.x[first + (i + j) * step]);
        }
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (i + j >= count) continue;
        float values[kVector];
        widen<T>(x[j], values);
#pragma unroll
        for (int c = 0; c < kVector; ++c) {
          values[c] = (values[c] - mean[c]) * factor[c] + offset[c];
          if constexpr (kSilu) values[c] = silu(values[c]);
        }
#pragma unroll
        for (int c = 0; c < kVector / 2; ++c) x[j].pairs[c] = Pair<T>::round(values[2 * c], values[2 * c + 1]);
        p.normed[first + (i + j) * step] = x[j].words;
      }
    }
  }
  wait_for_cluster();
}

struct Plan {
  Params params;
  int images, slabs, blocks;
  int64_t shared_bytes;
};

// How the work is shared out: what takes least time by an estimate.
Plan plan_of(const TrtConvertGroupNormParams& c, const Device& device, int64_t most_shared_bytes) {
  // Cycles of a multiprocessor: memory brings it some 22 bytes in each, in sectors of 32. A thread block takes some 2,000 besides, and
  // 1,000 more to meet others.
  constexpr int64_t kBytes = 22, kSector = 32, kBeside = 2000, kMeeting = 1000;
  const auto in = [](int64_t size, int64_t of) { return (size + of - 1) / of; };
  const int group_channels = c.channels / c.groups;
  const int unit = std::lcm(group_channels, kVector), units = c.channels / unit;  // channels that are whole groups and whole vectors
  Plan best = {};
  int64_t least = INT64_MAX;
  for (int width = 1; width <= units; ++width) {
    const int slab_channels = unit * width;
    if (units % width || (width > 1 && slab_channels > kWideSlab)) continue;
    for (int blocks = 1; blocks <= kMostBlocks && blocks <= c.pixels; blocks *= 2) {
      Plan plan = {};
      Params& p = plan.params;
      p.pixels = static_cast<int>(c.pixels);
      p.vectors = c.channels / kVector;
      p.slab_vectors = slab_channels / kVector;
      p.block_pixels = static_cast<int>(in(c.pixels, blocks));
      p.rows = std::min(kThreads / p.slab_vectors, p.block_pixels);
      p.group_channels = group_channels;
      const int64_t most_kept = (most_shared_bytes - Layout(p).bytes()) / (int64_t{16} * p.rows * p.slab_vectors);
      const int64_t wanted = in(p.block_pixels, p.rows);
      p.kept = static_cast<int>(std::clamp<int64_t>(most_kept, 0, wanted));
      plan.images = static_cast<int>(c.batch);
      plan.slabs = units / width;
      plan.blocks = blocks;
      plan.shared_bytes = Layout(p).bytes();
      const int64_t bytes = p.block_pixels * in(2 * slab_channels, kSector) * kSector;
      const int64_t trips = 2 * bytes + bytes * (wanted - p.kept) / wanted;
      const int64_t waves = in(c.batch * plan.slabs * blocks, device.multiprocessors);
      const int64_t time = waves * (trips / kBytes + kBeside + (blocks > 1 ? kMeeting : 0));
      if (time >= least) continue;
      least = time;
      best = plan;
    }
  }
  return best;
}

template <typename T, bool kSilu>
cudaError_t launch(const Plan& plan, cudaStream_t stream) {
  const auto kernel = group_norm_kernel<T, kSilu>;
  const auto shared_bytes = static_cast<int>(plan.shared_bytes);
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes)) return error;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(plan.blocks);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(plan.slabs), static_cast<unsigned>(plan.images));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, plan.params);
}

constexpr int kMostImages = 65535;            // of a grid
constexpr long long kMostPixels = 1LL << 24;  // which FP32 counts without error

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
  if (report.check_flag("silu", c->silu)) return report.status;
  return report.check_epsilon(c->epsilon);
}

TrtConvertStatus check_tensors(const TrtConvertGroupNormParams& c, Report& report) {
  return report.check_tensors({{"x", c.x}, {"shift", c.shift, true}, {"weight", c.weight}, {"bias", c.bias},
                               {"normed", c.normed}});
}

cudaError_t read_shared_bytes(int& bytes) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  return error == cudaSuccess ? cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) : error;
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
  int shared_bytes = 0;
  if (const cudaError_t error = device.read()) return report.no_device(error);
  if (const cudaError_t error = read_shared_bytes(shared_bytes)) return report.no_device(error);
  if (!device.has_clusters())
    return report.fail(TRTCONVERT_UNSUPPORTED_DEVICE,
                       "device: expected compute capability 9.0 or later, and a library compiled for it; got %d.%d and %s; build the "
                       "engine again on this GPU",
                       device.major, device.minor, TRTCONVERT_ARCHITECTURES);
  Plan plan = plan_of(*params, device, shared_bytes);
  const auto at = [](const void* tensor) { return static_cast<const uint4*>(tensor); };
  plan.params.x = at(params->x);
  plan.params.shift = at(params->shift);
  plan.params.weight = at(params->weight);
  plan.params.bias = at(params->bias);
  plan.params.normed = static_cast<uint4*>(params->normed);
  plan.params.epsilon = params->epsilon;
  const auto stream = static_cast<cudaStream_t>(params->stream);
  const auto launched = [&](auto silu) {
    return params->data_type == TRTCONVERT_BFLOAT16 ? launch<__nv_bfloat16, silu>(plan, stream) : launch<__half, silu>(plan, stream);
  };
  return report.launched(params->silu ? launched(std::true_type()) : launched(std::false_type()), "group norm");
}

}  // extern "C"
