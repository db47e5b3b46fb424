// What Python holds: a machine (threads and scratch memory) and the handles that are bound at load.
//
// Knows neither models nor requests. The arrays behind a handle are kept alive by the Python side.
#pragma once

#include <vector>

#include "attention.h"
#include "linear.h"
#include "peaks.h"
#include "sampling.h"
#include "thread_pool.h"

namespace KVIST_NAMESPACE {

struct Linear {
  std::vector<Segment> segments;

  int n() const {
    int sum = 0;
    for (const Segment& s : segments) sum += s.n;
    return sum;
  }
  int k() const { return segments.front().k; }
  bool quantized() const {
    for (const Segment& s : segments)
      if (s.quantized()) return true;
    return false;
  }
};

struct Step {
  StepBatch batch;
  std::vector<GroupTable> groups;
};

class Machine {
 public:
  explicit Machine(int num_threads, const std::vector<int>& cpus = {})
      : pool_(num_threads, cpus), sampling_(static_cast<size_t>(pool_.num_threads())) {}

  int num_threads() const { return pool_.num_threads(); }
  bool bound() const { return pool_.bound(); }
  Peaks peaks(size_t memory_bytes) { return measure_peaks(pool_, memory_bytes); }
  void embed(const Linear& table, const int32_t* ids, int count, float* out);
  void norm_linear(const float* x, int rows, const float* norm, float eps, const Linear& weight, float* out);
  void linear_add(const float* x, int rows, const Linear& weight, float* residual);
  void gated_mlp(float* x, int rows, const float* norm, float eps, const Linear& gate_up, const Linear& down);
  void rope_write(const Step& step, const AttentionLayer& layer, float* qkv);
  void attend(const Step& step, const AttentionLayer& layer, const float* qkv, float* out);
  void sample(const float* logits, int vocabulary, const SampleBatch& batch, int32_t* token_ids, int32_t* outcomes);
  void score(const float* logits, int vocabulary, const ScoreRequest& request, const ScoreResult& result);

 private:
  ThreadPool pool_;
  RowBuffers rows_;
  RowBuffers hidden_rows_;
  Buffer<float> hidden_;
  AttentionBuffers attention_;
  std::vector<SamplingScratch> sampling_;  // one for each thread
};

}  // namespace KVIST_NAMESPACE
