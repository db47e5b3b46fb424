// The inner part of attention: the query vectors of a block of rows and one kv head against one partition of keys.
//
// Spans are walked outside and vectors inside, in tiles of up to kQueryTile that share each load of keys and values, so that a long
// prompt reads a span from near memory. A vector's own chain of operations is the same in any tile.
#pragma once

#include <algorithm>
#include <limits>

#include "attention.h"

namespace KVIST_NAMESPACE {

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

// Consecutive rows of one sequence with the query heads of one kv head. Vector v is row v / ratio, head kv_head * ratio + v % ratio.
struct QueryBlock {
  const AttentionLayer& layer;
  const int32_t* block_table;  // of the sequence
  const int32_t* positions;    // of the rows
  const float* q;              // scaled queries, [vectors][stride]
  long stride;
  int rows, kv_head;

  int first_key() const { return layer.window > 0 ? std::max(0, positions[0] - layer.window + 1) : 0; }
  int last_key() const { return positions[rows - 1]; }
  int ratio() const { return layer.heads / layer.kv_heads; }
  int vectors() const { return rows * ratio(); }
  int position(int v) const { return positions[v / ratio()]; }
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

// scores[v][0..16) = q . k for a tile of 16 keys
template <class Kv, int Q, class Tile>
void score_tile(const float* q, long stride, const Tile& keys, int dim, float (*scores)[kSpan]) {
  F acc[Q];
  for (int v = 0; v < Q; ++v) acc[v] = zero();
  Kv::keys(keys, dim, [&](int index, F element) {
    for (int v = 0; v < Q; ++v) acc[v] = Kv::multiply_add(set1(q[v * stride + index]), element, acc[v]);
  });
  for (int v = 0; v < Q; ++v) store(scores[v], acc[v]);
}

// The same for two tiles at once, where there are registers for them: few vectors alone do not fill the multipliers.
template <class Kv, int Q, class Tile>
void score_two_tiles(const float* q, long stride, const Tile* keys, int dim, float (*scores)[kSpan]) {
  F first[Q], second[Q];
  for (int v = 0; v < Q; ++v) first[v] = second[v] = zero();
  Kv::keys_of_two(keys[0], keys[1], dim, [&](int index, F a, F b) {
    for (int v = 0; v < Q; ++v) {
      const F element = set1(q[v * stride + index]);
      first[v] = Kv::multiply_add(element, a, first[v]);
      second[v] = Kv::multiply_add(element, b, second[v]);
    }
  });
  for (int v = 0; v < Q; ++v) {
    store(scores[v], first[v]);
    store(scores[v] + kKeyTile, second[v]);
  }
}

// acc[v] += weights[v][key] * values[key] for the keys [from, to) of a span, ascending
template <class Kv, int Q, class Tile>
void add_values(const float (*weights)[kSpan], const Tile* tiles, int dim, int from, int to, float* acc, long stride) {
  for (int d = 0; d < dim; d += 16) {
    F sum[Q];
    for (int v = 0; v < Q; ++v) sum[v] = load(acc + v * stride + d);
    for (int tile = from / kKeyTile; tile * kKeyTile < to; ++tile) {
      const int base = tile * kKeyTile;
      Kv::values(tiles[tile], dim, d, std::max(from - base, 0), std::min(to - base, kKeyTile), [&](int index, F values) {
        for (int v = 0; v < Q; ++v) sum[v] = Kv::multiply_add(set1(weights[v][base / Kv::kPerIndex + index]), values, sum[v]);
      });
    }
    for (int v = 0; v < Q; ++v) store(acc + v * stride + d, sum[v]);
  }
}

// Softmax of one vector over the visible keys [from, to) of a span: scores become weights, the state is rescaled.
template <class Kv>
inline void soften(float* scores, int from, int to, int dim, const State& state) {
  std::fill(scores, scores + from, kNothing);
  std::fill(scores + to, scores + kSpan, kNothing);
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

// What a vector sees of a span, as offsets [from, to).
struct Visible {
  int from, to;
};

inline Visible visible(const AttentionLayer& layer, int position, int start) {
  const int low = layer.window > 0 ? std::max(0, position - layer.window + 1) : 0;
  const int from = std::clamp(low - start, 0, kSpan), to = std::clamp(position + 1 - start, 0, kSpan);
  return from < to ? Visible{from, to} : Visible{0, 0};
}

// The 16-key tiles of a span that somebody in a block of queries sees: [first, end).
template <class Tile>
struct SpanTiles {
  int start, first, end;
  Tile keys[kSpan / kKeyTile];
  Tile values[kSpan / kKeyTile];
};

template <class T>
SpanTiles<Tile<T>> span_tiles(const QueryBlock& block, int span) {
  const AttentionLayer& layer = block.layer;
  const int start = span * kSpan;
  SpanTiles<Tile<T>> tiles{start, std::clamp(block.first_key() - start, 0, kSpan) / kKeyTile,
                           (std::clamp(block.last_key() + 1 - start, 0, kSpan) + kKeyTile - 1) / kKeyTile, {}, {}};
  const size_t per_head = static_cast<size_t>(layer.block_size) * layer.dim;
  for (int t = tiles.first; t < tiles.end; ++t) {
    const int position = start + t * kKeyTile, offset = position % layer.block_size;
    const size_t id = static_cast<size_t>(block.block_table[position / layer.block_size]);
    const T* base = reinterpret_cast<const T*>(layer.arena + id * layer.block_bytes + layer.layer_offset) + block.kv_head * per_head;
    tiles.keys[t].data = base + static_cast<size_t>(offset) * layer.dim;
    tiles.values[t].data = tiles.keys[t].data + layer.kv_heads * per_head;
  }
  return tiles;
}

template <class T>
SpanTiles<LeadingTile<T>> leading(const SpanTiles<Tile<T>>& tiles, const SpanTiles<Tile<T>>& next) {
  SpanTiles<LeadingTile<T>> result{tiles.start, tiles.first, tiles.end, {}, {}};
  for (int t = tiles.first; t < tiles.end; ++t) {
    const bool follows = next.first <= t && t < next.end;
    result.keys[t] = {tiles.keys[t].data, (follows ? next : tiles).keys[t].data};
    result.values[t] = {tiles.values[t].data, (follows ? next : tiles).values[t].data};
  }
  return result;
}

// Q vectors from `vector` on against one span.
template <class Kv, int Q, class Tile>
void attend_span(const QueryBlock& block, int vector, const SpanTiles<Tile>& tiles, const State& state) {
  const int dim = block.layer.dim;
  Visible seen[Q];
  int least = kSpan, most = 0, common_from = 0, common_to = kSpan;
  for (int v = 0; v < Q; ++v) {
    seen[v] = visible(block.layer, block.position(vector + v), tiles.start);
    if (seen[v].from < seen[v].to) {
      least = std::min(least, seen[v].from);
      most = std::max(most, seen[v].to);
    }
    common_from = std::max(common_from, seen[v].from);
    common_to = std::min(common_to, seen[v].to);
  }
  if (least >= most) return;

  alignas(64) float scores[Q][kSpan];
  const float* q = block.q + vector * block.stride;
  const auto at = [&](int tile) { return reinterpret_cast<float (*)[kSpan]>(&scores[0][tile * kKeyTile]); };
  int t = least / kKeyTile;
  const int end = (most + kKeyTile - 1) / kKeyTile;
  if constexpr (2 * Q <= kAccumulators)
    for (; t + 2 <= end; t += 2) score_two_tiles<Kv, Q>(q, block.stride, tiles.keys + t, dim, at(t));
  for (; t < end; ++t) score_tile<Kv, Q>(q, block.stride, tiles.keys[t], dim, at(t));

  for (int v = 0; v < Q; ++v)
    if (seen[v].from < seen[v].to) soften<Kv>(scores[v], seen[v].from, seen[v].to, dim, state.from(v));

  // Keys that all vectors see are shared, by whole indices; each vector's own keys before and after keep the ascending order.
  common_from = (common_from + Kv::kPerIndex - 1) / Kv::kPerIndex * Kv::kPerIndex;
  common_to = common_to / Kv::kPerIndex * Kv::kPerIndex;
  const auto own = [&](int v, int from, int to) {
    if (from < to) add_values<Kv, 1>(scores + v, tiles.values, dim, from, to, state.acc + v * state.stride, state.stride);
  };
  const bool shared = common_from < common_to;
  if (shared) {
    for (int v = 0; v < Q; ++v) own(v, seen[v].from, common_from);
    add_values<Kv, Q>(scores, tiles.values, dim, common_from, common_to, state.acc, state.stride);
  }
  for (int v = 0; v < Q; ++v) own(v, shared ? common_to : seen[v].from, seen[v].to);
}

template <class Kv, int Q = kQueryTile, class Tile>
void attend_tile(const QueryBlock& block, int vector, int count, const SpanTiles<Tile>& tiles, const State& state) {
  if (count == Q) return attend_span<Kv, Q>(block, vector, tiles, state);
  if constexpr (Q > 1) attend_tile<Kv, Q - 1>(block, vector, count, tiles, state);
}

// All vectors of the block over one partition; `state` is cleared first. `after`: what this thread will probably attend to
// when the block's last partition is done.
// The first vectors bring near what the others, and then the next span, read.
template <class Kv>
void attend_partition(const QueryBlock& block, int partition, const QueryBlock* after, const State& state) {
  using T = typename Kv::Element;
  const int vectors = block.vectors();
  state.clear(vectors);
  const int first = std::max(block.first_key(), partition * kPartition) / kSpan;
  const int last = std::min(block.last_key(), (partition + 1) * kPartition - 1) / kSpan;
  const int end = block.last_key() / kSpan;  // the partition after this one is this thread's next, too
  auto tiles = span_tiles<T>(block, first);
  for (int span = first; span <= last; ++span) {
    const auto next = span < end ? span_tiles<T>(block, span + 1) : after ? span_tiles<T>(*after, after->first_key() / kSpan) : tiles;
    attend_tile<Kv>(block, 0, std::min(kQueryTile, vectors), leading(tiles, next), state);
    for (int v = kQueryTile; v < vectors; v += kQueryTile) attend_tile<Kv>(block, v, std::min(kQueryTile, vectors - v), tiles, state.from(v));
    tiles = next;
  }
}

}  // namespace KVIST_NAMESPACE
