// The fused calls, put together from the kernels.
#include "machine.h"

namespace KVIST_NAMESPACE {

void Machine::embed(const Linear& table, const int32_t* ids, int count, float* out) {
  const Segment& rows = table.segments.front();
  pool_.run(count, [&](long i, int) { dequantize_row(rows, ids[i], out + i * rows.k); });
}

void Machine::norm_linear(const float* x, int rows, const float* norm, float eps, const Linear& weight, float* out) {
  const Rows prepared = prepare_rows(pool_, rows_, x, rows, weight.k(), norm, eps, weight.quantized());
  product(pool_, weight.segments, prepared, out, weight.n(), Store::write);
}

void Machine::linear_add(const float* x, int rows, const Linear& weight, float* residual) {
  const Rows prepared = prepare_rows(pool_, rows_, x, rows, weight.k(), nullptr, 0.0f, weight.quantized());
  product(pool_, weight.segments, prepared, residual, weight.n(), Store::add);
}

void Machine::gated_mlp(float* x, int rows, const float* norm, float eps, const Linear& gate_up, const Linear& down) {
  const Rows prepared = prepare_rows(pool_, rows_, x, rows, gate_up.k(), norm, eps, gate_up.quantized());
  const Segment &gate = gate_up.segments[0], &up = gate_up.segments[1];
  float* hidden = hidden_.reserve(static_cast<size_t>(rows) * gate.n);
  gated_product(pool_, gate, up, prepared, hidden);
  const Rows second = prepare_rows(pool_, hidden_rows_, hidden, rows, gate.n, nullptr, 0.0f, down.quantized());
  product(pool_, down.segments, second, x, down.n(), Store::add);
}

void Machine::rope_write(const Step& step, const AttentionLayer& layer, float* qkv) {
  KVIST_NAMESPACE::rope_write(pool_, step.batch, step.groups[static_cast<size_t>(layer.group)], layer, qkv);
}

void Machine::attend(const Step& step, const AttentionLayer& layer, const float* qkv, float* out) {
  KVIST_NAMESPACE::attend(pool_, attention_, step.batch, step.groups[static_cast<size_t>(layer.group)], layer, qkv, out);
}

void Machine::sample(const float* logits, int vocabulary, const SampleBatch& batch, int32_t* token_ids, int32_t* outcomes) {
  KVIST_NAMESPACE::sample(pool_, sampling_.data(), logits, vocabulary, batch, token_ids, outcomes);
}

void Machine::score(const float* logits, int vocabulary, const ScoreRequest& request, const ScoreResult& result) {
  KVIST_NAMESPACE::score(pool_, sampling_.data(), logits, vocabulary, request, result);
}

}  // namespace KVIST_NAMESPACE
