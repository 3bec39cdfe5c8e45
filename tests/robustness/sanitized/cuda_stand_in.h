// A CUDA runtime without a GPU, for the library's host code: it checks what the driver would, launches nothing and counts.
#pragma once

#include <cstdint>

namespace trtconvert::calls {

struct StandIn {
  int major = 9, minor = 0, multiprocessors = 132;
  bool has_device = true, is_capturing = true;
  int64_t launches = 0;  // of what the driver would take
  int64_t refused_launches = 0;
};

extern StandIn stand_in;

}  // namespace trtconvert::calls
