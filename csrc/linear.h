// Matrix products over packed weights: y = x W^T, with activations in float or in int8 groups of 32.
//
// A matrix is stored in panels of 16 columns (output features). Formats and their arithmetic for one row and one column:
//   dense (f32, f16, bf16)  acc = fma(x[k], w[k], acc), k ascending
//   w8a8, w4a8              per group g ascending: acc = fma(dot_g, scale_g * sa_g, acc), and for w4a8 also
//                           low = fma(minimum_g, sa_g * sum_g, low); y = acc + low
// where dot_g is an exact integer and (sa, q, sum) are the row's quantized activations. A row's chain of operations never depends on
// the other rows, on the tile it falls into or on the number of threads; K is never split.
#pragma once

#include <cstdint>
#include <vector>

#include "buffer.h"
#include "simd.h"
#include "thread_pool.h"

namespace KVIST_NAMESPACE {

constexpr int kPanel = 16;
constexpr int kGroup = 32;

enum class Format { f32, f16, bf16, w8, w4 };

// One packed matrix [n, k]; layouts as in PackedLinear of kernels/ops.py. The memory belongs to the caller.
struct Segment {
  Format format;
  int n, k;
  const void* data;
  const void* scale;    // float or binary16, [panels, groups, 16]
  const void* minimum;  // the same, w4 only
  bool half_scale;
  const float* bias;  // [n] or null

  int panels() const { return (n + kPanel - 1) / kPanel; }
  int groups() const { return k / kGroup; }
  bool quantized() const { return format == Format::w8 || format == Format::w4; }
  size_t panel_bytes() const;
};

// Rows ready for a product: the floats, and where a segment needs them the int8 groups.
struct Rows {
  int count, k;
  const float* x;           // [count, k]
  const int8_t* q;          // [count, k]
  const float* scale;       // [count, k / 32]
  const float* scaled_sum;  // scale * sum
  const int32_t* sum;
};

// Scratch for quantized rows.
struct RowBuffers {
  Buffer<float> x;
  Buffer<int8_t> q;
  Buffer<float> scale, scaled_sum;
  Buffer<int32_t> sum;
};

void quantize_row(const float* x, int k, int8_t* q, float* scale, float* scaled_sum, int32_t* sum);

// rows of x, RMS-normalised by `norm` when it is not null, and quantized when `quantize`
Rows prepare_rows(ThreadPool& pool, RowBuffers& buffers, const float* x, int count, int k, const float* norm, float eps, bool quantize);

// y[r][16] of one panel for rows [row, row + count), count <= kRowTile; without bias
void panel_product(const Segment& segment, int panel, const Rows& rows, int row, int count, float (*y)[kPanel]);

enum class Store { write, add };

// out[r, column...] = or += rows x segments; `ld` is the row length of out
void product(ThreadPool& pool, const std::vector<Segment>& segments, const Rows& rows, float* out, long ld, Store store);

// h[r, :] = silu(rows x gate) * (rows x up), [rows, gate.n]
void gated_product(ThreadPool& pool, const Segment& gate, const Segment& up, const Rows& rows, float* h);

// out[0..k) = row `id` of the table, dequantized
void dequantize_row(const Segment& table, int id, float* out);

}  // namespace KVIST_NAMESPACE
