// See attention.h for what is computed; here are the tiles and the sharing of work.
#include "attention.h"

#include <algorithm>
#include <vector>

#include "attention_walk.h"
#include "elementwise.h"

namespace KVIST_NAMESPACE {

namespace {

template <class Kv>
void write_row(const AttentionLayer& layer, int64_t slot, const float* k, const float* v) {
  using T = typename Kv::Element;
  const int dim = layer.dim, offset = static_cast<int>(slot % layer.block_size);
  const size_t per_head = static_cast<size_t>(layer.block_size) * dim;
  T* keys = reinterpret_cast<T*>(layer.arena + static_cast<size_t>(slot / layer.block_size) * layer.block_bytes + layer.layer_offset);
  T* values = keys + layer.kv_heads * per_head;
  for (int h = 0; h < layer.kv_heads; ++h) {
    for (int d = 0; d < dim; ++d) {
      keys[h * per_head + Kv::key_at(offset, d, dim)] = Kv::encode(k[h * dim + d]);
      values[h * per_head + Kv::value_at(offset, d, dim)] = Kv::encode(v[h * dim + d]);
    }
  }
}

using Item = AttentionItem;
using Unit = AttentionUnit;

constexpr int kShares = 4;  // units are at most so small a part of a thread's work, where they can be

int first_key(const AttentionLayer& layer, int position) { return layer.window > 0 ? std::max(0, position - layer.window + 1) : 0; }

int partitions_of(const Item& item) { return item.last - item.first + 1; }

// How a batch is shared among threads.
class Plan {
 public:
  Plan(AttentionBuffers& buffers, const StepBatch& batch, const AttentionLayer& layer, int threads)
      : batch_(batch), layer_(layer), ratio_(layer.heads / layer.kv_heads), items_(buffers.items), units_(buffers.units) {
    list_items(layer.kv_heads);
    list_units(threads);
    if (threads == 1 || largest_unit() * kShares * threads <= all_work()) return;
    list_items(1);  // heads are better shared than walked together
    list_units(threads);
  }

  int vectors(const Item& item) const { return item.rows * item.kv_heads * ratio_; }
  int most_vectors() const {
    int most = 0;
    for (const Item& item : items_) most = std::max(most, vectors(item));
    return most;
  }
  long partials() const { return partials_; }

 private:
  // Rows that are many to a kv head take one head, few take up to `joined` heads.
  void list_items(int joined) {
    const int most = std::clamp(kVectorsPerItem / ratio_, 1, 16);
    items_.clear();
    for (int s = 0; s < batch_.sequences; ++s)
      for (int row = batch_.query_start[s], rows; row < batch_.query_start[s + 1]; row += rows) {
        rows = std::min(most, batch_.query_start[s + 1] - row);
        const int heads = rows * ratio_ <= kQueryTile ? std::min(joined, kVectorsPerItem / (rows * ratio_)) : 1;
        for (int h = 0; h < layer_.kv_heads; h += heads) {
          Item item{s, row, rows, h, std::min(heads, layer_.kv_heads - h), 0, 0, 0, false};
          item.first = first_key(layer_, batch_.positions[row]) / kPartition;
          item.last = last_key(item) / kPartition;
          items_.push_back(item);
        }
      }
  }

  // An item with more than its share of the work is cut into partitions.
  void list_units(int threads) {
    const long all = all_work();
    units_.clear();
    partials_ = 0;
    for (Item& item : items_) {
      const int number = static_cast<int>(&item - items_.data());
      item.cut = threads > 1 && partitions_of(item) > 1 && work(item, item.first, item.last) * kShares * threads > all;
      if (!item.cut) {
        units_.push_back({number, item.first, item.last});
        continue;
      }
      item.partials = partials_;
      partials_ += static_cast<long>(vectors(item)) * partitions_of(item);
      for (int p = item.first; p <= item.last; ++p) units_.push_back({number, p, p});
    }
  }

  int last_key(const Item& item) const { return batch_.positions[item.row + item.rows - 1]; }
  long work(const Item& item, int first, int last) const {
    const int from = std::max(first * kPartition, first_key(layer_, batch_.positions[item.row]));
    return static_cast<long>(vectors(item)) * (std::min((last + 1) * kPartition, last_key(item) + 1) - from);
  }
  long all_work() const {
    long all = 0;
    for (const Item& item : items_) all += work(item, item.first, item.last);
    return all;
  }
  long largest_unit() const {
    long largest = 0;
    for (const Unit& unit : units_) largest = std::max(largest, work(items_[static_cast<size_t>(unit.item)], unit.first, unit.last));
    return largest;
  }

  const StepBatch& batch_;
  const AttentionLayer& layer_;
  const int ratio_;
  std::vector<Item>& items_;
  std::vector<Unit>& units_;
  long partials_ = 0;
};

void write_out(const State& state, int dim, float* out) {
  const F inverse = set1(1.0f / *state.sum);
  for (int d = 0; d < dim; d += 16) store(out + d, mul(load(state.acc + d), inverse));
}

// One thread's memory for a block of queries: scaled queries, two states, scores.
class Scratch {
 public:
  Scratch(float* memory, int vectors, int dim)
      : stride(dim + 16),  // no power of two: vectors must not share cache sets
        q(memory),
        scores(reinterpret_cast<Scores*>(q + 3 * vectors * stride)),
        part{q + vectors * stride, scores[vectors], scores[vectors] + vectors, stride},
        total{q + 2 * vectors * stride, part.sum + vectors, part.sum + 2 * vectors, stride} {}
  static size_t floats(int vectors, int dim) { return (static_cast<size_t>(vectors) * (3 * (dim + 16) + kSpan + 4) + 15) / 16 * 16; }

  const long stride;
  float* const q;
  Scores* const scores;
  const State part, total;
};

// One layer's attention over a batch.
template <class Kv>
class Attention {
 public:
  Attention(ThreadPool& pool, AttentionBuffers& buffers, const StepBatch& batch, const GroupTable& table, const AttentionLayer& layer,
            const float* qkv, float* out)
      : plan_(buffers, batch, layer, pool.num_threads()),
        pool_(pool),
        batch_(batch),
        table_(table),
        layer_(layer),
        qkv_(qkv),
        out_(out),
        items_(buffers.items),
        units_(buffers.units),
        vectors_(plan_.most_vectors()),
        record_(static_cast<size_t>(layer.dim) + 16),
        scratch_(buffers.scratch.reserve(Scratch::floats(vectors_, layer.dim) * pool.num_threads())),
        partials_(plan_.partials() > 0 ? buffers.partials.reserve(static_cast<size_t>(plan_.partials()) * record_) : nullptr) {}

  void run() const {
    // A thread goes on with its neighbour; where there are few units, with one that the others have left.
    const size_t threads = static_cast<size_t>(pool_.num_threads()), next = units_.size() < kShares * threads ? threads : 1;
    pool_.run(static_cast<long>(units_.size()), [&](long i, int thread) {
      const Unit& later = units_[std::min(static_cast<size_t>(i) + next, units_.size() - 1)];
      attend(units_[static_cast<size_t>(i)], items_[static_cast<size_t>(later.item)], scratch_of(thread));
    });
    if (!partials_) return;
    pool_.run(static_cast<long>(items_.size()) * vectors_, [&](long i, int thread) {
      const Item& item = items_[static_cast<size_t>(i / vectors_)];
      const int v = static_cast<int>(i % vectors_);
      if (item.cut && v < plan_.vectors(item)) merge_partitions(item, v, scratch_of(thread));
    });
  }

 private:
  Scratch scratch_of(int thread) const { return Scratch(scratch_ + Scratch::floats(vectors_, layer_.dim) * thread, vectors_, layer_.dim); }
  QueryBlock block_of(const Item& item, const Scratch& scratch) const {
    return {layer_, table_.block_table + item.sequence * table_.max_blocks, batch_.positions + item.row, scratch.q, scratch.stride,
            item.rows, item.kv_head, item.kv_heads};
  }
  float* out_of(const Item& item, const QueryBlock& block, int v) const {
    return out_ + (static_cast<size_t>(item.row + block.row(v)) * layer_.heads + block.head(v)) * layer_.dim;
  }
  // accumulator, maximum, sum
  float* partial_of(const Item& item, int v, int partition) const {
    return partials_ + (static_cast<size_t>(item.partials) + static_cast<size_t>(v) * partitions_of(item) + partition - item.first) * record_;
  }

  void scale_queries(const Item& item, const QueryBlock& block, float* q) const {
    const size_t width = (layer_.heads + 2 * static_cast<size_t>(layer_.kv_heads)) * layer_.dim;
    for (int v = 0; v < block.vectors(); ++v) {
      const float* from = qkv_ + (item.row + block.row(v)) * width + static_cast<size_t>(block.head(v)) * layer_.dim;
      for (int d = 0; d < layer_.dim; d += 16) Kv::keep_query(q + v * block.stride, d, mul(load(from + d), set1(layer_.scale)));
    }
  }

  void attend(const Unit& unit, const Item& later, const Scratch& scratch) const {
    const Item& item = items_[static_cast<size_t>(unit.item)];
    const QueryBlock block = block_of(item, scratch), after = block_of(later, scratch);
    scale_queries(item, block, scratch.q);
    scratch.total.clear(block.vectors());
    for (int p = unit.first; p <= unit.last; ++p) {
      attend_partition<Kv>(block, p, &after, scratch.scores, scratch.part);
      for (int v = 0; v < block.vectors(); ++v) {
        if (item.cut) keep_partial(scratch.part.from(v), partial_of(item, v, p));
        else merge(scratch.total.from(v), scratch.part.max[v], scratch.part.sum[v], scratch.part.from(v).acc, layer_.dim);
      }
    }
    if (item.cut) return;
    for (int v = 0; v < block.vectors(); ++v) write_out(scratch.total.from(v), layer_.dim, out_of(item, block, v));
  }

  void keep_partial(const State& part, float* to) const {
    if (!part.empty(0)) std::copy_n(part.acc, layer_.dim, to);
    to[layer_.dim] = *part.max;
    to[layer_.dim + 1] = *part.sum;
  }

  void merge_partitions(const Item& item, int v, const Scratch& scratch) const {
    const int dim = layer_.dim;
    scratch.total.clear(1);
    for (int p = item.first; p <= item.last; ++p) {
      const float* from = partial_of(item, v, p);
      merge(scratch.total, from[dim], from[dim + 1], from, dim);
    }
    write_out(scratch.total, dim, out_of(item, block_of(item, scratch), v));
  }

  const Plan plan_;
  ThreadPool& pool_;
  const StepBatch& batch_;
  const GroupTable& table_;
  const AttentionLayer& layer_;
  const float* const qkv_;
  float* const out_;
  const std::vector<Item>& items_;
  const std::vector<Unit>& units_;
  const int vectors_;
  const size_t record_;
  float *const scratch_, *const partials_;
};

}  // namespace

void rope_write(ThreadPool& pool, const StepBatch& batch, const GroupTable& table, const AttentionLayer& layer, float* qkv) {
  const int dim = layer.dim, width = (layer.heads + 2 * layer.kv_heads) * dim;
  const auto write = [&](int row) {
    float* q = qkv + static_cast<long>(row) * width;
    float* k = q + layer.heads * dim;
    const long position = std::min<long>(batch.positions[row], layer.table_rows - 1);
    const float *cosine = layer.cosine + position * layer.half, *sine = layer.sine + position * layer.half;
    for (int h = 0; h < layer.heads + layer.kv_heads; ++h) {
      float* head = q + h * dim;
      const float* norm = h < layer.heads ? layer.q_norm : layer.k_norm;
      if (norm) rms_norm(head, norm, layer.norm_eps, dim, head);
      rotate(head, cosine, sine, layer.half);
    }
    const float* v = k + layer.kv_heads * dim;
    switch (layer.format) {
      case KvFormat::bf16: return write_row<Bf16Kv>(layer, table.slots[row], k, v);
      case KvFormat::f16: return write_row<PlainKv<uint16_t>>(layer, table.slots[row], k, v);
      case KvFormat::f32: return write_row<PlainKv<float>>(layer, table.slots[row], k, v);
    }
  };
  // The keys of a tile share cache lines, so neighbours are better written by one thread.
  pool.run((batch.rows + kKeyTile - 1) / kKeyTile, [&](long item, int) {
    const int first = static_cast<int>(item) * kKeyTile;
    for (int row = first; row < std::min(first + kKeyTile, batch.rows); ++row) write(row);
  });
}

void attend(ThreadPool& pool, AttentionBuffers& buffers, const StepBatch& batch, const GroupTable& table, const AttentionLayer& layer,
            const float* qkv, float* out) {
  switch (layer.format) {
    case KvFormat::bf16: return Attention<AttendedBf16>(pool, buffers, batch, table, layer, qkv, out).run();
    case KvFormat::f16: return Attention<PlainKv<uint16_t>>(pool, buffers, batch, table, layer, qkv, out).run();
    case KvFormat::f32: return Attention<PlainKv<float>>(pool, buffers, batch, table, layer, qkv, out).run();
  }
}

}  // namespace KVIST_NAMESPACE
