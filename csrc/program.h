// A forward pass recorded once: fused calls over numbered arrays, run one after another on each step.
//
// Recording checks that widths fit, running that the step's arrays do; what the calls compute is the machine's. The arrays' memory,
// like that behind the handles, belongs to the Python side, which keeps it alive and binds it anew when it grows. Running allocates
// nothing by itself.
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "machine.h"

namespace KVIST_NAMESPACE {

// Everything that a step brings: its batch, the rows' tokens, and the rows that `take` takes.
struct Pass {
  Step step;
  const int32_t* token_ids;  // [rows]
  const int32_t* taken;      // [taken_rows], rows of the batch
  int taken_rows;
};

class Program {
 public:
  // The machine must outlive the program.
  explicit Program(Machine& machine) : machine_(machine) {}

  // A new array [rows, width]: `taken` says that it has a row for each taken row rather than for each row of the batch.
  int add_array(long width, bool taken);
  // Memory [rows, width] of an array.
  void bind_array(int array, float* memory, long rows, long width);

  // Each throws std::invalid_argument when widths do not fit. Handles must outlive the program.
  void embed(const Linear& table, int out);
  void norm_linear(int x, const float* norm, long norm_size, float eps, const Linear& weight, int out);
  void linear_add(int x, const Linear& weight, int residual);
  void gated_mlp(int x, const float* norm, long norm_size, float eps, const Linear& gate_up, const Linear& down);
  void rope_write(const AttentionLayer& layer, int qkv);
  void attend(const AttentionLayer& layer, int qkv, int out);
  void take(int x, int out);

  size_t size() const { return calls_.size(); }
  // Both throw std::invalid_argument, and then nothing was computed.
  void run(const Pass& pass);
  void run_timed(const Pass& pass, int64_t* nanoseconds);  // [size()], of each call

 private:
  struct Array {
    long width;
    bool taken;
    float* memory;
    long rows;
  };
  struct Embed {
    const Linear* table;
    int out;
  };
  struct NormLinear {
    int x;
    const float* norm;
    float eps;
    const Linear* weight;
    int out;
  };
  struct LinearAdd {
    int x;
    const Linear* weight;
    int residual;
  };
  struct GatedMlp {
    int x;
    const float* norm;
    float eps;
    const Linear *gate_up, *down;
  };
  struct RopeWrite {
    const AttentionLayer* layer;
    int qkv;
  };
  struct Attend {
    const AttentionLayer* layer;
    int qkv, out;
  };
  struct Take {
    int x, out;
  };
  using Call = std::variant<Embed, NormLinear, LinearAdd, GatedMlp, RopeWrite, Attend, Take>;

  const Array& array(int number) const;
  void expect(bool fits, const char* what) const;
  void expect_width(int array_number, long width, const char* what) const;
  void check(const Pass& pass) const;
  template <class Done>
  void run_all(const Pass& pass, Done done);
  float* memory(int number) const { return arrays_[static_cast<size_t>(number)].memory; }
  int rows(const Pass& pass, int number) const { return arrays_[static_cast<size_t>(number)].taken ? pass.taken_rows : pass.step.batch.rows; }

  void execute(const Pass& pass, const Embed& call);
  void execute(const Pass& pass, const NormLinear& call);
  void execute(const Pass& pass, const LinearAdd& call);
  void execute(const Pass& pass, const GatedMlp& call);
  void execute(const Pass& pass, const RopeWrite& call);
  void execute(const Pass& pass, const Attend& call);
  void execute(const Pass& pass, const Take& call);

  Machine& machine_;
  std::vector<Array> arrays_;
  std::vector<Call> calls_;
  int groups_ = 0;      // KV groups that the calls read
  int vocabulary_ = 0;  // tokens that every embedding table knows; 0: no embedding
};

}  // namespace KVIST_NAMESPACE
