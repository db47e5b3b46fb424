// See program.h.
#include "program.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

namespace KVIST_NAMESPACE {

namespace {

long qkv_width(const AttentionLayer& layer) { return (layer.heads + 2L * layer.kv_heads) * layer.dim; }

int64_t now() { return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

void Program::expect(bool fits, const char* what) const {
  if (!fits) throw std::invalid_argument(what);
}

const Program::Array& Program::array(int number) const {
  expect(number >= 0 && number < static_cast<int>(arrays_.size()), "program: no such array");
  return arrays_[static_cast<size_t>(number)];
}

void Program::expect_width(int number, long width, const char* what) const { expect(array(number).width == width, what); }

int Program::add_array(long width, bool taken) {
  expect(width > 0, "program: an array has a width");
  arrays_.push_back({width, taken, nullptr, 0});
  return static_cast<int>(arrays_.size()) - 1;
}

void Program::bind_array(int number, float* memory, long rows, long width) {
  expect_width(number, width, "program: memory does not match its array");
  arrays_[static_cast<size_t>(number)].memory = memory;
  arrays_[static_cast<size_t>(number)].rows = rows;
}

void Program::embed(const Linear& table, int out) {
  expect_width(out, table.k(), "embed: out does not match the table");
  expect(!array(out).taken, "embed: out has a row for each row of the batch");
  vocabulary_ = vocabulary_ ? std::min(vocabulary_, table.n()) : table.n();
  calls_.push_back(Embed{&table, out});
}

void Program::norm_linear(int x, const float* norm, long norm_size, float eps, const Linear& weight, int out) {
  expect_width(x, weight.k(), "norm_linear: x does not match the weight");
  expect_width(out, weight.n(), "norm_linear: out does not match the weight");
  expect(norm_size == weight.k() && array(x).taken == array(out).taken, "norm_linear: norm or rows do not match");
  calls_.push_back(NormLinear{x, norm, eps, &weight, out});
}

void Program::linear_add(int x, const Linear& weight, int residual) {
  expect_width(x, weight.k(), "linear_add: x does not match the weight");
  expect_width(residual, weight.n(), "linear_add: residual does not match the weight");
  expect(array(x).taken == array(residual).taken, "linear_add: rows do not match");
  calls_.push_back(LinearAdd{x, &weight, residual});
}

void Program::gated_mlp(int x, const float* norm, long norm_size, float eps, const Linear& gate_up, const Linear& down) {
  expect(gate_up.segments.size() == 2 && gate_up.segments[0].n == gate_up.segments[1].n, "gated_mlp: gate and up differ");
  expect_width(x, gate_up.k(), "gated_mlp: x does not match the weights");
  expect(norm_size == gate_up.k() && down.n() == gate_up.k() && down.k() == gate_up.segments[0].n, "gated_mlp: shapes do not match");
  calls_.push_back(GatedMlp{x, norm, eps, &gate_up, &down});
}

void Program::rope_write(const AttentionLayer& layer, int qkv) {
  expect_width(qkv, qkv_width(layer), "rope_write: qkv does not match the layer");
  expect(!array(qkv).taken, "rope_write: qkv has a row for each row of the batch");
  groups_ = std::max(groups_, layer.group + 1);
  calls_.push_back(RopeWrite{&layer, qkv});
}

void Program::attend(const AttentionLayer& layer, int qkv, int out) {
  expect_width(qkv, qkv_width(layer), "attend: qkv does not match the layer");
  expect_width(out, static_cast<long>(layer.heads) * layer.dim, "attend: out does not match the layer");
  expect(!array(qkv).taken && !array(out).taken, "attend: arrays have a row for each row of the batch");
  groups_ = std::max(groups_, layer.group + 1);
  calls_.push_back(Attend{&layer, qkv, out});
}

void Program::take(int x, int out) {
  expect_width(out, array(x).width, "take: widths do not match");
  expect(!array(x).taken && array(out).taken, "take: from rows of the batch to taken rows");
  calls_.push_back(Take{x, out});
}

void Program::check(const Pass& pass) const {
  for (const Array& each : arrays_) expect(each.rows >= (each.taken ? pass.taken_rows : pass.step.batch.rows), "program: an array is too small");
  expect(static_cast<int>(pass.step.groups.size()) >= groups_, "program: a KV group's tables are missing");
  for (int i = 0; i < pass.taken_rows; ++i)
    expect(pass.taken[i] >= 0 && pass.taken[i] < pass.step.batch.rows, "program: a row to take is outside the batch");
  if (vocabulary_ == 0) return;
  for (int i = 0; i < pass.step.batch.rows; ++i)
    expect(pass.token_ids[i] >= 0 && pass.token_ids[i] < vocabulary_, "program: a token is outside the embedding table");
}

void Program::execute(const Pass& pass, const Embed& call) { machine_.embed(*call.table, pass.token_ids, rows(pass, call.out), memory(call.out)); }

void Program::execute(const Pass& pass, const NormLinear& call) {
  if (const int count = rows(pass, call.x))
    machine_.norm_linear(memory(call.x), count, call.norm, call.eps, *call.weight, memory(call.out));
}

void Program::execute(const Pass& pass, const LinearAdd& call) {
  if (const int count = rows(pass, call.x)) machine_.linear_add(memory(call.x), count, *call.weight, memory(call.residual));
}

void Program::execute(const Pass& pass, const GatedMlp& call) {
  if (const int count = rows(pass, call.x)) machine_.gated_mlp(memory(call.x), count, call.norm, call.eps, *call.gate_up, *call.down);
}

void Program::execute(const Pass& pass, const RopeWrite& call) { machine_.rope_write(pass.step, *call.layer, memory(call.qkv)); }

void Program::execute(const Pass& pass, const Attend& call) { machine_.attend(pass.step, *call.layer, memory(call.qkv), memory(call.out)); }

void Program::execute(const Pass& pass, const Take& call) {
  const long width = array(call.x).width;
  for (int i = 0; i < pass.taken_rows; ++i)
    std::memcpy(memory(call.out) + i * width, memory(call.x) + pass.taken[i] * width, static_cast<size_t>(width) * sizeof(float));
}

template <class Done>
void Program::run_all(const Pass& pass, Done done) {
  check(pass);
  for (const Call& call : calls_) {
    std::visit([&](const auto& one) { execute(pass, one); }, call);
    done();
  }
}

void Program::run(const Pass& pass) {
  run_all(pass, [] {});
}

void Program::run_timed(const Pass& pass, int64_t* nanoseconds) {
  int64_t before = now();
  run_all(pass, [&] {
    const int64_t after = now();
    *nanoseconds++ = after - before;
    before = after;
  });
}

}  // namespace KVIST_NAMESPACE
