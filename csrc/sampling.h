// Draws tokens from rows of logits and scores tokens in them, without sorting a vocabulary.
//
// kernels/reference_sampling.py is the definition, and every build gives its results exactly: weights are whole numbers (2^-40 of the
// likeliest token's) of an exponential made of products and sums that are rounded each, so sums have no order. A row is computed by
// one thread, from itself alone. It knows neither requests nor text.
//
// How the sort is avoided: the first pass keeps the largest number of each lane in chunks of 1024. The k-th largest of those is no
// larger than the k-th largest of all, so few elements lie above it; a second pass collects them, from the chunks that have any, and
// the exact cut is made among them. For top-p the bound is lowered until what is collected weighs enough.
#pragma once

#include <cstdint>
#include <vector>

#include "buffer.h"
#include "thread_pool.h"

namespace KVIST_NAMESPACE {

constexpr int kMaxVocabulary = 1 << 22;  // a sum of weights stays within 2^63

// One row's parameters, as they cross: kernels/sampling.py, ROW.
struct SampleRow {
  uint64_t seed, choice, position;
  uint64_t top_p;             // in units of 2^-53
  float inverse_temperature;  // 0: the most likely token, and nothing else is read
  float min_p_log;            // -inf: none
  int32_t top_k;              // 0: no limit
  int32_t unused;
};
static_assert(sizeof(SampleRow) == 48);

// What changes a row's logits before the draw. Null pointers for what there is none of; ids are within the vocabulary.
struct Adjustment {
  const uint32_t* mask = nullptr;  // bit set: allowed
  long mask_words = 0;             // ceil(vocabulary / 32)
  const int32_t* bias_ids = nullptr;
  const double* bias = nullptr;
  long num_biased = 0;
  const int32_t* seen = nullptr;
  const int32_t* counts = nullptr;
  long num_seen = 0;
  double repetition = 1.0, frequency = 0.0, presence = 0.0;
};

struct SampleBatch {
  const SampleRow* rows;
  int count;
  std::vector<int> adjustment_of;  // [count]: place in adjustments, or -1
  std::vector<Adjustment> adjustments;

  // Whether every mask and every id fits a vocabulary.
  bool fits(int vocabulary) const;
};

enum class Outcome : int32_t { drawn, no_number, none_left };

struct ScoreRequest {
  const int32_t* rows;
  const int32_t* token_ids;
  const int32_t* tops;  // how many of the likeliest tokens, at most `width`
  int count, width;
};

struct ScoreResult {
  float* logits;
  float* peaks;
  uint64_t* totals;  // 0: the row holds no finite number
  int32_t* ranks;
  int32_t* top_ids;  // [count, width]
  float* top_logits;
};

// Ascending keys are in order of logits, largest first, ties by id.
struct Keyed {
  uint64_t key, weight;
};

// One thread's scratch memory.
struct SamplingScratch {
  Buffer<float> row, maxima, sorted, values;
  Buffer<int32_t> ids;
  Buffer<uint64_t> spans, weights;
  Buffer<Keyed> keyed;
};

void sample(ThreadPool& pool, SamplingScratch* scratch, const float* logits, int vocabulary, const SampleBatch& batch, int32_t* token_ids,
            int32_t* outcomes);
void score(ThreadPool& pool, SamplingScratch* scratch, const float* logits, int vocabulary, const ScoreRequest& request,
           const ScoreResult& result);

// The high 53 bits of the first word of Philox 4x64-10 with key (seed, choice) and counter `position`.
uint64_t random_share(uint64_t seed, uint64_t choice, uint64_t position);

}  // namespace KVIST_NAMESPACE
