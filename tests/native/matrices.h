// Random packed matrices of every format, with the numbers that they stand for.
#pragma once

#include <algorithm>

#include "check.h"
#include "kv_format.h"
#include "linear.h"

namespace native_test {

using namespace KVIST_NAMESPACE;

// Scales and minimums are float or binary16; dense formats have none.
struct Kind {
  const char* name;
  Format format;
  bool half_scale;
};

constexpr Kind kKinds[] = {{"f32", Format::f32, false}, {"f16", Format::f16, false},   {"bf16", Format::bf16, false},  {"w8", Format::w8, false},
                           {"w4", Format::w4, false},   {"w8 half", Format::w8, true}, {"w4 half", Format::w4, true}};

// The bytes of a matrix in its layout, and beside them w[row * k + i] (dense) or q, scale and minimum (quantized).
struct Matrix {
  Kind kind;
  int n, k;
  std::vector<uint8_t> data, scale_data, minimum_data;
  std::vector<float> bias;
  std::vector<double> w, scale, minimum;  // [n, k], [n, k / 32], [n, k / 32]
  std::vector<int> q;                     // [n, k]

  bool quantized() const { return kind.format == Format::w8 || kind.format == Format::w4; }
  int groups() const { return k / kGroup; }
  Segment segment() const {
    const void* high = quantized() ? scale_data.data() : nullptr;
    const void* low = kind.format == Format::w4 ? minimum_data.data() : nullptr;
    return {kind.format, n, k, data.data(), high, low, kind.half_scale, bias.empty() ? nullptr : bias.data()};
  }
};

template <class T>
void put(std::vector<uint8_t>& bytes, size_t index, T value) {
  std::memcpy(bytes.data() + index * sizeof value, &value, sizeof value);
}

// Any sign and fraction, exponents around one, and some subnormal.
inline uint16_t random_f16(Chance& chance) {
  const int exponent = chance.below(8) == 0 ? 0 : 8 + chance.below(8);
  const int sign_and_fraction = chance.below(2048);
  return static_cast<uint16_t>((sign_and_fraction & 1024) << 5 | exponent << 10 | (sign_and_fraction & 1023));
}

// One scale or minimum: stores it and gives its value.
inline double put_scale(std::vector<uint8_t>& bytes, size_t index, bool half, Chance& chance) {
  if (half) {
    const uint16_t bits = random_f16(chance);
    put(bytes, index, bits);
    return f16_value(bits);
  }
  const float value = chance.uniform();
  put(bytes, index, value);
  return value;
}

inline void fill_dense(Matrix& m, Chance& chance) {
  m.data.resize(static_cast<size_t>(m.segment().panels()) * kPanel * m.k * (m.kind.format == Format::f32 ? 4 : 2));
  m.w.resize(static_cast<size_t>(m.n) * m.k);
  for (int row = 0; row < m.n; ++row)
    for (int i = 0; i < m.k; ++i) {
      const size_t at = (static_cast<size_t>(row / kPanel) * m.k + i) * kPanel + row % kPanel;
      double& w = m.w[static_cast<size_t>(row) * m.k + i];
      if (m.kind.format == Format::f32) {
        const float value = chance.uniform();
        put(m.data, at, value);
        w = value;
        continue;
      }
      const uint16_t bits = m.kind.format == Format::f16 ? random_f16(chance) : to_bf16(chance.uniform());
      put(m.data, at, bits);
      w = m.kind.format == Format::f16 ? f16_value(bits) : bf16_value(bits);
    }
}

// Extremes are as likely as anything else.
inline int random_weight(bool four_bits, Chance& chance) {
  const int low = four_bits ? 0 : -128, high = four_bits ? 15 : 127;
  const int pick = chance.below(6);
  return pick == 0 ? low : pick == 1 ? high : low + chance.below(high - low + 1);
}

inline void fill_quantized(Matrix& m, bool unit, Chance& chance) {
  const bool four = m.kind.format == Format::w4;
  const size_t blocks = static_cast<size_t>(m.segment().panels()) * m.groups();
  m.data.assign(blocks * (four ? 256 : 512), four ? 0 : 128);
  m.scale_data.assign(blocks * kPanel * (m.kind.half_scale ? 2 : 4), 0);
  if (four) m.minimum_data = m.scale_data;
  for (int row = 0; row < m.n; ++row)
    for (int g = 0; g < m.groups(); ++g) {
      const size_t block = static_cast<size_t>(row / kPanel) * m.groups() + g, lane = row % kPanel;
      for (int e = 0; e < kGroup; ++e) {
        const int q = random_weight(four, chance);
        m.q.push_back(q);
        const size_t within = lane * 4 + e % 4;
        if (four) m.data[block * 256 + (e / 4 % 4) * 64 + within] |= static_cast<uint8_t>(e < 16 ? q : q << 4);
        else m.data[block * 512 + (e / 4) * 64 + within] = static_cast<uint8_t>(q + 128);
      }
      m.scale.push_back(put_scale(m.scale_data, block * kPanel + lane, m.kind.half_scale, chance));
      m.minimum.push_back(four ? put_scale(m.minimum_data, block * kPanel + lane, m.kind.half_scale, chance) : 0.0);
      if (!unit) continue;
      m.scale.back() = 1;
      m.minimum.back() = four ? -8 : 0;
      for (auto* table : {&m.scale_data, &m.minimum_data}) {
        if (table->empty()) continue;
        const bool is_scale = table == &m.scale_data;
        if (m.kind.half_scale) put<uint16_t>(*table, block * kPanel + lane, is_scale ? 0x3c00 : 0xc800);
        else put<float>(*table, block * kPanel + lane, is_scale ? 1.0f : -8.0f);
      }
    }
}

// `unit`: scales of one and minimums of -8, so that whole activations give whole results.
inline Matrix make_matrix(const Kind& kind, int n, int k, bool with_bias, Chance& chance, bool unit = false) {
  Matrix m{kind, n, k, {}, {}, {}, {}, {}, {}, {}, {}};
  if (m.quantized()) fill_quantized(m, unit, chance);
  else fill_dense(m, chance);
  if (with_bias) m.bias = chance.floats(n);
  return m;
}

// y = x W^T + bias of one element in double precision, and how far a kernel may be from it.
struct Exact {
  double value, bound;
};

inline Exact exact_product(const Matrix& m, const Rows& rows, int row, int column) {
  double sum = 0, size = 0;
  const auto add = [&](double term) {
    sum += term;
    size += std::fabs(term);
  };
  if (m.quantized()) {
    for (int g = 0; g < m.groups(); ++g) {
      const size_t at = static_cast<size_t>(row) * m.groups() + g, w = static_cast<size_t>(column) * m.groups() + g;
      int dot = 0;
      for (int e = 0; e < kGroup; ++e) dot += m.q[w * kGroup + e] * rows.q[at * kGroup + e];
      add(dot * m.scale[w] * rows.scale[at]);
      add(m.minimum[w] * rows.scaled_sum[at]);
    }
  } else {
    for (int i = 0; i < m.k; ++i) add(m.w[static_cast<size_t>(column) * m.k + i] * rows.x[static_cast<size_t>(row) * m.k + i]);
  }
  if (!m.bias.empty()) add(m.bias[column]);
  return {sum, ((m.quantized() ? m.groups() : m.k) + 6) * kEps * size + 1e-35};
}

}  // namespace native_test
