// The 16-lane vocabulary of simd.h and the number formats of the cache, value by value.
#include <algorithm>

#include "bf16_dot.h"
#include "check.h"
#include "kv_format.h"
#include "simd.h"
#include "thread_pool.h"

using namespace KVIST_NAMESPACE;

namespace native_test {

namespace {

std::vector<float> lanes_of(F v) {
  std::vector<float> lanes(16);
  store(lanes.data(), v);
  return lanes;
}

void every_f16_is_read_and_written_back(Digest& digest) {
  std::vector<uint16_t> bits(16), again(16);
  for (int first = 0; first < 65536; first += 16) {
    for (int i = 0; i < 16; ++i) bits[i] = static_cast<uint16_t>(first + i);
    const F v = load_f16(bits.data());
    const auto values = lanes_of(v);
    store_f16(again.data(), v);
    std::vector<float> columns(16);
    for (int c = 0; c < 16; c += kLanes) store_v(columns.data() + c, load_v_f16(bits.data() + c));
    for (int i = 0; i < 16; ++i) {
      const double expected = f16_value(bits[i]);
      if (std::isnan(expected)) {
        check(std::isnan(values[i]) && std::isnan(f16_value(again[i])), "f16 %04x is no NaN any more", bits[i]);
        continue;
      }
      check(values[i] == expected && again[i] == bits[i], "f16 %04x reads as %g and is written as %04x", bits[i], values[i], again[i]);
      check(columns[i] == expected, "f16 %04x reads as %g in a column", bits[i], columns[i]);
    }
    digest.add(values);
  }
}

// Any bits, magnitudes that f16 can hold, and halfway points.
float rounding_sample(Chance& chance, int i) {
  const float any = std::bit_cast<float>(static_cast<uint32_t>(chance.bits()));
  if (i % 4 == 0) return any;
  const int exponent = chance.below(44) - 26;
  if (i % 4 == 1) return std::ldexp(chance.uniform(), exponent);
  if (i % 4 == 2) return std::ldexp(static_cast<float>(2 * chance.below(2048) + 1), exponent);
  return std::bit_cast<float>((std::bit_cast<uint32_t>(any) & 0xffff0000u) | 0x8000u);
}

// Conversions run as in a kernel, with subnormals flushed; what they should give is computed without.
void sixteen_bits_round_to_the_nearest(Digest& digest) {
  constexpr int kSamples = 20000;
  Chance chance(1);
  std::vector<float> samples;
  for (int i = 0; i < kSamples; ++i) samples.push_back(rounding_sample(chance, i));
  std::vector<uint16_t> halves(kSamples), brains(kSamples);
  ThreadPool(1).run(kSamples, [&](long i, int) {
    halves[i] = one_to_f16(samples[i]);
    brains[i] = to_bf16(samples[i]);
  });
  for (int i = 0; i < kSamples; ++i) {
    const float v = samples[i];
    const uint16_t half = halves[i], brain = brains[i];
    if (std::isnan(v)) {
      check(std::isnan(f16_value(half)) && std::isnan(bf16_value(brain)), "NaN %08x becomes a number", std::bit_cast<uint32_t>(v));
      continue;
    }
    check(f16_value(half) == nearest_f16(v), "%a in f16 is %a", v, f16_value(half));
    check(bf16_value(brain) == nearest_bf16(v), "%a in bf16 is %a", v, bf16_value(brain));
    check(std::signbit(v) == (half >> 15) && std::signbit(v) == (brain >> 15), "%a loses its sign", v);
    digest.add(static_cast<uint32_t>(half) << 16 | brain);
  }
}

void bf16_pairs_split() {
  Chance chance(2);
  std::vector<uint16_t> pairs(32);
  for (uint16_t& bits : pairs) bits = to_bf16(chance.uniform());
  F even, odd;
  split_bf16_pairs(pairs.data(), even, odd);
  const auto first = lanes_of(even), second = lanes_of(odd);
  std::vector<float> column(16);
  for (int c = 0; c < 16; c += kLanes) store_v(column.data() + c, load_v_bf16(pairs.data() + c));
  for (int i = 0; i < 16; ++i) {
    check(first[i] == bf16_value(pairs[2 * i]) && second[i] == bf16_value(pairs[2 * i + 1]), "pair %d is split wrongly", i);
    check(column[i] == bf16_value(pairs[i]), "bf16 lane %d is read wrongly", i);
  }
}

#if defined(KVIST_BF16_DOT)
// Both products one after the other, the second of a pair first, each sum rounded to a float: by whole numbers in double precision.
void pairs_are_multiplied_and_added(Digest& digest) {
  check(bf16_dot_as_defined(), "the 16-bit dot product is not that of the definition");
  Chance chance(4);
  int ordered = 0;
  for (int round = 0; round < 2000; ++round) {
    std::vector<float> values = chance.floats(48, 4.0f);
    for (float& v : values) v = std::ldexp(v, chance.below(16) - 8);
    std::vector<float> a(16), b(16), sum(values.begin(), values.begin() + 16), kept(16);
    std::vector<uint16_t> halves(32), others(32);
    for (int i = 0; i < 2; ++i) {
      const F stored = store_bf16(halves.data() + 16 * i, load(values.data() + 16 * (1 + i)));
      store(kept.data(), stored);
      for (int j = 0; j < 16; ++j) {
        check(kept[j] == nearest_bf16(values[16 * (1 + i) + j]), "%a is stored as %a", values[16 * (1 + i) + j], kept[j]);
        check(bf16_value(halves[16 * i + j]) == kept[j], "%a is not what was stored", kept[j]);
      }
    }
    for (uint16_t& bits : others) bits = to_bf16(std::ldexp(chance.uniform(), chance.below(8)));
    std::memcpy(a.data(), halves.data(), 64);
    std::memcpy(b.data(), others.data(), 64);
    const auto found = lanes_of(dot_bf16(load(a.data()), load(b.data()), load(sum.data())));
    for (int i = 0; i < 16; ++i) {
      const double even = bf16_value(halves[2 * i]) * bf16_value(others[2 * i]), odd = bf16_value(halves[2 * i + 1]) * bf16_value(others[2 * i + 1]);
      const float expected = static_cast<float>(static_cast<float>(sum[i] + odd) + even);
      ordered += static_cast<float>(static_cast<float>(sum[i] + even) + odd) != expected;
      check(found[i] == expected, "%a + %a + %a is %a", sum[i], odd, even, found[i]);
    }
    digest.add(found);
    const auto high = lanes_of(keep_bits(load(a.data()), 0xffff0000u)), low = lanes_of(keep_bits(load(a.data()), 0x0000ffffu));
    for (int i = 0; i < 16; ++i) {
      check(std::bit_cast<uint32_t>(high[i]) == static_cast<uint32_t>(halves[2 * i + 1]) << 16, "the second of pair %d", i);
      check(std::bit_cast<uint32_t>(low[i]) == halves[2 * i], "the first of pair %d", i);
    }
  }
  check(ordered > 0, "the order of a pair's products was never seen");
}
#endif

void exponentials(Digest& digest) {
  for (int i = 0; i < 12000; ++i) {
    const float x = -90.0f + 0.01485f * static_cast<float>(i);
    const float e = lanes_of(exp(set1(x)))[i % 16];
    digest.add(&e, 1);
    const double real = std::exp(static_cast<double>(x));
    if (x < -87.4f) check(e == 0.0f, "exp(%a) is %a, not 0", x, e);
    else if (x > -87.3f && x < 88.0f) check(std::fabs(e - real) <= 2e-7 * real, "exp(%a) is %a", x, e);
    const float s = lanes_of(silu(set1(x)))[i % 16];
    const double exact = x / (1 + std::exp(-static_cast<double>(x)));
    digest.add(&s, 1);
    check(std::fabs(s - exact) <= 1e-6 * std::fabs(exact) + 1e-30, "silu(%a) is %a", x, s);
  }
  check(lanes_of(exp(zero()))[0] == 1.0f, "exp(0) is not 1");
  check(lanes_of(exp(set1(-kInf)))[0] == 0.0f, "exp(-inf) is not 0");
}

void lanes_fold_in_one_order(Digest& digest) {
  Chance chance(3);
  for (int round = 0; round < 200; ++round) {
    const auto v = chance.floats(16, 1000.0f);
    auto sum = v;
    for (int half = 8; half >= 1; half /= 2)
      for (int i = 0; i < half; ++i) sum[i] = sum[i] + sum[i + half];
    const float folded = fold_add(load(v.data()));
    check(folded == sum[0], "lanes add up to %a, not %a", folded, sum[0]);
    check(fold_max(load(v.data())) == *std::max_element(v.begin(), v.end()), "fold_max misses the largest lane");
    digest.add(&folded, 1);
  }
}

void whole_numbers() {
  const std::vector<float> v = {0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -2.5f,       126.5f, -126.5f,
                                127,  -127, 0,    3.2f,  -3.7f, 0.49999997f, 100.51f, -100.49f};
  std::vector<int8_t> whole(16);
  store_int8(whole.data(), round_to_int(load(v.data())));
  for (int i = 0; i < 16; ++i) check(whole[i] == std::nearbyint(v[i]), "%a rounds to %d", v[i], whole[i]);
}

void tails_touch_nothing_beyond() {
  for (int count = 0; count <= 16; ++count) {
    std::vector<float> from(count), to(count);
    for (int i = 0; i < count; ++i) from[i] = static_cast<float>(i + 1);
    const F v = load_tail(from.data(), count, -2.0f);
    const auto lanes = lanes_of(v);
    for (int i = 0; i < 16; ++i) check(lanes[i] == (i < count ? from[i] : -2.0f), "lane %d of a tail of %d is %g", i, count, lanes[i]);
    store_tail(to.data(), v, count);
    check(from == to, "a tail of %d is stored wrongly", count);
  }
}

}  // namespace

void simd_cases(Digest& digest) {
  sixteen_bits_round_to_the_nearest(digest);
  const FloatMode mode;
  every_f16_is_read_and_written_back(digest);
  bf16_pairs_split();
#if defined(KVIST_BF16_DOT)
  pairs_are_multiplied_and_added(digest);
#endif
  exponentials(digest);
  lanes_fold_in_one_order(digest);
  whole_numbers();
  tails_touch_nothing_beyond();
}

}  // namespace native_test
