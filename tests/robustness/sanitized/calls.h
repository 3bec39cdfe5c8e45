// What both kinds of calls have in common: counts of outcomes, and a check that ends the program.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "random_values.h"

namespace trtconvert::calls {

// By function, by outcome: how often.
using Counts = std::map<std::string, std::map<std::string, long long>>;

[[gnu::format(printf, 2, 3)]] inline void require(bool holds, char const* format, ...) {
  if (holds) return;
  std::fputs("random_calls: ", stderr);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputs("\n", stderr);
  std::abort();
}

// Another device, or none, for the next call. Most have kernels of their own.
void choose_device(Random& random);

void call_c_apis(Random& random, long long rounds, Counts& counts);
void call_plugins(Random& random, long long rounds, Counts& counts);

}  // namespace trtconvert::calls
