// Recorded programs: the bits of direct calls, refusals, times, and no allocation once buffers have grown.
#include <atomic>
#include <cstdlib>
#include <new>
#include <stdexcept>

#include "cache.h"
#include "matrices.h"
#include "program.h"

namespace {

std::atomic<long> allocations{0};

}  // namespace

// Counts what the whole program allocates; the sanitizer still sees malloc and free.
void* operator new(size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(size ? size : 1)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace native_test {

namespace {

constexpr int kHidden = 64, kMlp = 96, kVocabulary = 50;

const Shape& attention_shape() {
  static const Shape shape{"program", KvFormat::bf16, 16, 32, 4, 2, 40, 16, true, {{0, 33}, {0, 5}, {0, 1}}};
  return shape;
}

Linear linear(std::vector<Matrix>& matrices, const std::vector<int>& widths, int k, Chance& chance) {
  Linear result;
  for (const int n : widths) {
    matrices.push_back(make_matrix(kKinds[6], n, k, true, chance));
    result.segments.push_back(matrices.back().segment());
  }
  return result;
}

// Two equal layers, the head, and the arrays that a step needs.
struct Model {
  explicit Model(Chance& chance) : norm(chance.floats(kHidden, 1.5f)) {
    const Shape& s = attention_shape();
    matrices.reserve(8);
    table = linear(matrices, {kVocabulary}, kHidden, chance);
    qkv = linear(matrices, {s.heads * s.dim, s.kv_heads * s.dim, s.kv_heads * s.dim}, kHidden, chance);
    o = linear(matrices, {kHidden}, s.heads * s.dim, chance);
    gate_up = linear(matrices, {kMlp, kMlp}, kHidden, chance);
    down = linear(matrices, {kHidden}, kMlp, chance);
  }

  std::vector<Matrix> matrices;
  std::vector<float> norm;
  Linear table, qkv, o, gate_up, down;
};

struct Arrays {
  Arrays(int rows, int taken_rows)
      : hidden(static_cast<size_t>(rows) * kHidden),
        qkv(static_cast<size_t>(rows) * attention_shape().width()),
        mixed(static_cast<size_t>(rows) * attention_shape().heads * attention_shape().dim),
        taken(static_cast<size_t>(taken_rows) * kHidden),
        logits(static_cast<size_t>(taken_rows) * kVocabulary) {}
  std::vector<float> hidden, qkv, mixed, taken, logits;
};

void record(Program& program, const Model& model, const AttentionLayer& layer) {
  const Shape& s = attention_shape();
  const int hidden = program.add_array(kHidden, false), qkv = program.add_array(s.width(), false);
  const int mixed = program.add_array(s.heads * s.dim, false), taken = program.add_array(kHidden, true);
  const int logits = program.add_array(kVocabulary, true);
  program.embed(model.table, hidden);
  for (int i = 0; i < 2; ++i) {
    program.norm_linear(hidden, model.norm.data(), kHidden, 1e-5f, model.qkv, qkv);
    program.rope_write(layer, qkv);
    program.attend(layer, qkv, mixed);
    program.linear_add(mixed, model.o, hidden);
    program.gated_mlp(hidden, model.norm.data(), kHidden, 1e-5f, model.gate_up, model.down);
  }
  program.take(hidden, taken);
  program.norm_linear(taken, model.norm.data(), kHidden, 1e-5f, model.table, logits);
}

void bind(Program& program, Arrays& arrays, int rows, int taken_rows) {
  const Shape& s = attention_shape();
  program.bind_array(0, arrays.hidden.data(), rows, kHidden);
  program.bind_array(1, arrays.qkv.data(), rows, s.width());
  program.bind_array(2, arrays.mixed.data(), rows, s.heads * s.dim);
  program.bind_array(3, arrays.taken.data(), taken_rows, kHidden);
  program.bind_array(4, arrays.logits.data(), taken_rows, kVocabulary);
}

void by_hand(Machine& machine, const Model& model, const AttentionLayer& layer, const Pass& pass, Arrays& arrays) {
  const int rows = pass.step.batch.rows;
  machine.embed(model.table, pass.token_ids, rows, arrays.hidden.data());
  for (int i = 0; i < 2; ++i) {
    machine.norm_linear(arrays.hidden.data(), rows, model.norm.data(), 1e-5f, model.qkv, arrays.qkv.data());
    machine.rope_write(pass.step, layer, arrays.qkv.data());
    machine.attend(pass.step, layer, arrays.qkv.data(), arrays.mixed.data());
    machine.linear_add(arrays.mixed.data(), rows, model.o, arrays.hidden.data());
    machine.gated_mlp(arrays.hidden.data(), rows, model.norm.data(), 1e-5f, model.gate_up, model.down);
  }
  for (int i = 0; i < pass.taken_rows; ++i)
    std::copy_n(arrays.hidden.data() + pass.taken[i] * kHidden, kHidden, arrays.taken.data() + i * kHidden);
  if (pass.taken_rows) machine.norm_linear(arrays.taken.data(), pass.taken_rows, model.norm.data(), 1e-5f, model.table, arrays.logits.data());
}

template <class Body>
void refused(const char* what, Body body) {
  bool thrown = false;
  try {
    body();
  } catch (const std::invalid_argument&) {
    thrown = true;
  }
  check(thrown, "%s is not refused", what);
}

void runs_have_the_bits_of_direct_calls(Digest& digest) {
  Chance chance(41);
  const Model model(chance);
  Cache cache(attention_shape(), chance);
  const AttentionLayer layer = cache.layer();
  const Batch batch = cache.batch({{0, 0, 33}, {1, 0, 5}, {2, 0, 1}});
  const int rows = batch.step().rows;
  std::vector<int32_t> ids;
  for (int i = 0; i < rows; ++i) ids.push_back(chance.below(kVocabulary));
  const std::vector<int32_t> taken{38, 32, 0};
  for (const int threads : {1, 3})
    for (const int taken_rows : {3, 0}) {
      Machine machine(threads), other(threads);
      const Pass pass{{batch.step(), {batch.table()}}, ids.data(), taken.data(), taken_rows};
      Arrays expected(rows, 3), arrays(rows, 3);
      by_hand(other, model, layer, pass, expected);
      Program program(machine);
      record(program, model, layer);
      bind(program, arrays, rows, 3);
      std::vector<int64_t> times(program.size(), -1);
      program.run_timed(pass, times.data());
      for (const int64_t time : times) check(time >= 0, "a call took %lld ns", static_cast<long long>(time));
      check(arrays.hidden == expected.hidden && arrays.logits == expected.logits, "a program has other bits than direct calls");
      long before = allocations.load();
      for (int i = 0; i < 2; ++i) other.attend(pass.step, layer, expected.qkv.data(), expected.mixed.data());
      const long of_attention = allocations.load() - before;
      before = allocations.load();
      program.run(pass);
      check(allocations.load() - before == of_attention, "a run allocates %ld times, its attention alone %ld", allocations.load() - before,
            of_attention);
      check(arrays.logits == expected.logits, "a second run has other bits");
      digest.add(arrays.logits);
    }
}

void what_does_not_fit_is_refused() {
  Chance chance(42);
  const Model model(chance);
  Cache cache(attention_shape(), chance);
  const AttentionLayer layer = cache.layer();
  Machine machine(1);
  Program program(machine);
  record(program, model, layer);
  const size_t size = program.size();
  refused("a wrong width", [&] { program.embed(model.table, 1); });
  refused("an array that is not there", [&] { program.take(0, 9); });
  refused("taking to rows of the batch", [&] { program.take(0, 0); });
  refused("a qkv of another layer", [&] { program.attend(layer, 0, 2); });
  check(program.size() == size, "a refused call is recorded");

  const Batch batch = cache.batch({{2, 0, 1}});
  const int32_t id = 3, far = kVocabulary, row = 0, beyond = 1;
  Pass pass{{batch.step(), {batch.table()}}, &id, &row, 1};
  refused("running without memory", [&] { program.run(pass); });
  Arrays arrays(1, 1);
  bind(program, arrays, 1, 1);
  program.run(pass);
  pass.token_ids = &far;
  refused("a token outside the table", [&] { program.run(pass); });
  pass.token_ids = &id;
  pass.taken = &beyond;
  refused("a row outside the batch", [&] { program.run(pass); });
  pass.taken_rows = 0;
  program.run(pass);
  pass.step.groups.clear();
  refused("a group without tables", [&] { program.run(pass); });
}

void peaks_are_positive() {
  Machine machine(2);
  const Peaks peaks = machine.peaks(1 << 16);
  check(peaks.read_bytes > 0 && peaks.f32 > 0 && peaks.w8a8 > 0 && peaks.w4a8 > 0, "a peak is not positive");
}

}  // namespace

void program_cases(Digest& digest) {
  peaks_are_positive();
  runs_have_the_bits_of_direct_calls(digest);
  what_does_not_fit_is_refused();
}

}  // namespace native_test
