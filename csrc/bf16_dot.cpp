// See bf16_dot.h. The vendors describe the instruction alike, but only in words and pseudocode, so it is asked before it is trusted.
#include "bf16_dot.h"

#include <cstdint>
#include <cstring>

#include "kv_format.h"
#include "thread_pool.h"

namespace KVIST_NAMESPACE {

bool bf16_dot_as_defined() {
#if defined(KVIST_BF16_DOT)
  const FloatMode mode;
  alignas(64) uint16_t a[32], b[32];
  alignas(64) float sum[16];
  uint32_t state = 1;
  const auto draw = [&] { return state = state * 1664525u + 1013904223u; };  // Numerical Recipes, section 7.1
  // Exponents within a few of each other, so that roundings meet: where both products are added exactly, or in another order, bits differ.
  const auto number = [&](int spread) {
    const uint32_t bits = draw() >> 8;
    return (bits & 0x8000u) | ((127u - static_cast<uint32_t>(spread) / 2 + (bits >> 17) % static_cast<uint32_t>(spread)) << 7) | (bits & 0x7fu);
  };
  for (int round = 0; round < 256; ++round) {
    for (int i = 0; i < 32; ++i) {
      a[i] = static_cast<uint16_t>(number(12));
      b[i] = static_cast<uint16_t>(number(12));
    }
    for (float& s : sum) {
      const uint32_t bits = number(24) << 16 | draw() >> 16;
      std::memcpy(&s, &bits, 4);
    }
    F even[2], odd[2], pairs[2];
    const uint16_t* from[2] = {a, b};
    for (int i = 0; i < 2; ++i) {
      split_bf16_pairs(from[i], even[i], odd[i]);
      std::memcpy(&pairs[i], from[i], 64);
    }
    alignas(64) float found[16], expected[16];
    store(found, dot_bf16(pairs[0], pairs[1], load(sum)));
    store(expected, fma(even[0], even[1], fma(odd[0], odd[1], load(sum))));
    if (std::memcmp(found, expected, sizeof found) != 0) return false;
  }
#endif
  return true;
}

}  // namespace KVIST_NAMESPACE
