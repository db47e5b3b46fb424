// The inner part of attention: up to kQueryTile query vectors of one kv head against one partition of keys.
#pragma once

#include <algorithm>
#include <limits>

#include "attention.h"

namespace KVIST_NAMESPACE {

// Online-softmax state of the vectors of a tile; a vector that has seen no key yet has max = -inf, sum = 0.
struct State {
  alignas(64) float acc[kQueryTile][kHeadStride];
  float max[kQueryTile], sum[kQueryTile];

  void clear(int vectors) {
    for (int v = 0; v < vectors; ++v) {
      max[v] = -std::numeric_limits<float>::infinity();
      sum[v] = 0.0f;
    }
  }
  bool empty(int v) const { return max[v] == -std::numeric_limits<float>::infinity(); }
};

// `rows` consecutive rows x `heads` query heads; vector v is row v / heads, head `head` + v % heads.
struct Tile {
  const AttentionLayer& layer;
  const int32_t* block_table;  // of the sequence
  const int32_t* positions;    // of the rows
  const float* qkv;            // first row
  long row_width;
  int rows, head, heads;

  int vectors() const { return rows * heads; }
};

inline float exp_one(float x) {
  alignas(64) float lanes[16];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

// Folds (max, sum, acc) of one more partition into vector v of `total`; an empty side leaves the other as it is.
inline void merge(State& total, int v, float max, float sum, const float* acc, int dim) {
  if (max == -std::numeric_limits<float>::infinity()) return;
  if (total.empty(v)) {
    for (int d = 0; d < dim; d += 16) store(total.acc[v] + d, load(acc + d));
    total.max[v] = max;
    total.sum[v] = sum;
    return;
  }
  const float both = std::max(total.max[v], max);
  const float a = exp_one(total.max[v] - both), b = exp_one(max - both);
  const F old_weight = set1(a), new_weight = set1(b);
  for (int d = 0; d < dim; d += 16) store(total.acc[v] + d, fma(load(total.acc[v] + d), old_weight, mul(load(acc + d), new_weight)));
  total.sum[v] = total.sum[v] * a + sum * b;
  total.max[v] = both;
}

// Scores of Q vectors against T tiles of 16 keys: scores[v][16 * t ...] = q . k
template <class Kv, int Q, int T>
void score_tiles(const float (*q)[kHeadStride], const typename Kv::Element* const* tiles, int dim, float (*scores)[kSpan]) {
  F acc[T][Q];
  for (int t = 0; t < T; ++t)
    for (int v = 0; v < Q; ++v) acc[t][v] = zero();
  if constexpr (T == 1) {
    Kv::keys(tiles[0], dim, [&](int d, F keys) {
      for (int v = 0; v < Q; ++v) acc[0][v] = fma(set1(q[v][d]), keys, acc[0][v]);
    });
  } else {
    Kv::keys_of_two(tiles[0], tiles[1], dim, [&](int d, F first, F second) {
      for (int v = 0; v < Q; ++v) {
        const F element = set1(q[v][d]);
        acc[0][v] = fma(element, first, acc[0][v]);
        acc[1][v] = fma(element, second, acc[1][v]);
      }
    });
  }
  for (int t = 0; t < T; ++t)
    for (int v = 0; v < Q; ++v) store(scores[v] + kKeyTile * t, acc[t][v]);
}

// acc[v] += weights[v][key] * values[key] for the keys [from, to) of a span, ascending
template <class Kv, int Q>
void add_values(const float (*weights)[kSpan], const typename Kv::Element* const* tiles, int dim, int from, int to, float (*acc)[kHeadStride]) {
  for (int d = 0; d < dim; d += 16) {
    F sum[Q];
    for (int v = 0; v < Q; ++v) sum[v] = load(acc[v] + d);
    for (int tile = from / kKeyTile; tile * kKeyTile < to; ++tile) {
      const int base = tile * kKeyTile;
      Kv::values(tiles[tile], dim, d, std::max(from - base, 0), std::min(to - base, kKeyTile), [&](int key, F values) {
        for (int v = 0; v < Q; ++v) sum[v] = fma(set1(weights[v][base + key]), values, sum[v]);
      });
    }
    for (int v = 0; v < Q; ++v) store(acc[v] + d, sum[v]);
  }
}

// Softmax of one vector over the visible keys [from, to) of a span: scores become weights, the state is rescaled.
inline void soften(float* scores, int from, int to, int dim, State& state, int v) {
  for (int i = 0; i < from; ++i) scores[i] = -std::numeric_limits<float>::infinity();
  for (int i = to; i < kSpan; ++i) scores[i] = -std::numeric_limits<float>::infinity();
  F s[kSpan / 16];
  for (int i = 0; i < kSpan / 16; ++i) s[i] = load(scores + 16 * i);
  const float largest = fold_max(max(max(s[0], s[1]), max(s[2], s[3])));
  F sum = zero();
  const bool first = state.empty(v);
  const float both = first ? largest : std::max(state.max[v], largest);
  for (int i = 0; i < kSpan / 16; ++i) {
    const F weight = exp(sub(s[i], set1(both)));
    store(scores + 16 * i, weight);
    sum = add(sum, weight);
  }
  const float total = fold_add(sum);
  if (first) {
    for (int d = 0; d < dim; d += 16) store(state.acc[v] + d, zero());
    state.sum[v] = total;
  } else if (both == state.max[v]) {
    state.sum[v] += total;
  } else {
    const float alpha = exp_one(state.max[v] - both);
    for (int d = 0; d < dim; d += 16) store(state.acc[v] + d, mul(load(state.acc[v] + d), set1(alpha)));
    state.sum[v] = state.sum[v] * alpha + total;
  }
  state.max[v] = both;
}

template <class Kv, int Q>
void attend_span(const Tile& tile, const float (*q)[kHeadStride], int span, State& state) {
  using T = typename Kv::Element;
  const AttentionLayer& layer = tile.layer;
  const int dim = layer.dim, start = span * kSpan, ratio = layer.heads / layer.kv_heads;
  int from[Q], to[Q], least = kSpan, most = 0, common_from = 0, common_to = kSpan;
  for (int v = 0; v < Q; ++v) {
    const int position = tile.positions[v / tile.heads];
    const int low = layer.window > 0 ? std::max(0, position - layer.window + 1) : 0;
    from[v] = std::clamp(low - start, 0, kSpan);
    to[v] = std::clamp(position + 1 - start, 0, kSpan);
    if (from[v] >= to[v]) from[v] = to[v] = 0;
    if (from[v] < to[v]) {
      least = std::min(least, from[v]);
      most = std::max(most, to[v]);
    }
    common_from = std::max(common_from, from[v]);
    common_to = std::min(common_to, to[v]);
  }
  if (least >= most) return;

  // Pointers to the 16-key tiles that somebody sees.
  const T* keys[kSpan / kKeyTile];
  const T* values[kSpan / kKeyTile];
  const size_t per_head = static_cast<size_t>(layer.block_size) * dim;
  const int first_tile = least / kKeyTile, end_tile = (most + kKeyTile - 1) / kKeyTile;
  for (int t = first_tile; t < end_tile; ++t) {
    const int position = start + t * kKeyTile, offset = position % layer.block_size;
    const size_t block = static_cast<size_t>(tile.block_table[position / layer.block_size]);
    const T* base = reinterpret_cast<const T*>(layer.arena + block * layer.block_bytes + layer.layer_offset) + (tile.head / ratio) * per_head;
    keys[t] = base + static_cast<size_t>(offset) * dim;
    values[t] = keys[t] + layer.kv_heads * per_head;
  }

  alignas(64) float scores[Q][kSpan];
  int t = first_tile;
  if constexpr (2 * Q <= kAccumulators)
    for (; t + 2 <= end_tile; t += 2) score_tiles<Kv, Q, 2>(q, keys + t, dim, reinterpret_cast<float (*)[kSpan]>(&scores[0][t * kKeyTile]));
  for (; t < end_tile; ++t) score_tiles<Kv, Q, 1>(q, keys + t, dim, reinterpret_cast<float (*)[kSpan]>(&scores[0][t * kKeyTile]));

  for (int v = 0; v < Q; ++v)
    if (from[v] < to[v]) soften(scores[v], from[v], to[v], dim, state, v);

  // Keys that all vectors see are shared; each vector's own keys before and after keep the ascending order.
  if (common_from < common_to) {
    for (int v = 0; v < Q; ++v)
      if (from[v] < common_from) add_values<Kv, 1>(scores + v, values, dim, from[v], common_from, state.acc + v);
    add_values<Kv, Q>(scores, values, dim, common_from, common_to, state.acc);
  }
  for (int v = 0; v < Q; ++v) {
    const int rest = common_from < common_to ? common_to : from[v];
    if (rest < to[v]) add_values<Kv, 1>(scores + v, values, dim, rest, to[v], state.acc + v);
  }
}

template <class Kv, int Q>
void attend_vectors(const Tile& tile, int partition, State& state) {
  const AttentionLayer& layer = tile.layer;
  alignas(64) float q[Q][kHeadStride];
  for (int v = 0; v < Q; ++v) {
    const float* from = tile.qkv + (v / tile.heads) * tile.row_width + (tile.head + v % tile.heads) * layer.dim;
    for (int d = 0; d < layer.dim; ++d) q[v][d] = from[d] * layer.scale;
  }
  const int low = layer.window > 0 ? std::max(0, tile.positions[0] - layer.window + 1) : 0;
  const int high = tile.positions[tile.rows - 1];
  const int first = std::max(low, partition * kPartition) / kSpan;
  const int last = std::min(high, (partition + 1) * kPartition - 1) / kSpan;
  for (int span = first; span <= last; ++span) attend_span<Kv, Q>(tile, q, span, state);
}

template <class Kv, int Q = kQueryTile>
void attend_partition(const Tile& tile, int partition, State& state) {
  if (tile.vectors() == Q) return attend_vectors<Kv, Q>(tile, partition, state);
  if constexpr (Q > 1) attend_partition<Kv, Q - 1>(tile, partition, state);
}

}  // namespace KVIST_NAMESPACE
