// Operations on one row: RMS norm, rotation, quantization of activations.
#include <algorithm>

#include "check.h"
#include "elementwise.h"
#include "linear.h"

using namespace KVIST_NAMESPACE;

namespace native_test {

namespace {

void rms_norms(Digest& digest) {
  Chance chance(11);
  for (const int n : {1, 2, 5, 15, 16, 17, 31, 48, 80, 100, 257, 576}) {
    const auto x = chance.floats(n, 3.0f), weight = chance.floats(n);
    double squares = 0;
    for (const float v : x) squares += static_cast<double>(v) * v;
    const double inverse = 1 / std::sqrt(squares / n + 1e-5f);
    std::vector<float> y(n);
    rms_norm(x.data(), weight.data(), 1e-5f, n, y.data());
    for (int i = 0; i < n; ++i) {
      const double exact = x[i] * inverse * weight[i];
      const double bound = (n / 16 + 10) * kEps * std::fabs(exact);
      check(std::fabs(y[i] - exact) <= bound, "rms_norm of %d: element %d is %a, not %a", n, i, y[i], exact);
    }
    auto in_place = x;
    rms_norm(in_place.data(), weight.data(), 1e-5f, n, in_place.data());
    check(in_place == y, "rms_norm of %d differs in place", n);
    digest.add(y);
  }
}

void rotations(Digest& digest) {
  Chance chance(12);
  for (const int half : {0, 1, 3, 8, 20, 32, 128}) {
    const auto head = chance.floats(2 * half + 3, 4.0f), cosine = chance.floats(half), sine = chance.floats(half);
    auto turned = head;
    rotate(turned.data(), cosine.data(), sine.data(), half);
    for (int i = 0; i < half; ++i) {
      const double a = head[i], b = head[half + i];
      const double size = (std::fabs(a) + std::fabs(b)) * (std::fabs(cosine[i]) + std::fabs(sine[i]));
      check(std::fabs(turned[i] - (a * cosine[i] - b * sine[i])) <= 2 * kEps * size, "rotation of %d: element %d", half, i);
      check(std::fabs(turned[half + i] - (b * cosine[i] + a * sine[i])) <= 2 * kEps * size, "rotation of %d: element %d", half, half + i);
    }
    check(std::equal(head.begin() + 2 * half, head.end(), turned.begin() + 2 * half), "rotation of %d reaches too far", half);
    digest.add(turned);
  }
}

struct Quantized {
  std::vector<int8_t> q;
  std::vector<float> scale, scaled_sum;
  std::vector<int32_t> sum;
};

Quantized quantized(const std::vector<float>& x) {
  const FloatMode mode;
  const size_t groups = x.size() / kGroup;
  Quantized row{std::vector<int8_t>(x.size()), std::vector<float>(groups), std::vector<float>(groups), std::vector<int32_t>(groups)};
  quantize_row(x.data(), static_cast<int>(x.size()), row.q.data(), row.scale.data(), row.scaled_sum.data(), row.sum.data());
  for (size_t g = 0; g < groups; ++g) {
    int32_t sum = 0;
    for (int i = 0; i < kGroup; ++i) {
      sum += row.q[g * kGroup + i];
      check(row.q[g * kGroup + i] >= -127, "an activation is -128");
    }
    check(row.sum[g] == sum, "group %zu sums to %d, not %d", g, row.sum[g], sum);
  }
  return row;
}

// One rounding to nearest even of x * (127 / largest), so integers are known exactly.
void activations_are_quantized(Digest& digest) {
  Chance chance(13);
  for (const int k : {32, 64, 96, 576}) {
    auto x = chance.floats(k, 5.0f);
    x[3] = x[k - 1] = 4.999f;
    for (int i = 0; i < 32 && k > 32; ++i) x[i] *= 1e-20f;
    const Quantized row = quantized(x);
    for (int g = 0; g < k / kGroup; ++g) {
      float largest = 0;
      for (int i = 0; i < kGroup; ++i) largest = std::max(largest, std::fabs(x[g * kGroup + i]));
      check(row.scale[g] == largest * (1.0f / 127.0f), "scale of group %d", g);
      check(row.scaled_sum[g] == row.scale[g] * static_cast<float>(row.sum[g]), "scaled sum of group %d", g);
      const float inverse = 127.0f / largest;
      for (int i = g * kGroup; i < (g + 1) * kGroup; ++i) {
        const float steps = x[i] * inverse;
        check(row.q[i] == std::nearbyint(std::clamp(steps, -127.0f, 127.0f)), "%a of %a becomes %d", x[i], largest, row.q[i]);
        const double back = static_cast<double>(row.q[i]) * row.scale[g];
        check(std::fabs(back - x[i]) <= 0.50002 * row.scale[g], "%a comes back as %a", x[i], back);
      }
    }
    for (const int8_t q : row.q) digest.add(static_cast<uint32_t>(static_cast<uint8_t>(q)));
    digest.add(row.scale);
    digest.add(row.scaled_sum);
  }
}

void extreme_activations_are_quantized() {
  const Quantized zeros = quantized(std::vector<float>(64, 0.0f));
  check(std::all_of(zeros.q.begin(), zeros.q.end(), [](int8_t q) { return q == 0; }), "zeros do not stay zero");
  check(zeros.scale == std::vector<float>(2, 0.0f) && zeros.scaled_sum == zeros.scale, "zeros have a scale");

  // A group this small stands for less than 1e-36 whatever its integers are; they only have to be there.
  for (const float tiny : {1e-45f, 1e-40f, 1.2e-38f, 1e-37f, 3.7e-37f}) {
    std::vector<float> x(32, 0.0f);
    x[5] = tiny;
    x[6] = -tiny;
    const Quantized row = quantized(x);
    check(row.scale[0] >= 0 && 127 * row.scale[0] <= 1.01f * tiny && std::isfinite(row.scaled_sum[0]), "%a has scale %a", tiny, row.scale[0]);
  }

  std::vector<float> huge(32, 1.0f);
  huge[0] = std::numeric_limits<float>::max();
  huge[1] = -huge[0];
  const Quantized row = quantized(huge);
  check(row.q[0] == 127 && row.q[1] == -127 && row.q[2] == 0 && row.sum[0] == 0, "the largest floats become %d and %d", row.q[0], row.q[1]);
  check(std::isfinite(row.scale[0]) && std::isfinite(row.scale[0] * 127.0f * 0.999f), "the largest float has scale %a", row.scale[0]);

  // What infinities and NaNs become is open, but it is an integer that `quantized` finds within range and summed.
  for (const float odd : {kInf, -kInf, kNan}) {
    for (const int at : {0, 7, 16, 31}) {
      std::vector<float> x(64, 0.5f);
      x[at] = odd;
      const Quantized broken = quantized(x);
      check(broken.scale[1] == 0.5f * (1.0f / 127.0f) && broken.sum[1] == 32 * 127, "an odd value spoils the next group");
    }
    quantized(std::vector<float>(32, odd));
  }
}

}  // namespace

void row_cases(Digest& digest) {
  rms_norms(digest);
  rotations(digest);
  activations_are_quantized(digest);
  extreme_activations_are_quantized();
}

}  // namespace native_test
