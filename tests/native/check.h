// What the native cases share: failing, chance, bits, number formats in double precision, and the digest of all results.
//
// Every array that a kernel gets lies in a vector of exactly its size, so that a sanitizer sees one element too many.
#pragma once

#include <bit>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

namespace native_test {

constexpr double kEps = 0x1p-23;  // two roundings of a float: a chain of n operations errs by less than n of these, fused or not
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Prints what was being checked and ends the program.
__attribute__((format(printf, 2, 3))) inline void check(bool ok, const char* what, ...) {
  if (ok) return;
  std::va_list values;
  va_start(values, what);
  std::fputs("FAILED: ", stderr);
  std::vfprintf(stderr, what, values);
  std::fputc('\n', stderr);
  std::exit(1);
}

// splitmix64 (Steele et al. 2014): the same numbers everywhere, provided that no expression draws twice.
class Chance {
 public:
  explicit Chance(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int below(int n) { return static_cast<int>(bits() % static_cast<uint64_t>(n)); }
  float uniform() { return static_cast<float>(static_cast<int64_t>(bits() >> 40) - (1 << 23)) * 0x1p-23f; }  // [-1, 1)
  std::vector<float> floats(size_t count, float size = 1.0f) {
    std::vector<float> values(count);
    for (float& v : values) v = uniform() * size;
    return values;
  }

 private:
  uint64_t state_;
};

// FNV-1a of the bits of every result, in the order of the cases; all NaNs count as one.
class Digest {
 public:
  void add(const float* values, size_t count) {
    for (size_t i = 0; i < count; ++i) add(std::isnan(values[i]) ? 0x7fc00000u : std::bit_cast<uint32_t>(values[i]));
  }
  void add(const std::vector<float>& values) { add(values.data(), values.size()); }
  void add(uint32_t word) {
    for (int i = 0; i < 4; ++i) hash_ = (hash_ ^ ((word >> (8 * i)) & 255u)) * 0x100000001b3u;
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325u;
};

inline bool same_bits(const float* a, const float* b, size_t count) { return std::memcmp(a, b, count * sizeof(float)) == 0; }

inline double f16_value(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  double value = std::ldexp(1024 + fraction, exponent - 25);
  if (exponent == 0) value = std::ldexp(fraction, -24);
  if (exponent == 31) value = fraction ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  return bits & 0x8000 ? -value : value;
}

inline double bf16_value(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// The nearest number with `fraction` bits after the point and exponents from `least` to `most`; ties to even, infinity beyond.
inline double nearest(double value, int fraction, int least, int most) {
  if (value == 0 || !std::isfinite(value)) return value;
  const double step = std::ldexp(1.0, std::max(std::ilogb(value), least) - fraction);
  const double rounded = std::nearbyint(value / step) * step;
  return std::fabs(rounded) >= std::ldexp(1.0, most + 1) ? std::copysign(std::numeric_limits<double>::infinity(), value) : rounded;
}
inline double nearest_f16(double value) { return nearest(value, 10, -14, 15); }
inline double nearest_bf16(double value) { return nearest(value, 7, -126, 127); }

// The cases; each file of this room has one set of them.
void simd_cases(Digest& digest);
void row_cases(Digest& digest);
void linear_cases(Digest& digest);
void attention_cases(Digest& digest);
void sampling_cases(Digest& digest);
void pool_cases(Digest& digest);
void program_cases(Digest& digest);

}  // namespace native_test
