// Random arguments to every C API. Structs are allocated as long as they say they are, messages as long as they are said to be, so that
// AddressSanitizer sees whoever reads or writes further.
#include <algorithm>
#include <memory>
#include <vector>

#include "calls.h"
#include "cuda_stand_in.h"
#include "trtconvert/channels_last_add.h"
#include "trtconvert/graph_copies.h"
#include "trtconvert/group_norm.h"
#include "trtconvert/int8_attention.h"
#include "trtconvert/int8_conv.h"
#include "trtconvert/int8_linear.h"
#include "trtconvert/linear.h"
#include "trtconvert/quantise.h"
#include "trtconvert/quantise_change.h"
#include "trtconvert/residual_norm.h"
#include "trtconvert/weighted_sum.h"

namespace trtconvert::calls {
namespace {

constexpr int kMostSpoiled = 3;  // fields of one call

using Bytes = std::unique_ptr<unsigned char, decltype(&std::free)>;

// Memory of exactly so many bytes, with something in it.
Bytes exactly(size_t bytes, void const* content = nullptr, size_t content_bytes = 0) {
  Bytes memory(static_cast<unsigned char*>(std::malloc(std::max<size_t>(bytes, 1))), std::free);
  std::memset(memory.get(), 0xa5, bytes);
  if (content) std::memcpy(memory.get(), content, std::min(bytes, content_bytes));
  return memory;
}

// A message of any size, or none; what it holds has to fit the status.
struct Message {
  explicit Message(Random& random)
      : size(random.one_in(8) ? 0 : static_cast<size_t>(random.between(1, 600))), is_null(random.one_in(20)), memory(exactly(size)) {}

  char* text() const { return is_null ? nullptr : reinterpret_cast<char*>(memory.get()); }
  void check(char const* function, TrtConvertStatus status) const {
    require(status >= TRTCONVERT_OK && status <= TRTCONVERT_CUDA_ERROR, "%s: status %d", function, int(status));
    if (is_null || size == 0) return;
    require(std::memchr(memory.get(), 0, size), "%s: a message without an end", function);
    require(size == 1 || (*memory == 0) == (status == TRTCONVERT_OK), "%s: status %d with the message '%s'", function, int(status),
            text());
  }

  size_t size;
  bool is_null;
  Bytes memory;
};

// The caller's struct, shorter where it says so: a header of an older version may have been.
template <typename Params>
Bytes as_long_as_it_says(Params const& params) {
  constexpr size_t kHead = 2 * sizeof(uint32_t);
  return exactly(std::clamp<size_t>(params.struct_size, kHead, sizeof(Params)), &params, sizeof(Params));
}

template <typename Params>
using Function = TrtConvertStatus (*)(Params const*, char*, size_t);

template <typename Params>
TrtConvertStatus call(char const* name, Function<Params> function, Params const* params, Random& random, Counts& counts) {
  Message const message(random);
  TrtConvertStatus const status = function(params, message.text(), message.size);
  message.check(name, status);
  ++counts[name][std::to_string(status)];
  return status;
}

// Both functions of an API, with arguments of `valid`, and then with some fields changed.
template <typename Params>
void call_both(char const* name, Function<Params> check, Function<Params> run, Params (*valid)(Random&), Random& random,
               long long rounds, Counts& counts) {
  std::string const check_name = std::string(name) + "_check", run_name = std::string(name) + "_run";
  for (long long round = 0; round < rounds; ++round) {
    choose_device(random);
    Params params = valid(random);
    for (int64_t spoiled = random.between(0, kMostSpoiled); spoiled > 0; --spoiled) random.spoil(params);
    Bytes const memory = as_long_as_it_says(params);
    auto const* const given = random.one_in(200) ? nullptr : reinterpret_cast<Params const*>(memory.get());
    TrtConvertStatus const checked = call(check_name.c_str(), check, given, random, counts);
    TrtConvertStatus const run_status = call(run_name.c_str(), run, given, random, counts);
    // What a check refuses for its fields never runs.
    require(checked != TRTCONVERT_INVALID_ARGUMENT || run_status == TRTCONVERT_INVALID_ARGUMENT, "%s: ran what its check refused", name);
  }
}

TrtConvertModeTable mode_table(Random& random, int32_t batch) {
  TrtConvertModeTable table = {};
  table.mode_set = random.one_of({2, 4, 8, 6, 10, 12, 14});
  table.num_bins = static_cast<int32_t>(random.size(65536));
  table.batch = batch;
  table.timestep_max = 1000.f;
  table.timestep = random.address<float const>();
  table.modes = random.address<int32_t const>();
  table.x_scale = random.address<float const>();
  return table;
}

template <typename Params>
Params headed(uint32_t version) {
  Params params = {};
  params.struct_size = sizeof(Params);
  params.version = version;
  return params;
}

TrtConvertLinearParams linear(Random& random) {
  auto p = headed<TrtConvertLinearParams>(TRTCONVERT_LINEAR_VERSION);
  p.rows = random.size(1 << 24);
  p.in_channels = static_cast<int32_t>(random.size(65536, 8));
  p.out_channels = static_cast<int32_t>(random.size(65536, 8));
  p.data_type = static_cast<int32_t>(random.between(0, 1));
  p.geglu = static_cast<int32_t>(random.between(0, 1));
  p.x = random.address(), p.weight = random.address(), p.y = random.address();
  if (random.one_in(2)) p.bias = random.address();
  return p;
}

TrtConvertInt8LinearParams int8_linear(Random& random) {
  auto p = headed<TrtConvertInt8LinearParams>(TRTCONVERT_INT8_LINEAR_VERSION);
  p.rows = random.one_in(3) ? random.between(1, 20) : random.size(1 << 24);
  p.in_channels = static_cast<int32_t>(random.size(65536, 16));
  p.out_channels = static_cast<int32_t>(random.size(65536, 16));
  p.data_type = static_cast<int32_t>(random.between(0, 1));
  p.activation = static_cast<int32_t>(random.between(0, 3));
  p.mode_set = random.one_of({2, 4, 8, 6, 10, 12, 14});
  p.x = random.address(), p.weight = random.address();
  p.row_scale = random.address<float const>(), p.weight_scale = random.address<float const>();
  if (random.one_in(2)) p.bias = random.address<float const>();
  p.target_arch = random.one_in(4) ? 80 : 0;
  if (random.one_in(3)) {
    p.out_table = mode_table(random, 1);
    p.out_table.mode_set = 8;
    p.mode_set = random.one_of({4, 8, 12});
    p.out_payload = random.address(), p.out_row_scale = random.address<float>();
  } else {
    p.y = random.address();
    if (p.activation == 0 && random.one_in(2)) p.residual = random.address();
    if (random.one_in(4)) {
      p.changes = 1, p.activation = 0, p.mode_set = 8;
      p.residual = random.address();
    }
  }
  return p;
}

TrtConvertInt8ConvParams int8_conv(Random& random) {
  auto p = headed<TrtConvertInt8ConvParams>(TRTCONVERT_INT8_CONV_VERSION);
  p.batch = random.one_in(2) ? random.between(1, 4) : random.size(65536);
  p.height = static_cast<int32_t>(random.size(16384)), p.width = static_cast<int32_t>(random.size(16384));
  p.in_channels = static_cast<int32_t>(random.size(16384, 16));
  p.out_channels = static_cast<int32_t>(random.size(65536, 8));
  p.kernel_h = static_cast<int32_t>(random.between(1, 15)), p.kernel_w = static_cast<int32_t>(random.between(1, 15));
  p.stride_y = static_cast<int32_t>(random.between(1, 8)), p.stride_x = static_cast<int32_t>(random.between(1, 8));
  p.pad_y = static_cast<int32_t>(random.between(0, p.kernel_h - 1)), p.pad_x = static_cast<int32_t>(random.between(0, p.kernel_w - 1));
  p.data_type = static_cast<int32_t>(random.between(0, 1));
  p.table = mode_table(random, 1);
  p.table.mode_set = 8;
  p.x = random.address(), p.weight = random.address(), p.y = random.address(), p.marks = random.address();
  p.weight_scale = random.address<float const>();
  if (random.one_in(2)) p.bias = random.address<float const>();
  if (random.one_in(2)) p.residual = random.address();
  p.target_arch = random.one_in(4) ? 80 : 0;
  return p;
}

TrtConvertQuantiseParams quantise(Random& random) {
  auto p = headed<TrtConvertQuantiseParams>(TRTCONVERT_QUANTISE_VERSION);
  auto const batch = static_cast<int32_t>(random.size(65536));
  p.rows = batch * random.size(INT32_MAX / batch);
  p.channels = static_cast<int32_t>(random.size(65536, 16));
  p.data_type = static_cast<int32_t>(random.between(0, 1));
  p.table = mode_table(random, batch);
  p.x = random.address(), p.payload = random.address(), p.row_scale = random.address<float>();
  if (random.one_in(2)) p.factor = random.address<float const>(), p.offset = random.address<float const>();
  p.starts_early = static_cast<int32_t>(random.between(0, 1));
  return p;
}

TrtConvertQuantiseChangeParams quantise_change(Random& random) {
  auto p = headed<TrtConvertQuantiseChangeParams>(TRTCONVERT_QUANTISE_CHANGE_VERSION);
  p.batch = static_cast<int32_t>(random.size(65536));
  p.rows = p.batch * random.size(INT32_MAX / p.batch);
  p.channels = static_cast<int32_t>(random.size(65536, 16));
  p.data_type = static_cast<int32_t>(random.between(0, 1));
  p.activation = random.one_of({0, 2, 3});
  p.places = static_cast<int32_t>(random.size(65536));
  p.place = static_cast<int32_t>(random.between(0, p.places - 1));
  p.x = random.address(), p.a_hat = random.address(), p.scales = random.address<float const>();
  p.payload = random.address(), p.row_scale = random.address<float>(), p.a_next = random.address();
  if (random.one_in(2)) p.factor = random.address<float const>();
  return p;
}

TrtConvertResidualNormParams residual_norm(Random& random) {
  auto p = headed<TrtConvertResidualNormParams>(TRTCONVERT_RESIDUAL_NORM_VERSION);
  p.rows = random.size(int64_t{1} << 31);
  p.channels = static_cast<int32_t>(random.size(TRTCONVERT_RESIDUAL_NORM_MOST_CHANNELS, 16));
  p.data_type = static_cast<int32_t>(random.between(0, 1));
  p.epsilon = 1e-5f;
  p.x = random.address(), p.residual = random.address(), p.weight = random.address(), p.bias = random.address();
  p.sum = random.address(), p.normed = random.address();
  p.starts_early = static_cast<int32_t>(random.between(0, 1));
  if (random.one_in(2)) {
    p.table = mode_table(random, 1);
    p.payload = random.address(), p.row_scale = random.address<float>();
    if (random.one_in(2)) p.normed = nullptr;
  }
  return p;
}

TrtConvertGroupNormParams group_norm(Random& random) {
  auto p = headed<TrtConvertGroupNormParams>(TRTCONVERT_GROUP_NORM_VERSION);
  p.batch = random.size(65535);
  p.pixels = random.size(1 << 24);
  p.channels = static_cast<int32_t>(random.size(TRTCONVERT_GROUP_NORM_MOST_CHANNELS, 8));
  std::vector<int32_t> divisors;
  for (int32_t groups = 1; groups <= p.channels; ++groups)
    if (p.channels % groups == 0) divisors.push_back(groups);
  p.groups = divisors[random.between(0, static_cast<int64_t>(divisors.size()) - 1)];
  p.data_type = static_cast<int32_t>(random.between(0, 1));
  p.silu = static_cast<int32_t>(random.between(0, 1));
  p.epsilon = 1e-5f;
  p.x = random.address(), p.weight = random.address(), p.bias = random.address(), p.normed = random.address();
  if (random.one_in(2)) p.shift = random.address();
  if (random.one_in(2)) return p;
  p.table = mode_table(random, 1);
  p.table.mode_set = 8;
  p.normed = nullptr, p.payload = random.address(), p.marks = random.address();
  if (random.one_in(2)) p.factor = random.address<float const>();
  return p;
}

TrtConvertChannelsLastAddParams channels_last_add(Random& random) {
  auto p = headed<TrtConvertChannelsLastAddParams>(TRTCONVERT_CHANNELS_LAST_ADD_VERSION);
  p.pixels = random.size(int64_t{1} << 31);
  p.channels = static_cast<int32_t>(random.size(65536, 8));
  p.data_type = static_cast<int32_t>(random.between(0, 1));
  p.x = random.address(), p.y = random.address(), p.sum = random.address();
  return p;
}

TrtConvertWeightedSumParams weighted_sum(Random& random) {
  auto p = headed<TrtConvertWeightedSumParams>(TRTCONVERT_WEIGHTED_SUM_VERSION);
  p.count = random.size(int64_t{1} << 40);
  p.num_terms = static_cast<int32_t>(random.between(1, TRTCONVERT_MOST_TERMS));
  p.data_type = static_cast<int32_t>(random.between(0, 2));
  for (TrtConvertTerm& term : p.terms)
    term = {random.address(), static_cast<float>(random.between(-3, 3)), static_cast<int32_t>(random.between(0, 2))};
  p.sum = random.address();
  return p;
}

TrtConvertStrides strides(Random& random, int64_t tokens, int64_t heads, int64_t dim) {
  if (random.one_in(30)) return {random.odd_integer() / 8 * 8, random.odd_integer() / 8 * 8, random.odd_integer() / 8 * 8};
  if (random.one_in(2)) return {tokens * heads * dim, heads * dim, dim};
  return {tokens * heads * dim, dim, tokens * dim};
}

TrtConvertAttentionParams attention(Random& random) {
  auto p = headed<TrtConvertAttentionParams>(TRTCONVERT_ATTENTION_VERSION);
  int64_t const group = random.one_in(2) ? 1 : random.between(1, 8);
  p.num_kv_heads = static_cast<int32_t>(random.size(random.one_in(3) ? 65535 / group : 64));
  p.num_heads = static_cast<int32_t>(p.num_kv_heads * group);
  p.batch = static_cast<int32_t>(random.size(random.one_in(3) ? 65535 : 16));
  p.head_dim = static_cast<int32_t>(random.between(4, 32) * 8);
  // Of sizes that fit together, or of any.
  int64_t const most = random.one_in(3) ? 1 << 30
                                        : std::clamp<int64_t>((int64_t{1} << 44) / p.batch / p.num_heads / p.head_dim, 1, 1 << 30);
  p.num_queries = static_cast<int32_t>(random.size(most));
  p.num_keys = random.one_in(2) ? p.num_queries : static_cast<int32_t>(random.size(random.one_in(3) ? std::min<int64_t>(most, 128) : most));
  p.num_bins = static_cast<int32_t>(random.size(1000));
  p.data_type = static_cast<int32_t>(random.between(0, 1));
  p.scaling = static_cast<int32_t>(random.between(0, 1));
  p.smooth_k = static_cast<int32_t>(random.between(0, 1));
  p.softmax_scale = 0.125f;
  p.timestep_max = 1000.f;
  p.target_arch = random.one_in(4) ? 80 : 0;
  p.q = random.address(), p.k = random.address(), p.v = random.address(), p.out = random.address();
  p.q_strides = strides(random, p.num_queries, p.num_heads, p.head_dim);
  p.k_strides = strides(random, p.num_keys, p.num_kv_heads, p.head_dim);
  p.v_strides = strides(random, p.num_keys, p.num_kv_heads, p.head_dim);
  p.out_strides = strides(random, p.num_queries, p.num_heads, p.head_dim);
  for (auto* table : {&p.timestep, &p.q_scale, &p.k_scale, &p.v_scale, &p.k_offset, &p.v_offset})
    *table = random.address<float const>();
  p.modes = random.address<int32_t const>();
  p.workspace = random.address();
  p.workspace_size = SIZE_MAX;
  if (random.one_in(4)) {
    p.mask_kind = static_cast<int32_t>(random.between(1, 2));
    p.mask = random.address();
    for (int64_t& stride : p.mask_strides) stride = random.one_in(4) ? random.odd_integer() : random.between(0, 1 << 20);
  }
  if (random.one_in(4)) p.key_lengths = random.address<int32_t const>();
  if (random.one_in(4)) p.lse = random.address<float>();
  if (random.one_in(4)) {
    p.block_mask = random.address();
    p.block_mask_batch = random.one_in(2) ? 1 : p.batch;
    p.block_mask_heads = random.one_in(2) ? 1 : p.num_heads;
  }
  if (random.one_in(6)) {
    p.source_keys = static_cast<int32_t>(random.size(most));
    p.key_index = random.address<int32_t const>();
  } else if (p.num_queries == p.num_keys) {
    if (random.one_in(2)) p.rotary = random.address<float const>();
    if (random.one_in(2)) {
      p.q_norm = random.address<float const>(), p.k_norm = random.address<float const>();
      p.norm_epsilon = 1e-6f;
      p.norm_across_heads = static_cast<int32_t>(random.between(0, 1));
      if (!p.norm_across_heads && p.num_queries > 1) p.norm_split = static_cast<int32_t>(random.between(0, p.num_queries - 1));
    }
    if (random.one_in(3) && p.num_queries > 128) {
      p.token_split = static_cast<int32_t>(random.between(1, (p.num_queries - 1) / 128)) * 128;
      p.second_q = random.address(), p.second_k = random.address(), p.second_v = random.address(), p.second_out = random.address();
      p.second_q_strides = p.second_k_strides = p.second_v_strides = p.second_out_strides = p.q_strides;
    }
  }
  return p;
}

void call_attention(Random& random, long long rounds, Counts& counts) {
  call_both<TrtConvertAttentionParams>("trtconvert_attention", trtconvert_attention_check, trtconvert_attention_run, attention, random,
                                       rounds, counts);
  for (long long round = 0; round < rounds; ++round) {
    choose_device(random);
    TrtConvertAttentionParams params = attention(random);
    for (int64_t spoiled = random.between(0, kMostSpoiled); spoiled > 0; --spoiled) random.spoil(params);
    Bytes const memory = as_long_as_it_says(params);
    auto const* const given = reinterpret_cast<TrtConvertAttentionParams const*>(memory.get());
    Message const message(random);
    Bytes const size = exactly(sizeof(size_t));
    auto* const bytes = random.one_in(100) ? nullptr : reinterpret_cast<size_t*>(size.get());
    TrtConvertStatus const status = trtconvert_attention_workspace_size(given, bytes, message.text(), message.size);
    message.check("trtconvert_attention_workspace_size", status);
    ++counts["trtconvert_attention_workspace_size"][std::to_string(status)];
    if (status != TRTCONVERT_OK) continue;
    // Q, K and V in 8 bits are in it: it did not wrap.
    long double const least = static_cast<long double>(params.batch) * params.head_dim *
                              (static_cast<long double>(params.num_heads) * params.num_queries +
                               2.L * params.num_kv_heads * params.num_keys);
    require(*bytes >= least && *bytes < (size_t{1} << 60), "workspace of %zu bytes for operands of %.0Lf", *bytes, least);
    params.workspace_size = *bytes - 1;
    if (call("trtconvert_attention_check", trtconvert_attention_check, &params, random, counts) == TRTCONVERT_OK)
      require(false, "a workspace that is a byte too small was taken");
  }
}

void call_copies(Random& random, long long rounds, Counts& counts) {
  for (long long round = 0; round < rounds; ++round) {
    choose_device(random);
    auto const num_nodes = random.between(0, 3);
    std::vector<TrtConvertCopyNode> nodes(num_nodes);  // read to its end and no further
    for (TrtConvertCopyNode& node : nodes) {
      node = {};
      node.struct_size = sizeof(node);
      node.outwards = static_cast<int32_t>(random.between(0, 1));
      node.count = static_cast<int32_t>(random.between(1, TRTCONVERT_MOST_COPIES));
      for (int32_t i = 0; i < node.count; ++i) {
        node.copies[i].bytes = random.one_in(5) ? 0 : static_cast<uint64_t>(random.one_in(3) ? random.odd_integer() : random.size(1 << 30));
        node.copies[i].buffer = node.copies[i].bytes || random.one_in(2) ? random.address(1) : nullptr;
      }
      for (int64_t spoiled = random.one_in(3) ? random.between(0, kMostSpoiled) : 0; spoiled > 0; --spoiled) random.spoil(node);
      int const error = trtconvert_record_copies(random.address(), random.one_in(100) ? nullptr : &node);
      ++counts["trtconvert_record_copies"][error == 0 ? "0" : "an error"];
    }
    // A launch of nodes that were not recorded, or changed since, is refused or goes on; it reads nothing but their addresses.
    if (!nodes.empty() && random.one_in(4)) random.spoil(nodes[random.between(0, num_nodes - 1)]);
    size_t copies = 0;
    for (TrtConvertCopyNode const& node : nodes)
      if (node.count >= 1 && node.count <= TRTCONVERT_MOST_COPIES) copies += static_cast<size_t>(node.count);
    std::vector<uint64_t> addresses(copies);
    for (uint64_t& address : addresses) address = random.one_in(50) ? 0 : static_cast<uint64_t>(random.between(1, int64_t{1} << 40));
    TrtConvertCopyingGraph graph = {};
    graph.exec = random.one_in(50) ? nullptr : random.address();
    graph.stream = random.address();
    graph.nodes = random.one_in(50) ? nullptr : nodes.data();
    graph.addresses = random.one_in(50) ? nullptr : addresses.data();
    graph.num_nodes = random.one_in(20) ? -static_cast<int32_t>(random.size(INT32_MAX)) : static_cast<int32_t>(num_nodes);
    for (int launch = 0; launch < 2; ++launch) {
      int const error = trtconvert_launch_copies(random.one_in(100) ? nullptr : &graph);
      ++counts["trtconvert_launch_copies"][error == 0 ? "0" : "an error"];
    }
  }
}

// What random arguments have found, with the argument that is named.
void call_found(Counts& counts) {
  constexpr int64_t kLarge = int64_t{1} << 60;
  auto const refused = [&](char const* named, auto change) {
    Random same(7);
    auto p = headed<TrtConvertAttentionParams>(TRTCONVERT_ATTENTION_VERSION);
    p.batch = p.num_heads = p.num_kv_heads = p.num_bins = 1;
    p.num_queries = p.num_keys = 300;
    p.head_dim = 64;
    p.softmax_scale = 0.125f, p.timestep_max = 1000.f;
    p.q = same.address(), p.k = same.address(), p.v = same.address(), p.out = same.address();
    p.q_strides = p.k_strides = p.v_strides = p.out_strides = {300 * 64, 64, 64};
    for (auto* table : {&p.timestep, &p.q_scale, &p.k_scale, &p.v_scale, &p.k_offset, &p.v_offset})
      *table = same.address<float const>();
    p.modes = same.address<int32_t const>();
    p.workspace = same.address(), p.workspace_size = size_t{1} << 40;
    char message[512];
    stand_in = {};
    require(trtconvert_attention_run(&p, message, sizeof(message)) == TRTCONVERT_OK, "refused without a change: %s", message);
    change(p);
    require(trtconvert_attention_run(&p, message, sizeof(message)) == TRTCONVERT_INVALID_ARGUMENT, "taken with another %s", named);
    require(std::strncmp(message, named, std::strlen(named)) == 0, "expected a message of %s, got '%s'", named, message);
    ++counts["found before"]["refused"];
  };
  refused("v: expected strides", [](auto& p) { p.v_strides.token = kLarge; });
  refused("q: expected strides", [](auto& p) { p.q_strides.batch = -kLarge; });
  refused("mask_strides: ", [](auto& p) { p.mask_kind = TRTCONVERT_MASK_BOOL, p.mask = p.q, p.mask_strides[2] = kLarge; });
  refused("workspace: ", [](auto& p) { p.workspace = reinterpret_cast<void*>(~uintptr_t{0xffff}), p.workspace_size = SIZE_MAX; });
  TrtConvertCopyNode unrecorded = {};
  unrecorded.struct_size = sizeof(unrecorded), unrecorded.count = INT32_MAX;
  uint64_t const address = 4096;
  TrtConvertCopyingGraph const graph = {&unrecorded, nullptr, &unrecorded, &address, 1};
  require(trtconvert_launch_copies(&graph) != 0, "a node that was not recorded was launched");
  ++counts["found before"]["refused"];
}

}  // namespace

void call_c_apis(Random& random, long long rounds, Counts& counts) {
  call_found(counts);
  call_attention(random, rounds, counts);
  call_both<TrtConvertLinearParams>("trtconvert_linear", trtconvert_linear_check, trtconvert_linear_run, linear, random, rounds, counts);
  call_both<TrtConvertInt8LinearParams>("trtconvert_int8_linear", trtconvert_int8_linear_check, trtconvert_int8_linear_run, int8_linear,
                                        random, rounds, counts);
  call_both<TrtConvertInt8ConvParams>("trtconvert_int8_conv", trtconvert_int8_conv_check, trtconvert_int8_conv_run, int8_conv,
                                        random, rounds, counts);
  call_both<TrtConvertQuantiseParams>("trtconvert_quantise", trtconvert_quantise_check, trtconvert_quantise_run, quantise, random, rounds,
                                      counts);
  call_both<TrtConvertQuantiseChangeParams>("trtconvert_quantise_change", trtconvert_quantise_change_check,
                                            trtconvert_quantise_change_run, quantise_change, random, rounds, counts);
  call_both<TrtConvertResidualNormParams>("trtconvert_residual_norm", trtconvert_residual_norm_check, trtconvert_residual_norm_run,
                                          residual_norm, random, rounds, counts);
  call_both<TrtConvertGroupNormParams>("trtconvert_group_norm", trtconvert_group_norm_check, trtconvert_group_norm_run, group_norm, random,
                                       rounds, counts);
  call_both<TrtConvertChannelsLastAddParams>("trtconvert_channels_last_add", trtconvert_channels_last_add_check,
                                             trtconvert_channels_last_add_run, channels_last_add, random, rounds, counts);
  call_both<TrtConvertWeightedSumParams>("trtconvert_weighted_sum", trtconvert_weighted_sum_check, trtconvert_weighted_sum_run, weighted_sum,
                                         random, rounds, counts);
  call_copies(random, rounds, counts);
  for (long long round = 0; round < rounds; ++round) {
    choose_device(random);
    ++counts["trtconvert_linear_is_supported"][std::to_string(trtconvert_linear_is_supported())];
    ++counts["trtconvert_group_norm_is_supported"][std::to_string(trtconvert_group_norm_is_supported())];
  }
}

}  // namespace trtconvert::calls
