#include "sampling.h"

#include <functional>

#include "sampling_row.h"

namespace KVIST_NAMESPACE {

namespace {

__extension__ typedef unsigned __int128 Wide;

constexpr int kShareBits = 53;
constexpr uint64_t kAll = uint64_t{1} << kShareBits;
constexpr int kBuckets = 1024;

inline uint64_t key_of(float value, int32_t id) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t ascending = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(~ascending) << 32 | static_cast<uint32_t>(id);
}

inline float value_of(uint64_t key) {
  const uint32_t ascending = ~static_cast<uint32_t>(key >> 32);
  return std::bit_cast<float>(ascending & 0x80000000u ? ascending & 0x7fffffffu : ~ascending);
}

inline int32_t id_of(uint64_t key) { return static_cast<int32_t>(static_cast<uint32_t>(key)); }

// Elements that are still in question, by id.
struct Candidates {
  int count;
  float* values;
  int32_t* ids;
  uint64_t* weights;

  uint64_t total() const {
    uint64_t sum = 0;
    for (int i = 0; i < count; ++i) sum += weights[i];
    return sum;
  }
};

void weigh(const Row& row, Candidates& c) {
  for_lanes(c.values, 0, c.count, [&](int i, F v) {
    alignas(64) float lanes[16];
    store(lanes, weight(row.scaled(v)));
    for (int j = 0; j < 16; ++j) c.weights[i + j] = units(lanes[j]);  // there is room beyond the last
  });
}

// Elements whose scaled number is within [bound, most].
Candidates collect(const Row& row, float bound, SamplingScratch& s, float most = 0.0f) {
  const size_t room = static_cast<size_t>(row.n) + 16;
  Candidates c{0, s.values.reserve(room), s.ids.reserve(room), s.weights.reserve(room)};
  for (int chunk = 0; chunk < chunks_of(row.n); ++chunk) {
    if (row.scaled(row.largest_of_chunk(chunk)) < bound) continue;
    const int begin = chunk * kChunk, end = std::min(row.n, begin + kChunk);
    for_lanes(row.x, begin, end, [&](int i, F v) {
      const F clean = numbers(v);
      unsigned found = mask_ge(row.scaled(clean), set1(bound)) & ~mask_gt(row.scaled(clean), set1(most));
      if (!found) return;
      if (end - i < 16) found &= (1u << (end - i)) - 1;
      alignas(64) float lanes[16];
      store(lanes, clean);
      for (; found; found &= found - 1) {
        const int lane = std::countr_zero(found);
        c.values[c.count] = lanes[lane];
        c.ids[c.count++] = i + lane;
      }
    });
  }
  weigh(row, c);
  return c;
}

// A bound (on scaled numbers) that leaves the k largest, and few more; -inf if chunks cannot tell.
float bound_of_largest(const Row& row, long k, SamplingScratch& s) {
  if (k > row.num_maxima()) return kImpossible;
  float* sorted = s.sorted.reserve(static_cast<size_t>(row.num_maxima()));
  std::copy_n(row.maxima, row.num_maxima(), sorted);
  std::nth_element(sorted, sorted + (k - 1), sorted + row.num_maxima(), std::greater<float>());
  return row.scaled(sorted[k - 1]);
}

bool by_key(const Keyed& a, const Keyed& b) { return a.key < b.key; }

// The key of the first place, in order, where the weights reach `goal`: a quickselect by weight. They do reach it.
uint64_t key_reaching(Keyed* first, Keyed* last, uint64_t goal) {
  for (int round = 0; last - first > 32 && round < 64; ++round) {
    const Keyed middle = first[(last - first) / 2], end = last[-1];
    const uint64_t pivot = std::max(std::min(first->key, middle.key), std::min(std::max(first->key, middle.key), end.key));
    uint64_t before = 0;
    Keyed* cut = std::partition(first, last, [&](const Keyed& one) {
      const bool is_before = one.key < pivot;
      before += is_before ? one.weight : 0;
      return is_before;
    });
    if (before >= goal) {
      last = cut;
    } else {
      goal -= before;
      first = cut;
    }
  }
  std::sort(first, last, by_key);
  while (first + 1 < last && first->weight < goal) goal -= first++->weight;
  return first->key;
}

uint64_t goal_of(uint64_t total, uint64_t top_p) {
  const Wide product = static_cast<Wide>(total) * top_p + (kAll - 1);
  return std::max<uint64_t>(static_cast<uint64_t>(product >> kShareBits), 1);
}

// The place where the running sum first exceeds `target`, which is less than the sum of all; `target` becomes what is left of it.
int place_above(const uint64_t* sizes, uint64_t& target) {
  int place = 0;
  for (; sizes[place] <= target; ++place) target -= sizes[place];
  return place;
}

// Buckets of scaled numbers, largest first: a 32nd of a unit each, and the rest in the last.
inline float bucket_of(float scaled) { return std::min(-32.0f * scaled, kBuckets - 1.0f); }
inline F bucket_of(F scaled) { return min(mul(set1(-32.0f), scaled), set1(kBuckets - 1.0f)); }

// Keeps the first candidates, in order of logits, whose sizes reach `goal`, which all together do; they stay in order of ids. The cut
// is looked for in one bucket only.
template <class Size>
void keep_first(const Row& row, Candidates& c, uint64_t goal, SamplingScratch& s, Size size) {
  const auto bucket = [&](int i) { return static_cast<int>(bucket_of(row.scaled(c.values[i]))); };
  uint64_t sums[kBuckets] = {};
  for (int i = 0; i < c.count; ++i) sums[bucket(i)] += size(i);
  uint64_t target = goal - 1;
  const int place = place_above(sums, target);
  Keyed* const keyed = s.keyed.reserve(static_cast<size_t>(c.count));
  Keyed* end = keyed;
  for (int i = 0; i < c.count; ++i)
    if (bucket(i) == place) *end++ = {key_of(c.values[i], c.ids[i]), size(i)};
  const uint64_t last = key_reaching(keyed, end, target + 1);
  int kept = 0;
  for (int i = 0; i < c.count; ++i) {
    if (key_of(c.values[i], c.ids[i]) > last) continue;
    c.values[kept] = c.values[i];
    c.ids[kept] = c.ids[i];
    c.weights[kept++] = c.weights[i];
  }
  c.count = kept;
}

void keep_largest(const Row& row, Candidates& c, int k, SamplingScratch& s) {
  if (k < c.count) keep_first(row, c, static_cast<uint64_t>(k), s, [](int) { return uint64_t{1}; });
}

void keep_nucleus(const Row& row, Candidates& c, uint64_t goal, SamplingScratch& s) {
  keep_first(row, c, goal, s, [&](int i) { return c.weights[i]; });
}

// The key of the last element of a nucleus too large to be collected: only the bucket that it ends in is.
uint64_t last_of_nucleus(const Row& row, uint64_t goal, SamplingScratch& s) {
  uint64_t sums[2][kBuckets] = {};  // two, because neighbours often share a bucket
  for_lanes(row.x, 0, row.n, [&](int, F v) {
    alignas(64) float lanes[16], buckets[16];
    const F scaled = max(row.scaled(numbers(v)), set1(kFaintest));
    store(lanes, weight(scaled));
    store(buckets, bucket_of(scaled));
    for (int j = 0; j < 16; ++j) sums[j % 2][static_cast<int>(buckets[j])] += units(lanes[j]);
  });
  for (int i = 0; i < kBuckets; ++i) sums[0][i] += sums[1][i];
  uint64_t target = goal - 1;
  const float place = static_cast<float>(place_above(sums[0], target));
  const Candidates c = collect(row, std::nextafter((place + 1.0f) / -32.0f, 0.0f), s, place / -32.0f);
  Keyed* keyed = s.keyed.reserve(static_cast<size_t>(c.count));
  for (int i = 0; i < c.count; ++i) keyed[i] = {key_of(c.values[i], c.ids[i]), c.weights[i]};
  return key_reaching(keyed, keyed + c.count, target + 1);
}

uint64_t target_of(const SampleRow& from, uint64_t total) {
  return static_cast<uint64_t>(static_cast<Wide>(random_share(from.seed, from.choice, from.position)) * total >> kShareBits);
}

int draw_from(const Candidates& c, const SampleRow& from) {
  uint64_t target = target_of(from, c.total());
  return c.ids[place_above(c.weights, target)];
}

// A draw by the weights that weigh(i, lanes) gives; `spans` holds their sums, `total` the sum of these.
template <class Weigh>
int draw_from_spans(const Row& row, const SampleRow& from, const uint64_t* spans, uint64_t total, Weigh weigh) {
  uint64_t target = target_of(from, total), inside[kWeightSpan];
  const int begin = kWeightSpan * place_above(spans, target);
  for_lanes(row.x, begin, std::min(row.n, begin + kWeightSpan), [&](int i, F v) {
    alignas(64) float lanes[16];
    store(lanes, weigh(i, v));
    for (int j = 0; j < 16; ++j) inside[i - begin + j] = units(lanes[j]);
  });
  return begin + place_above(inside, target);
}

int draw_from_nucleus(const Row& row, const SampleRow& from, uint64_t goal, uint64_t* spans, SamplingScratch& s) {
  for (const int k : {64, 512}) {
    if (k > row.num_maxima()) break;
    Candidates c = collect(row, bound_of_largest(row, k, s), s);
    const uint64_t weight = c.total();
    if (weight >= goal) {
      keep_nucleus(row, c, goal, s);
      return draw_from(c, from);
    }
    if (weight < goal / 4) break;  // eight times as many will hardly do
  }
  const uint64_t last = last_of_nucleus(row, goal, s);
  const float value = value_of(last);
  const int end = id_of(last) + 1;
  const auto weigh = [&](int i, F v) { return choose(lanes_before(i, numbers(v), value, end), weight(row.scaled(v)), zero()); };
  const uint64_t total = sum_weights(row, spans, weigh);
  return draw_from_spans(row, from, spans, total, weigh);
}

int draw(Row& row, const SampleRow& from, SamplingScratch& s) {
  if (from.inverse_temperature == 0.0f) return first_largest(row);
  row.inverse = from.inverse_temperature;
  const bool top_k = from.top_k > 0 && from.top_k < row.n, min_p = from.min_p_log > kImpossible, top_p = from.top_p < kAll;
  if (top_k || min_p) {
    const float bound = top_k ? bound_of_largest(row, from.top_k, s) : kImpossible;
    Candidates c = collect(row, std::max(bound, from.min_p_log), s);
    if (top_k) keep_largest(row, c, from.top_k, s);
    if (top_p) keep_nucleus(row, c, goal_of(c.total(), from.top_p), s);
    return draw_from(c, from);
  }
  const auto weigh = [&](int, F v) { return weight(row.scaled(v)); };
  uint64_t* spans = s.spans.reserve(static_cast<size_t>(spans_of(row.n)));
  const uint64_t total = sum_weights(row, spans, weigh);
  return top_p ? draw_from_nucleus(row, from, goal_of(total, from.top_p), spans, s) : draw_from_spans(row, from, spans, total, weigh);
}

// The row's numbers after mask, bias and penalties. What the mask rules out stays -inf through the others.
const float* adjust(const float* x, int n, const Adjustment& change, SamplingScratch& s) {
  float* y = s.row.reserve(static_cast<size_t>(n) + 16);
  for_lanes(x, 0, n, [&](int i, F v) {
    const unsigned allowed = change.mask ? change.mask[i / 32] >> i % 32 & 0xffffu : 0xffffu;
    store(y + i, choose(allowed, numbers(v), set1(kImpossible)));
  });
  for (long i = 0; i < change.num_biased; ++i) {
    float& value = y[change.bias_ids[i]];
    value = number(static_cast<float>(value + change.bias[i]));
  }
  for (long i = 0; i < change.num_seen; ++i) {
    float& value = y[change.seen[i]];
    double changed = value > 0.0f ? value / change.repetition : value * change.repetition;
    if (change.counts[i] > 0) changed -= change.frequency * change.counts[i] + change.presence;
    value = number(static_cast<float>(changed));
  }
  return y;
}

Outcome sample_row(const float* x, int n, const SampleRow& from, const Adjustment* change, SamplingScratch& s, int32_t& token_id) {
  token_id = 0;
  Row row = read_row(change ? adjust(x, n, *change, s) : x, n, s);
  if (row.peak == kImpossible) return change && read_row(x, n, s).peak > kImpossible ? Outcome::none_left : Outcome::no_number;
  token_id = draw(row, from, s);
  return Outcome::drawn;
}

// How many tokens come before one in order of logits, ties by id.
int count_before(const Row& row, int token, float logit) {
  int before = 0;
  for (int chunk = 0; chunk < chunks_of(row.n); ++chunk) {
    if (row.largest_of_chunk(chunk) < logit) continue;
    for_lanes(row.x, chunk * kChunk, std::min(row.n, (chunk + 1) * kChunk),
              [&](int i, F v) { before += std::popcount(lanes_before(i, numbers(v), logit, token)); });
  }
  return before;
}

void list_largest(const Row& row, int count, SamplingScratch& s, int32_t* ids, float* logits) {
  const int wanted = std::min(count, row.n);
  if (wanted == 0) return;
  Candidates c = collect(row, bound_of_largest(row, wanted, s), s);
  keep_largest(row, c, wanted, s);
  Keyed* keyed = s.keyed.reserve(static_cast<size_t>(wanted));
  for (int i = 0; i < wanted; ++i) keyed[i] = {key_of(c.values[i], c.ids[i]), 0};
  std::sort(keyed, keyed + wanted, by_key);
  for (int i = 0; i < wanted; ++i) {
    ids[i] = id_of(keyed[i].key);
    logits[i] = value_of(keyed[i].key);
  }
}

bool all_within(const int32_t* ids, long count, int vocabulary) {
  return std::all_of(ids, ids + count, [&](int32_t id) { return id >= 0 && id < vocabulary; });
}

}  // namespace

bool SampleBatch::fits(int vocabulary) const {
  return std::all_of(adjustments.begin(), adjustments.end(), [&](const Adjustment& a) {
    return (!a.mask || a.mask_words == (vocabulary + 31) / 32) && all_within(a.bias_ids, a.num_biased, vocabulary) &&
           all_within(a.seen, a.num_seen, vocabulary);
  });
}

uint64_t random_share(uint64_t seed, uint64_t choice, uint64_t position) {
  uint64_t c[4] = {position, 0, 0, 0};
  for (int round = 0; round < 10; ++round) {
    const Wide first = static_cast<Wide>(0xd2e7470ee14c6c93u) * c[0], second = static_cast<Wide>(0xca5a826395121157u) * c[2];
    const uint64_t next[4] = {static_cast<uint64_t>(second >> 64) ^ c[1] ^ seed, static_cast<uint64_t>(second),
                              static_cast<uint64_t>(first >> 64) ^ c[3] ^ choice, static_cast<uint64_t>(first)};
    std::copy_n(next, 4, c);
    seed += 0x9e3779b97f4a7c15u;
    choice += 0xbb67ae8584caa73bu;
  }
  return c[0] >> (64 - kShareBits);
}

void sample(ThreadPool& pool, SamplingScratch* scratch, const float* logits, int vocabulary, const SampleBatch& batch, int32_t* token_ids,
            int32_t* outcomes) {
  pool.run(batch.count, [&](long i, int thread) {
    const int place = batch.adjustment_of[static_cast<size_t>(i)];
    const Adjustment* change = place < 0 ? nullptr : &batch.adjustments[static_cast<size_t>(place)];
    outcomes[i] = static_cast<int32_t>(sample_row(logits + i * vocabulary, vocabulary, batch.rows[i], change, scratch[thread], token_ids[i]));
  });
}

void score(ThreadPool& pool, SamplingScratch* scratch, const float* logits, int vocabulary, const ScoreRequest& request,
           const ScoreResult& result) {
  pool.run(request.count, [&](long i, int thread) {
    SamplingScratch& s = scratch[thread];
    const Row row = read_row(logits + static_cast<long>(request.rows[i]) * vocabulary, vocabulary, s);
    result.totals[i] = 0;
    if (row.peak == kImpossible) return;
    const int token = request.token_ids[i];
    result.logits[i] = number(row.x[token]);
    result.peaks[i] = row.peak;
    result.totals[i] = sum_weights(row, nullptr, [&](int, F v) { return weight(row.scaled(v)); });
    result.ranks[i] = 1 + count_before(row, token, result.logits[i]);
    list_largest(row, request.tops[i], s, result.top_ids + i * request.width, result.top_logits + i * request.width);
  });
}

}  // namespace KVIST_NAMESPACE
