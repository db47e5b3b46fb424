// Paged attention and the write of rotated keys and values, for any mix of prompt and decode rows.
//
// A row at position q sees keys max(0, q - window + 1) .. q. Keys are walked in partitions of 512 positions and, inside one, in spans
// of 64, both aligned to absolute positions, with the online softmax of FlashAttention (Dao et al. 2022, algorithm 1). Partitions
// are folded in ascending order: M' = max(M, m), A' = A e^(M - M') + a e^(m - M'), L likewise. A row's chain of operations depends on
// its own position and keys alone; whether partitions are shared among threads or walked by one changes no bit. Only what was
// written to the cache is read, and only the visible slots of it.
#pragma once

#include <cstdint>
#include <vector>

#include "buffer.h"
#include "kv_format.h"
#include "thread_pool.h"

namespace KVIST_NAMESPACE {

constexpr int kPartition = 512;
constexpr int kMaxHeadDim = 256;
constexpr int kVectorsPerItem = 64;  // queries that walk a span together

// One step's requests; see ForwardBatch and GroupTables of kernels/ops.py.
struct GroupTable {
  const int32_t* block_table;  // [sequences, max_blocks]
  const int64_t* slots;        // [rows]
  long max_blocks;
};
struct StepBatch {
  int rows, sequences;
  const int32_t* positions;
  const int32_t* query_start;  // [sequences + 1]
};

// One layer over its cache.
struct AttentionLayer {
  uint8_t* arena;
  size_t block_bytes;   // stride of blocks
  size_t layer_offset;  // of this layer's share inside a block
  KvFormat format;
  int block_size;
  int group;  // KV group
  int heads, kv_heads, dim;
  float scale;
  int window;  // 0: full
  const float *cosine, *sine;  // [positions, rotary / 2]
  long table_rows;
  int half;  // rotary / 2
  const float *q_norm, *k_norm;  // [dim] or null
  float norm_eps;
};

// Rows of a sequence and kv heads that walk their keys together.
struct AttentionItem {
  int sequence, row, rows, kv_head, kv_heads;
  int first, last;  // partitions
  long partials;    // where its own begin, in records; unused unless it is cut
  bool cut;
};

// What a thread takes: the partitions [first, last] of an item.
struct AttentionUnit {
  int item, first, last;
};

struct AttentionBuffers {
  Buffer<float> partials, scratch;
  std::vector<AttentionItem> items;
  std::vector<AttentionUnit> units;
};

// qkv [rows, (heads + 2 kv_heads) * dim]: norms and rotates q and k in place, writes k and v to their slots.
void rope_write(ThreadPool& pool, const StepBatch& batch, const GroupTable& table, const AttentionLayer& layer, float* qkv);

// out [rows, heads * dim]
void attend(ThreadPool& pool, AttentionBuffers& buffers, const StepBatch& batch, const GroupTable& table, const AttentionLayer& layer,
            const float* qkv, float* out);

}  // namespace KVIST_NAMESPACE
