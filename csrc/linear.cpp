// Tiles and loops of the matrix products; what they compute is written in linear.h.
#include "linear.h"

#include <algorithm>
#include <cmath>

#include "elementwise.h"
#include "linear_formats.h"
#include "linear_pair.h"

namespace KVIST_NAMESPACE {

namespace {

constexpr int kNearBytes = 16384;  // of int8 rows that a thread keeps in its first cache beside a panel of weights

constexpr size_t kAheadBytes = 8192;  // a panel of weights and the one after it stay in the first cache together up to this size

// Asks for a line of what will be read next, a panel further on in memory; asking beyond the end does no harm.
template <bool Leads>
void ask_ahead(const void* at) {
  if constexpr (Leads) __builtin_prefetch(at);
}

template <class Weights, int R>
void dense_panel(const Segment& s, int panel, const Rows& rows, int row, float (*y)[kPanel]) {
  const auto* w = static_cast<const typename Weights::T*>(s.data) + static_cast<size_t>(panel) * s.k * kPanel;
  const float* x = rows.x + static_cast<size_t>(row) * s.k;
  for (int c = 0; c < kPanel; c += kLanes) {
    V acc[R];
    for (int r = 0; r < R; ++r) acc[r] = zero_v();
    for (int k = 0; k < s.k; ++k) {
      const V column = Weights::load_lanes(w + static_cast<size_t>(k) * kPanel + c);
      for (int r = 0; r < R; ++r) acc[r] = fma_v(set1_v(x[static_cast<size_t>(r) * s.k + k]), column, acc[r]);
    }
    for (int r = 0; r < R; ++r) store_v(y[r] + c, acc[r]);
  }
}

template <class Scale, int R, bool Leads>
void w8_panel(const Segment& s, int panel, const Rows& rows, int row, float (*y)[kPanel]) {
  const int groups = s.groups();
  const size_t first = static_cast<size_t>(panel) * groups, at = static_cast<size_t>(row) * groups;
  const auto* w = static_cast<const uint8_t*>(s.data) + first * 512;
  const int8_t* q = rows.q + static_cast<size_t>(row) * s.k;
  for (int c = 0; c < kPanel; c += kLanes) {
    V acc[R];
    for (int r = 0; r < R; ++r) acc[r] = zero_v();
    for (int g = 0; g < groups; ++g) {
      VI dot[R];
      for (int line = 0; line < 512 * kLanes / kPanel; line += 64) ask_ahead<Leads>(w + (static_cast<size_t>(groups) + g) * 512 + c * 32 + line);
      dot_w8<R>(w + static_cast<size_t>(g) * 512 + 4 * c, q + g * kGroup, s.k, rows.sum + at + g, groups, dot);
      const V scale = Scale::load_lanes(s.scale, (first + g) * kPanel + c);
      for (int r = 0; r < R; ++r)
        acc[r] = fma_v(to_float_v(dot[r]), mul_v(scale, set1_v(rows.scale[at + static_cast<size_t>(r) * groups + g])), acc[r]);
    }
    for (int r = 0; r < R; ++r) store_v(y[r] + c, acc[r]);
  }
}

template <class Scale, int R, bool Leads>
void w4_panel(const Segment& s, int panel, const Rows& rows, int row, float (*y)[kPanel]) {
  const int groups = s.groups();
  const size_t first = static_cast<size_t>(panel) * groups, at = static_cast<size_t>(row) * groups;
  const auto* w = static_cast<const uint8_t*>(s.data) + first * 256;
  const int8_t* q = rows.q + static_cast<size_t>(row) * s.k;
  for (int c = 0; c < kPanel; c += kLanes) {
    V acc[R], low[R];
    for (int r = 0; r < R; ++r) acc[r] = low[r] = zero_v();
    for (int g = 0; g < groups; ++g) {
      VI dot[R];
      for (int line = 0; line < 256 * kLanes / kPanel; line += 64) ask_ahead<Leads>(w + (static_cast<size_t>(groups) + g) * 256 + c * 16 + line);
      dot_w4<R>(w + static_cast<size_t>(g) * 256 + 4 * c, q + g * kGroup, s.k, dot);
      const V scale = Scale::load_lanes(s.scale, (first + g) * kPanel + c);
      const V minimum = Scale::load_lanes(s.minimum, (first + g) * kPanel + c);
      for (int r = 0; r < R; ++r) {
        const size_t i = at + static_cast<size_t>(r) * groups + g;
        acc[r] = fma_v(to_float_v(dot[r]), mul_v(scale, set1_v(rows.scale[i])), acc[r]);
        low[r] = fma_v(minimum, set1_v(rows.scaled_sum[i]), low[r]);
      }
    }
    for (int r = 0; r < R; ++r) store_v(y[r] + c, add_v(acc[r], low[r]));
  }
}

template <int R, bool Leads>
void panel_rows(const Segment& s, int panel, const Rows& rows, int row, float (*y)[kPanel]) {
  switch (s.format) {
    case Format::f32: return dense_panel<DenseF32, R>(s, panel, rows, row, y);
    case Format::f16: return dense_panel<DenseF16, R>(s, panel, rows, row, y);
    case Format::bf16: return dense_panel<DenseBf16, R>(s, panel, rows, row, y);
    case Format::w8: return s.half_scale ? w8_panel<HalfScale, R, Leads>(s, panel, rows, row, y) : w8_panel<FloatScale, R, Leads>(s, panel, rows, row, y);
    case Format::w4: return s.half_scale ? w4_panel<HalfScale, R, Leads>(s, panel, rows, row, y) : w4_panel<FloatScale, R, Leads>(s, panel, rows, row, y);
  }
}

template <int R>
void panel_tile(const Segment& s, int panel, const Rows& rows, int row, int count, float (*y)[kPanel]) {
  // The first rows bring near what is read after this panel; for the others it would be asked for again in vain.
  const bool leads = row == 0 && s.panel_bytes() <= kAheadBytes;
  if (count == R) return leads ? panel_rows<R, true>(s, panel, rows, row, y) : panel_rows<R, false>(s, panel, rows, row, y);
  if constexpr (R > 1) panel_tile<R - 1>(s, panel, rows, row, count, y);
}

// Panels an item takes: enough weights to outweigh the handing out, few enough to share evenly.
int panels_per_item(const ThreadPool& pool, const Segment& s) {
  const int by_size = static_cast<int>(std::max<size_t>(1, 32768 / s.panel_bytes()));
  const int by_share = std::max(1, s.panels() / (8 * pool.num_threads()));
  return std::min(by_size, by_share);
}

long items_of(const ThreadPool& pool, const Segment& s) {
  const int step = panels_per_item(pool, s);
  return (s.panels() + step - 1) / step;
}

// Calls use(panel, row, row count) for the tiles of panels [panel, end): blocks of rows that stay in near memory go through all
// panels before the next block.
template <class Use>
void each_tile(const Rows& rows, int panel, int end, Use use) {
  const int block = std::max(8, kNearBytes / rows.k / kRowTile) * kRowTile;
  for (int first = 0; first < rows.count; first += block)
    for (int p = panel; p < end; ++p)
      for (int row = first; row < std::min(first + block, rows.count); row += kRowTile) use(p, row, std::min(kRowTile, rows.count - row));
}

void finish_panel(const Segment& s, int panel, const float* y, float* out, Store how) {
  const int column = panel * kPanel, count = std::min(kPanel, s.n - column);
  for (int c = 0; c < count; ++c) {
    const float value = s.bias ? y[c] + s.bias[column + c] : y[c];
    out[column + c] = how == Store::add ? out[column + c] + value : value;
  }
}

}  // namespace

size_t Segment::panel_bytes() const {
  const size_t elements = static_cast<size_t>(k) * kPanel;
  switch (format) {
    case Format::f32: return elements * 4;
    case Format::f16:
    case Format::bf16: return elements * 2;
    case Format::w8: return elements;
    case Format::w4: return elements / 2;
  }
  return elements;
}

void quantize_row(const float* x, int k, int8_t* q, float* scale, float* scaled_sum, int32_t* sum) {
  for (int g = 0; g < k / kGroup; ++g) {
    const F a = load(x + g * kGroup), b = load(x + g * kGroup + 16);
    const float largest = fold_max(max(abs(a), abs(b)));
    const F inverse = set1(largest >= 1e-30f ? 127.0f / largest : 0.0f);  // below, the quotient overflows
    const F low = set1(-127.0f), high = set1(127.0f);
    const I qa = round_to_int(min(max(mul(a, inverse), low), high));
    const I qb = round_to_int(min(max(mul(b, inverse), low), high));
    store_int8(q + g * kGroup, qa);
    store_int8(q + g * kGroup + 16, qb);
    int32_t total = 0;
    for (int i = 0; i < kGroup; ++i) total += q[g * kGroup + i];
    scale[g] = largest * (1.0f / 127.0f);
    sum[g] = total;
    scaled_sum[g] = scale[g] * static_cast<float>(total);
  }
}

Rows prepare_rows(ThreadPool& pool, RowBuffers& buffers, const float* x, int count, int k, const float* norm, float eps, bool quantize) {
  const int groups = k / kGroup;
  const size_t all = static_cast<size_t>(count);
  float* normed = norm ? buffers.x.reserve(all * k) : nullptr;
  int8_t* q = quantize ? buffers.q.reserve(all * k) : nullptr;
  float* scale = quantize ? buffers.scale.reserve(all * groups) : nullptr;
  float* scaled_sum = quantize ? buffers.scaled_sum.reserve(all * groups) : nullptr;
  int32_t* sum = quantize ? buffers.sum.reserve(all * groups) : nullptr;
  const auto row = [&](long r, int) {
    const size_t at = static_cast<size_t>(r);
    const float* from = x + at * k;
    if (norm) {
      rms_norm(from, norm, eps, k, normed + at * k);
      from = normed + at * k;
    }
    if (quantize) quantize_row(from, k, q + at * k, scale + at * groups, scaled_sum + at * groups, sum + at * groups);
  };
  if (norm || quantize) pool.run(count, row);
  return {count, k, norm ? normed : x, q, scale, scaled_sum, sum};
}

void panel_product(const Segment& segment, int panel, const Rows& rows, int row, int count, float (*y)[kPanel]) {
  panel_tile<kRowTile>(segment, panel, rows, row, count, y);
}

namespace {

// Where item `at` of a product lies when segment s has count(s) items.
struct Place {
  const Segment& segment;
  int item;
  int column;  // of the segment's first among all columns
};

template <class Count>
Place place_of(const std::vector<Segment>& segments, long item, Count count) {
  int column = 0;
  for (const Segment& s : segments) {
    const long own = count(s);
    if (item < own) return {s, static_cast<int>(item), column};
    item -= own;
    column += s.n;
  }
  return {segments.back(), 0, column};  // not reached: items are counted by the same function
}

template <class Count>
long all_items(const std::vector<Segment>& segments, Count count) {
  long items = 0;
  for (const Segment& s : segments) items += count(s);
  return items;
}

// One row: a matrix is read at two places, its beginning and its middle.
void row_product(ThreadPool& pool, const std::vector<Segment>& segments, const Rows& row, float* out, Store how) {
  const auto pairs = [](const Segment& s) { return (s.panels() + 1) / 2; };
  pool.run(all_items(segments, pairs), [&](long item, int) {
    const auto [s, panel, column] = place_of(segments, item, pairs);
    const int other = panel + pairs(s);
    alignas(64) float y[2][kPanel];
    if (other == s.panels()) {
      panel_product(s, panel, row, 0, 1, y);
    } else {
      pair_product({s, panel}, {s, other}, row, y);
      finish_panel(s, other, y[1], out + column, how);
    }
    finish_panel(s, panel, y[0], out + column, how);
  });
}

void finish_gated(const Segment& gate, const Segment& up, int panel, const float* g, const float* u, float* h) {
  const int column = panel * kPanel, width = std::min(kPanel, gate.n - column);
  F a = load(g), b = load(u);
  if (gate.bias) a = add(a, load_tail(gate.bias + column, width));
  if (up.bias) b = add(b, load_tail(up.bias + column, width));
  const F value = mul(silu(a), b);
  if (width == kPanel) store(h + column, value);
  else store_tail(h + column, value, width);
}

void row_gated_product(ThreadPool& pool, const Segment& gate, const Segment& up, const Rows& row, float* h) {
  pool.run(gate.panels(), [&](long panel, int) {
    alignas(64) float y[2][kPanel];
    pair_product({gate, static_cast<int>(panel)}, {up, static_cast<int>(panel)}, row, y);
    finish_gated(gate, up, static_cast<int>(panel), y[0], y[1], h);
  });
}

}  // namespace

void product(ThreadPool& pool, const std::vector<Segment>& segments, const Rows& rows, float* out, long ld, Store how) {
  if (rows.count == 1) return row_product(pool, segments, rows, out, how);
  const auto items = [&](const Segment& s) { return items_of(pool, s); };
  pool.run(all_items(segments, items), [&](long number, int) {
    const auto [s, item, column] = place_of(segments, number, items);
    const int step = panels_per_item(pool, s), end = std::min(s.panels(), (item + 1) * step);
    alignas(64) float y[kRowTile][kPanel];
    each_tile(rows, item * step, end, [&](int panel, int row, int count) {
      panel_product(s, panel, rows, row, count, y);
      for (int r = 0; r < count; ++r) finish_panel(s, panel, y[r], out + column + (row + r) * ld, how);
    });
  });
}

void gated_product(ThreadPool& pool, const Segment& gate, const Segment& up, const Rows& rows, float* h) {
  if (rows.count == 1) return row_gated_product(pool, gate, up, rows, h);
  const int step = panels_per_item(pool, gate);
  pool.run(items_of(pool, gate), [&](long item, int) {
    alignas(64) float g[kRowTile][kPanel], u[kRowTile][kPanel];
    const int end = std::min(gate.panels(), static_cast<int>(item + 1) * step);
    each_tile(rows, static_cast<int>(item) * step, end, [&](int panel, int row, int count) {
      panel_product(gate, panel, rows, row, count, g);
      panel_product(up, panel, rows, row, count, u);
      for (int r = 0; r < count; ++r) finish_gated(gate, up, panel, g[r], u[r], h + static_cast<size_t>(row + r) * gate.n);
    });
  });
}

namespace {

float scale_at(const void* p, bool half, size_t i) {
  if (!half) return static_cast<const float*>(p)[i];
  alignas(64) uint16_t bits[16] = {static_cast<const uint16_t*>(p)[i]};
  alignas(64) float lanes[16];
  store_v(lanes, load_v_f16(bits));
  return lanes[0];
}

}  // namespace

void dequantize_row(const Segment& t, int id, float* out) {
  const size_t panel = static_cast<size_t>(id) / kPanel, lane = static_cast<size_t>(id) % kPanel;
  if (!t.quantized()) {
    for (int k = 0; k < t.k; ++k) {
      const size_t i = (panel * t.k + k) * kPanel + lane;
      if (t.format == Format::f32) {
        out[k] = static_cast<const float*>(t.data)[i];
        continue;
      }
      alignas(64) uint16_t bits[16] = {static_cast<const uint16_t*>(t.data)[i]};
      alignas(64) float lanes[16];
      store_v(lanes, t.format == Format::f16 ? load_v_f16(bits) : load_v_bf16(bits));
      out[k] = lanes[0];
    }
    return;
  }
  const auto* data = static_cast<const uint8_t*>(t.data);
  for (int g = 0; g < t.groups(); ++g) {
    const size_t block = panel * t.groups() + g;
    const float scale = scale_at(t.scale, t.half_scale, block * kPanel + lane);
    const float minimum = t.minimum ? scale_at(t.minimum, t.half_scale, block * kPanel + lane) : 0.0f;
    for (int e = 0; e < kGroup; ++e) {
      const int quad = e / 4;
      if (t.format == Format::w8) {
        out[g * kGroup + e] = scale * static_cast<float>(data[block * 512 + quad * 64 + lane * 4 + e % 4] - 128);
      } else {
        const uint8_t byte = data[block * 256 + (quad % 4) * 64 + lane * 4 + e % 4];
        out[g * kGroup + e] = scale * static_cast<float>(quad < 4 ? byte & 15 : byte >> 4) + minimum;
      }
    }
  }
}

}  // namespace KVIST_NAMESPACE
