// See peaks.h. Each measurement is a loop that no thread leaves early and whose results are used, so that none is left out.
#include "peaks.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "buffer.h"
#include "simd.h"

namespace KVIST_NAMESPACE {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRounds = 4;
constexpr int kChains = 10;  // independent sums: enough to hide the latency of a fused product
constexpr int kGroupBytes = 512, kGroupWidth = 32, kGroupColumns = 16, kGroups = 8;
constexpr double kLongEnough = 0.02;

// Seconds in which every thread does body(thread) once; all begin together.
template <class Body>
double seconds_of(ThreadPool& pool, Body body) {
  const int threads = pool.num_threads();
  std::atomic<int> arrived{0};
  std::atomic<Clock::rep> first{Clock::time_point::max().time_since_epoch().count()};
  pool.run(threads, [&](long, int thread) {
    arrived.fetch_add(1);
    while (arrived.load() < threads) std::this_thread::yield();  // one item a thread, at the same time
    const Clock::rep now = Clock::now().time_since_epoch().count();
    Clock::rep known = first.load();
    while (now < known && !first.compare_exchange_weak(known, now)) {
    }
    body(thread);
  });
  return std::chrono::duration<double>(Clock::now().time_since_epoch() - Clock::duration(first.load())).count();
}

// Operations a second of body(thread, repetitions), each repetition `operations`; repetitions grow until a round takes long enough.
template <class Body>
double rate_of(ThreadPool& pool, double operations, Body body) {
  double best = 0;
  long repetitions = 64;
  for (int round = 0; round < kRounds;) {
    const double seconds = seconds_of(pool, [&](int thread) { body(thread, repetitions); });
    if (seconds < kLongEnough) {
      repetitions *= 4;
      continue;
    }
    best = std::max(best, operations * static_cast<double>(repetitions) * pool.num_threads() / seconds);
    ++round;
  }
  return best;
}

// Each thread reads at two places in turn: more lines of memory are on their way than with one.
double read_rate(ThreadPool& pool, size_t bytes, std::vector<float>& sink) {
  constexpr size_t kStep = 8 * kLanes;
  const size_t share = std::max(bytes / sizeof(float) / pool.num_threads() / kStep, size_t{1}) * kStep;
  Buffer<float> memory;
  float* data = memory.reserve(share * pool.num_threads());
  double best = 0;
  pool.run(pool.num_threads(), [&](long item, int) { std::fill_n(data + item * share, share, 1.0f); });
  for (int round = 0; round < kRounds; ++round) {
    const double seconds = seconds_of(pool, [&](int thread) {
      V sum[8];
      for (V& one : sum) one = zero_v();
      const float* const begin = data + thread * share;
      for (const float *p = begin, *q = begin + share / 2; p < begin + share / 2; p += kStep / 2, q += kStep / 2)
        for (int i = 0; i < 4; ++i) {
          sum[i] = add_v(sum[i], load_v(p + i * kLanes));
          sum[4 + i] = add_v(sum[4 + i], load_v(q + i * kLanes));
        }
      for (int i = 1; i < 8; ++i) sum[0] = add_v(sum[0], sum[i]);
      store_v(sink.data() + thread * kLanes, sum[0]);
    });
    best = std::max(best, static_cast<double>(share * sizeof(float)) * pool.num_threads() / seconds);
  }
  return best;
}

double f32_rate(ThreadPool& pool, std::vector<float>& sink) {
  return rate_of(pool, 2.0 * kChains * kLanes, [&](int thread, long repetitions) {
    const V factor = set1_v(0.999f + 1e-9f * static_cast<float>(thread)), term = set1_v(0.001f);
    V chain[kChains];
    for (int i = 0; i < kChains; ++i) chain[i] = set1_v(static_cast<float>(i));
    for (long r = 0; r < repetitions; ++r)
      for (V& one : chain) one = fma_v(one, factor, term);
    for (int i = 1; i < kChains; ++i) chain[0] = add_v(chain[0], chain[i]);
    store_v(sink.data() + thread * kLanes, chain[0]);
  });
}

// dot(weights of a group, rows of activations, sums): kLanes columns of kRowTile rows
template <class Dot>
double dot_rate(ThreadPool& pool, int group_bytes, std::vector<float>& sink, Dot dot) {
  const std::vector<uint8_t> weights(static_cast<size_t>(kGroups) * group_bytes, 3);
  const std::vector<int8_t> rows(static_cast<size_t>(kRowTile) * kGroups * kGroupWidth, 5);
  const std::vector<int32_t> sums(static_cast<size_t>(kRowTile) * kGroups, 160);
  return rate_of(pool, 2.0 * kGroups * kGroupWidth * kGroupColumns * kRowTile, [&](int thread, long repetitions) {
    V total[kRowTile];
    for (V& one : total) one = zero_v();
    for (long r = 0; r < repetitions; ++r)
      for (int column = 0; column < kGroupColumns; column += kLanes)
        for (int g = 0; g < kGroups; ++g) {
          VI product[kRowTile];
          dot(weights.data() + static_cast<size_t>(g) * group_bytes + 4 * column, rows.data() + g * kGroupWidth, sums.data() + g, product);
          for (int i = 0; i < kRowTile; ++i) total[i] = add_v(total[i], to_float_v(product[i]));
        }
    for (int i = 1; i < kRowTile; ++i) total[0] = add_v(total[0], total[i]);
    store_v(sink.data() + thread * kLanes, total[0]);
  });
}

}  // namespace

Peaks measure_peaks(ThreadPool& pool, size_t memory_bytes) {
  std::vector<float> sink(static_cast<size_t>(pool.num_threads()) * kLanes);
  constexpr long kStride = kGroups * kGroupWidth;
  Peaks peaks{};
  peaks.read_bytes = read_rate(pool, memory_bytes, sink);
  peaks.f32 = f32_rate(pool, sink);
  peaks.w8a8 = dot_rate(pool, kGroupBytes, sink, [](const uint8_t* w, const int8_t* a, const int32_t* sum, VI(&product)[kRowTile]) {
    dot_w8<kRowTile>(w, a, kStride, sum, kGroups, product);
  });
  peaks.w4a8 = dot_rate(pool, kGroupBytes / 2, sink, [](const uint8_t* w, const int8_t* a, const int32_t*, VI(&product)[kRowTile]) {
    dot_w4<kRowTile>(w, a, kStride, product);
  });
  return peaks;
}

}  // namespace KVIST_NAMESPACE
