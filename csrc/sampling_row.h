// One row of logits as sampling reads it: numbers, the largest of them, weights and their sums. Every pass over a row is here or
// goes through for_lanes. What the words mean: kernels/reference_sampling.py.
#pragma once

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <limits>

#include "sampling.h"
#include "simd.h"

namespace KVIST_NAMESPACE {

constexpr float kImpossible = -std::numeric_limits<float>::infinity();
constexpr float kFaintest = -30.0f;  // below it a weight is nothing
constexpr int kChunk = 1024;         // elements whose lanes have their largest kept
constexpr int kWeightSpan = 256;           // elements whose weights are summed up together

// NaN is -inf, +inf the largest float, subnormals and -0 are 0. (min and max give their second operand when the first is NaN.)
inline F numbers(F v) {
  const F finite = min(max(v, set1(kImpossible)), set1(FLT_MAX));
  return zero_below(finite, abs(finite), set1(FLT_MIN));
}

inline float number(float v) {
  if (!(v > kImpossible)) return kImpossible;
  return std::fabs(v) < FLT_MIN ? 0.0f : std::min(v, FLT_MAX);
}

// body(i, lanes i to i + 15) for [begin, end), begin a multiple of 16; beyond the end lanes are -inf.
template <class Body>
inline void for_lanes(const float* x, int begin, int end, Body body) {
  int i = begin;
  for (; i + 16 <= end; i += 16) body(i, load(x + i));
  if (i < end) body(i, load_tail(x + i, end - i, kImpossible));
}

inline int spans_of(int n) { return (n + kWeightSpan - 1) / kWeightSpan; }
inline int chunks_of(int n) { return (n + kChunk - 1) / kChunk; }

// A row of logits with its largest number, and of each chunk the 16 lanes' largest.
struct Row {
  const float* x;
  int n;
  const float* maxima;  // [chunks, 16]
  float peak;
  int peak_chunk;
  float inverse;  // 1 / temperature

  float largest_of_chunk(int chunk) const { return fold_max(load(maxima + 16 * chunk)); }
  int num_maxima() const { return 16 * chunks_of(n); }
  float scaled(float v) const { return (v - peak) * inverse; }
  F scaled(F v) const { return mul(sub(v, set1(peak)), set1(inverse)); }
};

inline Row read_row(const float* x, int n, SamplingScratch& s) {
  float* maxima = s.maxima.reserve(static_cast<size_t>(16 * chunks_of(n)));
  Row row{x, n, maxima, kImpossible, 0, 1.0f};
  for (int chunk = 0; chunk < chunks_of(n); ++chunk) {
    const int begin = chunk * kChunk, end = std::min(n, begin + kChunk);
    F top[4] = {set1(kImpossible), set1(kImpossible), set1(kImpossible), set1(kImpossible)};
    int i = begin;
    for (; i + 64 <= end; i += 64)
      for (int j = 0; j < 4; ++j) top[j] = max(load(x + i + 16 * j), top[j]);
    for_lanes(x, i, end, [&](int, F v) { top[0] = max(v, top[0]); });
    const F all = numbers(max(max(top[0], top[1]), max(top[2], top[3])));
    store(maxima + 16 * chunk, all);
    const float largest = fold_max(all);
    if (largest > row.peak) {
      row.peak = largest;
      row.peak_chunk = chunk;
    }
  }
  return row;
}

inline int first_largest(const Row& row) {
  const int begin = row.peak_chunk * kChunk;
  for (int i = begin;; i += 16) {
    const F v = i + 16 <= row.n ? load(row.x + i) : load_tail(row.x + i, row.n - i, kImpossible);
    const unsigned found = mask_ge(numbers(v), set1(row.peak));
    if (found) return i + std::countr_zero(found);
  }
}

// e^scaled for scaled <= 0: no product is fused with a sum, unlike simd.h's, so that every build has the same bits.
inline F weight(F scaled) {
  const F x = min(max(scaled, set1(kFaintest)), zero());
  const I n = round_to_int(mul(x, set1(1.44269504f)));
  const F nf = to_float(n);
  F r = add(x, mul(nf, set1(-0.693359375f)));
  r = add(r, mul(nf, set1(2.12194440e-4f)));
  const F square = mul(r, r);
  F p = add(mul(set1(1.9875691500e-4f), r), set1(1.3981999507e-3f));
  p = add(mul(p, square), add(mul(set1(8.3334519073e-3f), r), set1(4.1665795894e-2f)));
  p = add(mul(p, square), add(mul(set1(1.6666665459e-1f), r), set1(5.0000001201e-1f)));
  p = add(mul(p, square), add(r, set1(1.0f)));
  return mul(p, exp2i(n));
}

// Sum of what weigh(i, lanes i to i + 15) gives; of each span too, if wanted.
template <class Weigh>
uint64_t sum_weights(const Row& row, uint64_t* spans, Weigh weigh) {
  uint64_t total = 0;
  for (int span = 0; span < spans_of(row.n); ++span) {
    const int begin = span * kWeightSpan, end = std::min(row.n, begin + kWeightSpan);
    UnitSum sum{};
    for_lanes(row.x, begin, end, [&](int i, F v) { sum = add_units(sum, weigh(i, v)); });
    const uint64_t whole = fold_units(sum, (end - begin + 15) / 16);
    if (spans) spans[span] = whole;
    total += whole;
  }
  return total;
}

// Lanes of elements i to i + 15 that come before `value` at id `end`, in order of logits, ties by id.
inline unsigned lanes_before(int i, F numbers, float value, int end) {
  const unsigned earlier = end >= i + 16 ? 0xffffu : end > i ? (1u << (end - i)) - 1 : 0u;
  return mask_gt(numbers, set1(value)) | (mask_ge(numbers, set1(value)) & earlier);
}

}  // namespace KVIST_NAMESPACE
