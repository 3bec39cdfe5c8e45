// Division of the sm_90a kernel's work into thread blocks.
//
// A unit is the common work of a thread block's consumers: query blocks of one head, over all its keys. Units with a query block
// for every consumer come first, head by head; then each head's last unit with the remaining query blocks. If a single query block
// remains, a unit may take the last query blocks of several heads (gathered), and each consumer has its own keys.
//
// Under a block mask a unit is a row of blocks of one head, 128 queries, for two consumers: a third consumer would need keys of
// another row. Units come in the order of BlockRow, and are not divided.
//
// There are as many thread blocks as multiprocessors. Each begins with the unit of its own number and then takes the next free
// unit. If the last units of a launch would leave most multiprocessors idle, their keys are divided into parts that are taken like
// units; the results meet in the workspace (merge() in epilogue.cuh). A thread block computes in one mode: several modes of a batch
// share the thread blocks.
#pragma once

#include <algorithm>

#include "../params.h"

namespace trtconvert::attention {

struct Schedule {
  int full, rest;     // per head: units with a block for every consumer, and blocks of the last unit
  int full_units;     // of all heads of a batch element
  int gathered;       // heads in a unit after the full units
  int units;          // of a batch element
  int divided, parts; // of the last batch element: the number of divided last units, and the number of their parts

  Schedule() = default;

  // `can_gather`: whether each consumer can have its own keys.
  Schedule(const Params& p, int consumers, bool can_gather)
      : full(p.query_blocks / consumers),
        rest(p.query_blocks % consumers),
        full_units(p.heads * full),
        gathered(1),
        units(full_units + (rest ? p.heads : 0)),
        divided(0),
        parts(1) {
    if (can_gather && rest == 1 && int64_t(units) * p.batch > p.multiprocessors) {
      gathered = consumers;
      units = full_units + ceil_div(p.heads, gathered);
    }
    if (p.block_mask_heads > 0) return;
    const int64_t all = int64_t(units) * p.batch;
    const int last_wave = int(all % p.multiprocessors);
    if (last_wave == 0 || last_wave > units) return;
    // The last wave's time relative to a whole unit: waves of parts, each with the overhead of a task, and the merge of the parts.
    float shortest = 1.f;
    for (int count = 2; count <= kMaxParts && count <= p.key_tiles && last_wave * count <= most_parts(p); ++count) {
      const int waves = ceil_div(last_wave * count, p.multiprocessors);
      const float time = float(waves) / count + (1.f * (waves - 1) + 1.f * count + 3.f) / p.key_tiles;
      if (time < shortest - 0.01f) {
        shortest = time;
        parts = count;
      }
    }
    if (parts > 1) divided = last_wave;
  }

  static constexpr int kBlockConsumers = kBlock / kQueryBlock;  // under a block mask

  // Upper bounds over modes, per batch element.
  static int64_t most_units(const Params& p) { return int64_t(p.heads) * ceil_div(p.query_blocks, kFewestConsumers); }

  // Bounds that grow with the shapes: a workspace for the largest shapes of an engine has to fit all shapes.
  static int most_divided(const Params& p) { return int(std::min(int64_t(p.multiprocessors), most_units(p))); }
  static int most_parts(const Params& p) {
    const int64_t parts = most_units(p) * std::min(kMaxParts, p.key_tiles);
    return int(std::min(int64_t(2) * p.multiprocessors, parts));
  }

  // Units and parts of units, of a batch element or of the last one.
  TRTCONVERT_HOST_DEVICE int tasks(bool last) const { return units + (last ? divided * (parts - 1) : 0); }

 private:
  static constexpr int kMaxParts = 8;
  static constexpr int kFewestConsumers = 2;
};

}  // namespace trtconvert::attention
