// See elementwise.h.
#include "elementwise.h"

#include <cmath>

namespace KVIST_NAMESPACE {

void rms_norm(const float* x, const float* weight, float eps, int n, float* y) {
  const int whole = n / 16 * 16;
  F squares = zero();
  for (int i = 0; i < whole; i += 16) {
    const F v = load(x + i);
    squares = fma(v, v, squares);
  }
  if (whole < n) {
    const F v = load_tail(x + whole, n - whole);
    squares = fma(v, v, squares);
  }
  const F inverse = set1(1.0f / std::sqrt(fold_add(squares) / static_cast<float>(n) + eps));
  for (int i = 0; i < whole; i += 16) store(y + i, mul(mul(load(x + i), inverse), load(weight + i)));
  if (whole < n) {
    const F v = mul(mul(load_tail(x + whole, n - whole), inverse), load_tail(weight + whole, n - whole));
    store_tail(y + whole, v, n - whole);
  }
}

void rotate(float* head, const float* cosine, const float* sine, int half) {
  float* second = head + half;
  for (int i = 0; i < half; ++i) {
    const float a = head[i], b = second[i];
    head[i] = a * cosine[i] - b * sine[i];
    second[i] = b * cosine[i] + a * sine[i];
  }
}

}  // namespace KVIST_NAMESPACE
