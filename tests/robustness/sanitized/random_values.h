// Random arguments: sizes as callers have them, and what nobody has.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>

namespace trtconvert::calls {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  int64_t between(int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(engine_); }
  bool one_in(int64_t count) { return between(1, count) == 1; }
  template <typename T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[between(0, static_cast<int64_t>(values.size()) - 1)];
  }

  // A size: as many small ones as there are ones of any number of digits, most of them multiples of a step.
  int64_t size(int64_t most, int64_t step = 1) {
    double const digits = std::uniform_real_distribution<>(0, std::log2(static_cast<double>(most)))(engine_);
    auto const size = static_cast<int64_t>(std::exp2(digits));
    int64_t const stepped = (size + step - 1) / step * step;
    return one_in(20) ? size : std::min(stepped, most / step * step);
  }

  int64_t odd_integer() {
    switch (between(0, 5)) {
      case 0:
        return between(-3, 20);
      case 1:
        return (int64_t{1} << between(0, 62)) + between(-1, 1);
      case 2:
        return -(int64_t{1} << between(0, 62)) + between(-1, 1);
      case 3:
        return one_of<int64_t>({INT32_MAX, INT32_MIN, UINT32_MAX, INT64_MAX, INT64_MIN, 0, 65535, 65536});
      case 4:
        return between(-100'000, 100'000) * one_of<int64_t>({1, 8, 16, 128});
      default:
        return static_cast<int64_t>(engine_());
    }
  }

  double odd_real() {
    constexpr auto kInf = std::numeric_limits<double>::infinity();
    switch (between(0, 2)) {
      case 0:
        return one_of<double>({0.0, -0.0, kInf, -kInf, std::nan(""), 1e-45, -1e-45, 1e38, 3.5e38, 1e300, -1.0, 1.0, 1000.0});
      case 1:
        return std::uniform_real_distribution<>(-2, 2)(engine_);
      default: {
        uint64_t const bits = engine_();
        double value;
        std::memcpy(&value, &bits, sizeof(value));
        return value;
      }
    }
  }

  // An address on a device: never read here.
  template <typename T = void>
  T* address(int64_t alignment = 256) {
    return reinterpret_cast<T*>(between(1, int64_t{1} << 30) * alignment);
  }

  // Overwrites a field of a struct, whichever it is: all of them have 4 or 8 bytes.
  template <typename Struct>
  void spoil(Struct& value) {
    auto* const bytes = reinterpret_cast<unsigned char*>(&value);
    if (one_in(2)) {
      auto* const place = bytes + 4 * between(0, sizeof(Struct) / 4 - 1);
      auto const integer = static_cast<int32_t>(odd_integer());
      auto const real = static_cast<float>(odd_real());
      std::memcpy(place, one_in(2) ? static_cast<void const*>(&integer) : &real, 4);
    } else {
      int64_t const integer = one_in(4) ? 0 : odd_integer();
      std::memcpy(bytes + 8 * between(0, sizeof(Struct) / 8 - 1), &integer, 8);
    }
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace trtconvert::calls
