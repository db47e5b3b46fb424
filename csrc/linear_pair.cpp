// See linear_pair.h.
#include "linear_pair.h"

#include "linear_formats.h"

namespace KVIST_NAMESPACE {

namespace {

constexpr int kParts = kPanel / kLanes;  // registers for the columns of a panel

constexpr size_t kWeightsAhead = 1536;              // bytes: what is read while a line comes
constexpr size_t kScalesAhead = kWeightsAhead / 8;  // scales take up to an eighth of the weights

// Asks for what lies so much `further` in memory than the `bytes` at `at`; asking beyond the end does no harm.
inline void ask_ahead(const void* at, size_t bytes, size_t further) {
  for (size_t line = 0; line < bytes; line += 64) __builtin_prefetch(static_cast<const char*>(at) + further + line);
}

// The same for scales or minimums of a group of a panel.
template <class Scale>
void ask_ahead(const void* scales, size_t group) {
  ask_ahead(static_cast<const char*>(scales) + group * kPanel * Scale::kBytes, 1, kScalesAhead);
}

template <class Weights>
void dense_pair(const PanelOf (&of)[2], const Rows& row, float (*y)[kPanel]) {
  const int k = row.k;
  const typename Weights::T* w[2];
  V acc[2][kParts];
  for (int i = 0; i < 2; ++i) {
    w[i] = static_cast<const typename Weights::T*>(of[i].segment.data) + static_cast<size_t>(of[i].panel) * k * kPanel;
    for (V& one : acc[i]) one = zero_v();
  }
  for (int at = 0; at < k; ++at) {
    const V x = set1_v(row.x[at]);
    for (int i = 0; i < 2; ++i)
      for (int c = 0; c < kParts; ++c) acc[i][c] = fma_v(x, Weights::load_lanes(w[i] + static_cast<size_t>(at) * kPanel + c * kLanes), acc[i][c]);
  }
  for (int i = 0; i < 2; ++i)
    for (int c = 0; c < kParts; ++c) store_v(y[i] + c * kLanes, acc[i][c]);
}

template <class Scale>
void w8_pair(const PanelOf (&of)[2], const Rows& row, float (*y)[kPanel]) {
  const int groups = row.k / kGroup;
  V acc[2][kParts];
  for (auto& panel : acc)
    for (V& one : panel) one = zero_v();
  for (int g = 0; g < groups; ++g) {
    const V row_scale = set1_v(row.scale[g]);
    for (int i = 0; i < 2; ++i) {
      const Segment& s = of[i].segment;
      const size_t group = static_cast<size_t>(of[i].panel) * groups + g;
      const auto* w = static_cast<const uint8_t*>(s.data) + group * 512;
      ask_ahead(w, 512, kWeightsAhead);
      ask_ahead<Scale>(s.scale, group);
      for (int c = 0; c < kParts; ++c) {
        VI dot[1];
        dot_w8<1>(w + 4 * c * kLanes, row.q + g * kGroup, row.k, row.sum + g, groups, dot);
        const V scale = Scale::load_lanes(s.scale, group * kPanel + c * kLanes);
        acc[i][c] = fma_v(to_float_v(dot[0]), mul_v(scale, row_scale), acc[i][c]);
      }
    }
  }
  for (int i = 0; i < 2; ++i)
    for (int c = 0; c < kParts; ++c) store_v(y[i] + c * kLanes, acc[i][c]);
}

template <class Scale>
void w4_pair(const PanelOf (&of)[2], const Rows& row, float (*y)[kPanel]) {
  const int groups = row.k / kGroup;
  V acc[2][kParts], low[2][kParts];
  for (int i = 0; i < 2; ++i)
    for (int c = 0; c < kParts; ++c) acc[i][c] = low[i][c] = zero_v();
  for (int g = 0; g < groups; ++g) {
    const V row_scale = set1_v(row.scale[g]), row_sum = set1_v(row.scaled_sum[g]);
    for (int i = 0; i < 2; ++i) {
      const Segment& s = of[i].segment;
      const size_t group = static_cast<size_t>(of[i].panel) * groups + g;
      const auto* w = static_cast<const uint8_t*>(s.data) + group * 256;
      ask_ahead(w, 256, kWeightsAhead);
      ask_ahead<Scale>(s.scale, group);
      ask_ahead<Scale>(s.minimum, group);
      for (int c = 0; c < kParts; ++c) {
        VI dot[1];
        dot_w4<1>(w + 4 * c * kLanes, row.q + g * kGroup, row.k, dot);
        const V scale = Scale::load_lanes(s.scale, group * kPanel + c * kLanes);
        const V minimum = Scale::load_lanes(s.minimum, group * kPanel + c * kLanes);
        acc[i][c] = fma_v(to_float_v(dot[0]), mul_v(scale, row_scale), acc[i][c]);
        low[i][c] = fma_v(minimum, row_sum, low[i][c]);
      }
    }
  }
  for (int i = 0; i < 2; ++i)
    for (int c = 0; c < kParts; ++c) store_v(y[i] + c * kLanes, add_v(acc[i][c], low[i][c]));
}

}  // namespace

void pair_product(const PanelOf& first, const PanelOf& second, const Rows& row, float (*y)[kPanel]) {
  const Segment &a = first.segment, &b = second.segment;
  if (a.format != b.format || a.half_scale != b.half_scale) {
    panel_product(a, first.panel, row, 0, 1, y);
    return panel_product(b, second.panel, row, 0, 1, y + 1);
  }
  const PanelOf both[] = {first, second};
  switch (a.format) {
    case Format::f32: return dense_pair<DenseF32>(both, row, y);
    case Format::f16: return dense_pair<DenseF16>(both, row, y);
    case Format::bf16: return dense_pair<DenseBf16>(both, row, y);
    case Format::w8: return a.half_scale ? w8_pair<HalfScale>(both, row, y) : w8_pair<FloatScale>(both, row, y);
    case Format::w4: return a.half_scale ? w4_pair<HalfScale>(both, row, y) : w4_pair<FloatScale>(both, row, y);
  }
}

}  // namespace KVIST_NAMESPACE
