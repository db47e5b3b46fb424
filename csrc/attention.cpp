// See attention.h for what is computed; here are the tiles and the sharing of work.
#include "attention.h"

#include <algorithm>
#include <limits>
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

// Consecutive rows of one sequence and one kv head: what a thread takes, for one partition or for all of them.
struct Block {
  int sequence, row, rows, kv_head;
};

std::vector<Block> blocks_of(const StepBatch& batch, const AttentionLayer& layer, int rows_per_block) {
  std::vector<Block> blocks;
  for (int s = 0; s < batch.sequences; ++s)
    for (int row = batch.query_start[s]; row < batch.query_start[s + 1]; row += rows_per_block)
      for (int h = 0; h < layer.kv_heads; ++h)
        blocks.push_back({s, row, std::min(rows_per_block, batch.query_start[s + 1] - row), h});
  return blocks;
}

struct Shape {
  int heads_per_tile, rows_per_tile;
};

// Query heads of one kv head first, then rows, up to kQueryTile vectors.
Shape tile_shape(const AttentionLayer& layer) {
  const int ratio = layer.heads / layer.kv_heads;
  const int heads = std::min(ratio, kQueryTile);
  return {heads, heads == ratio ? std::max(1, kQueryTile / ratio) : 1};
}

// Calls use(row, row count, head, head count) for the tiles of a block.
template <class Use>
void each_tile(const AttentionLayer& layer, const Block& block, Use use) {
  const Shape shape = tile_shape(layer);
  const int ratio = layer.heads / layer.kv_heads, first = block.kv_head * ratio;
  for (int row = block.row; row < block.row + block.rows; row += shape.rows_per_tile)
    for (int h = 0; h < ratio; h += shape.heads_per_tile)
      use(row, std::min(shape.rows_per_tile, block.row + block.rows - row), first + h, std::min(shape.heads_per_tile, ratio - h));
}

int first_key(const AttentionLayer& layer, int position) { return layer.window > 0 ? std::max(0, position - layer.window + 1) : 0; }

void write_out(const State& state, int vector, int dim, float* out) {
  const F inverse = set1(1.0f / state.sum[vector]);
  for (int d = 0; d < dim; d += 16) store(out + d, mul(load(state.acc[vector] + d), inverse));
}

template <class Kv>
void attend_format(ThreadPool& pool, AttentionBuffers& buffers, const StepBatch& batch, const GroupTable& table, const AttentionLayer& layer,
                   const float* qkv, float* out) {
  const int width = (layer.heads + 2 * layer.kv_heads) * layer.dim, dim = layer.dim;
  const auto blocks = blocks_of(batch, layer, 16);
  const auto tile_of = [&](int sequence, int row, int rows, int head, int heads) {
    return Tile{layer, table.block_table + sequence * table.max_blocks, batch.positions + row, qkv + static_cast<size_t>(row) * width, width, rows, head, heads};
  };
  const auto last_key = [&](const Block& b) { return batch.positions[b.row + b.rows - 1]; };

  // Enough blocks to share: each walks its own partitions. Otherwise partitions are items of their own.
  int partitions = 1;
  for (const Block& b : blocks) partitions = std::max(partitions, last_key(b) / kPartition + 1);
  if (partitions == 1 || static_cast<long>(blocks.size()) >= 4L * pool.num_threads()) {
    pool.run(static_cast<long>(blocks.size()), [&](long item, int) {
      const Block& b = blocks[static_cast<size_t>(item)];
      each_tile(layer, b, [&](int row, int rows, int head, int heads) {
        State total, part;
        const Tile tile = tile_of(b.sequence, row, rows, head, heads);
        total.clear(rows * heads);
        for (int p = first_key(layer, tile.positions[0]) / kPartition; p <= tile.positions[rows - 1] / kPartition; ++p) {
          part.clear(rows * heads);
          attend_partition<Kv>(tile, p, part);
          for (int v = 0; v < rows * heads; ++v) merge(total, v, part.max[v], part.sum[v], part.acc[v], dim);
        }
        for (int v = 0; v < rows * heads; ++v) write_out(total, v, dim, out + (static_cast<size_t>(row + v / heads) * layer.heads + head + v % heads) * dim);
      });
    });
    return;
  }
  const size_t record = static_cast<size_t>(dim) + 16;  // accumulator, maximum, sum
  float* partials = buffers.partials.reserve(static_cast<size_t>(batch.rows) * layer.heads * partitions * record);
  const auto partial = [&](int row, int head, int p) { return partials + ((static_cast<size_t>(row) * layer.heads + head) * partitions + p) * record; };
  pool.run(static_cast<long>(blocks.size()) * partitions, [&](long item, int) {
    const Block& b = blocks[static_cast<size_t>(item / partitions)];
    const int p = static_cast<int>(item % partitions);
    if (p * kPartition > last_key(b)) return;
    each_tile(layer, b, [&](int row, int rows, int head, int heads) {
      State part;
      part.clear(rows * heads);
      attend_partition<Kv>(tile_of(b.sequence, row, rows, head, heads), p, part);
      for (int v = 0; v < rows * heads; ++v) {
        float* to = partial(row + v / heads, head + v % heads, p);
        for (int d = 0; d < dim; d += 16) store(to + d, load(part.acc[v] + d));
        to[dim] = part.max[v];
        to[dim + 1] = part.sum[v];
      }
    });
  });
  pool.run(static_cast<long>(batch.rows) * layer.heads, [&](long item, int) {
    const int row = static_cast<int>(item / layer.heads), head = static_cast<int>(item % layer.heads), position = batch.positions[row];
    State total;
    total.clear(1);
    for (int p = first_key(layer, position) / kPartition; p <= position / kPartition; ++p) {
      const float* from = partial(row, head, p);
      merge(total, 0, from[dim], from[dim + 1], from, dim);
    }
    write_out(total, 0, dim, out + static_cast<size_t>(item) * dim);
  });
}

}  // namespace

void rope_write(ThreadPool& pool, const StepBatch& batch, const GroupTable& table, const AttentionLayer& layer, float* qkv) {
  const int dim = layer.dim, width = (layer.heads + 2 * layer.kv_heads) * dim;
  pool.run(batch.rows, [&](long row, int) {
    float* q = qkv + row * width;
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
  });
}

void attend(ThreadPool& pool, AttentionBuffers& buffers, const StepBatch& batch, const GroupTable& table, const AttentionLayer& layer,
            const float* qkv, float* out) {
  switch (layer.format) {
    case KvFormat::bf16: return attend_format<Bf16Kv>(pool, buffers, batch, table, layer, qkv, out);
    case KvFormat::f16: return attend_format<PlainKv<uint16_t>>(pool, buffers, batch, table, layer, qkv, out);
    case KvFormat::f32: return attend_format<PlainKv<float>>(pool, buffers, batch, table, layer, qkv, out);
  }
}

}  // namespace KVIST_NAMESPACE
