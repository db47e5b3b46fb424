// How blocks of queries walk the keys and values of their sequence.
//
// Many vectors to a kv head (a prompt) take one head: spans outside and vectors inside, so that a span is read from near memory. Few
// vectors (decoding) wait for memory: all heads of the block walk a span together, in the order in which it lies there, and ask for
// what comes a little later. A vector's own chain of operations is the same.
#pragma once

#include "attention.h"
#include "attention_tile.h"

namespace KVIST_NAMESPACE {

constexpr size_t kAheadBytes = 4096;  // so much further on in their walk lies what few vectors ask for: time enough, and little near memory

// Consecutive rows of one sequence with the query heads of consecutive kv heads. Of kv head kv_head + i are the vectors
// [i * per_head(), (i + 1) * per_head()), rows outermost.
struct QueryBlock {
  const AttentionLayer& layer;
  const int32_t* block_table;  // of the sequence
  const int32_t* positions;    // of the rows
  const float* q;              // scaled queries, [vectors][stride]
  long stride;
  int rows, kv_head, kv_heads;

  int first_key() const { return layer.window > 0 ? std::max(0, positions[0] - layer.window + 1) : 0; }
  int last_key() const { return positions[rows - 1]; }
  int ratio() const { return layer.heads / layer.kv_heads; }
  int per_head() const { return rows * ratio(); }
  int vectors() const { return kv_heads * per_head(); }
  int row(int v) const { return v % per_head() / ratio(); }
  int head(int v) const { return (kv_head + v / per_head()) * ratio() + v % ratio(); }

  // What the vectors of a row see of the span that begins at key `start`.
  Visible visible(int row, int start) const {
    const int position = positions[row], low = layer.window > 0 ? std::max(0, position - layer.window + 1) : 0;
    const int from = std::clamp(low - start, 0, kSpan), to = std::clamp(position + 1 - start, 0, kSpan);
    return from < to ? Visible{from, to} : Visible{0, 0};
  }
};

// The tiles of a span that somebody in a block of queries sees, [first, end), of its first kv head.
template <class T>
struct SpanTiles {
  int start, first, end;
  const T* keys[kSpanTiles];
  const T* values[kSpanTiles];
};

template <class T>
SpanTiles<T> span_tiles(const QueryBlock& block, int span) {
  const AttentionLayer& layer = block.layer;
  const int start = span * kSpan;
  SpanTiles<T> tiles{start, std::clamp(block.first_key() - start, 0, kSpan) / kKeyTile,
                     (std::clamp(block.last_key() + 1 - start, 0, kSpan) + kKeyTile - 1) / kKeyTile, {}, {}};
  const size_t per_head = static_cast<size_t>(layer.block_size) * layer.dim;
  for (int t = tiles.first; t < tiles.end; ++t) {
    const int position = start + t * kKeyTile, offset = position % layer.block_size;
    const size_t id = static_cast<size_t>(block.block_table[position / layer.block_size]);
    const T* base = reinterpret_cast<const T*>(layer.arena + id * layer.block_bytes + layer.layer_offset) + block.kv_head * per_head;
    tiles.keys[t] = base + static_cast<size_t>(offset) * layer.dim;
    tiles.values[t] = tiles.keys[t] + layer.kv_heads * per_head;
  }
  return tiles;
}

// The tiles that few vectors read, one after the other: of each span the keys, `together` tiles of each head in turn (one by one where
// fewer are left), then the values, one tile of each head in turn. After the block's last tile come those of `after`, and then the last
// span again and again.
template <class T>
class Walk {
 public:
  Walk(const QueryBlock& block, int span, const QueryBlock* after, int together)
      : block_(&block), after_(after), together_(together), span_(span), tiles_(span_tiles<T>(block, span)) {
    begin(tiles_.first);
  }

  const T* next() {
    const size_t per_head = static_cast<size_t>(block_->layer.block_size) * block_->layer.dim;
    const T* const tile = (values_ ? tiles_.values : tiles_.keys)[t_ + i_] + h_ * per_head;
    advance();
    return tile;
  }

 private:
  void begin(int t) {
    t_ = t;
    count_ = values_ || t + together_ > tiles_.end ? 1 : together_;
    i_ = h_ = 0;
  }
  void advance() {
    if (++i_ < count_) return;
    i_ = 0;
    if (++h_ < block_->kv_heads) return;
    if (t_ + count_ < tiles_.end) return begin(t_ + count_);
    values_ = !values_;
    if (!values_) next_span();
    begin(tiles_.first);
  }
  void next_span() {
    if (span_ < block_->last_key() / kSpan) {
      ++span_;
    } else if (after_) {
      block_ = after_;
      after_ = nullptr;
      span_ = block_->first_key() / kSpan;
    }
    tiles_ = span_tiles<T>(*block_, span_);
  }

  const QueryBlock* block_;
  const QueryBlock* after_;
  int together_, span_, t_ = 0, count_ = 1, i_ = 0, h_ = 0;
  bool values_ = false;
  SpanTiles<T> tiles_;
};

// Few: Q vectors to a head.
template <class Kv, int Q>
void attend_few(const QueryBlock& block, int first, int last, const QueryBlock* after, Scores* scores, const State& state) {
  using T = typename Kv::Element;
  constexpr int N = side_by_side(Q);
  const int dim = block.layer.dim;
  Walk<T> walk(block, first, after, N), ahead(block, first, after, N);
  for (size_t asked = 0; asked < kAheadBytes; asked += kKeyTile * static_cast<size_t>(dim) * sizeof(T)) ahead.next();
  LeadingTile<T> tiles[kSpanTiles];
  const auto take = [&](int t, int count) {
    for (int i = t; i < t + count; ++i) tiles[i] = {walk.next(), ahead.next()};
  };
  for (int span = first; span <= last; ++span) {
    const Views<Kv, Q> views([&](int v) { return block.visible(v / block.ratio(), span * kSpan); });
    const int begin = views.least / kKeyTile, end = (views.most + kKeyTile - 1) / kKeyTile;
    for (int t = begin, count; t < end; t += count) {
      count = t + N <= end ? N : 1;
      for (int h = 0; h < block.kv_heads; ++h) {
        take(t, count);
        score<Kv, Q>(block.q + h * Q * block.stride, block.stride, tiles + t, count, dim, scores_at(scores + h * Q, t));
      }
    }
    for (int t = begin; t < end; ++t)
      for (int h = 0; h < block.kv_heads; ++h) {
        if (t == begin) views.soften_all(scores + h * Q, dim, state.from(h * Q));
        take(t, 1);
        views.add_seen(scores + h * Q, tiles, t * kKeyTile, (t + 1) * kKeyTile, dim, state.from(h * Q));
      }
  }
}

template <class Kv, int Q = kQueryTile>
void attend_few_of(int count, const QueryBlock& block, int first, int last, const QueryBlock* after, Scores* scores, const State& state) {
  if (count == Q) return attend_few<Kv, Q>(block, first, last, after, scores, state);
  if constexpr (Q > 1) attend_few_of<Kv, Q - 1>(count, block, first, last, after, scores, state);
}

// Many: Q vectors from `vector` on against one span.
template <class Kv, int Q, class Tile>
void attend_span(const QueryBlock& block, int vector, int start, const Tile* keys, const Tile* values, const State& state) {
  const int dim = block.layer.dim;
  const Views<Kv, Q> views([&](int v) { return block.visible((vector + v) / block.ratio(), start); });
  if (views.none()) return;
  alignas(64) Scores scores[Q];
  const int begin = views.least / kKeyTile, end = (views.most + kKeyTile - 1) / kKeyTile;
  score<Kv, Q>(block.q + vector * block.stride, block.stride, keys + begin, end - begin, dim, scores_at(scores, begin));
  views.soften_all(scores, dim, state);
  views.add_seen(scores, values, 0, kSpan, dim, state);
}

template <class Kv, int Q = kQueryTile, class Tile>
void attend_tile(const QueryBlock& block, int vector, int count, int start, const Tile* keys, const Tile* values, const State& state) {
  if (count == Q) return attend_span<Kv, Q>(block, vector, start, keys, values, state);
  if constexpr (Q > 1) attend_tile<Kv, Q - 1>(block, vector, count, start, keys, values, state);
}

// The first vectors bring near what the others, and then the next span, read.
template <class Kv>
void attend_many(const QueryBlock& block, int first, int last, const QueryBlock* after, const State& state) {
  using T = typename Kv::Element;
  const int vectors = block.vectors(), end = block.last_key() / kSpan;  // the partition after this one is this thread's next, too
  auto tiles = span_tiles<T>(block, first);
  for (int span = first; span <= last; ++span) {
    const auto next = span < end ? span_tiles<T>(block, span + 1) : after ? span_tiles<T>(*after, after->first_key() / kSpan) : tiles;
    LeadingTile<T> leading[2][kSpanTiles];
    Tile<T> plain[2][kSpanTiles];
    for (int t = tiles.first; t < tiles.end; ++t) {
      const auto& later = next.first <= t && t < next.end ? next : tiles;
      leading[0][t] = {tiles.keys[t], later.keys[t]}, leading[1][t] = {tiles.values[t], later.values[t]};
      plain[0][t] = {tiles.keys[t]}, plain[1][t] = {tiles.values[t]};
    }
    attend_tile<Kv>(block, 0, std::min(kQueryTile, vectors), tiles.start, leading[0], leading[1], state);
    for (int v = kQueryTile; v < vectors; v += kQueryTile)
      attend_tile<Kv>(block, v, std::min(kQueryTile, vectors - v), tiles.start, plain[0], plain[1], state.from(v));
    tiles = next;
  }
}

// All vectors of the block over one partition; `state` is cleared first. `after`: what this thread will probably attend to when the
// block's last partition is done. Blocks of many vectors to a head have one head. scores [vectors] for the others.
template <class Kv>
void attend_partition(const QueryBlock& block, int partition, const QueryBlock* after, Scores* scores, const State& state) {
  state.clear(block.vectors());
  const int first = std::max(block.first_key(), partition * kPartition) / kSpan;
  const int last = std::min(block.last_key(), (partition + 1) * kPartition - 1) / kSpan;
  if (block.per_head() <= kQueryTile) attend_few_of<Kv>(block.per_head(), block, first, last, after, scores, state);
  else attend_many<Kv>(block, first, last, after, state);
}

}  // namespace KVIST_NAMESPACE
