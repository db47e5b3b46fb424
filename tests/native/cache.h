// A paged cache for the attention cases: sequences at scattered blocks of one layer among two, NaN wherever nothing was written.
//
// Knows the layouts of kv_format.h by its own formulas, and what every slot should hold. Knows nothing of attention.
#pragma once

#include <algorithm>

#include "attention.h"
#include "check.h"

namespace native_test {

using namespace KVIST_NAMESPACE;

constexpr int32_t kNowhere = 0x7ff00000;  // a block id far outside any arena: following it ends the program

struct Sequence {
  int before, rows;  // positions written by an earlier step, and rows of the step under test
  int length() const { return before + rows; }
};

struct Shape {
  const char* name;
  KvFormat format;
  int block_size, dim, heads, kv_heads, window, half;
  bool norms;
  std::vector<Sequence> sequences;

  float scale() const { return 2.0f / std::sqrt(static_cast<float>(dim)); }
  int width() const { return (heads + 2 * kv_heads) * dim; }
  size_t element_bytes() const { return format == KvFormat::f32 ? 4 : 2; }
  size_t share_bytes() const { return static_cast<size_t>(2) * kv_heads * block_size * dim * element_bytes(); }
  int first_key(int position) const { return window > 0 ? std::max(0, position - window + 1) : 0; }
  double rounded(double value) const {
    return format == KvFormat::f32 ? value : format == KvFormat::f16 ? nearest_f16(value) : nearest_bf16(value);
  }
};

// Rows of a step: `count` positions of sequence `sequence` from `first` on.
struct Part {
  int sequence, first, count;
};

// The arrays that a StepBatch and a GroupTable point to.
struct Batch {
  std::vector<int32_t> positions, query_start{0}, block_table;
  std::vector<int64_t> slots;
  long max_blocks = 0;

  StepBatch step() const {
    return {static_cast<int>(positions.size()), static_cast<int>(query_start.size()) - 1, positions.data(), query_start.data()};
  }
  GroupTable table() const { return {block_table.data(), slots.data(), max_blocks}; }
};

class Cache {
 public:
  Cache(const Shape& shape, Chance& chance) : shape_(shape) {
    int longest = 0;
    for (const Sequence& s : shape.sequences) {
      longest = std::max(longest, s.length());
      blocks_.emplace_back(static_cast<size_t>((s.length() + shape.block_size - 1) / shape.block_size));
    }
    max_blocks_ = (longest + shape.block_size - 1) / shape.block_size + 1;
    std::vector<int32_t> ids;
    for (const auto& own : blocks_)
      for (size_t i = 0; i < own.size(); ++i) ids.push_back(static_cast<int32_t>(ids.size()));
    for (size_t i = ids.size(); i > 1; --i) std::swap(ids[i - 1], ids[static_cast<size_t>(chance.below(static_cast<int>(i)))]);
    arena_.assign(ids.size() * 2 * shape.share_bytes(), 0xff);
    for (auto& own : blocks_)
      for (int32_t& id : own) {
        id = ids.back();
        ids.pop_back();
      }
    cosine_ = chance.floats(static_cast<size_t>(longest) * shape.half);
    for (const float c : cosine_) sine_.push_back(std::sqrt(1 - c * c));
    norm_[0] = chance.floats(shape.dim, 1.5f);
    norm_[1] = chance.floats(shape.dim, 1.5f);
  }

  const Shape& shape() const { return shape_; }
  const std::vector<float>& cosine() const { return cosine_; }
  const std::vector<float>& sine() const { return sine_; }
  const std::vector<float>& norm(bool key) const { return norm_[key]; }
  std::vector<uint8_t>& arena() { return arena_; }

  AttentionLayer layer() {
    const Shape& s = shape_;
    const float *q_norm = s.norms ? norm_[0].data() : nullptr, *k_norm = s.norms ? norm_[1].data() : nullptr;
    const long table_rows = static_cast<long>(cosine_.size()) / std::max(s.half, 1);
    return {arena_.data(), 2 * s.share_bytes(), s.share_bytes(), s.format, s.block_size, 0,      s.heads, s.kv_heads, s.dim,
            s.scale(),     s.window,            cosine_.data(),  sine_.data(), table_rows, s.half, q_norm, k_norm,     1e-5f};
  }

  // The table names only blocks that some row of the part sees or writes.
  Batch batch(const std::vector<Part>& parts) const {
    Batch batch;
    batch.max_blocks = max_blocks_;
    for (const Part& part : parts) {
      const int last = part.first + part.count - 1;
      for (int b = 0; b < max_blocks_; ++b) {
        const bool seen = b >= shape_.first_key(part.first) / shape_.block_size && b <= last / shape_.block_size;
        batch.block_table.push_back(seen ? blocks_[part.sequence][b] : kNowhere);
      }
      for (int p = part.first; p <= last; ++p) {
        batch.positions.push_back(p);
        const int64_t block = blocks_[part.sequence][p / shape_.block_size];
        batch.slots.push_back(block * shape_.block_size + p % shape_.block_size);
      }
      batch.query_start.push_back(static_cast<int32_t>(batch.positions.size()));
    }
    return batch;
  }

  // What the cache holds for one position, head and element.
  double value(bool key, int sequence, int position, int head, int d) const {
    const uint8_t* at = arena_.data() + place(key, sequence, position, head, d);
    if (shape_.format == KvFormat::f32) {
      float stored;
      std::memcpy(&stored, at, 4);
      return stored;
    }
    uint16_t stored;
    std::memcpy(&stored, at, 2);
    return shape_.format == KvFormat::f16 ? f16_value(stored) : bf16_value(stored);
  }

  // Makes one position of a sequence NaN, as in memory that nobody wrote.
  void forget(int sequence, int position) {
    for (int h = 0; h < shape_.kv_heads; ++h)
      for (int d = 0; d < shape_.dim; ++d)
        for (const bool key : {false, true})
          std::memset(arena_.data() + place(key, sequence, position, h, d), 0xff, shape_.element_bytes());
  }

  // Forgetting everything that was written must leave no byte changed.
  bool is_blank() const {
    return std::all_of(arena_.begin(), arena_.end(), [](uint8_t byte) { return byte == 0xff; });
  }

 private:
  size_t place(bool key, int sequence, int position, int head, int d) const {
    const int offset = position % shape_.block_size, tile = offset / 16, lane = offset % 16, dim = shape_.dim;
    const size_t per_head = static_cast<size_t>(shape_.block_size) * dim;
    const bool pairs = shape_.format == KvFormat::bf16;
    size_t within;
    if (key) within = pairs ? ((tile * (dim / 2) + d / 2) * 16 + lane) * 2 + d % 2 : (tile * dim + d) * 16 + lane;
    else within = pairs ? (offset / 2 * dim + d) * 2 + offset % 2 : offset * dim + d;
    within += per_head * (key ? head : shape_.kv_heads + head);
    const size_t block = static_cast<size_t>(blocks_[sequence][position / shape_.block_size]);
    return (2 * block + 1) * shape_.share_bytes() + within * shape_.element_bytes();
  }

  Shape shape_;
  int max_blocks_;
  std::vector<std::vector<int32_t>> blocks_;
  std::vector<uint8_t> arena_;
  std::vector<float> cosine_, sine_, norm_[2];
};

}  // namespace native_test
