// The inner part of attention: some query vectors of one kv head against the keys and values of a span.
//
// A vector's own chain of operations is the same whatever vectors and tiles it is computed beside.
#pragma once

#include <algorithm>
#include <limits>

#include "kv_format.h"

namespace KVIST_NAMESPACE {

constexpr int kSpan = 64;
constexpr int kSpanTiles = kSpan / kKeyTile;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Online-softmax state of some vectors; one that has seen no key yet has max = kNothing. acc[v * stride + d].
struct State {
  float *acc, *max, *sum;
  long stride;

  State from(int v) const { return {acc + v * stride, max + v, sum + v, stride}; }
  bool empty(int v) const { return max[v] == kNothing; }
  void clear(int vectors) const {
    std::fill_n(max, vectors, kNothing);
    std::fill_n(sum, vectors, 0.0f);
  }
};

inline float exp_one(float x) {
  alignas(64) float lanes[16];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

// Folds one more partition's (max, sum, acc) into vector 0 of `total`; an empty side leaves the other as it is.
inline void merge(const State& total, float max, float sum, const float* acc, int dim) {
  if (max == kNothing) return;
  if (total.empty(0)) {
    std::copy_n(acc, dim, total.acc);
    *total.max = max;
    *total.sum = sum;
    return;
  }
  const float both = std::max(*total.max, max);
  const float a = exp_one(*total.max - both), b = exp_one(max - both);
  for (int d = 0; d < dim; d += 16) store(total.acc + d, fma(load(total.acc + d), set1(a), mul(load(acc + d), set1(b))));
  *total.sum = *total.sum * a + sum * b;
  *total.max = both;
}

// What a vector sees of a span, as offsets [from, to).
struct Visible {
  int from, to;

  bool none() const { return from >= to; }
};

// One vector's scores of a span's keys, which become their weights.
using Scores = float[kSpan];

// From a span's tile `t` on.
inline Scores* scores_at(Scores* scores, int t) { return reinterpret_cast<Scores*>(&scores[0][t * kKeyTile]); }

// How many chains of Q vectors are computed side by side: few vectors alone do not fill the multipliers.
constexpr int side_by_side(int q) { return 4 * q <= kAccumulators ? 4 : 2 * q <= kAccumulators ? 2 : 1; }

// scores[v][16 n, 16 n + 16) = q . k for N tiles of keys
template <class Kv, int Q, int N, class Tile>
void score_tiles(const float* q, long stride, const Tile* keys, int dim, Scores* scores) {
  F acc[N][Q];
  for (auto& tile : acc)
    for (F& one : tile) one = zero();
  Kv::template keys<N>(keys, dim, [&](int n, int index, F element) __attribute__((always_inline)) {
    for (int v = 0; v < Q; ++v) acc[n][v] = Kv::multiply_add(set1(q[v * stride + index]), element, acc[n][v]);
  });
  for (int n = 0; n < N; ++n)
    for (int v = 0; v < Q; ++v) store(scores[v] + n * kKeyTile, acc[n][v]);
}

template <class Kv, int Q, class Tile>
void score(const float* q, long stride, const Tile* keys, int count, int dim, Scores* scores) {
  constexpr int N = side_by_side(Q);
  int t = 0;
  if constexpr (N > 1)
    for (; t + N <= count; t += N) score_tiles<Kv, Q, N>(q, stride, keys + t, dim, scores_at(scores, t));
  for (; t < count; ++t) score_tiles<Kv, Q, 1>(q, stride, keys + t, dim, scores_at(scores, t));
}

// acc[v][d..d + 16 N) += weights[v][key] * values[key][d..d + 16 N) for the keys [from, to) of tiles [first, end) each, ascending
template <class Kv, int Q, int N, class Tile>
[[gnu::always_inline]] inline void add_columns(const Scores* weights, const Tile* tiles, int first, int end, int from, int to, int dim, int d,
                                               float* acc, long stride) {
  F sum[N][Q];
  for (int n = 0; n < N; ++n)
    for (int v = 0; v < Q; ++v) sum[n][v] = load(acc + v * stride + d + 16 * n);
  for (int t = first; t < end; ++t) {
    const float* own = weights[0] + t * kKeyTile / Kv::kPerIndex;
    Kv::template values<N>(tiles[t], dim, d, from, to, [&](int n, int index, F values) __attribute__((always_inline)) {
      for (int v = 0; v < Q; ++v) sum[n][v] = Kv::multiply_add(set1(own[v * kSpan + index]), values, sum[n][v]);
    });
  }
  for (int n = 0; n < N; ++n)
    for (int v = 0; v < Q; ++v) store(acc + v * stride + d + 16 * n, sum[n][v]);
}

template <class Kv, int Q, class Tile>
void add_whole_tiles(const Scores* weights, const Tile* tiles, int first, int end, int dim, float* acc, long stride) {
  constexpr int N = side_by_side(Q);
  int d = 0;
  if constexpr (N > 1)
    for (; d + 16 * N <= dim; d += 16 * N) add_columns<Kv, Q, N>(weights, tiles, first, end, 0, kKeyTile, dim, d, acc, stride);
  for (; d < dim; d += 16) add_columns<Kv, Q, 1>(weights, tiles, first, end, 0, kKeyTile, dim, d, acc, stride);
}

template <class Kv, int Q, class Tile>
void add_part(const Scores* weights, const Tile* tiles, int from, int to, int dim, float* acc, long stride) {
  if (from >= to) return;
  const int t = from / kKeyTile, base = t * kKeyTile;
  for (int d = 0; d < dim; d += 16) add_columns<Kv, Q, 1>(weights, tiles, t, t + 1, from - base, to - base, dim, d, acc, stride);
}

// acc[v] += weights[v][key] * values[key] for the keys [from, to) of a span, ascending
template <class Kv, int Q, class Tile>
void add_values(const Scores* weights, const Tile* tiles, int from, int to, int dim, float* acc, long stride) {
  const int whole = std::min(to, (from + kKeyTile - 1) / kKeyTile * kKeyTile), rest = std::max(whole, to / kKeyTile * kKeyTile);
  add_part<Kv, Q>(weights, tiles, from, whole, dim, acc, stride);
  if (whole < rest) add_whole_tiles<Kv, Q>(weights, tiles, whole / kKeyTile, rest / kKeyTile, dim, acc, stride);
  add_part<Kv, Q>(weights, tiles, rest, to, dim, acc, stride);
}

// Softmax of one vector over the keys that it sees of a span: scores become weights, the state is rescaled.
template <class Kv>
inline void soften(float* scores, Visible seen, int dim, const State& state) {
  std::fill(scores, scores + seen.from, kNothing);
  std::fill(scores + seen.to, scores + kSpan, kNothing);
  F s[kSpan / 16];
  for (int i = 0; i < kSpan / 16; ++i) s[i] = load(scores + 16 * i);
  const float largest = fold_max(max(max(s[0], s[1]), max(s[2], s[3])));
  const bool first = state.empty(0);
  const float both = first ? largest : std::max(*state.max, largest);
  F sum = zero();
  for (int i = 0; i < kSpan / 16; ++i) {
    sum = add(sum, Kv::keep_weights(scores, 16 * i, exp(sub(s[i], set1(both)))));
  }
  const float total = fold_add(sum);
  if (first) {
    std::fill_n(state.acc, dim, 0.0f);
    *state.sum = total;
  } else if (both == *state.max) {
    *state.sum += total;
  } else {
    const float alpha = exp_one(*state.max - both);
    for (int d = 0; d < dim; d += 16) store(state.acc + d, mul(load(state.acc + d), set1(alpha)));
    *state.sum = *state.sum * alpha + total;
  }
  *state.max = both;
}

// What Q vectors see of a span: each of them, somebody [least, most), all of them [common_from, common_to).
template <class Kv, int Q>
struct Views {
  Visible each[Q];
  int least = kSpan, most = 0, common_from = 0, common_to = kSpan;

  // see(v): what vector v sees
  template <class See>
  explicit Views(See see) {
    for (int v = 0; v < Q; ++v) {
      each[v] = see(v);
      if (!each[v].none()) {
        least = std::min(least, each[v].from);
        most = std::max(most, each[v].to);
      }
      common_from = std::max(common_from, each[v].from);
      common_to = std::min(common_to, each[v].to);
    }
    // Shared are whole indices.
    common_from = (common_from + Kv::kPerIndex - 1) / Kv::kPerIndex * Kv::kPerIndex;
    common_to = common_to / Kv::kPerIndex * Kv::kPerIndex;
    if (common_from >= common_to) common_from = common_to = kSpan;
  }

  bool none() const { return least >= most; }

  void soften_all(Scores* scores, int dim, const State& state) const {
    for (int v = 0; v < Q; ++v)
      if (!each[v].none()) soften<Kv>(scores[v], each[v], dim, state.from(v));
  }

  // Values of the keys [low, high): what all see is shared, and each vector's own keys before and after keep the ascending order.
  template <class Tile>
  void add_seen(const Scores* weights, const Tile* tiles, int low, int high, int dim, const State& state) const {
    const auto own = [&](int v, int from, int to) {
      from = std::max({low, each[v].from, from}), to = std::min({high, each[v].to, to});
      if (from < to) add_values<Kv, 1>(weights + v, tiles, from, to, dim, state.acc + v * state.stride, state.stride);
    };
    for (int v = 0; v < Q; ++v) own(v, 0, common_from);
    const int from = std::max(low, common_from), to = std::min(high, common_to);
    if (from < to) add_values<Kv, Q>(weights, tiles, from, to, dim, state.acc, state.stride);
    for (int v = 0; v < Q; ++v) own(v, common_to, kSpan);
  }
};

}  // namespace KVIST_NAMESPACE
