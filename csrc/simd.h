// The one dispatch point of the native code: which instruction set this module is compiled for.
//
// A module is compiled whole with one set of flags. Each header below defines two sets of names:
//   F, I    16 floats, 16 int32, whatever the register width, for everything whose lanes are folded:
//           load, store, set1, zero, add, sub, mul, div, fma, max, min, abs, to_float, round_to_int, exp2i, zero_below, load_f16,
//           store_f16, split_bf16_pairs, store_int8, fold_add, fold_max (8+8, 4+4, 2+2, 1+1),
//           mask_ge, mask_gt (bit i: lane i), choose (lanes of a where the bit is set, else of b),
//           UnitSum, add_units, fold_units: exact sums of floats in [0, 1] in whole units of 2^-40
//   V, VI   one register of kLanes floats or int32, for matrix products, where lanes are columns and never meet:
//           load_v, load_v_f16, load_v_bf16, store_v, set1_v, zero_v, add_v, mul_v, fma_v, to_float_v, and
//           dot_w4, dot_w8: integer dot products of one 32-element group, kLanes columns, with R rows (layouts: linear.h)
// Lanes never mix except in the folds, so every width computes the same thing.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace KVIST_NAMESPACE {
constexpr double kUnitsBase = 6144.0;
}

#if defined(KVIST_AVX512)
#include "simd_avx512.h"
#elif defined(KVIST_AVX2)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

namespace KVIST_NAMESPACE {

// A float in [0, 1] in units of 2^-40, rounded to nearest even: the last bit of a double near 1.5 * 2^12 is one unit.
inline uint64_t units(float v) { return std::bit_cast<uint64_t>(v + kUnitsBase) - std::bit_cast<uint64_t>(kUnitsBase); }

// The sum of `count` vectors that were added, all lanes.
inline uint64_t fold_units(const UnitSum& sum, int count) {
  uint64_t lanes[sizeof sum / sizeof(uint64_t)], total = 0;
  std::memcpy(lanes, &sum, sizeof sum);
  for (const uint64_t lane : lanes) total += lane;
  return total - 16 * static_cast<uint64_t>(count) * std::bit_cast<uint64_t>(kUnitsBase);
}

// e^x for each lane; relative error under 2e-7, exactly 1 at 0, exactly 0 below -87.3 (so a masked score of -inf weighs nothing).
// Range reduction by log2(e) with a two-part ln 2 and a degree-6 polynomial.
inline F exp(F x) {
  const F low = set1(-87.33654f);
  const F clamped = min(max(x, low), set1(88.37626f));
  const I n = round_to_int(mul(clamped, set1(1.44269504f)));
  const F nf = to_float(n);
  F r = fma(nf, set1(-0.693359375f), clamped);
  r = fma(nf, set1(2.12194440e-4f), r);
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, set1(1.0f)));
  return zero_below(mul(p, exp2i(n)), x, low);
}

// x / (1 + e^-x)
inline F silu(F x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

// The first `count` lanes from memory, the rest `fill`; reads nothing beyond.
inline F load_tail(const float* p, int count, float fill = 0.0f) {
  alignas(64) float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = i < count ? p[i] : fill;
  return load(lanes);
}

inline void store_tail(float* p, F v, int count) {
  alignas(64) float lanes[16];
  store(lanes, v);
  for (int i = 0; i < count; ++i) p[i] = lanes[i];
}

}  // namespace KVIST_NAMESPACE
