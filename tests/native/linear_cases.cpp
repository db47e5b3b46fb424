// Matrix products in every format against double precision, integers exactly, and each row's bits whatever runs beside it.
#include <string>

#include "machine.h"
#include "matrices.h"

namespace native_test {

namespace {

constexpr int kMaxRows = 9;
constexpr float kGuard = -12345.0f;

struct Product {
  std::vector<float> out;
  long ld;
};

std::vector<Segment> segments_of(const std::vector<Matrix>& matrices) {
  std::vector<Segment> segments;
  for (const Matrix& m : matrices) segments.push_back(m.segment());
  return segments;
}

bool any_quantized(const std::vector<Matrix>& matrices) {
  return std::any_of(matrices.begin(), matrices.end(), [](const Matrix& m) { return m.quantized(); });
}

// `count` rows of x from `row` on, in a copy of their own; rows of the result are three floats longer than they need to be.
Product multiply(ThreadPool& pool, const std::vector<Matrix>& matrices, const std::vector<float>& x, int row, int count, Store how) {
  const int k = matrices[0].k;
  const std::vector<float> own(x.begin() + static_cast<long>(row) * k, x.begin() + static_cast<long>(row + count) * k);
  RowBuffers buffers;
  const Rows rows = prepare_rows(pool, buffers, own.data(), count, k, nullptr, 0.0f, any_quantized(matrices));
  Product result{{}, 3};
  for (const Matrix& m : matrices) result.ld += m.n;
  result.out.assign(static_cast<size_t>(count * result.ld), kGuard);
  if (how == Store::add)
    for (int r = 0; r < count; ++r)
      for (long c = 0; c < result.ld - 3; ++c) result.out[r * result.ld + c] = 0.25f * static_cast<float>((row + r + c) % 7);
  product(pool, segments_of(matrices), rows, result.out.data(), result.ld, how);
  return result;
}

// All rows at once on one thread against double precision; gives the result for comparison with other ways to compute it.
Product check_values(ThreadPool& pool, const char* name, const std::vector<Matrix>& matrices, const std::vector<float>& x, Store how) {
  const Product result = multiply(pool, matrices, x, 0, kMaxRows, how);
  RowBuffers buffers;
  const Rows rows = prepare_rows(pool, buffers, x.data(), kMaxRows, matrices[0].k, nullptr, 0.0f, any_quantized(matrices));
  for (int r = 0; r < kMaxRows; ++r) {
    long at = r * result.ld;
    for (const Matrix& m : matrices)
      for (int c = 0; c < m.n; ++c, ++at) {
        Exact exact = exact_product(m, rows, r, c);
        const double before = how == Store::add ? 0.25 * static_cast<double>((at - r * result.ld + r) % 7) : 0.0;
        exact.bound += 2 * kEps * (std::fabs(before) + std::fabs(exact.value));
        const double error = std::fabs(result.out[at] - (before + exact.value));
        check(error <= exact.bound, "%s [%d, %d]: row %d column %d is %a, off by %g of %g", name, m.n, m.k, r, c, result.out[at], error,
              exact.bound);
      }
    for (; at < (r + 1) * result.ld; ++at) check(result.out[at] == kGuard, "%s: row %d is written beyond its end", name, r);
  }
  return result;
}

// Law L1: the same bits in batches of 1 to 9 rows, at any place in the batch, on one thread or three.
void check_bits(const char* name, const std::vector<Matrix>& matrices, const std::vector<float>& x, const Product& all, Store how) {
  ThreadPool one(1), three(3);
  for (int count = 1; count <= kMaxRows; ++count) {
    const int row = (count * 5) % (kMaxRows - count + 1);
    for (ThreadPool* pool : {&one, &three}) {
      const Product part = multiply(*pool, matrices, x, row, count, how);
      const bool same = same_bits(part.out.data(), all.out.data() + row * all.ld, part.out.size());
      check(same, "%s: %d rows from %d on %d threads have other bits", name, count, row, pool->num_threads());
    }
  }
  for (int row = 0; row < kMaxRows; ++row)
    check(same_bits(multiply(one, matrices, x, row, 1, how).out.data(), all.out.data() + row * all.ld, static_cast<size_t>(all.ld)),
          "%s: row %d alone has other bits", name, row);
}

void products(Digest& digest) {
  ThreadPool pool(1);
  Chance chance(21);
  for (const Kind& kind : kKinds) {
    const bool dense = kind.format == Format::f32 || kind.format == Format::f16 || kind.format == Format::bf16;
    const int odd = dense ? 33 : 96, least = dense ? 1 : 32;
    const std::vector<std::vector<Matrix>> sets = {
        {make_matrix(kind, 1, least, false, chance)},
        {make_matrix(kind, 17, odd, true, chance), make_matrix(kind, 24, odd, false, chance), make_matrix(kind, 48, odd, true, chance)},
        {make_matrix(kind, 330, 32, true, chance)},
    };
    for (const auto& matrices : sets)
      for (const Store how : {Store::write, Store::add}) {
        const auto x = chance.floats(static_cast<size_t>(kMaxRows) * matrices[0].k, 2.0f);
        const Product all = check_values(pool, kind.name, matrices, x, how);
        check_bits(kind.name, matrices, x, all, how);
        digest.add(all.out);
      }
  }
}

void formats_mix(Digest& digest) {
  ThreadPool pool(3);
  Chance chance(22);
  std::vector<Matrix> matrices;
  for (const Kind& kind : kKinds) {
    const int n = 5 + chance.below(30);
    matrices.push_back(make_matrix(kind, n, 64, n % 2 == 0, chance));
  }
  const auto x = chance.floats(kMaxRows * 64);
  const Product all = check_values(pool, "mixed", matrices, x, Store::write);
  check_bits("mixed", matrices, x, all, Store::write);
  digest.add(all.out);
}

// Whole activations that reach 127 in each group quantize to themselves, so results are whole numbers and known exactly.
void integers_are_exact(Digest& digest) {
  ThreadPool pool(3);
  Chance chance(23);
  for (const Kind& kind : kKinds) {
    if (kind.format != Format::w8 && kind.format != Format::w4) continue;
    const int k = 288;
    const std::vector<Matrix> matrices = {make_matrix(kind, 37, k, false, chance, true)};
    std::vector<float> x(kMaxRows * k);
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % kGroup == 0 ? 127 : chance.below(255) - 127);
    for (int i = 0; i < k; ++i) x[i] = i / kGroup % 2 == 0 ? 127.0f : -127.0f;
    const Product result = multiply(pool, matrices, x, 0, kMaxRows, Store::write);
    for (int r = 0; r < kMaxRows; ++r)
      for (int c = 0; c < 37; ++c) {
        long exact = 0;
        for (int i = 0; i < k; ++i) exact += static_cast<long>(x[r * k + i]) * (matrices[0].q[c * k + i] + static_cast<long>(matrices[0].minimum[0]));
        const float value = result.out[r * result.ld + c];
        check(value == static_cast<float>(exact), "%s: row %d column %d is %f, not %ld", kind.name, r, c, value, exact);
      }
    digest.add(result.out);
  }
}

// A row of infinities and NaNs spoils no other.
void broken_rows_stay_alone() {
  ThreadPool pool(3);
  Chance chance(24);
  for (const Kind& kind : kKinds) {
    const std::vector<Matrix> matrices = {make_matrix(kind, 20, 64, false, chance)};
    auto x = chance.floats(kMaxRows * 64);
    for (int i = 0; i < 64; ++i) x[2 * 64 + i] = i % 2 ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
    const Product all = multiply(pool, matrices, x, 0, kMaxRows, Store::write);
    for (int row = 0; row < kMaxRows; ++row) {
      if (row == 2) continue;
      const Product alone = multiply(pool, matrices, x, row, 1, Store::write);
      check(same_bits(alone.out.data(), all.out.data() + row * all.ld, alone.out.size()), "%s: row %d is spoilt by row 2", kind.name, row);
    }
  }
}

// silu(gate) * up; silu's slope is at most 1.1.
void gated_products(Digest& digest) {
  Chance chance(25);
  ThreadPool one(1), three(3);
  for (const Kind& kind : kKinds)
    for (const int n : {16, 37, 200}) {
      const Kind& other = n == 200 ? kKinds[(static_cast<size_t>(&kind - std::begin(kKinds)) + 1) % std::size(kKinds)] : kind;
      const Matrix gate = make_matrix(kind, n, 64, n == 37, chance), up = make_matrix(other, n, 64, n != 16, chance);
      const bool quantize = gate.quantized() || up.quantized();
      const auto x = chance.floats(kMaxRows * 64);
      RowBuffers buffers, own;
      const Rows rows = prepare_rows(one, buffers, x.data(), kMaxRows, 64, nullptr, 0.0f, quantize);
      std::vector<float> h(static_cast<size_t>(kMaxRows) * n), shared(h.size());
      gated_product(one, gate.segment(), up.segment(), rows, h.data());
      gated_product(three, gate.segment(), up.segment(), rows, shared.data());
      check(same_bits(h.data(), shared.data(), h.size()), "%s: gated product has other bits on three threads", kind.name);
      for (int r = 0; r < kMaxRows; ++r) {
        for (int c = 0; c < n; ++c) {
          const Exact a = exact_product(gate, rows, r, c), b = exact_product(up, rows, r, c);
          const double s = a.value / (1 + std::exp(-a.value)), exact = s * b.value;
          const double bound = 1.1 * a.bound * std::fabs(b.value) + (std::fabs(s) + 1.1 * a.bound) * b.bound + 2e-6 * std::fabs(exact) + 1e-30;
          const float value = h[r * n + c];
          check(std::fabs(value - exact) <= bound, "%s: gated row %d column %d is %a, not %a", kind.name, r, c, value, exact);
        }
        const Rows alone = prepare_rows(one, own, x.data() + r * 64, 1, 64, nullptr, 0.0f, quantize);
        gated_product(three, gate.segment(), up.segment(), alone, shared.data());
        check(same_bits(shared.data(), h.data() + r * n, static_cast<size_t>(n)), "%s: gated row %d alone has other bits", kind.name, r);
      }
      digest.add(h);
    }
}

void rows_are_dequantized(Digest& digest) {
  Chance chance(26);
  for (const Kind& kind : kKinds) {
    const Matrix m = make_matrix(kind, 19, 96, false, chance);
    std::vector<float> row(96);
    for (int id = 0; id < m.n; ++id) {
      dequantize_row(m.segment(), id, row.data());
      for (int i = 0; i < m.k; ++i) {
        const size_t at = static_cast<size_t>(id) * m.k + i, group = static_cast<size_t>(id) * 3 + i / kGroup;
        float expected = static_cast<float>(m.quantized() ? m.scale[group] * m.q[at] : m.w[at]);
        if (kind.format == Format::w4) expected += static_cast<float>(m.minimum[group]);
        check(row[i] == expected, "%s: row %d element %d is %a, not %a", kind.name, id, i, row[i], expected);
      }
      digest.add(row);
    }
  }
}

// The fused calls are their parts: the same bits.
void fused_calls(Digest& digest) {
  Chance chance(27);
  ThreadPool pool(1);
  Machine machine(3);
  for (const Kind& kind : kKinds) {
    const Matrix gate = make_matrix(kind, 64, 96, false, chance), up = make_matrix(kind, 64, 96, true, chance);
    const Matrix down = make_matrix(kind, 96, 64, true, chance);
    const Linear gate_up{{gate.segment(), up.segment()}}, back{{down.segment()}};
    const auto x = chance.floats(kMaxRows * 96), norm = chance.floats(96);
    RowBuffers buffers, inner;
    const Rows rows = prepare_rows(pool, buffers, x.data(), kMaxRows, 96, norm.data(), 1e-5f, gate.quantized());
    std::vector<float> parts(kMaxRows * 128), fused(parts.size());
    product(pool, gate_up.segments, rows, parts.data(), 128, Store::write);
    machine.norm_linear(x.data(), kMaxRows, norm.data(), 1e-5f, gate_up, fused.data());
    check(same_bits(parts.data(), fused.data(), parts.size()), "%s: norm_linear is not its parts", kind.name);

    std::vector<float> hidden(kMaxRows * 64), sum = x, mlp = x;
    gated_product(pool, gate.segment(), up.segment(), rows, hidden.data());
    const Rows second = prepare_rows(pool, inner, hidden.data(), kMaxRows, 64, nullptr, 0.0f, down.quantized());
    product(pool, back.segments, second, sum.data(), 96, Store::add);
    machine.gated_mlp(mlp.data(), kMaxRows, norm.data(), 1e-5f, gate_up, back);
    check(same_bits(sum.data(), mlp.data(), sum.size()), "%s: gated_mlp is not its parts", kind.name);

    std::vector<float> added = x;
    machine.linear_add(hidden.data(), kMaxRows, back, added.data());
    check(same_bits(sum.data(), added.data(), sum.size()), "%s: linear_add is not its parts", kind.name);
    digest.add(mlp);

    const std::vector<int32_t> ids = {63, 0, 17, 17};
    std::vector<float> rows_of_table(4 * 96), row(96);
    machine.embed({{gate.segment()}}, ids.data(), 4, rows_of_table.data());
    for (size_t i = 0; i < ids.size(); ++i) {
      dequantize_row(gate.segment(), ids[i], row.data());
      check(same_bits(row.data(), rows_of_table.data() + i * 96, 96), "%s: embedding %zu is not its row", kind.name, i);
    }
  }
}

}  // namespace

void linear_cases(Digest& digest) {
  products(digest);
  formats_mix(digest);
  integers_are_exact(digest);
  broken_rows_stay_alone();
  gated_products(digest);
  rows_are_dequantized(digest);
  fused_calls(digest);
}

}  // namespace native_test
