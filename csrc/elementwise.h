// Row-wise operations: RMS norm, rotary embedding. A row's result depends on the row alone.
#pragma once

#include "simd.h"

namespace KVIST_NAMESPACE {

// y = x / sqrt(mean(x^2) + eps) * weight; the sum of squares in 16 lanes (lane j: elements j, j + 16, ...), then folded. y may be x.
void rms_norm(const float* x, const float* weight, float eps, int n, float* y);

// Rotates pairs (i, i + half) of one head in place by the angles whose cosines and sines are given, [half].
void rotate(float* head, const float* cosine, const float* sine, int half);

}  // namespace KVIST_NAMESPACE
