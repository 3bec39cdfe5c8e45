// random_calls ROUNDS SEED: that many calls of every function, and how they ended as JSON. A report of a sanitizer ends it.
#include <cstdlib>

#include "calls.h"
#include "cuda_stand_in.h"

namespace trtconvert::calls {

void choose_device(Random& random) {
  stand_in.has_device = !random.one_in(30);
  switch (random.between(0, 7)) {
    case 0:
      stand_in.major = 8, stand_in.minor = random.one_of({0, 6, 9});
      break;
    case 1:
      stand_in.major = random.one_of({7, 10, 12}), stand_in.minor = random.one_of({0, 3, 5});
      break;
    default:
      stand_in.major = 9, stand_in.minor = 0;
  }
  stand_in.multiprocessors = random.one_in(4) ? static_cast<int>(random.between(1, 200)) : 132;
  stand_in.is_capturing = !random.one_in(20);
}

}  // namespace trtconvert::calls

int main(int count, char** arguments) {
  using namespace trtconvert::calls;
  if (count != 3) {
    std::fprintf(stderr, "usage: random_calls ROUNDS SEED\n");
    return 2;
  }
  long long const rounds = std::atoll(arguments[1]);
  Random random(static_cast<uint64_t>(std::atoll(arguments[2])));
  Counts counts;
  call_c_apis(random, rounds, counts);
  call_plugins(random, rounds, counts);
  std::printf("{\n");
  for (auto const& [function, outcomes] : counts) {
    std::printf(" \"%s\": {", function.c_str());
    char const* between = "";
    for (auto const& [outcome, times] : outcomes) {
      std::printf("%s\"%s\": %lld", between, outcome.c_str(), times);
      between = ", ";
    }
    std::printf("},\n");
  }
  std::printf(" \"launches\": {\"taken\": %lld, \"refused\": %lld}\n}\n", static_cast<long long>(stand_in.launches),
              static_cast<long long>(stand_in.refused_launches));
}
