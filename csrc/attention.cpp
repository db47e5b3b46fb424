// See attention.h for what is computed; here are the tiles and the sharing of work.
#include "attention.h"

#include <algorithm>
#include <vector>

#include "attention_tile.h"
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

void list_items(const StepBatch& batch, const AttentionLayer& layer, int rows_per_item, std::vector<Item>& items) {
  items.clear();
  for (int s = 0; s < batch.sequences; ++s)
    for (int row = batch.query_start[s]; row < batch.query_start[s + 1]; row += rows_per_item)
      for (int h = 0; h < layer.kv_heads; ++h) items.push_back({s, row, std::min(rows_per_item, batch.query_start[s + 1] - row), h});
}

int first_key(const AttentionLayer& layer, int position) { return layer.window > 0 ? std::max(0, position - layer.window + 1) : 0; }

void write_out(const State& state, int dim, float* out) {
  const F inverse = set1(1.0f / *state.sum);
  for (int d = 0; d < dim; d += 16) store(out + d, mul(load(state.acc + d), inverse));
}

// One thread's memory for a block of queries: scaled queries and two states.
class Scratch {
 public:
  Scratch(float* memory, int vectors, int dim)
      : stride(dim + 16),  // no power of two: vectors must not share cache sets
        q(memory),
        part{q + vectors * stride, q + 3 * vectors * stride, q + 3 * vectors * stride + vectors, stride},
        total{q + 2 * vectors * stride, part.sum + vectors, part.sum + 2 * vectors, stride} {}
  static size_t floats(int vectors, int dim) { return static_cast<size_t>(vectors) * (3 * (dim + 16) + 4); }

  const long stride;
  float* const q;
  const State part, total;
};

QueryBlock block_of(const AttentionLayer& layer, const StepBatch& batch, const GroupTable& table, const Item& item, const Scratch& scratch) {
  return {layer, table.block_table + item.sequence * table.max_blocks, batch.positions + item.row, scratch.q, scratch.stride, item.rows, item.kv_head};
}

template <class Kv>
QueryBlock scale_queries(const AttentionLayer& layer, const StepBatch& batch, const GroupTable& table, const Item& item, const float* qkv,
                         const Scratch& scratch) {
  const QueryBlock block = block_of(layer, batch, table, item, scratch);
  const long width = (layer.heads + 2L * layer.kv_heads) * layer.dim;
  for (int v = 0; v < block.vectors(); ++v) {
    const float* from = qkv + (item.row + v / block.ratio()) * width + (item.kv_head * block.ratio() + v % block.ratio()) * layer.dim;
    for (int d = 0; d < layer.dim; d += 16) Kv::keep_query(scratch.q + v * scratch.stride, d, mul(load(from + d), set1(layer.scale)));
  }
  return block;
}

template <class Kv>
void attend_format(ThreadPool& pool, AttentionBuffers& buffers, const StepBatch& batch, const GroupTable& table, const AttentionLayer& layer,
                   const float* qkv, float* out) {
  const int dim = layer.dim, ratio = layer.heads / layer.kv_heads;
  const int rows_per_item = std::clamp(kVectorsPerItem / ratio, 1, 16), vectors = rows_per_item * ratio;
  list_items(batch, layer, rows_per_item, buffers.items);
  const std::vector<Item>& items = buffers.items;
  const size_t scratch_size = (Scratch::floats(vectors, dim) + 15) / 16 * 16;
  float* scratch_memory = buffers.scratch.reserve(scratch_size * pool.num_threads());
  const auto scratch_of = [&](int thread) { return Scratch(scratch_memory + scratch_size * thread, vectors, dim); };
  const auto out_of = [&](const Item& item, int v) { return (static_cast<size_t>(item.row + v / ratio) * layer.heads + item.kv_head * ratio + v % ratio); };
  const auto last_key = [&](const Item& item) { return batch.positions[item.row + item.rows - 1]; };

  // A thread goes on with its neighbour; where there are few items, with one that the others have left.
  const size_t threads = static_cast<size_t>(pool.num_threads()), next = items.size() < 4 * threads ? threads : 1;
  // Enough items to share: each walks its own partitions. Otherwise partitions are items of their own, merged afterwards.
  int partitions = 1;
  for (const Item& item : items) partitions = std::max(partitions, last_key(item) / kPartition + 1);
  if (partitions == 1 || static_cast<long>(items.size()) >= 4L * pool.num_threads()) {
    pool.run(static_cast<long>(items.size()), [&](long i, int thread) {
      const Item& item = items[static_cast<size_t>(i)];
      const Scratch scratch = scratch_of(thread);
      const QueryBlock block = scale_queries<Kv>(layer, batch, table, item, qkv, scratch);
      const QueryBlock after = block_of(layer, batch, table, items[std::min(static_cast<size_t>(i) + next, items.size() - 1)], scratch);
      scratch.total.clear(block.vectors());
      for (int p = block.first_key() / kPartition; p <= block.last_key() / kPartition; ++p) {
        attend_partition<Kv>(block, p, &after, scratch.part);
        for (int v = 0; v < block.vectors(); ++v)
          merge(scratch.total.from(v), scratch.part.max[v], scratch.part.sum[v], scratch.part.from(v).acc, dim);
      }
      for (int v = 0; v < block.vectors(); ++v) write_out(scratch.total.from(v), dim, out + out_of(item, v) * dim);
    });
    return;
  }
  const size_t record = static_cast<size_t>(dim) + 16;  // accumulator, maximum, sum
  float* partials = buffers.partials.reserve(static_cast<size_t>(batch.rows) * layer.heads * partitions * record);
  pool.run(static_cast<long>(items.size()) * partitions, [&](long i, int thread) {
    const Item& item = items[static_cast<size_t>(i / partitions)];
    const int p = static_cast<int>(i % partitions);
    if (p * kPartition > last_key(item)) return;
    const Scratch scratch = scratch_of(thread);
    const QueryBlock block = scale_queries<Kv>(layer, batch, table, item, qkv, scratch);
    attend_partition<Kv>(block, p, nullptr, scratch.part);
    for (int v = 0; v < block.vectors(); ++v) {
      float* to = partials + (out_of(item, v) * partitions + p) * record;
      if (!scratch.part.empty(v)) std::copy_n(scratch.part.from(v).acc, dim, to);
      to[dim] = scratch.part.max[v];
      to[dim + 1] = scratch.part.sum[v];
    }
  });
  pool.run(static_cast<long>(batch.rows) * layer.heads, [&](long i, int thread) {
    const int position = batch.positions[i / layer.heads];
    const State total = scratch_of(thread).total;
    total.clear(1);
    for (int p = first_key(layer, position) / kPartition; p <= position / kPartition; ++p) {
      const float* from = partials + (static_cast<size_t>(i) * partitions + p) * record;
      merge(total, from[dim], from[dim + 1], from, dim);
    }
    write_out(total, dim, out + static_cast<size_t>(i) * dim);
  });
}

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
    case KvFormat::bf16: return attend_format<AttendedBf16>(pool, buffers, batch, table, layer, qkv, out);
    case KvFormat::f16: return attend_format<PlainKv<uint16_t>>(pool, buffers, batch, table, layer, qkv, out);
    case KvFormat::f32: return attend_format<PlainKv<float>>(pool, buffers, batch, table, layer, qkv, out);
  }
}

}  // namespace KVIST_NAMESPACE
