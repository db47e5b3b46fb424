// Sampling: draws and scores against sorting in plain loops over the same weights, for rows of every length, alone and together.
#include "sampling.h"

#include <algorithm>
#include <cfloat>
#include <numeric>

#include "check.h"
#include "sampling_row.h"

using namespace KVIST_NAMESPACE;

namespace native_test {

namespace {

constexpr int kVocabularies[] = {1, 15, 16, 17, 100, 1023, 1025, 2600};
constexpr uint64_t kWhole = uint64_t{1} << 53;

// One row's numbers and weights, and ids in order of the numbers.
struct Sorted {
  std::vector<float> numbers, scaled;
  std::vector<uint64_t> weights;
  std::vector<int> order;

  // The most likely token has no inverse temperature, and needs the order alone.
  Sorted(const std::vector<float>& row, float inverse) : numbers(row), scaled(row.size()), weights(row.size()), order(row.size()) {
    for (float& v : numbers) v = number(v);
    const float peak = *std::max_element(numbers.begin(), numbers.end());
    for (size_t i = 0; i < row.size(); ++i) {
      alignas(64) float lanes[16];
      scaled[i] = inverse > 0.0f ? (numbers[i] - peak) * inverse : 0.0f;
      store(lanes, weight(set1(scaled[i])));
      weights[i] = units(lanes[0]);
      check(std::fabs(static_cast<double>(weights[i]) * 0x1p-40 - std::exp(static_cast<double>(scaled[i]))) < 3e-7, "weight of %g",
            static_cast<double>(scaled[i]));
    }
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int a, int b) {
      const float x = numbers[static_cast<size_t>(a)], y = numbers[static_cast<size_t>(b)];
      return x > y || (x == y && a < b);
    });
  }

  uint64_t weight_of(const std::vector<int>& ids) const {
    uint64_t sum = 0;
    for (const int id : ids) sum += weights[static_cast<size_t>(id)];
    return sum;
  }

  int draw(const SampleRow& from) const {
    if (from.inverse_temperature == 0.0f) return order.front();
    std::vector<int> kept;
    for (const int id : order)
      if (scaled[static_cast<size_t>(id)] >= from.min_p_log) kept.push_back(id);
    if (from.top_k > 0) kept.resize(std::min(kept.size(), static_cast<size_t>(from.top_k)));
    if (from.top_p < kWhole) {
      // These shares are powers of two, so that the goal needs no wide product.
      const uint64_t parts = kWhole / from.top_p, goal = (weight_of(kept) + parts - 1) / parts;
      uint64_t reached = 0;
      size_t count = 0;
      while (reached < goal) reached += weights[static_cast<size_t>(kept[count++])];
      kept.resize(count);
    }
    std::sort(kept.begin(), kept.end());
    const long double share = static_cast<long double>(random_share(from.seed, from.choice, from.position)) * 0x1p-53L;
    const auto target = static_cast<uint64_t>(share * static_cast<long double>(weight_of(kept)));
    uint64_t reached = 0;
    for (const int id : kept)
      if ((reached += weights[static_cast<size_t>(id)]) > target) return id;
    return -1;
  }
};

std::vector<float> random_row(Chance& chance, int n, int kind) {
  std::vector<float> row = chance.floats(static_cast<size_t>(n), kind % 3 == 0 ? 30.0f : 3.0f);
  if (kind % 2)
    for (float& v : row) v = std::nearbyint(v);
  if (kind % 5 == 4)
    for (float& v : row) {
      const float odd[] = {kNan, kInf, -kInf, -0.0f, 1e-41f};
      const int place = chance.below(12);
      if (place < 5) v = odd[place];
    }
  row[static_cast<size_t>(chance.below(n))] = 2.5f;
  return row;
}

SampleRow random_parameters(Chance& chance, int n) {
  SampleRow row{chance.bits(), chance.bits(), chance.bits(), kWhole, 0.0f, -kInf, 0, 0};
  const float inverses[] = {0.0f, 1.0f, 1.0f, 0.5f, 3.0f, 1e5f};
  row.inverse_temperature = inverses[chance.below(6)];
  if (chance.below(2)) row.top_p = kWhole >> (1 + chance.below(3));
  if (chance.below(3) == 0) row.top_k = 1 + chance.below(n + 3);
  if (chance.below(3) == 0) row.min_p_log = -3.0f * static_cast<float>(chance.below(3));
  return row;
}

void draws_are_those_of_sorting(Digest& digest) {
  Chance chance(11);
  ThreadPool pool(2);
  SamplingScratch scratch[2];
  for (const int n : kVocabularies) {
    constexpr int kRows = 30;
    std::vector<float> logits;
    std::vector<SampleRow> rows;
    std::vector<int> expected;
    for (int i = 0; i < kRows; ++i) {
      const std::vector<float> row = random_row(chance, n, i);
      rows.push_back(random_parameters(chance, n));
      logits.insert(logits.end(), row.begin(), row.end());
      expected.push_back(Sorted(row, rows.back().inverse_temperature).draw(rows.back()));
    }
    const SampleBatch batch{rows.data(), kRows, std::vector<int>(kRows, -1), {}};
    std::vector<int32_t> ids(kRows), outcomes(kRows), alone(1), outcome(1);
    sample(pool, scratch, logits.data(), n, batch, ids.data(), outcomes.data());
    for (int i = 0; i < kRows; ++i) {
      const size_t at = static_cast<size_t>(i);
      check(outcomes[at] == 0 && ids[at] == expected[at], "row %d of %d tokens gives %d, not %d", i, n, ids[at], expected[at]);
      const SampleBatch one{&rows[at], 1, {-1}, {}};
      const std::vector<float> row(logits.begin() + i * n, logits.begin() + (i + 1) * n);
      sample(pool, scratch, row.data(), n, one, alone.data(), outcome.data());
      check(alone[0] == ids[at], "row %d of %d tokens alone gives %d, not %d", i, n, alone[0], ids[at]);
      digest.add(static_cast<uint32_t>(ids[at]));
    }
  }
}

// As large as those of real models: 64 of the largest tokens are enough, then 512 of them; then the 64 weigh too little to go on.
void nuclei_of_a_large_vocabulary(Digest& digest) {
  constexpr int n = 33001;
  Chance chance(14);
  ThreadPool pool(1);
  SamplingScratch scratch[1];
  const std::vector<float> logits = chance.floats(n, 30.0f);
  for (const uint64_t parts : {16, 4, 2}) {
    SampleRow row{chance.bits(), 0, chance.bits(), kWhole / parts, 1.0f, -kInf, 0, 0};
    const int expected = Sorted(logits, 1.0f).draw(row);
    std::vector<int32_t> id(1), outcome(1);
    sample(pool, scratch, logits.data(), n, {&row, 1, {-1}, {}}, id.data(), outcome.data());
    check(outcome[0] == 0 && id[0] == expected, "a 1/%d of %d tokens gives %d, not %d", static_cast<int>(parts), n, id[0], expected);
    digest.add(static_cast<uint32_t>(id[0]));
  }
}

void adjusted_rows_keep_to_their_mask(Digest& digest) {
  Chance chance(12);
  ThreadPool pool(2);
  SamplingScratch scratch[2];
  for (const int n : kVocabularies) {
    const std::vector<float> logits = random_row(chance, n, 1);
    const int allowed = chance.below(n), banned = chance.below(n);
    std::vector<uint32_t> mask(static_cast<size_t>((n + 31) / 32));
    mask[static_cast<size_t>(allowed / 32)] |= 1u << allowed % 32;
    const std::vector<int32_t> bias_ids{banned}, seen{allowed}, counts{3};
    const std::vector<double> bias{-std::numeric_limits<double>::infinity()};
    Adjustment change;
    change.mask = mask.data();
    change.mask_words = static_cast<long>(mask.size());
    change.seen = seen.data();
    change.counts = counts.data();
    change.num_seen = 1;
    change.repetition = 1.5;
    change.presence = 100.0;
    std::vector<SampleRow> rows{random_parameters(chance, n), random_parameters(chance, n)};
    SampleBatch batch{rows.data(), 2, {0, 1}, {change, change}};
    batch.adjustments[1].bias_ids = bias_ids.data();
    batch.adjustments[1].bias = bias.data();
    batch.adjustments[1].num_biased = 1;
    check(batch.fits(n) && !batch.fits(allowed), "a batch fits its vocabulary of %d, and none of %d", n, allowed);
    std::vector<float> both(logits);
    both.insert(both.end(), logits.begin(), logits.end());
    std::vector<int32_t> ids(2), outcomes(2);
    sample(pool, scratch, both.data(), n, batch, ids.data(), outcomes.data());
    check(outcomes[0] == 0 && ids[0] == allowed, "a mask of %d gives %d", allowed, ids[0]);
    check(banned == allowed ? outcomes[1] == 2 : ids[1] == allowed, "a mask of %d without %d gives %d, outcome %d", allowed, banned, ids[1],
          outcomes[1]);
    digest.add(static_cast<uint32_t>(ids[0]));
  }
}

void rows_without_a_number_say_so() {
  ThreadPool pool(1);
  SamplingScratch scratch[1];
  const std::vector<float> logits{kNan, -kInf, kNan, -kInf, kNan};
  const SampleRow row{1, 2, 3, kWhole, 1.0f, -kInf, 0, 0};
  std::vector<int32_t> id(1), outcome(1);
  sample(pool, scratch, logits.data(), 5, {&row, 1, {-1}, {}}, id.data(), outcome.data());
  check(outcome[0] == 1, "outcome %d", outcome[0]);
}

void scores_are_those_of_sorting(Digest& digest) {
  Chance chance(13);
  ThreadPool pool(2);
  SamplingScratch scratch[2];
  for (const int n : kVocabularies) {
    constexpr int kRows = 10, kTop = 7;
    std::vector<float> logits;
    std::vector<int32_t> rows, tokens, tops;
    for (int i = 0; i < kRows; ++i) {
      const std::vector<float> row = random_row(chance, n, i);
      logits.insert(logits.end(), row.begin(), row.end());
      rows.push_back(kRows - 1 - i);
      tokens.push_back(chance.below(n));
      tops.push_back(chance.below(kTop + 1));
    }
    std::vector<float> values(kRows), peaks(kRows), top_logits(kRows * kTop);
    std::vector<uint64_t> totals(kRows);
    std::vector<int32_t> ranks(kRows), top_ids(kRows * kTop);
    score(pool, scratch, logits.data(), n, {rows.data(), tokens.data(), tops.data(), kRows, kTop},
          {values.data(), peaks.data(), totals.data(), ranks.data(), top_ids.data(), top_logits.data()});
    for (size_t i = 0; i < kRows; ++i) {
      const auto begin = logits.begin() + rows[i] * n;
      const Sorted sorted(std::vector<float>(begin, begin + n), 1.0f);
      const auto place = std::find(sorted.order.begin(), sorted.order.end(), tokens[i]) - sorted.order.begin();
      check(ranks[i] == place + 1, "token %d of %d has rank %d, not %ld", tokens[i], n, ranks[i], static_cast<long>(place + 1));
      check(totals[i] == sorted.weight_of(sorted.order), "total of %d", n);
      for (int t = 0; t < std::min(tops[i], n); ++t)
        check(top_ids[i * kTop + static_cast<size_t>(t)] == sorted.order[static_cast<size_t>(t)], "token %d in order of %d", t, n);
      digest.add(static_cast<uint32_t>(totals[i]));
    }
  }
}

}  // namespace

void sampling_cases(Digest& digest) {
  draws_are_those_of_sorting(digest);
  nuclei_of_a_large_vocabulary(digest);
  adjusted_rows_keep_to_their_mask(digest);
  rows_without_a_number_say_so();
  scores_are_those_of_sorting(digest);
}

}  // namespace native_test
