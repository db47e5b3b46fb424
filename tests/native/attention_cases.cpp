// Rotation, the write to the cache and paged attention: against double precision, and each row's bits whatever runs beside it.
#include <algorithm>

#include "cache.h"

namespace native_test {

namespace {

std::vector<Shape> shapes() {
  using enum KvFormat;
  return {
      {"three per head", bf16, 16, 64, 9, 3, 0, 32, false, {{0, 5}, {37, 1}, {70, 20}}},
      {"eight per head, norms", f16, 32, 16, 8, 1, 0, 8, true, {{15, 1}, {16, 18}}},
      {"window, partial rotation", f32, 64, 80, 3, 3, 20, 16, false, {{100, 30}, {3, 2}}},
      {"wide heads, large blocks", bf16, 128, 256, 2, 2, 0, 128, false, {{130, 3}}},
      {"nine per head, window", bf16, 16, 48, 9, 1, 33, 24, true, {{90, 17}, {0, 1}}},
      {"wide heads in f16", f16, 64, 192, 2, 1, 64, 0, false, {{62, 5}}},
      {"one row, three partitions", bf16, 16, 64, 3, 1, 0, 32, false, {{1100, 1}}},
      {"few rows, windowed partitions", f16, 16, 32, 3, 1, 520, 16, false, {{1040, 20}}},
      {"many heads, windowed partitions", f32, 32, 32, 8, 8, 700, 16, true, {{1030, 2}, {600, 1}}},
      {"across a partition's edge", f32, 128, 16, 6, 2, 0, 8, false, {{505, 14}}},
  };
}

// How rows with more than one partition were attended: partitions as items of their own, or whole rows. Both must be seen.
struct Ways {
  int split = 0, whole = 0;
};

std::vector<Part> parts_of(const Shape& shape, bool earlier) {
  std::vector<Part> parts;
  for (int s = 0; s < static_cast<int>(shape.sequences.size()); ++s) {
    const Sequence& sequence = shape.sequences[s];
    if (earlier && sequence.before > 0) parts.push_back({s, 0, sequence.before});
    if (!earlier) parts.push_back({s, sequence.before, sequence.rows});
  }
  return parts;
}

// One head of one row, normed and rotated in double precision, and its bound.
void check_head(const Cache& cache, const float* before, const float* after, bool key, int position) {
  const Shape& s = cache.shape();
  std::vector<double> x(before, before + s.dim);
  if (s.norms) {
    double squares = 0;
    for (const double v : x) squares += v * v;
    for (int d = 0; d < s.dim; ++d) x[d] *= cache.norm(key)[d] / std::sqrt(squares / s.dim + 1e-5f);
  }
  for (int d = 0; d < s.dim; ++d) {
    double exact = x[d], size = std::fabs(x[d]);
    if (d < 2 * s.half) {
      const int i = d % s.half, other = d < s.half ? d + s.half : d - s.half;
      const double c = cache.cosine()[position * s.half + i], sine = cache.sine()[position * s.half + i];
      exact = x[d] * c + (d < s.half ? -1 : 1) * x[other] * sine;
      size += std::fabs(x[other]);
    }
    const double bound = (s.dim / 16 + 16) * kEps * size;
    check(std::fabs(after[d] - exact) <= bound, "%s: element %d at %d is %a, not %a", s.name, d, position, after[d], exact);
  }
}

// Writes the rows of `parts` from random numbers; gives qkv as rope_write leaves it.
std::vector<float> write_rows(ThreadPool& pool, Cache& cache, const std::vector<Part>& parts, Chance& chance) {
  const Shape& s = cache.shape();
  const Batch batch = cache.batch(parts);
  std::vector<float> qkv = chance.floats(batch.positions.size() * s.width(), 3.0f);
  const auto before = qkv;
  rope_write(pool, batch.step(), batch.table(), cache.layer(), qkv.data());
  size_t row = 0;
  for (const Part& part : parts)
    for (int p = part.first; p < part.first + part.count; ++p, ++row) {
      const float *from = before.data() + row * s.width(), *to = qkv.data() + row * s.width();
      for (int h = 0; h < s.heads + s.kv_heads; ++h) check_head(cache, from + h * s.dim, to + h * s.dim, h >= s.heads, p);
      const float *k = to + s.heads * s.dim, *v = k + s.kv_heads * s.dim;
      const float* v_before = from + (s.heads + s.kv_heads) * s.dim;
      check(same_bits(v, v_before, static_cast<size_t>(s.kv_heads) * s.dim), "%s: values are changed", s.name);
      for (int i = 0; i < s.kv_heads * s.dim; ++i) {
        check(cache.value(true, part.sequence, p, i / s.dim, i % s.dim) == s.rounded(k[i]), "%s: key element %d at %d", s.name, i, p);
        check(cache.value(false, part.sequence, p, i / s.dim, i % s.dim) == s.rounded(v[i]), "%s: value element %d at %d", s.name, i, p);
      }
    }
  return qkv;
}

std::vector<float> attended(ThreadPool& pool, Cache& cache, const std::vector<Part>& parts, const std::vector<float>& qkv, Ways& ways) {
  const Batch batch = cache.batch(parts);
  std::vector<float> out(batch.positions.size() * cache.shape().heads * cache.shape().dim);
  AttentionBuffers buffers;
  attend(pool, buffers, batch.step(), batch.table(), cache.layer(), qkv.data(), out.data());
  const bool split = buffers.partials.reserve(0) != nullptr;
  if (*std::max_element(batch.positions.begin(), batch.positions.end()) >= kPartition) ++(split ? ways.split : ways.whole);
  return out;
}

// By how much, relatively, a weight is rounded where it is rounded to bf16, as the query is.
double rounding_of(const Shape& s) { return s.format == KvFormat::bf16 && AttendedBf16::kPerIndex == 2 ? 0x1p-9 : 0.0; }

long rounded = 0;  // elements checked where this was so

// One head of one row: softmax over the visible keys in double precision. A score's error moves a weight by as much, relatively.
void check_row(const Cache& cache, int sequence, int position, int head, const float* q, const float* out) {
  const Shape& s = cache.shape();
  const int first = s.first_key(position), kv_head = head / (s.heads / s.kv_heads);
  const double scale = s.scale(), rounding = rounding_of(s);
  std::vector<double> scores;
  double error = 0, largest = -std::numeric_limits<double>::infinity(), total = 0;
  for (int p = first; p <= position; ++p) {
    double score = 0, size = 0;
    for (int d = 0; d < s.dim; ++d) {
      const double query = rounding > 0 ? nearest_bf16(static_cast<float>(q[d] * s.scale())) : q[d] * scale;
      const double term = query * cache.value(true, sequence, p, kv_head, d);
      score += term;
      size += std::fabs(term);
    }
    scores.push_back(score);
    largest = std::max(largest, score);
    error = std::max(error, (s.dim + 3) * kEps * size);
  }
  for (double& score : scores) total += score = std::exp(score - largest);
  for (int d = 0; d < s.dim; ++d) {
    double exact = 0, size = 0;
    for (int p = first; p <= position; ++p) {
      const double term = scores[p - first] / total * cache.value(false, sequence, p, kv_head, d);
      exact += term;
      size += std::fabs(term);
    }
    rounded += rounding > 0;
    const double bound = (2 * error + 2 * rounding + (static_cast<double>(scores.size()) + 40) * kEps) * size + 1e-30;
    check(std::fabs(out[d] - exact) <= bound, "%s: position %d head %d element %d is %a, not %a within %g", s.name, position, head, d, out[d], exact,
          bound);
  }
}

// Law L1: a row alone, with NaN in all slots that it does not see, on one thread and on three, has the bits of the batch.
void check_alone(const Cache& cache, const Part& part, int row, const float* qkv, const float* out, Ways& ways) {
  const Shape& s = cache.shape();
  const int position = part.first + row;
  Cache own = cache;
  for (int p = 0; p < s.sequences[part.sequence].length(); ++p)
    if (p > position || p < s.first_key(position)) own.forget(part.sequence, p);
  const std::vector<float> one_row(qkv, qkv + s.width());
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    const auto alone = attended(pool, own, {{part.sequence, position, 1}}, one_row, ways);
    check(same_bits(alone.data(), out, alone.size()), "%s: position %d alone on %d threads has other bits", s.name, position, threads);
  }
}

void check_shape(const Shape& s, Ways& ways, Digest& digest) {
  Chance chance(31);
  ThreadPool one(1), three(3);
  Cache cache(s, chance);
  const auto earlier = parts_of(s, true), parts = parts_of(s, false);
  if (!earlier.empty()) write_rows(three, cache, earlier, chance);
  const auto qkv = write_rows(three, cache, parts, chance);
  for (const Part& part : parts)
    for (int p = 0; p < s.first_key(part.first); ++p) cache.forget(part.sequence, p);

  const auto out = attended(three, cache, parts, qkv, ways);
  const size_t row_size = static_cast<size_t>(s.heads) * s.dim;
  size_t row = 0;
  for (const Part& part : parts)
    for (int r = 0; r < part.count; ++r, ++row) {
      const float *from = qkv.data() + row * s.width(), *to = out.data() + row * row_size;
      for (int h = 0; h < s.heads; ++h) check_row(cache, part.sequence, part.first + r, h, from + h * s.dim, to + h * s.dim);
      check_alone(cache, part, r, from, to, ways);
    }
  const auto again = attended(one, cache, parts, qkv, ways);
  check(same_bits(again.data(), out.data(), out.size()), "%s: one thread gives other bits than three", s.name);
  digest.add(qkv);
  digest.add(out);

  for (int i = 0; i < static_cast<int>(s.sequences.size()); ++i)
    for (int p = 0; p < s.sequences[i].length(); ++p) cache.forget(i, p);
  check(cache.is_blank(), "%s: something outside the slots is written", s.name);
}

}  // namespace

void attention_cases(Digest& digest) {
  Ways ways;
  for (const Shape& shape : shapes()) check_shape(shape, ways, digest);
  check((rounded > 0) == (AttendedBf16::kPerIndex == 2), "weights were rounded for %ld elements", rounded);
  check(ways.split > 0 && ways.whole > 0, "partitions were shared %d times, walked by one thread %d times", ways.split, ways.whole);
}

}  // namespace native_test
